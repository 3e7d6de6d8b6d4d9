"""A user's own layers on the kernels give what torch's give, and those that could not stay torch's."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import fedkeep
from fedkeep.nn import convolution, linear_layer, native_recurrent, swapped
from fedkeep.nn.accelerate import accelerate, swaps_of
from fedkeep.nn.swapped import FastGRU, FastLinear, FastLSTM, FastSequential
from tests.nn.recurrent import needs_native

BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-12}


def tensors(found: Any) -> list[Tensor]:
    if isinstance(found, PackedSequence):
        return [found.data]
    return [t for f in found for t in tensors(f)] if isinstance(found, tuple) else [found]


def compared(
    layer: nn.Module, call: Callable[[nn.Module, Tensor], Any], x: Tensor, kind: torch.dtype
) -> nn.Module:
    """Compare what a layer and its swapped copy give, and all gradients; return the copy.

    Both have rounding errors, so they are compared with the same in float64: beyond torch's error there is the bound.
    """
    exact, fast = copy.deepcopy(layer).double(), accelerate(layer.to(kind))
    found = []
    for module in (exact, layer, fast):
        given = x.to(next(module.parameters()).dtype).requires_grad_()
        out = tensors(call(module, given))
        total = sum((t.double() * (1.5 + torch.arange(t.numel()).cos()).view(t.shape)).sum() for t in out)
        grads = torch.autograd.grad(total, [given, *module.parameters()])  # type: ignore[arg-type]
        with torch.no_grad():
            found.append([t.detach() for t in (*out, *grads, *tensors(call(module, given.detach())))])
    for wanted, theirs, got in zip(*found, strict=True):
        assert got.shape == wanted.shape
        apart, known = (
            (each - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30) for each in (got, theirs)
        )
        assert float(apart) <= BOUNDS[kind] + float(known)
    return fast


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran."""
    ran: list[str] = []
    for passes in (native_recurrent.PASSES, convolution.PASSES, linear_layer.PASSES):
        forward = passes.forward

        def noted(
            tensors: Any, *rest: Any, of: Any = passes, forward: Any = forward, **more: Any
        ) -> list[Tensor]:
            ran.append(of.name)
            return forward(tensors, *rest, **more)

        monkeypatch.setattr(passes, "forward", noted)
    return ran


# Sequences, length, inputs, hidden units, layers; more than 64 sequences are several chunks of the kernel.
SHAPES = [(3, 5, 4, 6, 1), (1, 1, 1, 1, 1), (70, 4, 3, 9, 2), (5, 7, 2, 17, 3), (130, 2, 3, 4, 1)]


@needs_native
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=["float32", "float64"])
def test_recurrent_layers_give_what_torch_gives(kind: Any, dtype: torch.dtype, runs: list[str]) -> None:
    ways = itertools.product(SHAPES, ("none", "zeros", "given", "packed", "sorted"))
    for number, ((sequences, length, inputs, hidden, layers), start) in enumerate(ways):
        two_ways, first = number % 2 > 0, number % 4 > 1
        torch.manual_seed(number)
        layer = kind(inputs, hidden, layers, batch_first=first, bidirectional=two_ways)
        x = torch.randn(sequences, length, inputs) if first else torch.randn(length, sequences, inputs)
        lengths = torch.randint(1, length + 1, (sequences,))
        lengths = lengths.sort(descending=True).values if start == "sorted" else lengths
        states = torch.randn(2, (1 + two_ways) * layers, sequences, hidden, dtype=torch.float64)

        def call(
            module: nn.Module,
            x: Tensor,
            start: str = start,
            first: bool = first,
            n: Tensor = lengths,
            states: Tensor = states,
        ) -> Any:
            if start in ("packed", "sorted"):
                return module(pack_padded_sequence(x, n, batch_first=first, enforce_sorted=start == "sorted"))
            h, c = (states if start == "given" else torch.zeros_like(states)).to(x.dtype)
            return module(x) if start == "none" else module(x, (h, c) if kind is nn.LSTM else h)

        del runs[:]
        fast = compared(layer, call, x, dtype)
        assert type(fast) in (FastLSTM, FastGRU)
        assert bool(runs) == (start != "given"), start


@needs_native
def test_packed_sequences_come_back_in_the_order_they_had() -> None:
    layer, x = nn.LSTM(3, 5, batch_first=True), torch.randn(4, 6, 3)
    packed = pack_padded_sequence(x, torch.tensor([2, 6, 1, 6]), batch_first=True, enforce_sorted=False)
    (mine, _), (theirs, _) = accelerate(layer)(packed), layer(packed)
    assert isinstance(mine, PackedSequence)
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))


@needs_native
def test_cell_states_can_be_differentiated_twice() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(2, 3, batch_first=True, bidirectional=True).double()
    x = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    fast = accelerate(layer)
    found = []
    for module in (layer, fast):
        _, (h, c) = module(x)
        (slope,) = torch.autograd.grad((h * c).sum() + (c**2).sum(), x, create_graph=True)
        found.append([slope, *torch.autograd.grad((slope**2).sum(), [x, *module.parameters()])])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("path", ["native", "pure"])
def test_swapped_layers_run_side_by_side(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "pure":
        monkeypatch.setattr(native_recurrent, "usable", lambda *_: False)
    torch.manual_seed(0)
    layers = [nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True).double() for _ in range(3)]
    x, fast = torch.randn(3, 2, 5, 3, dtype=torch.float64), accelerate(layers[0])
    params = {
        n: torch.stack([dict(layer.named_parameters())[n] for layer in layers])
        for n, _ in fast.named_parameters()
    }

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        output, (h, c) = torch.func.functional_call(fast, params, (x,))
        return (output**2).sum() + (h**3).sum() + (c**2).sum()

    together = torch.func.vmap(torch.func.grad(loss))({n: p.detach() for n, p in params.items()}, x)
    for k, layer in enumerate(layers):
        output, (h, c) = layer(x[k])
        alone = torch.autograd.grad((output**2).sum() + (h**3).sum() + (c**2).sum(), list(layer.parameters()))
        for (name, _), wanted in zip(layer.named_parameters(), alone, strict=True):
            torch.testing.assert_close(together[name][k], wanted, rtol=1e-10, atol=1e-12)


def chain(*more: nn.Module, channels: int = 2, kernel: int = 3, padding: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 4, kernel, padding=padding),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3),
        nn.ReLU(),
        nn.MaxPool2d((2, 2), stride=2),
        *more,
    )


@needs_native
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=["float32", "float64"])
def test_convolution_relu_and_pooling_give_what_torch_gives(dtype: torch.dtype, runs: list[str]) -> None:
    for number, (side, kernel, padding, more) in enumerate(
        itertools.product(
            (14, 17), (3, 5), (0, 1), ((), (nn.Flatten(),), (nn.Flatten(), nn.Linear(5, 3)), (nn.Tanh(),))
        )
    ):
        torch.manual_seed(number)
        if len(more) == 2:
            size = ((side + 2 * padding - kernel + 1) // 2 - 2) // 2
            more = (nn.Flatten(), nn.Linear(5 * size * size, 3))
        del runs[:]
        fast = compared(
            chain(*more, kernel=kernel, padding=padding),
            lambda module, x: module(x),
            torch.randn(3, 2, side, side),
            dtype,
        )
        assert type(fast) is FastSequential
        assert runs.count("conv_pool") >= 2


@needs_native
def test_images_come_out_in_torchs_order_of_memory() -> None:
    out = accelerate(chain())(torch.randn(3, 2, 12, 12))
    assert out.view(3, -1).shape == (3, 20)  # fails where channels lie together


@needs_native
def test_what_a_chain_cannot_take_goes_to_torch(runs: list[str]) -> None:
    torch.manual_seed(0)
    plain = chain()
    fast, x = accelerate(plain), torch.randn(2, 2, 12, 12)
    torch.testing.assert_close(fast[0](x), plain[0](x))  # a layer of the chain alone
    torch.testing.assert_close(fast[:2](x), plain[:2](x))
    assert runs == []
    torch.testing.assert_close(fast(x[0]), plain(x[0]), rtol=1e-5, atol=1e-6)  # one image
    with pytest.raises(RuntimeError, match="channels"):
        fast(torch.randn(2, 3, 12, 12))
    seen = []
    fast[1].register_forward_hook(lambda *arguments: seen.append(arguments[2].shape))
    fast(x)
    assert seen == [(2, 4, 12, 12)]


@needs_native
@pytest.mark.parametrize("rows", [1, 2, 16, 17])
def test_large_linear_layers_give_what_torch_gives(rows: int, runs: list[str]) -> None:
    torch.manual_seed(0)
    fast = compared(nn.Linear(600, 500), lambda module, x: module(x), torch.randn(rows, 600), torch.float32)
    assert type(fast) is FastLinear
    assert ("linear" in runs) == (rows in (2, 16))


@needs_native
def test_calls_that_torch_would_cast_go_to_torch(runs: list[str]) -> None:
    layer, x = nn.Linear(600, 500), torch.randn(5, 600)
    fast = accelerate(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(x), layer(x))
    assert runs == []
    fast(x)
    assert runs == ["linear"]


class Own(nn.LSTM):
    """A subclass."""


class Two(nn.Module):
    """Two layers."""

    def __init__(self, first: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = first, second


def lstm(**more: Any) -> nn.LSTM:
    return nn.LSTM(3, 4, **more)


def hooked() -> nn.Module:
    layer = lstm()
    layer.register_forward_hook(lambda *_: None)
    return layer


def tied() -> nn.Module:
    model = Two(lstm(), lstm())
    model.second.weight_hh_l0 = model.first.weight_hh_l0  # type: ignore[union-attr, assignment]
    return model


def under_two_names() -> nn.Module:
    layer = lstm()
    return Two(layer, layer)


def replaced() -> nn.Module:
    layer = lstm()
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def compiled() -> nn.Module:
    model = Two(lstm())
    model._orig_mod = model.first  # what torch.compile(model) gives holds the model by this name
    del model.first
    return model


LEFT = {
    "it has hooks": hooked,
    "it is a subclass, Own": lambda: Own(3, 4),
    "it is compiled": compiled,
    "its forward was replaced": replaced,
    "it stands in two places": under_two_names,
    "its weights are shared, or no plain parameters": tied,
    "it has dropout between its layers": lambda: lstm(num_layers=2, dropout=0.5),
    "it has projections": lambda: lstm(proj_size=2),
    "it has no bias": lambda: lstm(bias=False),
    "it is of torch.bfloat16": lambda: lstm().bfloat16(),
    "torch's is as fast beyond 256 hidden units": lambda: nn.LSTM(3, 257),
    "its weights are parametrised": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(600, 600)),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_stays_torchs(why: str) -> None:
    model = LEFT[why]()
    fast = accelerate(model)
    assert [type(layer) for layer in fast.modules()] == [type(layer) for layer in model.modules()]
    found = swaps_of(fast)
    assert not found.swapped
    assert set(found.left.values()) == {why}
    assert str(found).startswith("torch's own: ")


def test_small_linear_lazy_and_other_layers_are_left_without_a_word() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.LazyLinear(5), nn.Conv2d(1, 2, 3), nn.RNN(3, 4), nn.Linear(600, 600, bias=False)
    )
    assert swaps_of(accelerate(model)).left == {"4": "it has no bias"}


def test_fedkeeps_own_models_stay_as_they_are() -> None:
    model = fedkeep.models.TextClassifier(30, 3, hidden=300, mlp=1000)
    assert repr(accelerate(model)) == repr(model)
    assert str(swaps_of(model)) == ""


def test_a_copy_is_swapped_and_state_goes_both_ways() -> None:
    torch.manual_seed(0)
    model = Two(nn.Sequential(nn.Embedding(9, 3), lstm()), chain())
    fast = accelerate(model)
    assert type(model.first[1]) is nn.LSTM  # type: ignore[index]
    assert swaps_of(fast).swapped == {"first.1": "LSTM", "second": "convolution, ReLU, pooling"}
    assert str(swaps_of(fast)) == "on fedkeep's kernels: first.1 (LSTM), second (convolution, ReLU, pooling)"
    assert list(fast.state_dict()) == list(model.state_dict())
    for source, target in ((fast, model), (model, fast)):
        with torch.no_grad():
            next(source.parameters()).add_(1)
        target.load_state_dict(source.state_dict())
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), accelerate(fast)):  # noqa: S301
        assert repr(again) == repr(fast)
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_places_of_cell_states_are_where_the_kernel_puts_them() -> None:
    """By hand: lengths 1 and 2, H = 3, vectors of 2 numbers, so 4 padded units and records of 5 vectors."""
    found = swapped._places(torch.tensor([1, 2]), 2, 3, 2)
    # Longest first: sequence 1 stands at place 0, sequence 0 at place 1. Step 0 has two records of each tile, step 1 one.
    assert found.tolist() == [[10 + 8, 10 + 9, 20 + 10 + 8], [40 + 8, 40 + 9, 40 + 10 + 8]]
