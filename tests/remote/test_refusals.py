"""What a device says of an error: where it was raised to its owner alone, and no text that may hold data to the server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep import Phase, methods
from fedkeep.core.errors import ConfigError
from fedkeep.data.preparation import Encoding, Ready, Rules, Summary
from fedkeep.experiments.build import build_model
from fedkeep.experiments.config import parse_config
from fedkeep.remote import Packet
from fedkeep.remote.agreement import place_of, refusal
from fedkeep.remote.messages import Refused, message_of
from tests.remote.hand import Hand
from tests.tiny import Logits, classes

SECRET = "row 3: Anna Smith, /home/anna/notes.csv"
CONFIG = 'name = "x"\n[data]\nreader = "toy"\n[model]\nkind = "KIND"\n[method]\nkind = "fedavg"\n[run]\nrounds = 1\n'


class Own(nn.Module):
    """A model that a configuration names."""

    def __init__(self) -> None:
        raise ValueError(SECRET)


def refused(error: Exception, header: dict[str, Any]) -> Refused:
    return message_of(Packet.from_bytes(refusal(error, Packet(header), str).to_bytes()), Refused)


def built(kind: str, folder: Path) -> tuple[str, list[str], bytes]:
    """Let a node build a configuration's model; return what it answers, what it tells its owner, and all that left."""
    config = parse_config(CONFIG.replace("KIND", kind), "x.toml")
    hand = Hand(Logits, methods.furl("user", local=Phase(batch_size=4)), classes(kind="f4"))
    node, said = hand.node(folder, [0]), list[str]()
    node.tell = said.append
    node.experiment = lambda text, encoding: (
        build_model(config, Encoding.from_json(json.dumps(encoding))),
        hand.method,
    )
    reason = message_of(hand.say(node, hand.encode()), Refused).reason
    hand.close()
    return reason, said, b"".join(hand.left)


def test_what_fedkeep_says_for_another_error_stays_on_the_device(tmp_path: Path) -> None:
    """It raises the ConfigError itself, and the text within is the model's."""
    reason, said, left = built(f"{__name__}:Own", tmp_path)
    assert reason == "The experiment cannot be built on this device: ConfigError. Its own log says more."
    assert any(SECRET in line for line in said)
    assert b"Anna" not in left


def test_what_fedkeep_says_of_its_own_is_told(tmp_path: Path) -> None:
    reason, _, _ = built("no_such", tmp_path)
    assert "model.kind: there is no model 'no_such'. There are" in reason


def test_a_refusal_names_no_more_of_a_run_than_an_id_has() -> None:
    assert refused(ValueError(), {"run": "a" * 100}).run == "a" * 64


def unreadable() -> None:
    json.loads("{")


def indefinite() -> None:
    np.linalg.cholesky(-np.eye(2))


def a_folder_in_a_file() -> None:
    os.makedirs(Path(__file__) / "x")


def misfitting() -> None:
    nn.Linear(3, 3)(torch.ones(2))


def in_fedkeep() -> None:
    parse_config(CONFIG + "[", "x.toml")


@pytest.mark.parametrize("own", [unreadable, indefinite, a_folder_in_a_file, misfitting])
def test_the_place_of_an_error_is_in_the_owners_code(own: Callable[[], None]) -> None:
    """Not in Python's own library, NumPy or torch, which raised it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        own()
    place = place_of(caught.value)
    assert place == f" (test_refusals.py, line {own.__code__.co_firstlineno + 1}, in {own.__name__})"


def test_an_error_that_fedkeep_raises_is_at_no_place_of_the_owners() -> None:
    with pytest.raises(ConfigError) as caught:
        in_fedkeep()
    assert place_of(caught.value) == ""


class Reading(Ready):
    """A source of the owner's own that fails."""

    kind: ClassVar[type[Exception]]

    def summary(self, rules: Rules = Rules()) -> Summary:
        raise self.kind(SECRET)


@pytest.mark.parametrize("kind", [TypeError, ConfigError])
def test_what_a_reader_of_the_owners_says_while_it_sums_up_stays_on_the_device(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reading, "kind", kind, raising=False)
    hand = Hand(Logits, methods.furl("user", local=Phase(batch_size=4)), classes(kind="f4"))
    node, said = hand.node(tmp_path, [0]), list[str]()
    node.source, node.tell = Reading(data=hand.data), said.append
    reason = message_of(hand.say(node, hand.hello(summarise={})), Refused).reason
    assert "Its own log says more." in reason
    assert "Anna" not in reason
    assert SECRET in said[0]


def test_a_rule_that_is_for_no_column_is_refused_by_name(tmp_path: Path) -> None:
    hand = Hand(Logits, methods.furl("user", local=Phase(batch_size=4)), classes(kind="f4"))
    reason = message_of(
        hand.say(hand.node(tmp_path, [0]), hand.hello(summarise={"tokens": "word"})), Refused
    ).reason
    assert reason.startswith(
        "The rules of the summary cannot be used: preparation.tokens: wanted a column of the kind 'text', which it is "
        "for; got "
    )
