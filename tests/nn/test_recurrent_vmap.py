"""The recurrent layers under vmap: the numbers of a loop, by one call."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import embedding

from fedkeep.nn import LSTM, native_recurrent
from tests.nn.recurrent import KINDS, needs_native, relative, scalar

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [(), ("layer",), ("table",), ("lengths", "ids")])
def test_vmap_equals_loop(path, kind, shared) -> None:
    torch.manual_seed(0)
    clients, ours = 4, KINDS[kind][0]
    layers = [ours(5, 7, True).double() for _ in range(clients)]
    params = {k: v.detach() for k, v in stack_module_state(layers)[0].items()}
    data = {
        "layer": params,
        "table": torch.randn(clients, 9, 5, dtype=torch.float64),
        "ids": torch.randint(0, 9, (clients, 6, 8)),
        "lengths": torch.randint(1, 9, (clients, 6)),
    }
    base = ours(5, 7, True).double()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = base

        def forward(self, ids: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
            x = embedding(ids, table)
            pooled = [self.base.pooled(x, lengths, how) for how in ("last", "mean", "max")]
            return scalar((*self.base.forward_ids(ids, table, lengths), *self.base(x, lengths), *pooled))

    def loss(layer, table, ids, lengths):
        layer = {f"base.{k}": v for k, v in layer.items()}
        return functional_call(Twice(), layer, (ids, table, lengths))

    def pick(name: str, client: int):
        value = data[name]
        return {k: v[client] for k, v in value.items()} if name == "layer" else value[client]

    arguments = [pick(name, 0) if name in shared else data[name] for name in data]
    dims = tuple(None if name in shared else 0 for name in data)
    found = vmap(grad(loss, argnums=(0, 1)), in_dims=dims)(*arguments)
    for client in range(clients):
        one = [pick(name, 0 if name in shared else client) for name in data]
        leaves = {k: v.clone().requires_grad_() for k, v in one[0].items()}
        table = one[1].clone().requires_grad_()
        wanted = torch.autograd.grad(loss(leaves, table, *one[2:]), [*leaves.values(), table])
        for a, b in zip([*(found[0][k][client] for k in leaves), found[1][client]], wanted, strict=True):
            assert relative(a, b) < 1e-12


@needs_native
def test_vmap_runs_one_call_of_the_kernel(monkeypatch) -> None:
    calls = []
    run = native_recurrent._Call.run
    monkeypatch.setattr(
        native_recurrent._Call, "run", lambda self, *a: (calls.append(self.clients), run(self, *a))[1]
    )
    layer = LSTM(3, 4, True)
    params = {k: torch.stack([v.detach()] * 5) for k, v in layer.named_parameters()}
    x = torch.randn(5, 2, 6, 3)
    vmap(grad(lambda p, x: functional_call(layer, p, (x,))[1].sum()))(params, x)
    assert calls == [5, 5]


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_nested_vmap(kind) -> None:
    layer = KINDS[kind][0](3, 4, True).double()
    x = torch.randn(2, 3, 5, 6, 3, dtype=torch.float64)
    found = vmap(vmap(layer))(x)
    for i, j in itertools.product(range(2), range(3)):
        for a, b in zip(found, layer(x[i, j]), strict=True):
            assert torch.equal(a[i, j], b)
