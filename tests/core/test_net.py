"""A module used functionally, one model or a row per example."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple, Self

import pytest
import torch
from torch import Tensor, nn

from fedkeep.core.declared import declare
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net, PooledNet, gather, logits_of
from fedkeep.core.params import Params
from tests.refusals import raises
from tests.strangers.modules import Merging
from tests.tiny import Logits, Noisy, Unsaid

BATCH = {
    "x": torch.randn(4, 3, generator=torch.Generator().manual_seed(3)),
    "label": torch.tensor([0, 1, 2, 0]),
}


class Two(nn.Module):
    """Wants two columns, one of them optional."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, text: Tensor, bonus: Tensor | None = None) -> Tensor:
        return self.w * text + (0 if bonus is None else bonus)

    def features(self, text: Tensor) -> Tensor:
        return self.w + text


class Any_(nn.Module):
    """Takes whatever columns there are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, **columns: Tensor) -> Tensor:
        return self.w * sum(columns[name].double().sum() for name in sorted(columns))


def test_the_output_is_computed_with_the_values_given() -> None:
    model = Logits()
    own = {n: torch.randn_like(v) for n, v in Net(model).initial().items()}
    expected = BATCH["x"] @ own["linear.weight"].T + own["linear.bias"] + own["user"]
    torch.testing.assert_close(Net(model)(own, BATCH), expected)


def test_columns_are_found_by_name() -> None:
    net = Net(Two())
    batch = {"label": torch.tensor([1]), "bonus": torch.tensor([10.0]), "text": torch.tensor([3.0])}
    assert net(net.initial(), batch).item() == 16.0
    assert net(net.initial(), {"text": torch.tensor([3.0])}).item() == 6.0


def test_a_missing_column_is_named_with_a_suggestion() -> None:
    net = Net(Two())
    with raises(MethodError, column="text", columns=["label", "txt"]):
        net(net.initial(), {"txt": torch.zeros(1), "label": torch.zeros(1)})


def test_a_forward_that_takes_any_columns_gets_all() -> None:
    net = Net(Any_())
    assert net(net.initial(), {"a": torch.tensor([1.0]), "b": torch.tensor([2, 3])}).item() == 6.0


def test_other_methods_of_the_module_are_reached() -> None:
    net = Net(Two())
    assert net.call("features", {"w": torch.tensor(5.0)}, {"text": torch.tensor([1.0])}).item() == 6.0
    with raises(MethodError, model="Two", method="embed"):
        net.call("embed", {}, {})


def test_the_modules_own_values_never_change() -> None:
    model = Noisy()
    before = copy.deepcopy(model.state_dict())
    net = Net(model)
    net.train()
    values = net.initial()
    net(values, BATCH).sum().backward() if values["user"].requires_grad_() is not None else None
    values["linear.weight"].add_(1)
    after = model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert int(values["norm.num_batches_tracked"]) == 1  # statistics move in the values given, in place
    assert not torch.equal(values["norm.running_mean"], before["norm.running_mean"])


def test_initial_values_are_a_copy_without_a_graph() -> None:
    model = Logits()
    first = Net(model).initial()
    assert list(first) == list(model.state_dict())
    assert not any(v.requires_grad for v in first.values())
    first["user"] += 1
    assert torch.equal(Net(model).initial()["user"], model.user)


def test_only_parameters_that_want_gradients_are_trainable() -> None:
    model = Noisy()
    model.linear.bias.requires_grad_(False)
    assert Net(model).trainable() == {"norm.weight", "norm.bias", "linear.weight", "user"}


def test_training_mode_is_switched() -> None:
    model = Noisy(dropout=0.5)
    net = Net(model)
    net.train(False)
    values = net.initial()
    assert torch.equal(net(values, BATCH), net(values, BATCH))
    assert int(values["norm.num_batches_tracked"]) == 0
    net.train()
    assert not torch.equal(net(values, BATCH), net(values, BATCH))


class Merged(Noisy):
    """Is merged by an ``eval`` of its own."""

    merged = False

    def eval(self) -> Self:
        self.merged = True
        return super().eval()


def test_a_module_is_switched_by_its_own_eval() -> None:
    model = Merged()
    Net(model).train(False)
    assert (model.merged, model.norm.training) == (True, False)


def test_tied_weights_within_a_half_work() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Tied()
    net = Net(model)
    values = {n: v.requires_grad_() for n, v in net.initial().items()}
    torch.testing.assert_close(net(values, BATCH), model(BATCH["x"]))
    (slope,) = torch.autograd.grad(net(values, BATCH).sum(), [values["first.weight"]])
    model(BATCH["x"]).sum().backward()
    torch.testing.assert_close(slope, model.first.weight.grad)


CLIENT = torch.tensor([2, 0, 2, 1])


def tables(model: nn.Module) -> Params:
    values = Net(model).initial()
    draw = torch.Generator().manual_seed(5)
    values["user"] = torch.randn((3, *values["user"].shape), generator=draw)
    return values


def one_by_one(model: nn.Module, values: Params) -> Tensor:
    rows = []
    for position, client in enumerate(CLIENT.tolist()):
        own = {**values, "user": values["user"][client]}
        rows.append(Net(model)(own, {"x": BATCH["x"][position : position + 1]})[0])
    return torch.stack(rows)


class Mapped(Unsaid):
    """Says nothing of rows per example, so it is mapped."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.user.reshape(3)


@pytest.mark.parametrize("kind", [Logits, Mapped])
def test_a_row_per_example_equals_each_example_alone(kind: type[Logits]) -> None:
    model = kind()
    net = PooledNet(model, frozenset({"user"}))
    assert net.gathers == (kind is Logits)
    values = tables(model)
    torch.testing.assert_close(net(values, {**BATCH, "client": CLIENT}), one_by_one(model, values))


@pytest.mark.parametrize("kind", [Logits, Mapped])
def test_gradients_reach_only_the_rows_of_the_own_clients(kind: type[Logits]) -> None:
    model = kind()
    values = tables(model)
    values["user"].requires_grad_()
    out = PooledNet(model, frozenset({"user"}))(values, {**BATCH, "client": torch.tensor([2, 0, 2, 2])})
    (slope,) = torch.autograd.grad((out * torch.arange(1.0, 13.0).reshape(4, 3)).sum(), [values["user"]])
    assert slope[1].tolist() == [0, 0, 0]
    assert slope[0].tolist() == [4, 5, 6]
    assert slope[2].tolist() == [1 + 7 + 10, 2 + 8 + 11, 3 + 9 + 12]


def test_batches_are_not_normalised_example_by_example() -> None:
    """Without statistics kept it would even work, and be another model than each client's."""

    class Normalised(Mapped):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, track_running_stats=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    model = Normalised()
    net, values = (
        PooledNet(model, frozenset({"user"})),
        {**tables(model), **dict(model.norm.named_parameters("norm"))},
    )
    with raises(MethodError, model="Normalised", private=["user"]):
        net(values, {**BATCH, "client": CLIENT})


def test_without_private_names_pooled_is_plain() -> None:
    model = Logits()
    net = PooledNet(model, frozenset())
    torch.testing.assert_close(net(net.initial(), BATCH), Net(model)(net.initial(), BATCH))


def test_gather() -> None:
    table = torch.arange(12.0).reshape(3, 2, 2)
    assert torch.equal(gather(table, torch.tensor([2, 0])), table[[2, 0]])
    assert gather(torch.arange(3.0), torch.tensor([1])).shape == (1,)


def test_bound_parameters_are_held_seen_when_changed_and_given_back() -> None:
    module = nn.Linear(2, 1)
    net = Net(module)
    own = {n: v.clone() for n, v in module.state_dict().items()}
    held = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([0.5])}
    other = {"weight": torch.zeros(1, 2), "bias": torch.tensor([7.0])}
    batch = {"input": torch.tensor([[1.0, 1.0]])}
    with net.bound(held):
        assert float(net(held, batch)) == 3.5
        held["bias"] += 1.0
        assert float(net(held, batch)) == 4.5
        assert float(net(other, batch)) == 7.0  # another dict is swapped in for this call alone
        assert float(net(held, batch)) == 4.5
        partly = {**held, "bias": torch.tensor([7.0])}  # what it shares with the held one stays
        assert float(net(partly, batch)) == 10.0
        assert float(net(dict(held), batch)) == 4.5
        assert float(net(held, batch)) == 4.5
    assert float(net(held, batch)) == 4.5
    assert all(torch.equal(own[n], v) for n, v in module.state_dict().items())
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())


def test_a_layer_that_merges_into_frozen_values_leaves_no_rounding_there() -> None:
    module = Merging()
    net, own = Net(module), {n: v.clone() for n, v in module.state_dict().items()}
    frozen, places = module.a.weight, {n: p.data_ptr() for n, p in module.named_parameters()}
    with net.bound({n: torch.randn_like(v) for n, v in net.initial().items() if n != "a.weight"}):
        for mode in (False, True) * 20:
            module.train(mode)
        assert not torch.equal(frozen, own["a.weight"])
    assert all(torch.equal(own[n], v) for n, v in module.state_dict().items())
    assert {n: p.data_ptr() for n, p in module.named_parameters()} == places


def test_a_methods_state_is_none_of_the_modules() -> None:
    net = Net(nn.Linear(2, 1))
    held = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([0.5])}
    state = {"client/weight": torch.ones(3), "server/1/weight": torch.ones(3)}
    batch = {"input": torch.tensor([[1.0, 1.0]])}
    assert float(net({**held, **state}, batch)) == 3.5
    with net.bound({**held, **state}):
        assert float(net({**held, **state}, batch)) == 3.5


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda self, x, /: x, "x"),
        (lambda self, x, *more: x, r"\*more"),
        (lambda self, *xs: xs[0], r"\*xs"),
        (lambda self, x, /, **more: x, "x"),
    ],
)
def test_arguments_without_a_name_are_refused(forward: Callable[..., Tensor], name: str) -> None:
    net = Net(type("Given", (nn.Module,), {"forward": forward})())
    with pytest.raises(MethodError, match=rf"^Given\.forward takes '{name}' by position alone"):
        net({}, BATCH)


def test_any_arguments_at_all_are_given_by_name() -> None:
    net = Net(type("Given", (nn.Module,), {"forward": lambda self, *given, **columns: columns["x"]})())
    assert net({}, BATCH) is BATCH["x"]


class Told(NamedTuple):
    aux: Tensor
    logits: Tensor


class Untold(NamedTuple):
    output: Tensor
    aux: Tensor


def test_the_logits_of_an_output() -> None:
    one, other = torch.zeros(1), torch.ones(1)
    assert logits_of(Told(one, other)) is other
    assert logits_of(Untold(one, other)) is one
    assert logits_of((one, other)) is one
    assert logits_of((torch.tensor(0.5), one)) is one  # a loss stands first
    assert logits_of((one, torch.tensor(0.5))) is one
    assert logits_of(SimpleNamespace(logits=one)) is one
    assert logits_of(one) is one
    assert logits_of(()) == ()


def test_a_module_of_torchs_own_takes_the_features_or_the_only_column() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    net, x = Net(model), torch.randn(4, 3)
    batch = {"x": x, "label": torch.zeros(4), "client": torch.zeros(4)}
    assert torch.equal(net(net.initial(), batch), model(x))
    assert torch.equal(
        net(net.initial(), {"input": x, "x": x + 1}), model(x)
    )  # a column of its name goes first
    assert torch.equal(net(net.initial(), {**batch, "age": x + 1, "time": x, "opted_in": x}), model(x))
    assert torch.equal(net(net.initial(), {"image": x, "label": x, "time": x}), model(x))
    with raises(MethodError, column="input", columns=["age", "image", "label"]):
        net(net.initial(), {"image": x, "age": x, "label": x})


@pytest.mark.parametrize(
    "model",
    [nn.LSTM(3, 2), nn.Sequential(nn.TransformerEncoderLayer(3, 1, 4), nn.Linear(3, 2))],
    ids=["LSTM", "Sequential"],
)
def test_examples_are_not_taken_as_one_sequence(model: nn.Module) -> None:
    net = Net(model.eval())
    with pytest.raises(MethodError) as error:
        net(net.initial(), {"x": torch.randn(4, 3), "label": torch.zeros(4)})
    assert str(error.value).endswith(
        "forward would take the column 'x', (examples, features), as one sequence, and mix examples. Put it into a module "
        "that makes (examples, steps, features) of it."
    )
    sequences = torch.randn(4, 5, 3)
    assert net.call("forward", net.initial(), {"x": sequences}) is not None


class Pictures(nn.Module):
    """Gives what it was given."""

    def forward(self, image: Tensor) -> Tensor:
        return image


@pytest.mark.parametrize(
    ("image", "bytes_wanted", "kind", "largest"),
    [
        (torch.full((2, 3, 4, 4), 255, dtype=torch.uint8), False, torch.float32, 1),
        (torch.full((2, 3, 4, 4), 255, dtype=torch.uint8), True, torch.uint8, 255),
        (torch.full((2, 3, 4, 4), 255.0), False, torch.float32, 255),
        (torch.full((2, 16), 255, dtype=torch.uint8), False, torch.uint8, 255),  # no image: a text
    ],
)
def test_images_in_bytes_become_floats_unless_a_layer_takes_bytes(
    image: Tensor, bytes_wanted: bool, kind: torch.dtype, largest: int
) -> None:
    module = nn.Sequential()
    module.add_module("inner", declare(Pictures(), takes_bytes=bytes_wanted))
    for net, column in (
        (Net(module), "input"),
        (Net(declare(Pictures(), takes_bytes=bytes_wanted)), "image"),
    ):
        found = net({}, {column: image, "label": torch.zeros(2)})
        assert (found.dtype, found.max().item()) == (kind, largest)
