"""KTEPS on the plateau of knowing nothing: what a run that stays there is told, by the note of its method."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import nn

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.core.records import Record
from fedkeep.methods.kteps import Plateau
from fedkeep.methods.terms import squared_error
from tests.methods.parts import Parts
from tests.tiny import classes


def told(losses: Sequence[float], classes: int | None = 2, count: float = 2.0) -> str:
    history = [Record(n, n, "train", None, "loss", value, 1) for n, value in enumerate(losses)]
    return Plateau(count)(history, {} if classes is None else {"classes": classes})


def test_a_run_on_the_plateau_is_told() -> None:
    """Two branches of two classes that know nothing: 2 ln 2 = 1.386; 95 % of it is 1.317."""
    note = told([0.5, *[1.36] * 9, 1.375])
    assert all(part in note for part in ("1.36 to 1.38", "1.39", "diversity = 0", "kernel = 'median'"))
    assert not told([*[1.36] * 10, 1.31])
    assert not told([1.36] * 9)
    assert not told([*[1.36] * 10, math.nan])
    assert not told([1.36] * 10, classes=None)
    assert not told([0.65] * 10, count=1)  # of 0.693
    assert told([0.68] * 10, count=1)
    assert methods.kteps().note == Plateau()
    assert methods.kteps(local=Phase(loss=squared_error())).note is None


def test_a_simulation_warns_of_the_plateau() -> None:
    class Ignorant(Parts):
        """Its classifier knows nothing: logits are 0."""

        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)

    method = methods.kteps(noise=0, local=Phase(batch_size=4, optimizer=sgd(1e-9)))
    with pytest.warns(UserWarning, match=r"know nothing, 2\.2\.") as found:
        simulate(Ignorant().double(), method, classes(), rounds=10, cohort=4)
    assert found[0].filename == __file__


def loss_and_classes(history: Sequence[Record], meta: Mapping[str, Any]) -> str:
    count = sum(r.split == "train" and r.metric == "loss" for r in history)
    return f"{count} rounds, {meta['classes']} classes" if count > 1 else ""


def test_any_method_may_note_something_of_its_finished_run() -> None:
    method = methods.fedavg(local=Phase(batch_size=4)).but(note=loss_and_classes)
    with pytest.warns(UserWarning, match="^2 rounds, 3 classes$"):
        simulate(Parts().double(), method, classes(), rounds=2, cohort=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate(Parts().double(), method, classes(), rounds=1, cohort=4)
