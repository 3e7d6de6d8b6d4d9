"""What a method's hooks are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedkeep import Method, methods, sgd
from fedkeep.core.net import Net
from fedkeep.engines import first_global, first_kept
from fedkeep.engines.client_step import begin
from fedkeep.methods import Client, Finish, Finished, Phase, Start, Started
from fedkeep.methods.terms import squared_error
from tests.tiny import Logits, Scalar, classes, job, pairs, results, same_bits

DATA = classes()
SEEN: list[Any] = []


def train_twice(start: Start) -> Started:
    """Train from the same values twice, and again."""
    phase = Phase(batch_size=1, optimizer=sgd(0.5))
    SEEN.append([start.train(phase, {}) for _ in range(2)])
    return Started()


def note_loss(start: Start) -> Started:
    """Note the loss."""
    SEEN.append(start.loss({}))
    return Started()


def note_rate(done: Finish) -> Finished:
    """Note the learning rate."""
    SEEN.append(done.rate("w"))
    return Finished()


def one_count(net: Net) -> dict[str, torch.Tensor]:
    """Return what is sent."""
    return {"count": torch.zeros(1)}


def send_count(done: Finish) -> Finished:
    """Send a number along."""
    return Finished(sends={"count": torch.ones(1)})


def begun(method: Method) -> Any:
    """Return what the method's start notes of a client."""
    SEEN.clear()
    work = job(Logits().double(), method, DATA)
    sent = first_global(method, work.net, DATA).params
    begin(work, sent, first_kept(method, work.net), 1, work.rows(1), 0)
    return SEEN[0]


def test_every_call_of_train_draws_its_own_mini_batches() -> None:
    method = methods.furl("user").on_client(start=train_twice)
    first, again = begun(method), begun(method)
    assert not same_bits(first[0], first[1])
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


def test_the_loss_of_start_is_the_mean_over_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1 − 3)² twice and (1 − 9)², two at once: 24; the mean of both batches' means would be 34."""
    monkeypatch.setattr("fedkeep.engines.client_step.HOOK_BATCH", 2)
    SEEN.clear()
    method = methods.fedavg(local=Phase(loss=squared_error())).on_client(start=note_loss)
    results(job(Scalar(1.0), method, pairs({"a": [(1, 3), (1, 3), (1, 9)]})), [0])
    assert SEEN == [24.0]


def test_the_rate_that_finish_is_given_has_its_schedule_counted_in() -> None:
    SEEN.clear()
    falling = Phase(loss=squared_error(), optimizer=sgd(0.1, schedule="linear"))
    method = methods.fedavg(local=falling).on_client(finish=note_rate)
    results(job(Scalar(1.0), method, pairs({"a": [(1, 3)]})), [0], progress=0.75)
    (rate,) = SEEN
    assert rate == pytest.approx(0.025, abs=1e-15)


def test_what_clients_send_along_is_declared_on_the_cpu_where_the_server_is() -> None:
    method = Method(client=Client(sends=one_count, finish=send_count))
    declared = job(Logits(), method, DATA, device="meta").declared
    assert {n: v.device.type for n, v in declared.items()} == {"server/count": "cpu"}
