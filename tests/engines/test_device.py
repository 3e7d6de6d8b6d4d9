"""The device: it stages what clients keep, keeps what the server took, and tells nothing of either."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import Phase, methods, sgd
from fedkeep.core.errors import ConfigError, MethodError, NonFiniteError
from fedkeep.engines import (
    Centralised,
    ClientResult,
    Engine,
    Job,
    LocalDevice,
    Order,
    Sequential,
    Vectorised,
    first_global,
)
from fedkeep.engines.auto import Auto
from fedkeep.engines.client_step import train_client
from fedkeep.methods import Init, Kept, Sent, by_share, newest
from fedkeep.methods.terms import squared_error
from fedkeep.split import Upload
from tests.engines.test_round import BROKEN, Fragile
from tests.refusals import raises
from tests.tiny import Line, Logits, Rounds, classes, everyone, job, pairs, results, same_bits

FURL = methods.furl("user", local=Phase(batch_size=4))
DATA = classes(counts=(5, 9, 3, 7))
ENGINES = [Sequential, Vectorised]


def sent_by(work: Job) -> Sent:
    return Sent(params=first_global(work.method, work.net, work.data).params)


def orders(work: Job, clients: list[int], sent: Sent | None = None, round: int = 0) -> list[Order]:
    given = sent_by(work) if sent is None else sent
    return [Order(round=round, client=str(work.data.ids[c]), sent=given) for c in clients]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_clients_keep_is_staged_and_kept_for_shares_alone(engine: type[Engine]) -> None:
    work = job(Logits().double(), FURL, DATA)
    before = everyone(work.store, 4)
    expected = {result.client: result for result in results(work, [0, 1, 3], engine())}
    device = LocalDevice(work, engine())
    answers = list(device.train(orders(work, [0, 1, 3])))
    assert [answer.client for answer in answers] == ["user-0", "user-1", "user-3"]
    for client, answer in zip((0, 1, 3), answers, strict=True):
        assert answer.fault is None
        assert answer.loss == expected[client].loss
        assert same_bits(answer.upload.deltas, expected[client].upload.deltas)  # type: ignore[union-attr]
    assert work.store.seen(range(4)) == [False] * 4  # staged, not kept
    device.accept({"user-3": 0.25, "user-0": 0.75})
    assert work.store.seen(range(4)) == [True, False, False, True]
    after = everyone(work.store, 4)
    for client in range(4):
        mine = {n: v[client] for n, v in after.items()}
        untouched = {n: v[client] for n, v in before.items()}
        assert same_bits(mine, expected[client].kept if client in (0, 3) else untouched)  # type: ignore[arg-type]
    device.accept({"user-1": 1.0})  # it was dropped
    assert work.store.seen(range(4)) == [True, False, False, True]


@pytest.mark.parametrize("engine", [Sequential(), Auto(3, 9, 2)], ids=lambda e: type(e).__name__)
def test_an_upload_is_let_go_of_before_the_next_client_is_trained(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads are as large as models."""
    alive = list[weakref.ref[Upload]]()

    def noted(*arguments: Any) -> ClientResult:
        assert all(each() is None for each in alive)
        result = train_client(*arguments)
        assert result.upload is not None
        alive.append(weakref.ref(result.upload))
        return result

    monkeypatch.setattr("fedkeep.engines.client_step.train_client", noted)
    work = job(Logits(), FURL, DATA)
    for answer in LocalDevice(work, engine).train(orders(work, [0, 1, 3])):
        del answer
    assert len(alive) == 3


def test_orders_that_differ_in_when_they_are_are_not_trained_together() -> None:
    work = job(Logits(), FURL, DATA)
    first, second = orders(work, [0, 1])
    for changes in ({"round": 1}, {"progress": 0.5}):
        with pytest.raises(ConfigError) as error:
            list(LocalDevice(work, Sequential()).train([first, dataclasses.replace(second, **changes)]))
        later = f"({changes.get('round', 0)}, {changes.get('progress', 0.0)})"
        assert str(error.value) == (
            f"Orders that are trained together must have one round and one progress; got (0, 0.0) and {later}."
        )


def test_what_was_staged_and_never_accepted_is_dropped_by_the_next_round() -> None:
    work = job(Logits(), FURL, DATA)
    device = LocalDevice(work, Sequential())
    list(device.train(orders(work, [0, 1])))
    assert list(device.train([])) == []
    device.accept({"user-0": 0.5, "user-1": 0.5})
    assert work.store.seen(range(4)) == [False] * 4
    list(device.train(orders(work, [0, 1])))
    list(device.train(orders(work, [2], round=1)))
    device.accept({"user-0": 0.5, "user-2": 0.5})
    assert work.store.seen(range(4)) == [False, False, True, False]


def test_a_client_that_broke_down_has_nothing_to_keep() -> None:
    method = methods.furl("user", local=Phase(loss=squared_error(), optimizer=sgd(0.1)))
    work = job(Fragile(), method, BROKEN)
    device = LocalDevice(work, Sequential())
    answers = {answer.client: answer for answer in device.train(orders(work, [0, 1, 2]))}
    assert isinstance(answers["bad"].fault, NonFiniteError)
    assert answers["bad"].upload is None
    device.accept({"a": 0.5, "bad": 0.0, "c": 0.5})
    assert work.store.seen(range(3)) == [True, False, True]


def test_each_client_trains_from_what_it_was_sent() -> None:
    """ŷ = w·x, (1, 3), a step of 0.1 from w: w + 0.2 (3 − w); and the round names the streams."""
    work = job(
        Line(), methods.furl("user", local=Phase(loss=squared_error())), pairs({"a": [(1, 3)], "b": [(1, 3)]})
    )
    given = [
        Order(round=0, client=client, sent=Sent(params={"w": torch.tensor(w, dtype=torch.float64)}))
        for client, w in (("b", 1.0), ("a", 2.0))
    ]
    answers = list(LocalDevice(work, Sequential()).train(given))
    assert [answer.client for answer in answers] == ["b", "a"]
    changes = [float(answer.upload.deltas["w"]) for answer in answers if answer.upload is not None]
    assert changes == pytest.approx([0.4, 0.2], abs=1e-15)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_share_by_hand(engine: type[Engine]) -> None:
    """FURL eq. 6: w_p + z (u_p − w_p). ŷ = user (x = 0), kept 2, wanted 5, a step of 0.1: u_p = 2 + 0.2 · 3 = 2.6."""
    data = pairs({"a": [(0, 5)], "b": [(0, 5)], "c": [(0, 5)]})
    for scale, expected in ((1, [2.6, 2.6, 2.0]), ("fedavg", [2.15, 2.45, 2.0])):
        method = methods.furl("user", private_scale=scale, local=Phase(loss=squared_error()))  # type: ignore[arg-type]
        assert method.client.accept is (newest if scale == 1 else by_share)
        work = job(Line(), method, data)
        work.store.write([0, 1, 2], {"user": torch.full((3,), 2.0, dtype=torch.float64)})
        device = LocalDevice(work, engine())
        list(device.train(orders(work, [0, 1, 2])))
        device.accept({"a": 0.25, "b": 0.75})
        assert work.store.read([0, 1, 2])["user"].tolist() == pytest.approx(expected, abs=1e-15)


def test_a_share_of_what_is_kept() -> None:
    """Counters and the method's state are kept as they are after training."""
    before = Kept(
        params={"user": torch.tensor([1.0, 2.0]), "steps": torch.tensor(3)}, state={"h": torch.ones(1)}
    )
    after = Kept(
        params={"user": torch.tensor([5.0, 0.0]), "steps": torch.tensor(7)}, state={"h": torch.zeros(1)}
    )
    found = by_share(before, after, 0.25)
    assert found.params["user"].tolist() == [2.0, 1.5]
    assert int(found.params["steps"]) == 7
    assert float(found.state["h"]) == 0.0
    assert before.params["user"].tolist() == [1.0, 2.0]
    assert newest(before, after, 0.25) is after


def test_a_new_clients_share_moves_from_its_default() -> None:
    """The store has nothing of it: 2 is the default, u_p = 2.6, z = 1/2."""
    method = methods.furl("user", private_scale="fedavg", private_init=2.0, local=Phase(loss=squared_error()))
    work = job(Line(), method, pairs({"a": [(0, 5)]}))
    device = LocalDevice(work, Sequential())
    list(device.train(orders(work, [0])))
    device.accept({"a": 0.5})
    assert float(work.store.read([0])["user"]) == pytest.approx(2.3, abs=1e-15)


def test_an_answer_holds_nothing_private() -> None:
    model = Logits()
    with torch.no_grad():
        model.user.copy_(torch.tensor([0.7390851, -1.3247180, 0.5671433]))
    work = job(model, FURL.on_client(keep=Init(value="model")), DATA)
    device = LocalDevice(work, Sequential())
    for answer in device.train(orders(work, [0, 1])):
        assert {field.name for field in dataclasses.fields(answer)} == {"client", "upload", "loss", "fault"}
        assert set(answer.upload.deltas) == {"linear.weight", "linear.bias"}


def test_progress_is_told_client_by_client() -> None:
    seen: list[float] = []
    work = job(Logits(), FURL, DATA, after_step=seen.append)
    device = LocalDevice(work, Sequential())
    told = [list(seen) for _ in device.train(orders(work, [0, 1, 2, 3]))]
    assert told == [[], [0.25], [0.25, 0.5], [0.25, 0.5, 0.75]]
    assert seen == [0.25, 0.5, 0.75, 1.0]


def test_centralised_training_answers_once_and_keeps_everybody() -> None:
    seen: list[float] = []
    work = job(Logits(), FURL, DATA, after_step=seen.append)
    device = LocalDevice(work, Centralised())
    first, *others = device.train(orders(work, [0, 1, 2]))
    assert seen == [0.2, 0.4, 0.6, 0.8, 1.0]  # 17 examples, 4 a step
    assert first.upload is not None
    assert [(a.client, a.upload, a.fault) for a in others] == [(c, None, None) for c in ("user-1", "user-2")]
    assert work.store.seen(range(4)) == [False] * 4
    device.accept({"user-0": 1.0})
    assert work.store.seen(range(4)) == [True, True, True, False]


@dataclasses.dataclass(frozen=True)
class Update:
    """An update that gives something else."""

    what: str

    def __call__(self, server: Any, reduced: Any) -> Any:
        params = {n: v + 1 for n, v in server.params.items()}
        bias = params["linear.bias"]
        changes = {
            "shape": {"params": {**params, "linear.bias": torch.zeros(4)}},
            "type": {"params": {**params, "linear.bias": bias.double()}},
            "missing": {"params": {"linear.bias": bias}},
            "unknown": {"params": {**params, "extra": bias}},
            "nan": {"params": {**params, "linear.bias": bias * torch.nan}},
            "state shape": {"params": params, "state": {"mean": torch.zeros(3, 1)}},
            "state name": {"params": params, "state": {"mean": torch.zeros(3), "more": torch.zeros(1)}},
            "state nan": {"params": params, "state": {"mean": torch.full((3,), torch.inf)}},
        }
        return server.but(**changes[self.what])


def one_state(net: Any, clients: Any) -> dict[str, Tensor]:
    return {"mean": torch.zeros(3)}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "The update of 'furl' changes the server's parameters: 'linear.bias' wants (3,), is (4,)."),
        (
            "type",
            "The update of 'furl' changes the server's parameters: 'linear.bias' wants torch.float32, is torch.float64.",
        ),
        ("missing", "The update of 'furl' changes the server's parameters: missing ['linear.weight']."),
        ("unknown", "The update of 'furl' changes the server's parameters: unknown ['extra']."),
        (
            "nan",
            (
                "The server's parameters after round 0: 'linear.bias' holds a NaN or an infinity. Lower the learning rate "
                "or set clip_norm."
            ),
        ),
        ("state shape", "The update of 'furl' changes the server's state: 'mean' wants (3,), is (3, 1)."),
        ("state name", "The update of 'furl' changes the server's state: unknown ['more']."),
        (
            "state nan",
            (
                "The server's state after round 0: 'mean' holds a NaN or an infinity. Lower the learning rate or set "
                "clip_norm."
            ),
        ),
    ],
)
def test_an_update_that_is_refused_leaves_server_and_clients_as_they_were(what: str, message: str) -> None:
    method = FURL.on_server(state=one_state, update=Update(what))
    work = job(Logits(), method, DATA)
    rounds = Rounds(work)
    before = {n: v.clone() for n, v in rounds.server.params.items()}
    with raises(NonFiniteError if "nan" in what else MethodError, text=message):
        rounds([0, 1])
    assert same_bits(rounds.server.params, before)
    assert rounds.server.round == 0
    assert work.store.seen(range(4)) == [False] * 4
