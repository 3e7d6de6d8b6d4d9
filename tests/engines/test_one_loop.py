"""There is one loop of local training: what it does, it does under every engine.

A term writes a line for each of its calls, and so do hooks; an engine with a loop of its own would write others.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import Method, Phase, methods, sgd
from fedkeep.core.params import Batch, Params
from fedkeep.engines import Centralised, ClientResult, Engine, Sequential, Vectorised, Workers
from fedkeep.engines.workers.pool import start_method
from fedkeep.methods import EarlyStopping, Finish, Finished, Start, Started
from fedkeep.methods.terms import Term, cross_entropy
from tests.tiny import Logits, Noisy, classes, job, results, same_bits

FORK = pytest.mark.skipif(start_method() != "fork", reason="the lines' file is known by fork")
ALONE = [Sequential, pytest.param(lambda: Workers(2), marks=FORK, id="Workers")]
ENGINES = [*ALONE, Vectorised]
FOUR = classes(counts=(8, 8, 8, 8), valid=3)


def write(line: str) -> None:
    """Add a line to what was written; processes may do so side by side."""
    with open(os.environ["FEDKEEP_TEST_LINES"], "a", encoding="utf-8") as file:
        file.write(line + "\n")


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[str]]:
    """Return a function that counts the lines written since it was last called."""
    path = tmp_path / "lines"
    monkeypatch.setenv("FEDKEEP_TEST_LINES", str(path))

    def taken() -> Counter[str]:
        found = (
            Counter(path.read_text(encoding="utf-8").split("\n")[:-1]) if path.exists() else Counter[str]()
        )
        path.unlink(missing_ok=True)
        return found

    return taken


@dataclass(frozen=True)
class Counted(Term):
    """Cross-entropy that says when it is called, and whether in training."""

    name: str = "loss"

    def __call__(self, net: Any, params: Params, batch: Batch, received: Params) -> Tensor:
        write(f"{self.name}, {'training' if net.module.training else 'judging'}")
        return cross_entropy()(net, params, batch, received)


def begins(given: Start) -> Started:
    """Say so."""
    write("start")
    return Started()


def ends(given: Finish) -> Finished:
    """Say so, with the number of steps."""
    write(f"finish after {given.steps}")
    return Finished()


def second_round(work: Any, make: Callable[[], Engine], lines: Callable[[], Any]) -> Counter[str]:
    """Return what is written in a round of all clients; the first may try a model out."""
    engine = make()
    try:
        results(work, range(4), engine)
        lines()
        results(work, range(4), engine, round=1)
        written: Counter[str] = lines()
    finally:
        engine.close()
    return written


TWO = (
    Phase(loss=Counted("own"), trains="private", batch_size=4, epochs=3),
    Phase(loss=Counted("all"), batch_size=4, clip_norm=0.1, optimizer=sgd(0.1, momentum=0.9)),
)


@pytest.mark.parametrize("make", ENGINES)
def test_every_step_of_every_phase_is_taken_once(make: Any, lines: Any) -> None:
    """8 examples, 4 a mini-batch: 3 · 2 + 2 steps a client; side by side, the clients' steps are one call."""
    method = methods.furl("user").on_client(phases=TWO, start=begins, finish=ends)
    calls = 1 if make is Vectorised else 4
    assert second_round(job(Logits(), method, FOUR), make, lines) == {
        "own, training": 6 * calls,
        "all, training": 2 * calls,
        "start": 4,
        "finish after 8": 4,
    }


@pytest.mark.parametrize("make", ENGINES)
def test_turns_on_every_mini_batch(make: Any, lines: Any) -> None:
    phases = tuple(p.but(epochs=1) for p in TWO)
    method = methods.furl("user").on_client(phases=phases, turns=(2, 1), start=begins, finish=ends)
    calls = 1 if make is Vectorised else 4
    assert second_round(job(Logits(), method, FOUR), make, lines) == {
        "own, training": 4 * calls,
        "all, training": 2 * calls,
        "start": 4,
        "finish after 6": 4,
    }


@pytest.mark.parametrize("make", ENGINES)
def test_early_stopping_looks_at_each_clients_examples(make: Any, lines: Any) -> None:
    """A rate of nothing improves nothing: measured after passes 1, 2 and 3, stopped there; 3 · 2 steps."""
    phase = Phase(
        loss=Counted(),
        trains="private",
        batch_size=4,
        epochs=9,
        optimizer=sgd(0.0),
        early_stopping=EarlyStopping(every=1, patience=2),
    )
    method = methods.furl("user").on_client(phases=(phase,))
    calls = 1 if make is Vectorised else 4
    written = second_round(job(Logits(), method, FOUR), make, lines)
    assert written == {"loss, training": 6 * calls, "loss, judging": 3 * 4}


def test_centralised_training_too(lines: Any) -> None:
    """32 pooled examples, 4 a mini-batch."""
    method = methods.furl("user", local=Phase(loss=Counted(), batch_size=4))
    assert second_round(job(Logits(), method, FOUR), Centralised, lines) == {"loss, training": 8}


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("stops", [False, True])
def test_buffers_that_leave_stay_where_opted_out_examples_train(make: Any, stops: bool) -> None:
    """A private head on all examples, through a federated batch normalisation: what is uploaded knows none of them.

    With early stopping too, which puts back the best values: not those of the buffers.
    """
    data = classes(counts=(8, 8, 8, 8), valid=3, opted_in=True)
    rule = EarlyStopping(every=1, patience=3) if stops else None
    head = Phase(trains="private", examples="all", batch_size=4, epochs=4, early_stopping=rule)
    method: Method = methods.furl("user").on_client(phases=(head,))
    engine = make()
    try:
        found: list[ClientResult] = results(job(Noisy().double(), method, data), range(4), engine)
    finally:
        engine.close()
    for result in found:
        moved = {n: v for n, v in result.upload.deltas.items() if n.startswith("norm.running")}
        assert moved
        assert same_bits(moved, {n: torch.zeros_like(v) for n, v in moved.items()})
        assert bool(result.kept["user"].any())  # it did train
