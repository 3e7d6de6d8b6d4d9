"""Clients with equally many examples are computed side by side; numbers and order are those of one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Method, Run, methods, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.engines import judge
from fedkeep.engines.judge import windows
from fedkeep.methods import Global, Sent
from tests import refusals
from tests.tiny import Unsaid, parts

CLIENTS = 60
TESTS = [1 + client % 2 for client in range(40)] + [5] * 18 + [40, 4]
KEPT = torch.randn(CLIENTS, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Counted(Unsaid):
    """Says nothing of rows per example, and counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


class Looking(Counted):
    """Looks at a value, which no function over many clients may."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if float(x[0, 0]) < 100 else -out


class Spoiling(Counted):
    """Changes its batch, and then looks at a value."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x.clone())
        x += 1
        return out if float(out.sum()) < 1e9 else -out


class Named(Counted):
    """Returns its output by task."""

    def forward(self, x: Tensor) -> Any:
        return {"first": super().forward(x), "second": x[:, :2] + self.user[:2]}


def data(meta: dict[str, Any] | None = None) -> FederatedData:
    rng = np.random.default_rng(3)
    owner = [f"user-{c:02}" for c in range(CLIENTS) for _ in range(TESTS[c] + 1)]
    columns = {"x": rng.standard_normal((len(owner), 3)), "label": rng.integers(0, 3, len(owner))}
    columns["first"], columns["second"] = columns["label"], columns["label"] % 2
    split = [s for count in TESTS for s in parts(1, 0, count)]
    return FederatedData.from_columns(owner, columns, split, meta or {"task": "multiclass", "classes": 3})


def trained(kind: type[nn.Module], given: FederatedData, method: Method | None = None) -> Run:
    """Return a run whose clients all keep numbers of their own."""
    run = simulate(kind().double(), method or methods.furl("user"), given, rounds=0)
    run.private.write(range(CLIENTS), {"user": KEPT})
    return run


def by_hand(run: Run, client: int) -> Tensor:
    """Return a client's outputs on its test examples, from the parameters themselves."""
    x = torch.from_numpy(np.asarray(run.data.columns["x"])[run.data.rows(client, "test")])
    return x @ run.server["linear.weight"].T + run.server["linear.bias"] + KEPT[client]


def wanted(run: Run, clients: list[int]) -> np.ndarray:
    """Return the losses of clients' test examples, one client after the other."""
    found = []
    for c in clients:
        label = torch.from_numpy(np.asarray(run.data.columns["label"])[run.data.rows(c, "test")])
        found.append(nn.functional.cross_entropy(by_hand(run, c), label, reduction="none"))
    return torch.cat(found).numpy()


@pytest.mark.parametrize(("kind", "calls"), [(Counted, 3 + 2), (Looking, 1 + 60), (Spoiling, 1 + 60)])
def test_losses_and_their_order_are_those_of_one_client_after_the_other(
    kind: type[Counted], calls: int
) -> None:
    """20 clients have one example each, 20 two, 18 five; one has four, one 40."""
    run, order = trained(kind, data()), [7, *range(8, CLIENTS), *range(7)]
    kind.calls = 0
    found = run.judge(("own",), "test", [run.data.ids[c] for c in order])[0].of("own")
    assert kind.calls == calls
    np.testing.assert_allclose(found.loss, wanted(run, order), rtol=0, atol=1e-12)
    assert found.client.tolist() == [c for c in order for _ in range(TESTS[c])]
    assert found.row.tolist() == [row for c in order for row in run.data.rows(c, "test")]


def test_a_way_that_pools_and_one_that_does_not_are_judged_on_the_same_examples() -> None:
    method = methods.furl("user").but(predict_shared=shared_alone)
    run = trained(Counted, data(), method)
    judged = run.judge(("own", "shared"))[0]
    assert judged.of("own").row.tolist() == judged.of("shared").row.tolist()
    for model in ("own", "shared"):
        alone = run.judge((model,))[0].of(model)
        assert alone.loss.tobytes() == judged.of(model).loss.tobytes()
    np.testing.assert_allclose(judged.of("own").loss, wanted(run, list(range(CLIENTS))), rtol=0, atol=1e-12)
    assert abs(judged.of("own").loss - judged.of("shared").loss).max() > 0.1


def shared_alone(net: Net, params: Params, batch: Batch) -> Any:
    """Predict without private numbers."""
    return net({**params, "user": torch.zeros_like(params["user"])}, batch)


def test_what_the_server_sends_each_client_is_used_for_that_client() -> None:
    method = methods.furl("user").on_server(send=with_a_bias_of_its_own)
    run = trained(Counted, data(), method)
    Counted.calls = 0
    found = run.judge(("own",))[0].of("own")
    assert Counted.calls == 5
    plain = trained(Counted, data()).judge(("own",))[0].of("own")
    even = found.client % 2 == 0
    np.testing.assert_allclose(found.loss[even], plain.loss[even], rtol=0, atol=1e-12)
    assert (abs(found.loss - plain.loss)[~even] > 1e-3).all()


def with_a_bias_of_its_own(server: Global, client: str) -> Sent:
    """Send every other client 1 more for the first class."""
    more = torch.tensor([int(client[5:]) % 2, 0, 0])
    return Sent(params={**server.params, "linear.bias": server.params["linear.bias"] + more}, state={})


def test_outputs_by_task_are_taken_apart() -> None:
    tasks = {n: {"task": "multiclass", "label": n} for n in ("first", "second")}
    run = trained(Named, data({"task": "multiclass", "classes": 3, "tasks": tasks}))
    first, second = run.judge(("own",))
    np.testing.assert_allclose(first.of("own").loss, wanted(run, list(range(CLIENTS))), rtol=0, atol=1e-12)
    rows = first.of("own").row
    logits = torch.from_numpy(np.asarray(run.data.columns["x"])[rows, :2]) + KEPT[first.of("own").client, :2]
    label = torch.from_numpy(np.asarray(run.data.columns["second"])[rows])
    expected = nn.functional.cross_entropy(logits, label, reduction="none").numpy()
    np.testing.assert_allclose(second.of("own").loss, expected, rtol=0, atol=1e-12)


def test_an_error_among_many_clients_names_the_one() -> None:
    given = data()
    given.columns["label"][given.rows(44, "test")[3]] = 7  # type: ignore[index]
    with pytest.warns(UserWarning, match="test split alone"):
        run = trained(Counted, given)
    with refusals.raises(
        MethodError, batch="a batch of 5 examples", examples=5, why="Target 7 is out of bounds"
    ):
        run.evaluate()


@pytest.mark.parametrize(("classes", "calls"), [(3, 6), (1 << 20, 1 + 20 + 18 + 1 + 2)])
def test_more_examples_are_computed_at_once_where_outputs_are_small(
    classes: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 160 examples or of 20: 20 clients have one example each, 20 two, 18 five; one has four, one 40."""
    run = trained(Counted, data({"task": "multiclass", "classes": classes}))
    monkeypatch.setattr(judge, "CHUNK", 20)
    Counted.calls = 0
    found = run.judge(("own",))[0].of("own")
    assert Counted.calls == calls
    np.testing.assert_allclose(found.loss, wanted(run, list(range(CLIENTS))), rtol=0, atol=1e-12)


def test_a_window_ends_with_what_its_clients_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(Counted, data())
    full = run.judge(("own",))[0].of("own").loss
    monkeypatch.setattr(judge, "BYTES", 20 * 3 * 8)  # 20 clients' numbers
    sent = run.sent("user-00")
    looked = [w.clients for w in windows(run.job, [(np.arange(CLIENTS), sent)], "test")]
    assert [len(clients) for clients in looked] == [20, 20, 20]
    np.testing.assert_allclose(run.judge(("own",))[0].of("own").loss, full, rtol=0, atol=1e-12)


def test_a_server_that_sends_each_client_much_fills_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(Counted, data(), methods.furl("user").on_server(send=with_a_bias_of_its_own))
    monkeypatch.setattr(judge, "BYTES", 10 * (3 + 12) * 8)  # 10 clients' numbers and models
    looked = [
        w.clients
        for w in windows(run.job, [(np.array([c]), run.sent(f"user-{c:02}")) for c in range(CLIENTS)], "test")
    ]
    assert max(map(len, looked)) <= 11
