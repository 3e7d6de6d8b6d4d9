"""Attacks on models of tokens: each token has a label, and an example is a whole text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import attacks
from fedkeep.data import FederatedData, next_tokens
from fedkeep.experiments.attack import AttackRequest, attack
from fedkeep.experiments.config import Config, parse_config
from fedkeep.report.attacks import AttackFinding

WORDS, LENGTH, EXAMPLES = 7, 5, 8


class Writer(nn.Module):
    """Each token's successor by a table; ``vector`` is the writer's own taste."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(
            WORDS, 4, _weight=torch.linspace(-2, 2, WORDS * 4).sin().reshape(WORDS, 4)
        )
        self.vector = nn.Parameter(torch.zeros(WORDS))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits, (B, T, words)."""
        return self.embedding(input_ids) @ self.embedding.weight.T + self.vector


def texts(folder: Path, rate: float) -> tuple[Config, np.ndarray[Any, Any]]:
    """Save texts of different lengths of four writers, and return a configuration of these, and the texts."""
    ids = np.random.default_rng(0).integers(1, WORDS, (4 * EXAMPLES, LENGTH))
    label = next_tokens(ids)
    label[::3, 3:] = -100
    columns = {"input_ids": ids, "label": label}
    data = FederatedData.from_columns(
        client=np.repeat(list("abcd"), EXAMPLES),
        columns=columns,
        split=(["train"] * 6 + ["test"] * 2) * 4,
        meta={"task": "next_token", "classes": WORDS},
    )
    data.save(folder / "texts")
    text = f"""
data = {{ reader = "saved", folder = {str(folder / "texts")!r} }}
model = {{ kind = "{__name__}:Writer" }}
method = {{ kind = "furl", private = "vector", optimizer = {{ learning_rate = {rate} }} }}
run = {{ rounds = 2, cohort = 4, engine = "sequential" }}
"""
    return parse_config(text), label


def test_membership_of_a_text_goes_by_the_mean_loss_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a learning rate of 0 every model is the first one, whose losses are plain torch's."""
    config, label = texts(tmp_path, rate=0.0)
    seen: list[np.ndarray[Any, Any]] = []
    measured = attacks.membership
    monkeypatch.setattr(attacks, "membership", lambda *given: seen.append(given[0]) or measured(*given))
    attack(config, AttackRequest(attacks=("membership",), epsilons=(), shadows=3))
    train = np.arange(4 * EXAMPLES).reshape(4, EXAMPLES)[:, :6].ravel()
    ids = FederatedData.load(tmp_path / "texts").columns["input_ids"]
    with torch.no_grad():
        out = Writer()(torch.tensor(np.array(ids)))
    loss = nn.functional.cross_entropy(out.movedim(2, 1), torch.as_tensor(label), reduction="none")
    mean = loss.sum(1) / torch.as_tensor((label >= 0).sum(1))
    wanted = attacks.confidence(mean.double().numpy()[train])
    assert len(seen) == 4  # of the plain run and the split, the released model and her own
    for scores in seen:
        np.testing.assert_allclose(scores, np.tile(wanted, (3, 1)), rtol=1e-5)


def test_a_class_that_a_client_holds_most_is_nothing_that_texts_by_token_have(tmp_path: Path) -> None:
    config, _ = texts(tmp_path, rate=1.0)
    asked = AttackRequest(attacks=("label", "trait", "predictions"), epsilons=())
    found: list[AttackFinding] = attack(config, asked).findings
    by_class = [f for f in found if f.attack.startswith("Which class")]
    assert {f.note for f in by_class} == {"labels are of tokens."}
    (agreeing,) = (f for f in found if f.measure.startswith("predicts as") and f.value is not None)
    assert agreeing.guess is not None
    assert agreeing.value is not None
    assert agreeing.guess < agreeing.value > 0.95
