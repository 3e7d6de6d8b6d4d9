"""Swapped layers that are changed later, or called in unusual ways, give what torch's give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedkeep.nn.accelerate import accelerate
from tests.nn.recurrent import needs_native

pytestmark = needs_native


def chain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LSTM": (lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), (5, 6, 3)),
    "GRU": (lambda: nn.GRU(3, 4, 2, batch_first=True, bidirectional=True), (5, 6, 3)),
    "Linear": (lambda: nn.Linear(512, 512), (8, 512)),
    "chain": (chain, (3, 2, 12, 12)),
}


def parts(out: Any) -> list[Tensor]:
    return [t for o in out for t in parts(o)] if isinstance(out, tuple) else [out]


def same(name: str, call: Callable[[Any, Tensor], Any]) -> None:
    """Call a layer and its swapped copy with one input, and compare what they give."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().double()
    x, found = torch.randn(shape, dtype=torch.float64), []
    for module in (layer, accelerate(layer)):
        torch.manual_seed(1)
        found.append(parts(call(module, x.clone())))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_dropout_may_be_set_later(name: str) -> None:
    def call(module: Any, x: Tensor) -> Any:
        module.dropout = 0.5
        return module(x), module.eval()(x)

    same(name, call)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_the_forward_of_a_layer_in_a_chain_may_be_replaced_later(place: int) -> None:
    def call(module: Any, x: Tensor) -> Any:
        forward = module[place].forward
        module[place].forward = lambda x: 2 * forward(x)
        return module(x)

    same("chain", call)


@pytest.mark.parametrize("shape", [None, (1,), (8, 1)])
def test_a_linear_layer_may_have_another_bias_later(shape: tuple[int, ...] | None) -> None:
    def call(module: Any, x: Tensor) -> Any:
        module.bias = None if shape is None else nn.Parameter(torch.ones(shape, dtype=torch.float64))
        return module(x)

    same("Linear", call)


WRONG = {
    "Linear": ("bias", (7,)),
    "chain": ("0.bias", (2,)),
    "LSTM": ("weight_hh_l1", (16, 3)),
    "GRU": ("weight_ih_l1", (12, 9)),
}


@pytest.mark.parametrize("name", WRONG)
def test_torch_says_what_is_wrong_with_the_shape_of_a_weight(name: str) -> None:
    make, given = LAYERS[name]
    path, shape = WRONG[name]
    fast = accelerate(make()).double()
    owner, _, leaf = path.rpartition(".")
    setattr(fast.get_submodule(owner), leaf, nn.Parameter(torch.ones(shape, dtype=torch.float64)))
    with pytest.raises(RuntimeError, match="size|shapes"):
        fast(torch.randn(given, dtype=torch.float64))


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch loads its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LAYERS)
def test_a_mode_sees_the_operations_of_torchs_layer(name: str) -> None:
    make, shape = LAYERS[name]
    layer, x, found = make(), torch.randn(shape), []
    for module in (layer, accelerate(layer)):
        with Seen() as mode:
            module(x)
        found.append(mode.names)
    assert found[0] == found[1] != []


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_several_gradients_at_once(name: str, again: bool) -> None:
    def call(module: Any, x: Tensor) -> Any:
        given = x.requires_grad_()
        out = torch.cat([part.flatten() for part in parts(module(given))])
        wanted, inputs = torch.randn(3, len(out), dtype=torch.float64), [given, *module.parameters()]
        found = torch.autograd.grad(out, inputs, wanted, is_grads_batched=True, create_graph=again)
        if again:
            found += torch.autograd.grad(sum((f**2).sum() for f in found), given)  # type: ignore[arg-type]
        return found

    same(name, call)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_what_was_given_may_be_changed_in_place(name: str) -> None:
    def call(module: Any, x: Tensor) -> Any:
        given = x.requires_grad_()
        inner = given * 1
        out = module(inner)[0]
        inner += out[..., :3]
        return torch.autograd.grad((inner**2).sum() + out.sum(), [given, *module.parameters()])

    same(name, call)
