"""Runs of a user's own model: the same numbers as without the kernels, and a folder that says what was swapped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.core.errors import RunError
from fedkeep.experiments.build import build_model, run_config
from fedkeep.experiments.personalize import rooted
from fedkeep.nn.accelerate import swaps_of
from fedkeep.remote import fingerprint
from tests.experiments.configs import config
from tests.nn.recurrent import needs_native
from tests.tiny import classes, texts

pytestmark = pytest.mark.filterwarnings("ignore:The model predicts otherwise:UserWarning")


class Reader(nn.Module):
    """A plain recurrent classifier of texts."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, vocabulary: int = 300, classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 4)
        self.rnn = kind(4, 5, batch_first=True, bidirectional=True)  # type: ignore[call-arg, arg-type]
        self.out = nn.Linear(10, classes)
        self.user = nn.Parameter(torch.zeros(classes))

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        found, _ = self.rnn(self.embedding(text))
        inside = torch.arange(text.shape[1], device=text.device) < text_length[:, None]
        mean = (found * inside.unsqueeze(-1)).sum(1) / text_length[:, None]
        return self.out(mean) + self.user


class Columns(nn.Module):
    """A wide layer on features."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.wide = nn.Linear(1 << 16, 4)
        self.out = nn.Linear(4, classes)
        self.user = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.pad(x, (0, (1 << 16) - x.shape[1]))
        return self.out(self.wide(wide).relu()) + self.user


class InPlace(Columns):
    """The same, and what the wide layer gives is changed in place."""

    def __init__(self, change: str) -> None:
        super().__init__(4, 3)
        ways = {"relu": nn.ReLU(inplace=True), "dropout": nn.Dropout(0.5, inplace=True)}
        self.change = ways.get(change)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(nn.functional.pad(x, (0, (1 << 16) - x.shape[1])))
        if self.change is None:
            hidden += 1.0
        return self.out((hidden if self.change is None else self.change(hidden)) ** 2) + self.user


def run(accelerate: bool, kind: Any = nn.LSTM, **more: Any) -> Any:
    torch.manual_seed(0)
    model = Reader(kind).double()
    method = methods.furl("user", local=Phase(batch_size=2, optimizer=sgd(0.3, momentum=0.9)))
    more = {"rounds": 2, "cohort": 3, "engine": "sequential", **more}
    found = simulate(model, method, texts(vocabulary=300), accelerate=accelerate, progress=False, **more)
    assert type(model.rnn) is kind
    return found


@needs_native
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("engine", ["sequential", "workers"])
def test_a_run_gives_the_same_numbers(kind: Any, engine: str) -> None:
    plain, fast = run(False, kind), run(True, kind, engine=engine)
    assert swaps_of(fast.net.module).swapped == {"rnn": kind.__name__}
    assert not swaps_of(plain.net.module).swapped
    torch.testing.assert_close(fast.server, plain.server, rtol=1e-11, atol=1e-12)
    assert fast.evaluate()["loss"] == pytest.approx(plain.evaluate()["loss"], rel=1e-11)
    sent = [{r.metric: r.value for r in each.history}["upload_bytes"] for each in (plain, fast)]
    assert sent[0] == sent[1] < 300 * 4 * 8  # a client's own rows of the table, not all


@needs_native
@pytest.mark.parametrize("change", ["relu", "dropout", "sum"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_what_a_swapped_layer_gives_may_be_changed_in_place(change: str, engine: str) -> None:
    method = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.1)))
    found = []
    for accelerate in (False, True):
        torch.manual_seed(0)
        data = classes((5, 8, 7), kind="f8")
        options = {"rounds": 2, "cohort": 3, "engine": engine, "accelerate": accelerate}
        made = simulate(InPlace(change).double(), method, data, **options)  # type: ignore[arg-type]
        assert swaps_of(made.net.module).swapped == ({"wide": "Linear"} if accelerate else {})
        found.append(made.server)
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_the_folder_says_what_was_swapped_and_a_run_goes_on_with_the_same(tmp_path: Path) -> None:
    run(True, out=tmp_path)
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["accelerated"] == {"swapped": {"rnn": "LSTM"}, "left": {}}
    assert "FastLSTM" in info["identity"]["model"]["layers"]
    with pytest.raises(RunError, match="layers"):
        run(False, out=tmp_path, resume=True)
    assert run(True, out=tmp_path, resume=True).round == 2


def test_the_fingerprint_tells_swapped_layers_apart() -> None:
    method, model = methods.furl("user"), Reader()
    parts = [
        fingerprint.parts(module, method, dict(module.state_dict()), {})
        for module in (method.made_for(model), method.made_for(model, accelerate=True))
    ]
    assert fingerprint.differing(*parts) == "layers, accelerated layers"


def test_another_method_from_a_run_has_its_layers() -> None:
    for accelerate in (False, True):
        first = run(accelerate)
        again = rooted(first, Reader().double(), methods.furl("user"))
        assert swaps_of(again.net.module) == swaps_of(first.net.module)


def test_a_configuration_turns_it_off(tmp_path: Path) -> None:
    table = {"kind": f"{__name__}:Reader", "vocabulary": 30}
    settings = {"rounds": 1, "cohort": 2}
    data, told = texts(vocabulary=30), list[str]()
    for accelerate, wanted in ((True, {"rnn": "LSTM"}), (False, {})):
        made = config(model=table, run={**settings, "accelerate": accelerate})
        assert swaps_of(build_model(made, data)).swapped == wanted
        found = run_config(made, data=data, out=tmp_path / str(accelerate), progress=False, tell=told.append)
        assert swaps_of(found.net.module).swapped == wanted
    assert told == [
        "Layers on fedkeep's kernels: rnn (LSTM).",
        "Layers torch's own: rnn (accelerate was not asked for).",
    ]
