"""Faults of clients: which stop a run, which sit out, and which rounds count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.core.errors import (
    DroppedError,
    FailedError,
    FedkeepError,
    LostError,
    NonFiniteError,
    RoundError,
    UploadError,
)
from fedkeep.core.net import Net
from fedkeep.engines import Answer, Engine, LocalDevice, Order, Sequential
from fedkeep.engines.faults import Fault, Faults
from fedkeep.methods import Start, Started
from fedkeep.methods.terms import squared_error
from tests.engines.test_hooks import ENGINES, hooks_may_be_made_on_the_spot
from tests.engines.test_round import BROKEN, METHOD, Fragile
from tests.refusals import raises
from tests.tiny import Logits, Rounds, classes, everyone, job, pairs, same_bits

__all__ = ["hooks_may_be_made_on_the_spot"]  # a fixture of every test here
every_engine = pytest.mark.parametrize("engine", ENGINES)
FURL = methods.furl("user", local=Phase(batch_size=4))
DATA = classes()


class Unreliable(LocalDevice):
    """A device some of whose answers are others."""

    def __init__(self, *arguments: Any, answers: dict[str, Any]) -> None:
        super().__init__(*arguments)
        self.answers = answers

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        for answer in super().train(orders):
            change = self.answers.get(answer.client)
            yield answer if change is None else change(answer)


def lost(answer: Answer) -> Answer:
    return Answer(client=answer.client, fault=LostError(f"Client {answer.client!r} did not answer."))


def heavy(answer: Answer) -> Answer:
    assert answer.upload is not None
    return replace(answer, upload=replace(answer.upload, weight=1e12))


def rounds(faults: Faults, **answers: Any) -> tuple[Rounds, Any]:
    work = job(Logits(), FURL, DATA)
    made = Rounds(work, faults=faults)
    named = {name.replace("_", "-"): change for name, change in answers.items()}
    made.device = Unreliable(work, Sequential(), answers=named)
    return made, work


def test_a_lost_client_sits_out_and_is_told_apart() -> None:
    found, work = rounds(Faults(), user_1=lost)
    report = found([0, 1, 2])
    assert (report.clients, report.lost) == (2, 1)
    assert report.refused == ("Client 'user-1' did not answer.",)
    other, without = rounds(Faults())
    other([0, 2])
    assert same_bits(found.server.params, other.server.params)
    assert same_bits(
        everyone(work.store, 6), everyone(without.store, 6)
    )  # what the lost one trained is dropped
    with pytest.raises(LostError):
        rounds(Faults(lost="stop"), user_1=lost)[0]([0, 1, 2])


def test_an_upload_that_would_outweigh_all_others_is_refused() -> None:
    message = (
        "The upload of client 'user-2' was refused: its weight is 1e+12; at most 1e+09 examples are taken."
    )
    with raises(UploadError, text=message):
        rounds(Faults(), user_2=heavy)[0]([0, 1, 2])
    report = rounds(Faults(malformed="skip"), user_2=heavy)[0]([0, 1, 2])
    assert (report.refused, report.clients, report.lost) == ((message,), 2, 0)


def test_each_kind_has_a_policy_of_its_own() -> None:
    work = job(Fragile(), METHOD, BROKEN)
    with pytest.raises(NonFiniteError):
        Rounds(work, faults=Faults(malformed="skip"))([0, 1, 2])
    assert Rounds(work, faults=Faults(broken="skip"))([0, 1, 2]).clients == 2


HOT = Phase(optimizer=sgd(1e308), batch_size=2, epochs=5)


def trains_to_nan(given: Start) -> Started:
    return Started(params=given.train(HOT, {}))


def gives_nan(given: Start) -> Started:
    return Started(params={"linear.bias": given.params["linear.bias"] / 0})


def keeps_nan(given: Start) -> Started:
    return Started(state={"three": given.kept.state["three"] * torch.nan})


@every_engine
@pytest.mark.parametrize(
    ("start", "message"),
    [
        (trains_to_nan, "the training loss became NaN or infinite after "),
        (gives_nan, "what start of 'furl' gives as 'linear.bias' is NaN or infinite."),
        (keeps_nan, "what start of 'furl' gives as 'three' is NaN or infinite."),
    ],
)
@pytest.mark.parametrize("client", [0, 1])
def test_what_start_breaks_is_the_clients_fault(
    engine: Callable[[], Engine], start: Callable[[Start], Started], message: str, client: int
) -> None:
    """By client 0 ``vectorised`` finds out whether it can train, by client 1, the largest, how many at once."""

    def once(given: Start) -> Started:
        examples = sum(len(batch["label"]) for _, batch in given.outputs(lambda *_: None))
        return start(given) if examples == DATA.count(client, "train") else Started()

    method = FURL.on_client(state=state, start=once)
    work, clean = (
        job(Logits().double(), method, DATA),
        job(Logits().double(), FURL.on_client(state=state), DATA),
    )
    others = [k for k in range(4) if k != client]
    made = engine()
    report = Rounds(work, made, Faults(broken="skip"))([0, 1, 2, 3])
    (said,) = report.refused
    assert said.startswith(f"Client 'user-{client}', round 0: {message}")
    assert report.clients == 3
    assert [k for k in range(4) if work.store.seen([k])[0]] == others
    Rounds(clean)(others)
    found, wanted = work.store.read(others), clean.store.read(others)
    torch.testing.assert_close(found["user"], wanted["user"], rtol=0, atol=1e-12)
    with pytest.raises(NonFiniteError) as error:
        Rounds(work, made)([0, 1, 2, 3])
    made.close()
    assert str(error.value) == said


def state(net: Net) -> dict[str, Tensor]:
    return {"three": torch.full((3,), 0.5)}


@pytest.mark.parametrize(("least", "wanted"), [(2, 2), (5, 3)])
def test_a_round_of_too_few_does_not_count(least: int, wanted: int) -> None:
    found, work = rounds(Faults(minimum=least), user_1=lost, user_2=lost)
    before = everyone(work.store, 6)
    with pytest.raises(RoundError) as error:
        found([0, 1, 2])
    facts = error.value.facts
    assert (facts["round"], facts["taken"], facts["asked"], facts["wanted"]) == (0, 1, 3, wanted)
    assert "Client 'user-1' did not answer." in facts["first"]
    assert found.server.round == 0
    assert same_bits(everyone(work.store, 6), before)


FAILED, LOST = FailedError("The finish of 'furl' failed."), LostError("Client 'a' did not answer.")


@pytest.mark.parametrize(
    ("found", "failed"), [([FAILED, FAILED], True), ([FAILED, LOST], False), ([LOST], False), ([], False)]
)
def test_functions_alone_are_to_blame_or_not(found: list[Fault], failed: bool) -> None:
    with pytest.raises(RoundError) as error:
        Faults().check_enough(3, 0, 2, found)
    assert error.value.failed is failed


def test_simulate_says_how_many_must_take_part() -> None:
    method = methods.furl("user", local=Phase(loss=squared_error()))
    options: dict[str, Any] = {"rounds": 2, "cohort": 3, "on_nonfinite": "skip"}
    assert simulate(Fragile(), method, BROKEN, **options).round == 2
    with raises(RoundError, wanted=3, round=0, taken=2):
        simulate(Fragile(), method, BROKEN, min_clients=3, **options)
    alone = pairs({"bad": [(13, 1)]})
    with pytest.raises(RoundError, match="0 of 1 clients took part"):
        simulate(Fragile(), method, alone, **options)
    assert simulate(Fragile(), method, alone, min_clients=0, **options).round == 2


@every_engine
def test_refused_clients_have_downloaded_too(engine: Callable[[], Engine]) -> None:
    made = engine()
    report = Rounds(job(Fragile(), METHOD, BROKEN), made, Faults(broken="skip"))([0, 1, 2])
    made.close()
    assert (report.clients, report.downloads) == (2, 3)
    report = rounds(Faults(malformed="skip"), user_1=lost, user_2=heavy)[0]([0, 1, 2, 3])
    assert (report.clients, report.downloads) == (2, 3)  # nobody knows what reached the lost one
    run = simulate(Fragile(), METHOD, BROKEN, rounds=2, cohort=3, on_nonfinite="skip")
    for metric, clients in (("download_bytes", 3), ("upload_bytes", 2)):
        assert [(r.value, r.n) for r in run.history if r.metric == metric] == [(8, clients)] * 2
    alone = simulate(
        Fragile(), METHOD, pairs({"bad": [(13, 1)]}), rounds=1, on_nonfinite="skip", min_clients=0
    )
    assert [(r.value, r.n) for r in alone.history if r.metric == "download_bytes"] == [(8, 1)]


def test_errors_have_one_root() -> None:
    assert all(issubclass(kind, FedkeepError) for kind in (LostError, RoundError))


def test_dropped_clients_count_as_neither_asked_nor_missing():
    lost, dropped = LostError("x"), DroppedError("x")
    Faults(minimum=2).check_enough(4, 1, 3, [dropped, dropped])
    with pytest.raises(RoundError):
        Faults(minimum=2).check_enough(4, 1, 3, [dropped, lost])
