"""What a forward pass changes of its own module: buffers that it assigns, tables whose rows it renormalises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep.core.buffers import Veil
from fedkeep.core.copying import copied
from fedkeep.core.errors import MethodError, SplitError
from fedkeep.core.net import Net
from fedkeep.core.params import clone
from tests.refusals import raises

X = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])


class Assigning(nn.Module):
    """Assigns its buffer in training; tied, or told what to assign."""

    def __init__(self, tied: bool = False, given: Tensor | None = None) -> None:
        super().__init__()
        self.given = given
        self.layer: nn.Module = nn.Linear(3, 2)
        self.register_buffer("m", torch.zeros(3))
        if tied:
            self.register_buffer("n", self.m)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.m = self.m + x.mean(0) if self.given is None else self.given
        return self.layer(x - self.m)


class Words(nn.Module):
    """A table, or a bag, whose rows have at most length 1."""

    def __init__(self, bag: bool = False, still: bool = False) -> None:
        super().__init__()
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(6, 2, max_norm=1.0)
        with torch.no_grad():
            self.table.weight.fill_(3.0)
        self.table.weight.requires_grad_(not still)

    def forward(self, word: Tensor) -> Tensor:
        return self.table(word)


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_evaluation_writes_into_no_table(bag: bool, held: bool) -> None:
    net, word = Net(Words(bag)), {"word": torch.tensor([[0, 1], [1, 2]])}
    params = net.initial()
    before = clone(params)
    net.train(False)
    with net.bound(params if held else {}):
        found = net(params, word)
    assert float(found.detach().norm(dim=-1).max()) == pytest.approx(1.0)
    assert torch.equal(params["table.weight"], before["table.weight"])


def test_evaluation_writes_not_into_a_frozen_table_of_the_module_either() -> None:
    model = Words(still=True)
    net = Net(model)
    net.train(False)
    net({}, {"word": torch.tensor([0, 1])})
    assert bool((model.table.weight == 3).all())


def test_training_renormalises_the_table_that_is_trained() -> None:
    net = Net(Words())
    params = net.initial()
    with net.bound(params):
        net(params, {"word": torch.tensor([0])})
    assert params["table.weight"].detach().norm(dim=1).tolist() == pytest.approx([1.0, *[18**0.5] * 5])


@pytest.mark.parametrize("tied", [False, True])
def test_an_assigned_buffer_is_in_the_dict_afterwards(tied: bool) -> None:
    model = Assigning(tied)
    net, own = Net(model), model.m
    params = net.initial()
    held = params["m"]
    with net.bound(params):
        net(params, {"x": X})
        net(params, {"x": X})
        net.settle()
        assert params["m"].tolist() == [3.0, 6.0, 9.0]
        net(params, {"x": X})
    assert params["m"].data_ptr() == held.data_ptr()
    assert held.tolist() == [4.5, 9.0, 13.5]
    net(params, {"x": X})  # not held
    assert params["m"].tolist() == [6.0, 12.0, 18.0]
    net.train(False)
    net(params, {"x": X})
    assert params["m"].tolist() == [6.0, 12.0, 18.0]
    assert model.m is own
    assert own.tolist() == [0.0, 0.0, 0.0]


class Multiplying(Assigning):
    """Multiplies by its buffer before it assigns it: the gradient needs the old one."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.m[:2]
        self.m = self.m + x.mean(0)
        return out


@pytest.mark.parametrize("tied", [False, True])
def test_a_buffer_of_another_dict_that_is_assigned_keeps_its_tensor(tied: bool) -> None:
    """As a private copy's, whose dict is made anew for each call."""
    net = Net(Multiplying(tied))
    params, own = net.initial(), net.initial()
    own["layer.weight"].requires_grad_()
    with net.bound(params):
        one, two = (
            net(dict(own), {"x": X}).sum() for _ in range(2)
        )  # the second sees what the first has assigned
        (slope,) = torch.autograd.grad(one + two, own["layer.weight"])
        assert torch.equal(slope, torch.outer(torch.tensor([1.5, 3.0]), X.sum(0)))
        net.settle()
        assert own["m"].tolist() == [3.0, 6.0, 9.0]
        net(dict(own), {"x": X})
    assert own["m"].tolist() == [4.5, 9.0, 13.5]
    assert not params["m"].any()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("given", "shape"), [(torch.zeros(1), "(1,)"), (torch.zeros(2, 3), "(2, 3)")])
def test_an_assigned_buffer_of_another_shape_is_refused(held: bool, given: Tensor, shape: str) -> None:
    model = Assigning(given=given)
    model.layer = nn.Identity()  # takes any shape
    net = Net(model)
    params = net.initial()

    def run() -> None:
        with net.bound(params if held else {}):
            net(params, {"x": X})

    with raises(MethodError, wanted=(3,), buffer="m"):
        run()


@pytest.mark.parametrize("whose", ["each", "all", "the module's"])
def test_buffers_assigned_for_several_clients_at_once_are_refused(whose: str) -> None:
    model = Assigning()
    net, before = Net(model), model.m
    params = net.initial()
    shared = {} if whose == "each" else {"m": params.pop("m")}
    given = shared if whose == "all" else {}
    stacked = {n: torch.stack([v.detach()] * 2) for n, v in params.items()}
    with pytest.raises(RuntimeError, match="forward assigns the buffer 'm', which cannot be followed"):
        torch.func.vmap(lambda p, x: net({**p, **given}, {"x": x}))(stacked, torch.stack([X, X]))
    assert model.m is before


class Rotated(nn.Module):
    """Has a cache that grows to the longest text so far, and is read as far as it is said to reach."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.reach = 2
        self.register_buffer("cache", torch.arange(2.0), persistent=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.reach:
            self.reach = self.grown = x.shape[1]
            self.register_buffer("cache", torch.arange(float(self.reach)) / self.reach, persistent=False)
        return x * self.weight * self.cache[: x.shape[1]]


def test_a_cache_that_has_grown_is_as_before_afterwards() -> None:
    model = Rotated()
    net, cache = Net(model), model.cache
    with net.still("Client 'ann'"):
        net(net.initial(), {"x": X})
        assert model.reach == 3
    assert model.cache is cache
    assert model.reach == 2
    assert not hasattr(model, "grown")
    net(net.initial(), {"x": X})
    assert len(model.cache) == 3


@pytest.mark.parametrize("error", [False, True])
def test_who_assigns_a_persistent_buffer_is_named(error: bool) -> None:
    model = Rotated()
    net, scale = Net(model), model.scale

    def run(who: str | None) -> None:
        with net.still(who):
            model.scale = torch.zeros(1)
            if error:
                raise ValueError("something else")

    kind, said = (
        (ValueError, "else") if error else (SplitError, "Client 'ann': training changed 'scale', which")
    )
    with pytest.raises(kind, match=said):
        run("Client 'ann'")
    assert model.scale is scale
    if not error:
        run(None)
        assert model.scale is scale


class Growing(nn.Module):
    """Makes a parameter, or a layer, while it runs."""

    def __init__(self, made: Callable[[], nn.Module | nn.Parameter]) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(3, 2), made

    def forward(self, x: Tensor) -> Any:
        self.more = self.made()
        return self.layer(x)


@pytest.mark.parametrize("made", [lambda: nn.Parameter(torch.zeros(2)), lambda: nn.Linear(3, 2)])
def test_what_a_forward_makes_is_refused_by_name_and_taken_away(
    made: Callable[[], nn.Module | nn.Parameter],
) -> None:
    model = Growing(made)
    net = Net(model)
    with raises(MethodError, who="Client 'ann'", layer="more"), net.still("Client 'ann'"):
        net(net.initial(), {"x": X})
    assert not hasattr(model, "more")


class Noting(nn.Module):
    """Writes into a tensor that is no buffer, by a function that looks at the module; lists its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.seen, self.listed = torch.zeros(3), [self.weight]
        self.note: Any = lambda x: self.seen.add_(x.sum(0))

    def forward(self, x: Tensor) -> Any:
        return self.note(x)


def test_what_forward_writes_is_taken_back_and_is_a_copys_own() -> None:
    model = Noting()
    made: Any = copied(model)
    with Veil(made, ()):
        assert made(X).tolist() == [3.0, 6.0, 9.0]
        made.weight += 1  # as training does
    assert (made.seen.tolist(), made.weight.tolist()) == ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    made(X)
    assert (made.seen.tolist(), model.seen.tolist()) == ([3.0, 6.0, 9.0], [0.0, 0.0, 0.0])
