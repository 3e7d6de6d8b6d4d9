"""A method's hooks: what they are given, what they may give, and that every engine runs them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep import Method, Phase, methods, sgd, simulate
from fedkeep.core.errors import MethodError, NonFiniteError
from fedkeep.core.net import Net
from fedkeep.engines import Engine, Sequential, Vectorised, Workers
from fedkeep.engines.faults import Faults
from fedkeep.engines.workers.pool import start_method
from fedkeep.methods import Finish, Finished, Global, Init, Optimize, Reduced, Sent, Start, Started
from tests.refusals import raises
from tests.tiny import Logits, Noisy, Rounds, Scalar, classes, everyone, job, pairs, results, same_bits

DATA = classes(counts=(5, 9, 3, 7))
FURL = methods.furl("user", local=Phase(batch_size=4))
ENGINES = [
    Sequential,
    Vectorised,
    pytest.param(
        lambda: Workers(1),
        marks=pytest.mark.skipif(start_method() != "fork", reason="hooks go by fork"),
        id="Workers",
    ),
]


@pytest.fixture(autouse=True)
def hooks_may_be_made_on_the_spot(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are of what hooks do; that a method refuses nested functions is shown in tests/core."""
    monkeypatch.setattr("fedkeep.methods.base.describe", lambda *_: None)
    monkeypatch.setattr("fedkeep.experiments.conductor.describe", lambda *_: None)


def one(net: Net) -> dict[str, Tensor]:
    """State: a counter, and three numbers."""
    return {"rounds": torch.tensor(0), "three": torch.full((3,), 0.5)}


def refused(method: Method, engine: Engine, model: Any = None) -> str:
    """Return what is said of a method's hooks, having seen that nothing was kept."""
    work = job(model or Logits(), method, DATA)
    rounds = Rounds(work, engine)
    before = {n: v.clone() for n, v in rounds.server.params.items()}
    try:
        with pytest.raises(MethodError) as error:
            rounds([0, 1])
    finally:
        engine.close()
    assert same_bits(rounds.server.params, before)
    assert work.store.seen(range(4)) == [False] * 4
    return str(error.value)


KNOWN = "['client/rounds', 'client/three', 'linear.bias', 'linear.weight', 'user']"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("started", "message"),
    [
        (
            Started(params={"usr": torch.zeros(3)}),
            f"The start of 'furl' gives 'usr', which is not known there; known are {KNOWN}.",
        ),
        (
            Started(state={"more": torch.zeros(3)}),
            f"The start of 'furl' gives 'client/more', which is not known there; known are {KNOWN}.",
        ),
        (
            Started(params={"user": torch.zeros(2)}),
            "The start of 'furl' gives 'user' as (2,) torch.float32; wanted (3,) torch.float32, as it was.",
        ),
        (
            Started(params={"linear.bias": torch.zeros(3).double()}),
            "The start of 'furl' gives 'linear.bias' as (3,) torch.float64; wanted (3,) torch.float32, as it was.",
        ),
        (
            Started(state={"rounds": torch.zeros(())}),
            "The start of 'furl' gives 'client/rounds' as () torch.float32; wanted () torch.int64, as it was.",
        ),
    ],
)
def test_a_start_that_gives_something_else(
    engine: Callable[[], Engine], started: Started, message: str
) -> None:
    assert refused(FURL.on_client(state=one, start=lambda given: started), engine()) == message


def sends(net: Net) -> dict[str, Tensor]:
    return {"seen": torch.zeros(2)}


FINE = {"seen": torch.ones(2)}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("finished", "message"),
    [
        (
            Finished(params={"linear.bais": torch.zeros(3)}, sends=FINE),
            (
                "The finish of 'furl', params gives 'linear.bais', which is not known there; known are ['linear.bias', "
                "'linear.weight']."
            ),
        ),
        (
            Finished(params={"user": torch.zeros(3)}, sends=FINE),  # private
            (
                "The finish of 'furl', params gives 'user', which is not known there; known are ['linear.bias', "
                "'linear.weight']."
            ),
        ),
        (
            Finished(params={"linear.bias": torch.zeros(1, 3)}, sends=FINE),
            (
                "The finish of 'furl', params gives 'linear.bias' as (1, 3) torch.float32; wanted (3,) torch.float32, as it "
                "was."
            ),
        ),
        (
            Finished(state={"more": torch.zeros(3)}, sends=FINE),
            (
                "The finish of 'furl', state gives 'client/more', which is not known there; known are ['client/rounds', "
                "'client/three']."
            ),
        ),
        (
            Finished(state={"three": torch.zeros(4)}, sends=FINE),
            (
                "The finish of 'furl', state gives 'client/three' as (4,) torch.float32; wanted (3,) torch.float32, as it "
                "was."
            ),
        ),
        (
            Finished(sends={**FINE, "user": torch.zeros(3)}),
            "The finish of 'furl', sends gives 'server/user', which is not known there; known are ['server/seen'].",
        ),
        (
            Finished(sends={"seen": torch.zeros(3)}),
            "The finish of 'furl', sends gives 'server/seen' as (3,) torch.float32; wanted (2,) torch.float32, as it was.",
        ),
        (
            Finished(sends={"seen": torch.zeros(2, dtype=torch.int64)}),
            "The finish of 'furl', sends gives 'server/seen' as (2,) torch.int64; wanted (2,) torch.float32, as it was.",
        ),
        (
            Finished(),
            "What finish of 'furl' sends along is not what Client.sends declares: missing ['seen'].",
        ),
    ],
)
def test_a_finish_that_gives_something_else(
    engine: Callable[[], Engine], finished: Finished, message: str
) -> None:
    method = FURL.on_client(state=one, sends=sends, finish=lambda given: finished)
    assert refused(method, engine()) == message


def test_what_is_sent_along_undeclared_is_refused() -> None:
    message = refused(FURL.on_client(finish=lambda given: Finished(sends=FINE)), Sequential())
    assert (
        message == "The finish of 'furl', sends gives 'server/seen', which is not known there; known are []."
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("finished", "what"),
    [
        (
            Finished(params={"linear.bias": torch.full((3,), torch.nan)}, sends=FINE),
            "uploads as 'linear.bias'",
        ),
        (Finished(sends={"seen": torch.tensor([0, -torch.inf])}), "sends as 'seen'"),
        (Finished(sends=FINE, state={"three": torch.tensor([0, torch.nan, 0])}), "keeps as 'three'"),
    ],
)
def test_what_finish_breaks_is_the_clients_fault(
    engine: Callable[[], Engine], finished: Finished, what: str
) -> None:
    """The one client whose hook gives NaN is named, and may sit out."""

    def finish(given: Finish) -> Finished:
        return finished if int(given.kept.state["rounds"]) == 1 else Finished(sends=FINE)

    method = FURL.on_client(state=one, sends=sends, finish=finish)
    for on_fault in ("stop", "skip"):
        work = job(Logits(), method, DATA)
        default = work.store.read([1])
        work.store.write([1], {**default, "client/rounds": torch.ones(1, dtype=torch.int64)})
        rounds = Rounds(work, made := engine(), Faults(broken=on_fault))
        message = f"Client 'user-1', round 0: what finish of 'furl' {what} is NaN or infinite."
        if on_fault == "stop":
            with raises(NonFiniteError, text=message):
                rounds([0, 1, 2])
        else:
            report = rounds([0, 1, 2])
            assert (report.refused, report.clients) == ((message,), 2)
            assert work.store.seen(range(4)) == [True, True, True, False]
            assert same_bits(
                work.store.read([1]), {**default, "client/rounds": torch.ones(1, dtype=torch.int64)}
            )
        made.close()


DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
    "a normal number of numpy's": lambda: np.random.randn(),  # noqa: NPY002
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("which", ["start", "finish"])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_hook_that_draws_random_numbers_is_refused(
    engine: Callable[[], Engine], which: str, draw: str
) -> None:
    def hook(given: Any) -> Any:
        DRAWS[draw]()
        return Started() if which == "start" else Finished()

    np.random.seed(0)  # noqa: NPY002
    if draw.startswith("a normal"):
        np.random.randn()  # noqa: NPY002 - of two that are drawn at once the second is left
    said = refused(FURL.on_client(**{which: hook}), engine())
    assert said.startswith(
        f"The {which} of 'furl' drew random numbers, so its result would depend on the order"
    )
    assert said.endswith("a hook draws from a generator of its own, seeded by what it is given.")


def test_a_hook_may_draw_from_a_generator_of_its_own_and_train() -> None:
    """Dropout inside of ``train``, ``loss`` and ``outputs`` is no draw of the hook's."""

    def start(given: Start) -> Started:
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(3))
        moved = given.train(Phase(batch_size=4), {"user": drawn})
        assert given.loss({}) == given.loss({})  # dropout is off
        assert sum(len(batch["label"]) for _, batch in given.outputs(lambda *a: given.net(a[1], a[2]))) == 8
        return Started(params={"user": moved["user"]})

    work = job(Noisy(dropout=0.5), FURL.on_client(start=start), classes(counts=(8,), kind="f4"))
    random = torch.get_rng_state()
    first, second = (results(work, [0])[0].upload for _ in range(2))
    assert torch.equal(random, torch.get_rng_state())
    assert same_bits(first.deltas, second.deltas)


# --- what hooks are given and what becomes of what they give


HAND = pairs({"a": [(1, 3)], "b": [(1, 3), (1, 5)]})


def test_a_round_with_every_hook_by_hand() -> None:
    """ŷ = w·x; (1, 3), or (1, 3) and (1, 5) in one batch: slopes 2 (w − 3), 2 (w − 4); a step of 0.1.

    start: w + kept h; finish: uploads what was trained plus 1, sends its steps and keeps h = w. From w = 1:
    a begins at 1 + 0 → 1.4, b at 1 → 1.6; uploads 2.4 and 2.6, changes 1.4 and 1.6: w = 1 + (1.4 + 2 · 1.6) / 3.
    At w = 1 the mean losses are 2² and (2² + 4²) / 2.
    """
    losses = list[float]()

    def start(given: Start) -> Started:
        losses.append(given.loss({}))
        assert losses[-1] == given.loss(given.params)
        return Started(params={"w": given.sent.params["w"] + given.kept.state["h"]})

    def finish(given: Finish) -> Finished:
        assert given.rate("w") == 0.1
        assert set(given.started) == set(given.trained) == {"w"}
        assert torch.equal(given.started["w"], given.sent.params["w"] + given.kept.state["h"])
        trained = given.trained["w"]
        return Finished(
            params={"w": trained + 1}, sends={"steps": torch.tensor(float(given.steps))}, state={"h": trained}
        )

    def update(server: Global, reduced: Reduced) -> Global:
        return Optimize()(server, reduced).but(state={"sum": server.state["sum"] + reduced.state["steps"]})

    def state(net: Net) -> dict[str, Tensor]:
        return {"h": torch.zeros((), dtype=torch.float64)}

    method = (
        methods.fedavg(local=Phase(loss=methods.terms.squared_error(), optimizer=sgd(0.1)))
        .on_client(start=start, finish=finish, state=state, sends=lambda net: {"steps": torch.zeros(())})
        .on_server(state=lambda net, clients: {"sum": torch.tensor(float(len(clients)))}, update=update)
    )
    work = job(Scalar(1.0), method, HAND)
    rounds = Rounds(work)
    report = rounds([0, 1])
    assert losses == [4.0, 10.0]
    assert float(rounds.server.params["w"]) == pytest.approx(1 + (1.4 + 2 * 1.6) / 3, abs=1e-15)
    assert work.store.read([0, 1])["client/h"].tolist() == pytest.approx([1.4, 1.6], abs=1e-15)
    assert float(rounds.server.state["sum"]) == 3.0  # two clients, and a mean of one step
    assert report.upload_bytes == 8 + 4
    assert report.download_bytes == 8 + 4
    w = float(rounds.server.params["w"])
    rounds([0])
    began = w + 1.4
    assert work.store.read([0])["client/h"].tolist() == pytest.approx([began + 0.2 * (3 - began)], abs=1e-14)
    assert float(rounds.server.state["sum"]) == 4.0


def start_warm(given: Start) -> Started:
    """Begin at what a step of the private part gives, if that is better."""
    moved = given.train(Phase(trains="private", batch_size=4, optimizer=sgd(0.5)), {})
    better = given.loss({"user": moved["user"]}) < given.loss({})
    return Started(
        params={"user": moved["user"]} if better else {}, state={"rounds": given.kept.state["rounds"] + 1}
    )


def finish_all(given: Finish) -> Finished:
    """Send the mean output; upload some momentum; keep the user's change."""
    mean = torch.zeros(3)
    for output, _ in given.outputs(lambda net, params, batch: net(params, batch)):
        mean += output.float().sum(0)
    change = given.trained["linear.bias"] - given.sent.params["linear.bias"]
    return Finished(
        params={"linear.bias": given.trained["linear.bias"] + 0.5 * change},
        sends={"seen": mean[:2] / given.steps},
        state={"three": (given.trained["user"] - given.started["user"]).float()},
    )


def send_some(server: Global, client: str) -> Sent:
    """Half of the clients get another bias, all get the state."""
    shift = float(server.clients.index(client) % 2)
    params = {**server.params, "linear.bias": server.params["linear.bias"] + shift}
    return Sent(params=params, state={"mean": server.state["mean"] * (1 + shift)})


def update_all(server: Global, reduced: Reduced) -> Global:
    return Optimize()(server, reduced).but(state={"mean": server.state["mean"] + reduced.state["seen"]})


def start_mean(net: Net, clients: Any) -> dict[str, Tensor]:
    return {"mean": torch.zeros(2)}


EVERYTHING = FURL.on_client(
    state=one, sends=sends, start=start_warm, finish=finish_all, keep=Init(value=0.25)
).on_server(state=start_mean, send=send_some, update=update_all)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_every_engine_runs_hooks_alike(engine: Callable[[], Engine]) -> None:
    found = []
    for make in (Sequential, engine):
        work = job(Logits().double(), EVERYTHING, DATA)
        rounds = Rounds(work, made := make())
        reports = [rounds(clients) for clients in ([0, 1, 2], [3, 1], [2, 0, 1, 3])]
        made.close()
        found.append(
            {**rounds.server.params, **rounds.server.state, **everyone(work.store, 4)}
            | {"losses": torch.tensor([r.loss for r in reports])}
        )
        assert [r.download_bytes for r in reports] == [12 * 8 + 2 * 4] * 3
    assert found[0].keys() == found[1].keys()
    assert found[0]["client/rounds"].tolist() == [2, 3, 2, 2]
    for name, value in found[0].items():
        torch.testing.assert_close(
            found[1][name], value, rtol=0, atol=1e-6 if value.dtype == torch.float32 else 1e-12
        )


def test_the_methods_state_starts_as_it_says_whatever_private_values_do() -> None:
    for value in (0.25, ("normal", 0.3), "model"):
        method = FURL.on_client(state=one, keep=Init(value=value))  # type: ignore[arg-type]
        work = job(Logits(), method, DATA)
        kept = everyone(work.store, 4)
        assert kept["client/three"].tolist() == [[0.5] * 3] * 4
        assert kept["client/rounds"].tolist() == [0] * 4
        plain = job(Logits(), FURL.on_client(keep=Init(value=value)), DATA)  # type: ignore[arg-type]
        assert torch.equal(kept["user"], everyone(plain.store, 4)["user"])  # the same draws


def test_private_values_that_start_anew_leave_the_methods_state() -> None:
    def finish(given: Finish) -> Finished:
        return Finished(state={"rounds": given.kept.state["rounds"] + 1})

    method = FURL.on_client(state=one, finish=finish, keep=Init(value=0.0, every_round=True))
    run = simulate(Logits(), method, DATA, rounds=3, cohort=4, engine="sequential").last
    assert run.private.read(range(4))["client/rounds"].tolist() == [3] * 4
