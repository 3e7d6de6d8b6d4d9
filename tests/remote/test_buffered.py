"""FedBuff over a virtual clock equals a plain loop that shares nothing with it but the draw of cohorts."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from fedkeep import Phase, Split, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError, StoreError
from fedkeep.engines import Sampler
from fedkeep.methods import METHODS
from fedkeep.methods.client import nothing
from fedkeep.methods.server import no_state
from fedkeep.privacy import Chain
from fedkeep.remote import Packet, RoundPolicy
from fedkeep.remote.buffered import _scaled, check_buffered
from fedkeep.remote.device_store import DeviceStore
from fedkeep.remote.served_run import serve_run
from fedkeep.remote.transport import Died
from fedkeep.store import LedgerLines
from tests.engines.test_conformance import CASES, Case
from tests.methods.table import ROWS
from tests.refusals import raises
from tests.remote.federations import Devices, federation
from tests.remote.test_conformance import ledger_of, server_of
from tests.tiny import Logits, classes, same_bits

SECONDS = (1.03, 2.57, 7.11, 3.49, 1.61, 4.73)
"""How long each of six clients trains; no two of them ever end at one instant."""
DATA = classes(counts=(5, 9, 3, 7, 4, 6))
PLAIN = methods.fedavg(local=Phase(batch_size=1000, epochs=1, optimizer=sgd(0.2)))


@pytest.fixture(autouse=True)
def _case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "plain", Case(Logits, PLAIN, DATA))


def took(name: str, packet: Packet) -> float:
    """Return how long a node with one client takes: to train it; the rest takes no time."""
    trains = any(order["train"] for order in packet.header.get("orders", ()))
    return SECONDS[int(name.split("-")[1])] if trains else 0.0


@dataclass(frozen=True)
class Loop:
    """FedBuff by hand, all examples in one step: K answers make an update, M clients are under way."""

    rounds: int
    buffer: int
    concurrency: int
    exponent: float
    oldest: int | None = None

    def run(self) -> dict[str, torch.Tensor]:
        model = Logits().double()
        w = {n: p.detach().clone() for n, p in model.named_parameters()}
        sampler = Sampler(6, self.concurrency, "shuffled", 3)
        queue, number = list[int](), 0
        busy: dict[int, tuple[int, dict[str, torch.Tensor]]] = {}
        due: list[tuple[float, int]] = []
        now = 0.0
        for version in range(self.rounds):
            buffer: dict[int, dict[str, torch.Tensor]] = {}
            while len(buffer) < self.buffer:
                tried: set[int] = set()
                while len(busy) < self.concurrency and len(tried) < 6:
                    if not queue:
                        queue, number = sampler(number), number + 1
                    client = queue.pop(0)
                    if client not in tried and client not in busy and client not in buffer:
                        busy[client] = version, w
                        heapq.heappush(due, (now + SECONDS[client], client))
                    tried.add(client)
                now, client = heapq.heappop(due)
                began, x = busy.pop(client)
                if self.oldest is not None and version - began > self.oldest:
                    continue
                factor = (1 + version - began) ** -self.exponent
                buffer[client] = {n: factor * d for n, d in self.change(model, x, client).items()}
            weights = {c: len(DATA.rows(c, "train")) for c in buffer}
            total = sum(weights.values())
            w = {n: v + sum(weights[c] * buffer[c][n] for c in buffer) / total for n, v in w.items()}
        return w

    @staticmethod
    def change(model: torch.nn.Module, x: dict[str, torch.Tensor], client: int) -> dict[str, torch.Tensor]:
        batch = DATA.batch(DATA.rows(client, "train"))
        loss = lambda p: cross_entropy(functional_call(model, p, batch["x"].double()), batch["label"])  # noqa: E731
        return {n: -0.2 * g for n, g in grad(loss)(x).items()}


@pytest.mark.parametrize(
    ("buffer", "concurrency", "exponent", "oldest"),
    [(2, 4, 0.5, None), (1, 3, 0.5, None), (3, 5, 0.0, None), (2, 5, 0.5, 1)],
)
def test_buffered_rounds_equal_a_loop_by_hand(
    buffer: int, concurrency: int, exponent: float, oldest: int | None, tmp_path: Path
) -> None:
    policy = RoundPolicy(mode="buffered", buffer=buffer, staleness=exponent, oldest=oldest)
    devices = Devices("plain", tmp_path / "devices", 6, takes=took)
    run = federation("plain", "float64", policy=policy, cohort=concurrency, rounds=8, evaluate_every=0)
    serve_run(run, devices.transport, tmp_path / "run", progress=False, poll=0.25)
    devices.close()
    expected = Loop(8, buffer, concurrency, exponent, oldest).run()
    torch.testing.assert_close(server_of(tmp_path / "run"), expected, rtol=0, atol=1e-10)


def test_without_delay_and_with_a_buffer_as_large_as_the_cohort_it_is_synchronous_fedavg(
    tmp_path: Path,
) -> None:
    devices = Devices("plain", tmp_path / "devices", 3, takes=lambda name, packet: 0.0)
    policy = RoundPolicy(mode="buffered", buffer=3)
    run = federation("plain", "float64", policy=policy, cohort=3, rounds=4, evaluate_every=2)
    history = serve_run(run, devices.transport, tmp_path / "run", progress=False)
    devices.close()
    plain = simulate(
        Logits().double(), PLAIN, DATA, rounds=4, cohort=3, seed=3, engine="sequential", evaluate_every=2
    ).last
    assert same_bits(server_of(tmp_path / "run"), plain.server)
    assert [(r.round, r.split, r.metric, r.n) for r in history if r.client is None] == [
        (r.round, r.split, r.metric, r.n) for r in plain.history if r.client is None
    ]


def test_buffered_rounds_go_on_after_the_server_was_killed_and_no_state_is_lost(tmp_path: Path) -> None:
    case = "the share of FedAvg"
    devices = Devices(case, tmp_path / "devices", 6, takes=took)
    run = federation(case, policy=RoundPolicy(mode="buffered", buffer=2), cohort=4, rounds=6)
    send, left = devices.transport.send, [20]

    def stopping(messages: Any) -> list[str]:
        left[0] -= 1
        if left[0] == 0:
            raise Died
        return send(messages)

    devices.transport.send = stopping  # type: ignore[method-assign]
    with pytest.raises(Died):
        serve_run(run, devices.transport, tmp_path / "run", progress=False)
    history = serve_run(run, devices.transport, tmp_path / "run", progress=False)
    entries = ledger_of(tmp_path / "run")
    devices.kept(entries)  # every version that the ledger names is there
    devices.close()
    assert sum(entry.version for entry in entries.values()) == 6 * 2
    assert history[-1].round == 6
    assert '"kind": "lost"' not in (tmp_path / "run" / "events.jsonl").read_text()


def test_a_server_that_goes_on_draws_the_cohorts_that_follow(tmp_path: Path) -> None:
    """Not those of the run's beginning again, whose clients would be asked ever more often."""
    run = federation("plain", policy=RoundPolicy(mode="buffered", buffer=2), cohort=3, evaluate_every=0)
    devices = Devices("plain", tmp_path / "devices", 6, takes=took)
    serve_run(replace(run, rounds=1), devices.transport, tmp_path / "run", progress=False)
    devices.close()
    devices, asked = Devices("plain", tmp_path / "devices", 6, takes=took), list[list[str]]()
    send = devices.transport.send

    def noting(messages: Any) -> list[str]:
        given = list(messages)
        orders = [order for _, packet in given for order in packet.header.get("orders", ())]
        asked.append(sorted(order["client"] for order in orders if order["train"]))
        return send(given)

    devices.transport.send = noting  # type: ignore[method-assign]
    serve_run(replace(run, rounds=2), devices.transport, tmp_path / "run", progress=False)
    devices.close()
    sampler = Sampler(6, 3, "shuffled", 3)
    assert sorted(sampler(1)) != sorted(sampler(0))
    assert next(filter(None, asked)) == [f"user-{k}" for k in sorted(sampler(1))]


def test_counters_of_an_old_upload_are_not_scaled() -> None:
    start = {"w": torch.zeros(2), "count": torch.tensor(0)}
    old = Split().upload(start, {"w": torch.ones(2), "count": torch.tensor(7)}, 1.0)
    made = _scaled(old, 0.5).deltas
    assert made["w"].tolist() == [0.5, 0.5]
    assert (made["count"].item(), made["count"].dtype) == (7, torch.int64)


def test_methods_whose_state_assumes_synchrony_say_so_and_are_refused_by_name() -> None:
    refused = set()
    for name in METHODS:
        _, method = ROWS[name]
        keeps = method.server.state is not no_state or method.server.send is not None
        assert method.server.synchronous == (keeps or method.client.sends is not nothing), name
        if method.server.synchronous:
            refused.add(name)
            with pytest.raises(
                MethodError, match=f"^{method.name!r} assumes that all uploads of a round began"
            ):
                check_buffered(method)
        else:
            check_buffered(method)
    assert refused == {"scaffold", "feddyn", "ifca", "pfedhn", "fedproto", "fedamp", "feddbe", "fedpac"}


def test_a_buffer_larger_than_the_clients_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    devices = Devices("plain", tmp_path / "devices", 2)
    run = federation("plain", policy=RoundPolicy(mode="buffered", buffer=7))
    with pytest.raises(ConfigError, match=r"^rounds.buffer must be at.*6.*7"):
        serve_run(run, devices.transport, tmp_path / "run", progress=False)
    devices.close()
    assert not (tmp_path / "run").exists()


def test_an_upload_that_is_too_old_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update, seen = Chain.update, list[float]()

    def watched(self: Chain, state: Any, reports: Any, count: int) -> Any:
        seen.append(float(reports["0/inside"]))
        assert count == 2
        return update(self, state, reports, count)

    monkeypatch.setattr(Chain, "update", watched)
    takes = lambda name, packet: 1.0 if name == "node-0" else 7.0  # noqa: E731
    devices = Devices("quantile clipping", tmp_path, 3, takes=takes)
    policy = RoundPolicy(mode="buffered", buffer=2, oldest=0)
    run = federation("quantile clipping", policy=policy, cohort=4, rounds=8, evaluate_every=0)
    serve_run(run, devices.transport, tmp_path / "run", progress=False)
    devices.close()
    assert len(seen) == 8
    assert max(seen) <= 2
    assert "versions old; the oldest taken are 0." in (tmp_path / "run" / "events.jsonl").read_text()


def test_who_is_lost_at_once_is_not_asked_again_and_again_while_others_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before something has changed the answer is the same; where all are lost they are asked ever more seldom."""
    begin, asked, heals = DeviceStore.begin, list[tuple[float, str]](), {"user-3": 1e9}

    def lost(store: DeviceStore, lines: LedgerLines) -> None:
        (client,) = (store.ids[place] for place in lines.clients)
        asked.append((devices.transport.now(), client))
        if devices.transport.now() < heals.get(client, 100.0):
            raise StoreError("Its disk cannot be read.")
        begin(store, lines)

    monkeypatch.setattr(DeviceStore, "begin", lost)
    takes = lambda name, packet: 50.0 if packet.header["kind"] == "work" and name != "node-3" else 0.5  # noqa: E731
    devices = Devices("plain", tmp_path / "devices", 6, takes=takes)
    run = federation(
        "plain", policy=RoundPolicy(mode="buffered", buffer=2), cohort=6, rounds=3, evaluate_every=0
    )
    serve_run(run, devices.transport, tmp_path / "run", progress=False)
    devices.close()
    first = [client for when, client in asked if when < 60]
    assert sorted(first) == [f"user-{k}" for k in range(6)]
    assert sum(client == "user-3" for _, client in asked) <= 12
    assert '"kind": "round"' in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "value"),
    [("minimum", -1), ("deadline", 0.0), ("mode", "later"), ("over_selection", float("inf")), ("oldest", -1)],
)
def test_rules_out_of_their_bounds_are_refused_by_name(name: str, value: Any) -> None:
    with raises(ConfigError, name=name):
        RoundPolicy(**{name: value})
