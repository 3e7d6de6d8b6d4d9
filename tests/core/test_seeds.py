"""Streams are named by (seed, purpose, client, round), and stay the same for ever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep import methods, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.params import Params
from fedkeep.core.seeds import DrawWatch, Undisturbed, generator, numpy_generator, stream, without_draws
from fedkeep.data import toy
from tests.tiny import same_bits


def test_streams_differ_by_every_part_of_the_name() -> None:
    names = [
        (0, "batches", "a", 0),
        (1, "batches", "a", 0),
        (0, "noise", "a", 0),
        (0, "batches", "b", 0),
        (0, "batches", "a", 1),
        (0, "batchesa", "", 0),
        (0, "batches", "a0", 0),
        (0, "batches", "", 0),
        (10, "batches", "", 0),
        (1, "0batches", "", 0),
    ]
    assert len({stream(*name) for name in names}) == len(names)
    assert len({int(generator(*name).initial_seed()) for name in names}) == len(names)
    assert len({int(numpy_generator(*name).integers(2**62)) for name in names}) == len(names)


def test_a_stream_is_fixed_for_ever() -> None:
    # Numbers of earlier versions: if they change, no earlier run can be resumed or repeated.
    assert stream(0, "cohort") == 3296607877585955954
    assert stream(7, "batches/0", "user-é", 12) == 231592194740252113
    assert 0 <= stream(0, "cohort") < 2**63


def test_a_generator_starts_anew_at_every_call() -> None:
    first = torch.randn(4, generator=generator(1, "x", "c", 2))
    assert torch.equal(first, torch.randn(4, generator=generator(1, "x", "c", 2)))
    assert list(numpy_generator(1, "x").permutation(9)) == list(numpy_generator(1, "x").permutation(9))


def test_drawing_leaves_the_global_generators_alone() -> None:
    before = torch.random.get_rng_state()
    torch.randn(3, generator=generator(0, "x"))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.fixture
def neighbour() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Return what starts another thread that calls something again and again until the test ends."""
    done, threads = threading.Event(), list[threading.Thread]()

    def start(draw: Callable[[], object]) -> None:
        def go() -> None:
            while not done.is_set():
                draw()

        threads.append(threading.Thread(target=go))
        threads[-1].start()

    yield start
    done.set()
    for thread in threads:
        thread.join()


Start = Callable[[Callable[[], object]], None]


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, lambda: np.random.random()])  # noqa: NPY002
def test_what_another_thread_draws_is_nobody_elses(neighbour: Start, draw: Callable[[], object]) -> None:
    neighbour(draw)
    for _ in range(20):
        assert without_draws("hook", lambda: time.sleep(0.001) or 3, "cpu") == 3


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_attention_draws_where_it_has_dropout(rate: float) -> None:
    value = torch.ones(1, 2, 3, 4)
    with DrawWatch() as draws:
        nn.functional.scaled_dot_product_attention(value, value, value, dropout_p=rate)
    assert bool(draws.seen) == bool(rate)


def test_draws_from_a_generator_of_their_own_are_the_same(neighbour: Start) -> None:
    def drawn() -> list[torch.Tensor]:
        layers = [nn.Linear(3, 4), nn.Embedding(3, 2), nn.LSTM(2, 2)]
        return [
            torch.rand(2),
            torch.randn(3),
            torch.randperm(9),
            *(v for m in layers for v in m.parameters()),
        ]

    torch.manual_seed(3)
    own = drawn()
    neighbour(lambda: torch.rand(1))
    with DrawWatch(torch.Generator().manual_seed(3)):
        assert all(map(torch.equal, own, drawn()))


class Net(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.a, self.b, self.rate = nn.Linear(4, 8), nn.Linear(8, 3), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.dropout(self.a(x), self.rate, self.training))


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_training_beside_a_thread_that_draws_has_the_same_bits_or_says_what_it_needs(
    neighbour: Start, rate: float
) -> None:
    def run(engine: str) -> Params:
        given = {"rounds": 2, "evaluate_every": 0, "engine": engine}
        return simulate(model, methods.fedavg(), toy(users=6, examples=40), **given).server

    model = Net(rate)
    neighbour(lambda: time.sleep(0.01))
    alone = run("sequential")
    neighbour(lambda: torch.rand(1))  # begins within a second after a look
    if rate:
        with pytest.raises(MethodError, match="another thread.*engine='workers'"):
            run("sequential")
    else:
        assert same_bits(alone, run("sequential"))
    assert same_bits(alone, run("workers"))  # as the message says


def test_a_thread_that_is_new_since_the_last_look_is_looked_at_for_longer(neighbour: Start) -> None:
    def begun() -> Undisturbed:
        steps = Undisturbed("client", "cpu")
        steps.seeded()
        return steps

    neighbour(lambda: time.sleep(0.01))
    assert not begun().disturbed
    neighbour(lambda: (time.sleep(0.05), torch.rand(1)))  # draws seldom, and begins just after a look
    assert begun().disturbed
