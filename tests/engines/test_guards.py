"""A method's functions draw nothing, write into nothing that they are given, and give what fits, on every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import Method, simulate
from fedkeep.core.errors import FedkeepError, MethodError, NonFiniteError
from fedkeep.core.net import Net
from fedkeep.engines import Engine, Sequential
from fedkeep.engines.faults import Faults
from fedkeep.methods import (
    Finish,
    Finished,
    Global,
    Kept,
    Optimize,
    Reduced,
    Sent,
    Start,
    Started,
    WeightedMean,
)
from fedkeep.methods.server import MeanByGroup
from fedkeep.split import Split
from tests.engines.test_hooks import DATA, ENGINES, FURL, hooks_may_be_made_on_the_spot, one
from tests.tiny import Logits, Rounds, everyone, job, same_bits

__all__ = ["hooks_may_be_made_on_the_spot"]  # a fixture of every test here
every_engine = pytest.mark.parametrize("engine", ENGINES)


def said(method: Method, kind: type[FedkeepError] = MethodError) -> str:
    """Return why a run of a method is refused."""
    with pytest.raises(kind) as error:
        simulate(Logits(), method, DATA, rounds=2, cohort=4, engine="sequential", progress=False)
    return str(error.value)


# --- what is given back as it was given


def three(net: Net) -> dict[str, Tensor]:
    return {"three": torch.full((3,), 0.5, dtype=torch.float64), "seven": torch.tensor(7)}


def unchanged(given: Finish) -> Finished:
    return Finished(state=given.kept.state)


def before_training(given: Finish) -> Finished:
    return Finished(
        state={"three": given.started["user"]}, params={"linear.bias": given.sent.params["linear.bias"]}
    )


def to_each(server: Global, client: str) -> Sent:
    return Sent(params={n: v + 1 for n, v in server.params.items()})


def as_sent(given: Finish) -> Finished:
    return Finished(state={"three": given.sent.params["linear.bias"]})


@every_engine
@pytest.mark.parametrize(
    "method",
    [
        FURL.on_client(state=three, finish=unchanged),
        FURL.on_client(state=three, finish=before_training),
        FURL.on_client(state=three, finish=as_sent).on_server(send=to_each),
        replace(FURL, split=Split(["linear.*"])).on_client(state=three, finish=unchanged),
    ],
    ids=["kept", "started", "sent", "many private"],
)
def test_what_a_finish_gives_back_is_kept_as_it_was(engine: Callable[[], Engine], method: Method) -> None:
    """A process that trains shares its memory with the one that stores: what lies there is not written over."""
    found = []
    for make in (Sequential, engine):
        rounds = Rounds(
            work := job(
                Logits().double(),
                method,
                DATA,
            ),
            made := make(),
        )
        for _ in range(3):
            rounds([0, 1, 2, 3])
        made.close()
        found.append({**rounds.server.params, **everyone(work.store, 4)})
    if made.name != "vectorised":
        assert same_bits(*found)
        return
    assert found[0].keys() == found[1].keys()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


# --- writing into what is given

WRITES: dict[str, Callable[[Any], Any]] = {
    "start/sent": lambda given: given.sent.params["linear.bias"],
    "start/params": lambda given: given.params["user"],
    "finish/sent": lambda given: given.sent.params["linear.bias"],
    "finish/kept": lambda given: given.kept.state["three"],
    "finish/started": lambda given: given.started["linear.weight"],
    "finish/trained": lambda given: given.trained["user"],
}


@every_engine
@pytest.mark.parametrize("where", WRITES)
def test_a_hook_that_writes_into_what_it_is_given_is_refused(
    engine: Callable[[], Engine], where: str
) -> None:
    which = where.partition("/")[0]

    def hook(given: Any) -> Any:
        WRITES[where](given).zero_()
        return Started() if which == "start" else Finished()

    rounds = Rounds(job(Logits(), FURL.on_client(state=one, **{which: hook}), DATA), made := engine())
    with pytest.raises(MethodError) as error:
        rounds([0, 1])
    made.close()
    assert str(error.value).startswith(f"The {which} of 'furl' wrote into '")
    assert str(error.value).endswith("', which others read too. Make a new tensor: v * 0.5, not v.mul_(0.5).")


def test_functions_of_the_server_and_accept_write_into_nothing() -> None:
    def send(server: Global, client: str) -> Sent:
        server.params["linear.bias"].add_(1)
        return Sent(params=server.params)

    def accept(before: Kept, after: Kept, share: float) -> Kept:
        before.params["user"].zero_()
        return after

    assert said(FURL.on_server(send=send)).startswith(
        "The send of the server to client 'user-0' in round 0 wrote into 'linear.bias', which others"
    )
    assert said(FURL.on_client(accept=accept)).startswith(
        "The accept of client 'user-0' in round 0 wrote into 'user', which others"
    )


# --- random numbers


def noisy_state(net: Net, *others: Any) -> dict[str, Tensor]:
    return {"a": torch.randn(3)}


def noisy_send(server: Global, client: str) -> Sent:
    return Sent(params={n: v + torch.randn_like(v) for n, v in server.params.items()})


def noisy_update(server: Global, reduced: Reduced) -> Global:
    torch.rand(())
    return Optimize()(server, reduced)


def noisy_accept(before: Kept, after: Kept, share: float) -> Kept:
    torch.rand(())
    return after


@pytest.mark.parametrize(
    ("method", "who"),
    [
        (FURL.on_server(state=noisy_state), "server's state of 'furl'"),
        (FURL.on_client(state=noisy_state), "client's state of 'furl'"),
        (FURL.on_client(sends=noisy_state, finish=unchanged), "sends of 'furl'"),
        (FURL.on_server(send=noisy_send), "send of the server to client 'user-0' in round 0"),
        (FURL.on_server(update=noisy_update), "update of 'furl'"),
        (FURL.on_client(accept=noisy_accept), "accept of client 'user-0' in round 0"),
    ],
)
def test_functions_that_draw_from_no_stream_are_refused(method: Method, who: str) -> None:
    assert said(method).startswith(f"The {who} drew random numbers, ")


def drawn(given: Start | Finish) -> Tensor:
    first, again = (torch.rand(3, generator=given.generator()) for _ in range(2))
    assert torch.equal(first, again)
    return first


def drawing_start(given: Start) -> Started:
    return Started(state={"three": drawn(given)})


def drawing_finish(given: Finish) -> Finished:
    three = given.kept.state["three"]
    assert not torch.equal(three, drawn(given)), "another stream than at the start"
    return Finished(state={"three": three + drawn(given)})


@every_engine
def test_a_hook_draws_from_a_stream_of_its_client_and_round(engine: Callable[[], Engine]) -> None:
    work = job(Logits(), FURL.on_client(state=one, start=drawing_start, finish=drawing_finish), DATA)
    rounds = Rounds(work, made := engine())
    seen = []
    for clients in ([0, 1, 2, 3], [3, 1, 0]):
        rounds(clients)
        seen += everyone(work.store, 4)["client/three"].tolist()
    made.close()
    assert seen[2] == seen[6], "not asked again"
    assert len({tuple(three) for three in seen}) == 7, "each client and round has its own"
    plain = Rounds(other := job(Logits(), work.method, DATA))
    plain([1])
    assert everyone(other.store, 4)["client/three"].tolist()[1] == seen[1], (
        "whoever trains beside it, on any engine"
    )


# --- what fits


def gives(function: str, value: Any) -> Method:
    """Return FURL with a function that gives this."""
    if function in ("server.state", "send", "update"):
        return FURL.on_server(**{function.rpartition(".")[2]: lambda *_: value})
    along = {"finish": unchanged} if function == "sends" else {}
    return FURL.on_client(**{function.rpartition(".")[2]: lambda *_: value}, **along)


@pytest.mark.parametrize(
    ("function", "value", "message"),
    [
        (
            "client.state",
            {"n": 0},
            "The client's state of 'furl' gives 'n' as int; wanted a tensor, such as torch.tensor",
        ),
        ("server.state", {"n": 0.5}, "The server's state of 'furl' gives 'n' as float; wanted a tensor"),
        ("sends", {"n": [1]}, "The sends of 'furl' gives 'n' as list; wanted a tensor"),
        ("client.state", None, "The client's state of 'furl' gives NoneType; wanted Mapping."),
        (
            "client.state",
            {"upload/x": torch.zeros(1)},
            "The client's state of 'furl' gives 'upload/x' as a name; wanted a",
        ),
        (
            "server.state",
            {"upload/x": torch.zeros(1)},
            "The server's state of 'furl' gives 'upload/x' as a name; wanted",
        ),
        ("start", None, "The start of 'furl' gives NoneType; wanted Started."),
        ("finish", None, "The finish of 'furl' gives NoneType; wanted Finished."),
        (
            "start",
            Started(params={"user": 0.0}),
            "The start of 'furl' gives 'user' as float; wanted a tensor",
        ),  # type: ignore[dict-item]
        (
            "finish",
            Finished(state={"n": 3}),
            "The finish of 'furl', state gives 'client/n' as int; wanted a tensor",
        ),  # type: ignore[dict-item]
        (
            "finish",
            Finished(sends={"n": 3}),
            "The finish of 'furl', sends gives 'server/n' as int; wanted a tensor",
        ),  # type: ignore[dict-item]
        ("update", None, "The update of 'furl' gives NoneType; wanted Global."),
        ("send", None, "The send of the server to client 'user-0' in round 0 gives NoneType; wanted Sent."),
        ("accept", None, "The accept of client 'user-0' in round 0 gives NoneType; wanted Kept."),
    ],
)
def test_what_is_no_tensor_or_of_another_kind(function: str, value: Any, message: str) -> None:
    assert said(gives(function, value)).startswith(message)


def test_whole_numbers_are_not_sent_along_to_a_mean() -> None:
    def counts(net: Net) -> dict[str, Tensor]:
        return {"n": torch.zeros(3, dtype=torch.int64)}

    def count(given: Finish) -> Finished:
        return Finished(sends={"n": torch.ones(3, dtype=torch.int64)})

    method = FURL.on_client(sends=counts, finish=count)
    assert said(method).startswith(
        "The sends of 'furl' declares 'n' as torch.int64, of which the server's mean takes the "
    )
    by_group = MeanByGroup(group="n", groups=2, mean=WeightedMean())
    work = job(Logits(), method.on_server(reduce=by_group), DATA)
    assert work.declared["server/n"].dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            lambda p: {**p, "more": torch.zeros(2)},
            MethodError,
            "gives 'more', which is not known there; known are ",
        ),
        (
            lambda p: {"linear.bias": p["linear.bias"]},
            MethodError,
            "does not give all: missing ['linear.weight'].",
        ),
        (
            lambda p: {n: v.double() for n, v in p.items()},
            MethodError,
            "gives 'linear.weight' as (3, 3) torch.float64; wanted",
        ),
        (
            lambda p: {n: v[:1] for n, v in p.items()},
            MethodError,
            "gives 'linear.weight' as (1, 3) torch.float32; wanted (3,",
        ),
        (lambda p: {n: v / 0 for n, v in p.items()}, NonFiniteError, "gives 'linear."),
    ],
)
def test_a_send_that_gives_something_else(change: Any, kind: type[FedkeepError], message: str) -> None:
    def send(server: Global, client: str) -> Sent:
        return Sent(params=change(server.params))

    assert f"The send of the server to client 'user-0' in round 0 {message}" in said(
        FURL.on_server(send=send), kind
    )


def test_a_send_of_state_that_is_no_number() -> None:
    def send(server: Global, client: str) -> Sent:
        return Sent(params=server.params, state={"x": torch.tensor(float("nan"))})

    assert said(FURL.on_server(send=send), NonFiniteError) == (
        "The send of the server to client 'user-0' in round 0 gives 'x', which holds a NaN or an infinity."
    )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            lambda k: Kept(params=k.params, state={**k.state, "more": torch.zeros(1)}),
            MethodError,
            "gives 'client/more', which is",
        ),
        (
            lambda k: Kept(params=k.params, state={}),
            MethodError,
            "does not give all: missing ['client/rounds', 'client/three'].",
        ),
        (
            lambda k: Kept(params={"user": torch.zeros(4)}, state=k.state),
            MethodError,
            "gives 'user' as (4,) torch.float32; wanted",
        ),
        (
            lambda k: Kept(params={"user": k.params["user"] / 0}, state=k.state),
            NonFiniteError,
            "gives 'user', which holds a NaN",
        ),
    ],
)
def test_an_accept_that_gives_something_else(change: Any, kind: type[FedkeepError], message: str) -> None:
    def accept(before: Kept, after: Kept, share: float) -> Kept:
        return change(after)  # type: ignore[no-any-return]

    assert said(FURL.on_client(state=one, accept=accept), kind).startswith(
        f"The accept of client 'user-0' in round 0 {message}"
    )


def test_who_and_when_is_said_of_send_and_accept() -> None:
    """Nobody sits out for what ``accept`` gives: by then the server has the upload."""

    def accept(before: Kept, after: Kept, share: float) -> Kept:
        bad = int(after.state["rounds"]) == 2 and bool(after.state["largest"])
        return Kept(params={n: v / 0 if bad else v for n, v in after.params.items()}, state=after.state)

    def count(given: Finish) -> Finished:
        largest = sum(len(batch["label"]) for _, batch in given.outputs(lambda *_: None)) == 9
        return Finished(
            state={"rounds": given.kept.state["rounds"] + 1, "largest": torch.tensor(int(largest))}
        )

    def state(net: Net) -> dict[str, Tensor]:
        return {"rounds": torch.tensor(0), "largest": torch.tensor(0)}

    def send(server: Global, client: str) -> Sent:
        return Sent(params={} if (server.round, client) == (1, "user-2") else server.params)

    method = FURL.on_client(state=state, finish=count, accept=accept)
    for broken in ("stop", "skip"):
        rounds = Rounds(job(Logits(), method, DATA), faults=Faults(broken=broken))
        rounds([0, 1, 2])
        with pytest.raises(NonFiniteError) as error:
            rounds([0, 1, 2])
        assert str(error.value).startswith(
            "The accept of client 'user-1' in round 1 gives 'user', which holds a NaN"
        )
    assert said(FURL.on_server(send=send)).startswith(
        "The send of the server to client 'user-2' in round 1 does not give all: missing "
    )


@pytest.mark.parametrize("name", ["round", "trainable", "links"])
def test_an_update_sets_what_it_may_alone(name: str) -> None:
    values: dict[str, Any] = {"round": 7, "trainable": frozenset(), "links": {"x": torch.zeros(1)}}

    def update(server: Global, reduced: Reduced) -> Global:
        return Optimize()(server, reduced).but(**{name: values[name]})

    assert said(FURL.on_server(update=update)) == (
        f"The update of 'furl' sets {name!r}; it may set params, state and optimizer alone."
    )
