"""Which jobs are so small that ``auto`` trains them as one tensor program, and that it does."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, adam, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.engines import Job, Vectorised, auto, run_round
from fedkeep.engines.auto import as_one_program, width
from fedkeep.engines.vectorised.costs import Costs, StepCost, step_cost, times_faster
from fedkeep.engines.vectorised.stacked_lanes import Stacked
from fedkeep.methods import EarlyStopping
from fedkeep.models import BagOfWords, Linear
from tests import refusals
from tests.engines.test_auto import Judged
from tests.tiny import Logits, classes, everyone, job, results, same_bits, texts, threads_noted

FURL = methods.furl("user", local=Phase(batch_size=4))
MANY = classes(counts=[8] * 30, kind="f4")


@pytest.mark.parametrize(
    ("counts", "epochs", "cohort", "expected"),
    [
        ([8] * 6, 1, 6, 6.0),  # two steps, all six in each
        ([8] * 6, 3, 6, 6.0),
        ([8] * 6, 1, 2, 2.0),
        ([8] * 6, 1, 100, 6.0),  # there are no more than six
        ([4, 4, 4, 16], 1, 4, 7 / 4),  # three are through when the fourth has three more
        ([5, 6, 7, 4], 1, 4, 7 / 4),  # one full step of all, then mini-batches of 1, 2 and 3 apart
        ([5, 5, 7, 7], 2, 4, 16 / 6),  # each pass: one of all, one of two, one of the other two
        ([0, 0, 8, 8], 1, 2, 2.0),  # who has no examples takes no step
        ([8], 1, 1, 1.0),
        ([4, 40, 4, 4], 1, 2, 1.0 * 11 / 10),  # of 4 4 4 40 those at one and three quarters: 4 and 40
    ],
)
def test_width_by_hand(counts: list[int], epochs: int, cohort: int, expected: float) -> None:
    method = methods.furl("user", local=Phase(batch_size=4, epochs=epochs))
    assert width(job(Logits(), method, classes(counts=counts)), cohort) == pytest.approx(expected)


def test_every_phase_counts() -> None:
    """Eight mini-batches of one phase, two of the other: 30 + 60 steps alone, in 1 + 2 together."""
    method = FURL.on_client(
        phases=(Phase(trains="private", batch_size=8), Phase(trains="federated", batch_size=4))
    )
    assert width(job(Logits(), method, MANY), 30) == 30.0
    data = classes(counts=[8] * 15 + [4] * 15)
    assert width(job(Logits(), method, data), 30) == pytest.approx((30 + 45) / (2 + 2))


class Wide(nn.Module):
    """A small input and output, and much between them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.user = nn.Parameter(torch.zeros(hidden))
        self.front, self.back = nn.Linear(3, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.back(torch.relu(self.front(x) + self.user))


class Renormed(Logits):
    """Calls an operation that vmap runs client by client, with a warning."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(torch.renorm(x, 2, 0, 1.0))


STOPPING = FURL.on_client(
    phases=(Phase(trains="all", batch_size=4, epochs=2, early_stopping=EarlyStopping(patience=1)),)
)


@pytest.mark.parametrize(
    ("model", "method", "cohort", "chosen"),
    [
        (Logits(), FURL, 30, True),
        (Logits(), FURL, 9, False),  # nine step at once
        (Logits(), FURL, 10, True),
        (Wide(100), FURL, 30, True),
        (Wide(20_000), FURL, 30, False),  # 640 kB of parameters
        (Wide(6_000), FURL, 30, False),  # 190 kB, but with gradients and activations 900
        (Logits(), STOPPING, 30, False),
        (Renormed(), FURL, 10, False),  # 2.4 times as fast, by the model of costs
        (Renormed(), FURL, 30, True),  # 4.7 times
        (Logits(), methods.furl("user", local=Phase(batch_size=4, loss=Judged())), 30, False),
    ],
)
def test_what_is_small(model: nn.Module, method: Any, cohort: int, chosen: bool) -> None:
    reason = as_one_program(job(model, method, MANY), cohort)
    assert (reason is not None) == chosen
    if chosen:
        assert reason == f"clients are small, and of {cohort} about {cohort} take each step at once"


def test_torchs_word_on_what_it_computes_client_by_client_is_not_passed_on() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = simulate(Renormed(), FURL, MANY, rounds=1, cohort=30)
    assert run.engine == "vectorised"
    assert [str(one.message) for one in said if "batching rule" in str(one.message)] == []


def test_a_large_model_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stacked copies of it, to see if vmap can, would take time and memory for nothing."""
    monkeypatch.setattr(Vectorised, "suits", lambda _: pytest.fail("tried"))
    assert (
        as_one_program(job(Wide(30_000), FURL, MANY), 30) is None
    )  # 960 kB, and as much for gradients and updates
    assert as_one_program(job(Logits(), FURL, MANY), 9) is None


def test_moments_count() -> None:
    """Adam keeps two numbers for each parameter."""
    for optimizer, chosen in ((sgd(0.1), True), (adam(0.1), False)):
        work = job(Wide(4_500), methods.furl("user", local=Phase(batch_size=4, optimizer=optimizer)), MANY)
        assert (as_one_program(work, 30) is not None) == chosen


def test_what_a_step_costs_is_counted_of_one_client() -> None:
    """Costs of calls are shared, those of bytes and products are not; a linear layer's products: 2 · 4 · 3 · 3, twice."""
    work = step_cost(job(Logits(), FURL, MANY), 0)
    assert (work.flops, work.measured) == (2 * 2 * 4 * 3 * 3, True)
    some = StepCost(calls=10, kept=6_000_000, moved=2_000_000, flops=3_000_000, convolved=1_000_000)
    costs = Costs(alone=1, call=3, kept=7, moved=4, flops=5, convolved=6)
    assert costs.of(some, 8) == 1 + 30 / 8 + 42 + 8 + 15 + 6
    assert times_faster(work, 30) > times_faster(work, 10) > 1.5


@pytest.mark.parametrize(("clients", "chosen"), [(100, True), (8, False)])
def test_logistic_regression_on_many_examples_is_trained_together(clients: int, chosen: bool) -> None:
    """Of 600 examples of 784 numbers memory holds some 30 clients side by side, which is enough."""
    data = classes(counts=[600] * clients, features=784, labels=10, kind="f4")
    method = methods.fedavg(local=Phase(batch_size=32, optimizer=sgd(0.1)))
    work = job(Linear(784, 10), method, data)
    assert (as_one_program(work, clients) is not None) == chosen


def test_what_the_optimiser_moves_and_convolutions_are_counted_apart() -> None:
    """Forward: 4 images, 2 filters of 9 numbers at 16 places; backward: the weights' gradient, as images have none."""
    work = step_cost(images(6, nn.Conv2d(1, 2, 3)), 0)
    values = 2 * 9 + 2 + 3 * 2 * 16 + 3
    assert (work.kept, work.convolved, work.measured) == (4 * 2 * values, 2 * 2 * 4 * 2 * 9 * 16, True)
    product = 2 * 4 * (2 * 16) * 3
    assert work.flops == 3 * product  # forward, to the weights and to the images of filters


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(2, 2, 3, groups=2), nn.ConvTranspose2d(2, 2, 1), nn.Conv3d(2, 2, (1, 3, 3))],
    ids=["groups", "transposed", "three dimensions"],
)
def test_other_operations_than_were_measured_want_little_memory(layer: Any) -> None:
    """The costs say yes, but of its time nothing is known."""
    for pixels, chosen in ((6, True), (60, False)):
        work = images(pixels, layer)
        assert not step_cost(work, 0).measured
        assert (as_one_program(work, 30) is not None) == chosen


def images(pixels: int, layer: Any) -> Job:
    """Return a job on 30 clients with 8 images each, which a layer filters."""
    channels = layer.in_channels
    data = classes(counts=[8] * 30, features=channels * pixels * pixels, kind="f4")
    return job(Image(pixels, layer), methods.fedavg(local=Phase(batch_size=4)), data)


class Image(nn.Module):
    def __init__(self, pixels: int, layer: Any) -> None:
        super().__init__()
        depth = [1] * (isinstance(layer, nn.Conv3d))
        self.shape = (layer.in_channels, *depth, pixels, pixels)
        self.filter = layer
        self.out = nn.Linear(layer(torch.zeros(1, *self.shape)).numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.out(self.filter(x.reshape(-1, *self.shape)).flatten(1))


@pytest.mark.parametrize("then", [100.0, 0.0])
def test_a_run_that_goes_on_keeps_the_engine_that_it_began_with(
    then: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the table of costs says by then: another version's may be another."""
    options: Any = {"cohort": 20, "out": tmp_path / "run", "evaluate_every": 0}
    monkeypatch.setattr(auto, "times_faster", lambda *_: 100.0 - then)
    before = simulate(Logits(), FURL, MANY, rounds=2, **options)
    monkeypatch.setattr(auto, "times_faster", lambda *_: then)
    after = simulate(Logits(), FURL, MANY, rounds=4, resume=True, **options)
    expected = "sequential" if then else "vectorised"
    assert (before.engine, after.engine) == (expected, expected)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engine"] == expected


def test_of_a_large_table_the_rows_in_use_count() -> None:
    """A table of 1.6 MB, of which a client's texts use some rows."""
    data = texts(counts=[8] * 30, vocabulary=100_000)
    work = job(
        BagOfWords(100_000, 3, embedding_dim=4),
        methods.fedavg(local=Phase(batch_size=4, optimizer=sgd(0.1))),
        data,
    )
    assert as_one_program(work, 30) is not None
    decaying = methods.fedavg(
        local=Phase(batch_size=4, optimizer=sgd(0.1, weight_decay=0.1))
    )  # moves all rows
    assert as_one_program(replace(work, method=decaying), 30) is None


def test_of_a_huge_cohort_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "ENOUGH", 12)
    reason = as_one_program(job(Logits(), FURL, MANY), 100_000)
    assert reason == "clients are small, and of 12 about 12 take each step at once"


def test_nobody_has_examples() -> None:
    assert as_one_program(job(Logits(), FURL, classes(counts=[0] * 30)), 30) is None


class Failing(Logits):
    """Looks up a row that is not there."""

    def forward(self, x: Tensor) -> Tensor:
        """Fail."""
        return super().forward(x) + nn.functional.embedding(torch.tensor([7]), torch.zeros(5, 3))


def test_a_model_that_fails_is_named_by_training() -> None:
    """The check computes too, for clients who are nobody's fault; the error is that of the client whose turn it is."""
    with refusals.raises(
        MethodError, who="Client 'user-0', round 0", batch="a batch of 4 examples", examples=4
    ):
        simulate(Failing(), FURL, MANY, rounds=1, cohort=20)


@pytest.mark.parametrize("workers", [None, 1, 2])
def test_auto_trains_small_clients_together(
    workers: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread, whatever is set: the bits of ``vectorised`` so."""
    options: Any = {"rounds": 3, "cohort": 20, "out": tmp_path / "run"}
    seen = threads_noted(monkeypatch, Stacked, "train")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = simulate(Logits(), FURL, MANY, engine="vectorised", rounds=3, cohort=20)
    torch.set_num_threads(2)
    try:
        run = simulate(Logits(), FURL, MANY, engine="auto", workers=workers, **options)
        assert torch.get_num_threads() == 2
        assert seen == [1] * 6
    finally:
        torch.set_num_threads(before)
    assert run.engine == "vectorised"
    assert run.engine_reason == "clients are small, and of 20 about 20 take each step at once"
    assert same_bits(run.server, expected.server)
    assert same_bits(everyone(run.private, 30), everyone(expected.private, 30))
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (info["engine"], info["engine_reason"]) == (run.engine, run.engine_reason)


def test_it_is_asked_once_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(work: Any, cohort: int) -> str | None:
        asked.append((work, cohort))
        return as_one_program(work, cohort)

    monkeypatch.setattr(auto, "as_one_program", spy)
    engine = auto.Auto(20, workers=1)
    assert engine.choice == auto.Choice("sequential", "there is one core to use")
    first, second = job(Logits(), FURL, MANY), job(Logits(), STOPPING, MANY)
    for work in (first, first, second):
        assert len(results(work, range(20), engine)) == 20
        expected = "vectorised" if work is first else "sequential"
        assert engine.name == expected
    assert asked == [(first, 20), (second, 20)]
    assert engine.choice.reason == "there is one core to use"
    engine.close()


def test_a_run_that_was_stopped_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = simulate(Logits(), FURL, MANY, rounds=4, cohort=20)
    options: Any = {"rounds": 4, "cohort": 20, "out": tmp_path / "run"}

    def stopped(*arguments: Any) -> Any:
        if arguments[2].round == 2:
            raise KeyboardInterrupt
        return run_round(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("fedkeep.experiments.drive.run_round", stopped)
        with pytest.raises(KeyboardInterrupt):
            simulate(Logits(), FURL, MANY, **options)
    run = simulate(Logits(), FURL, MANY, resume=True, **options)
    assert run.engine == "vectorised"
    assert same_bits(run.server, expected.server)
    assert same_bits(everyone(run.private, 30), everyone(expected.private, 30))
