"""What the split checker sees: buffers, detached means, comparisons, inactive hinges, caches, updates in a region only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Split, check_split, declare, methods
from fedkeep.core.errors import SplitError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, weighted_mean
from fedkeep.split.probe import POINTS, SCALES, ProbeStep, same
from tests.refusals import raises
from tests.split.test_check import CROSS_ENTROPY, Weights, batches, joint
from tests.tiny import Logits, Noisy

EQUATION_1 = "Equation (1) is violated by 'user' (independent local training: ∂L(user i)/∂w_p(user j) = 0): "
EQUATION_2 = "Equation (2) is violated by {!r} (federated update: a_f(w_f, u_f of all users, summaries)): "
FILLED = (
    "training fills it from private values: after one step of user 0 it changes when that user's private values are "
    "replaced, so they would leave with it. Name it private too."
)


class NormOverUser(nn.Module):
    """Batch normalisation over what a private vector was added to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.user = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x + self.user))


def test_batch_norm_over_a_private_vector_is_a_leak_that_names_the_buffers() -> None:
    """The hole: after one step, the change of the running mean over 0.1 is the user's vector plus the data's mean."""
    model, batch = NormOverUser(), batches()[0]
    net = Net(model)
    params = net.initial()
    net(params, {**batch, "x": torch.zeros(4, 3)})
    torch.testing.assert_close(params["norm.running_mean"] / 0.1, model.user.detach())
    report = check_split(model, Split("user"), batches(), loss=CROSS_ENTROPY)
    assert str(report.violations[0]) == EQUATION_2.format("norm.running_mean") + FILLED
    # the variance of x + user is that of x, but for rounding, which may or may not show: bits are compared
    assert {v.parameter for v in report.violations} <= {"norm.running_mean", "norm.running_var"}
    kept = check_split(model, Split(["user", "norm.running_*"]), batches(), loss=CROSS_ENTROPY)
    assert kept.violations == ()


class Tallied(nn.Module):
    """Counts in a buffer: what it was given (``of`` users' vectors or examples), declared as updated or not."""

    def __init__(self, of: str, declared: bool) -> None:
        super().__init__()
        self.of = of
        self.linear, self.user = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.register_buffer("tally", torch.zeros(3))
        if declared:
            declare(self, updated_buffers=("tally",))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.tally.add_(self.user if self.of == "user" else x.sum(0))
        return self.linear(x) + self.user


def test_a_buffer_of_any_module_is_looked_at() -> None:
    assert check_split(Tallied("x", True), Split("user"), batches(), loss=CROSS_ENTROPY).ok
    report = check_split(Tallied("user", True), Split("user"), batches(), loss=CROSS_ENTROPY)
    assert [str(v) for v in report.violations] == [EQUATION_2.format("tally") + FILLED]
    assert check_split(Tallied("user", True), Split(["user", "tally"]), batches(), loss=CROSS_ENTROPY).ok


def test_a_frozen_buffer_that_training_changes_is_named() -> None:
    report = check_split(Tallied("user", False), Split("user"), batches(), loss=CROSS_ENTROPY)
    assert [str(v) for v in report.violations] == [EQUATION_2.format("tally") + FILLED]
    report = check_split(Tallied("x", False), Split("user"), batches(), loss=CROSS_ENTROPY)
    (violation,) = map(str, report.violations)
    assert violation.startswith("The frozen half is violated by 'tally': training changed 'tally'")


class Remembering(Logits):
    """Keeps something of a user's vector, and adds it to the next one's logits."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.list: list[Tensor] = []
        self.seen: Tensor | None = None
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        own = self.user.detach()
        if self.where == "list":
            self.list.append(own.clone())
            return out + 0.1 * torch.stack(self.list).mean(0)
        if self.where == "attribute":
            out = out if self.seen is None else out + 0.1 * self.seen
            self.seen = own.clone()
        elif self.where == "first":  # filled once, and never again
            self.seen = own.clone() if self.seen is None else self.seen
            out = out + 0.1 * self.seen
        elif self.where == "buffer":
            out = out + 0.1 * self.cache
            self.cache = own.clone()
        else:
            out = out + 0.1 * self.cache
            self.cache.mul_(0.9).add_(own)
        return out


@pytest.mark.parametrize("where", ["attribute", "first", "list", "buffer", "buffer in place"])
def test_values_that_a_model_remembers_are_found(where: str) -> None:
    model = Remembering(where)
    before = {name: value.clone() for name, value in model.named_buffers()}
    report = check_split(model, Split("user"), batches(), loss=CROSS_ENTROPY)
    assert [str(v) for v in report.violations] == [
        EQUATION_1
        + "the loss of user 0 changes with the private values of user 1, who was trained before: the model or the loss "
        "remembers them, in an attribute or in a buffer that is not persistent."
    ]
    assert model.seen is None
    assert model.list == []
    assert model.training
    assert all(torch.equal(before[n], v) and v.dtype == before[n].dtype for n, v in model.named_buffers())


def test_a_loss_that_remembers_is_found() -> None:
    last: list[Tensor] = [torch.zeros(3)]

    def loss(net: Net, params: Params, batch: Batch, received: Params) -> Tensor:
        value = CROSS_ENTROPY(net, params, batch, received) + ((params["user"] - last[0]) ** 2).sum()
        last[0] = params["user"].detach()
        return value

    report = check_split(Logits(), Split("user"), batches(), loss=loss)
    assert {(v.equation, v.parameter) for v in report.violations} == {(1, "user")}


def test_a_model_that_draws_elsewhere_is_said_to_be_irreproducible() -> None:
    class Drawing(Logits):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(np.random.default_rng().random())

    with raises(SplitError, said="is another when it is computed again with", what="the loss"):
        check_split(Drawing(), Split("user"), batches(), loss=CROSS_ENTROPY)


def detached_mean(private: Params, user: int) -> Tensor:
    return ((private["user"][user] - private["user"].detach().mean(0)) ** 2).sum()


def comparison(private: Params, user: int) -> Tensor:
    """How many users have a smaller first entry: whole numbers, without a gradient."""
    first = private["user"][:, 0]
    return 0.1 * (first < first[user]).sum() * (private["user"][user] ** 2).sum()


def far_hinge(private: Params, user: int) -> Tensor:
    """Is zero wherever the next user's vector is shorter than 50."""
    other = private["user"][(user + 1) % len(private["user"])]
    return torch.relu(other.norm() - 50)


def one_sided_hinge(private: Params, user: int) -> Tensor:
    other = private["user"][(user + 1) % len(private["user"])]
    return torch.relu(other[0].detach() - 3)


def own_region(private: Params, user: int) -> Tensor:
    """Looks at others only where its own vector is long."""
    table = private["user"]
    return torch.where(table[user].norm() > 50, table.detach().sum(), torch.zeros(()).double())


@pytest.mark.parametrize(
    "penalty", [detached_mean, comparison, far_hinge, one_sided_hinge, own_region], ids=lambda f: f.__name__
)
def test_a_loss_that_looks_at_others_without_a_gradient_violates_equation_1(penalty: Any) -> None:
    report = check_split(Logits(), Split("user"), batches(), joint=joint(Logits(), penalty=penalty))
    assert [(v.equation, v.parameter) for v in report.violations] == [(1, "user")]


def test_values_are_compared_where_there_is_no_gradient() -> None:
    report = check_split(Logits(), Split("user"), batches(), joint=joint(Logits(), penalty=detached_mean))
    assert [str(v) for v in report.violations] == [
        EQUATION_1 + "the loss of user 0 changes when other users' private values are replaced."
    ]


def test_a_step_that_writes_another_users_values_violates_equation_3() -> None:
    def penalty(private: Params, user: int) -> Tensor:
        private["user"].data[(user + 1) % len(private["user"])] *= 0.5
        return private["user"][user].sum()

    report = check_split(Logits(), Split("user"), batches(), joint=joint(Logits(), penalty=penalty))
    assert [v.seen for v in report.violations if v.equation == 3] == [
        "training user 0 changes the values of user 1."
    ]


@pytest.mark.parametrize(
    "where", [lambda table: table.norm(dim=1).amax() > 50, lambda table: table[0, 0] < -3]
)
def test_an_aggregation_that_looks_at_private_values_in_a_region_violates_equation_2(where: Any) -> None:
    def update(w_f: Params, trained: Sequence[Params], private: Params, summaries: Sequence[float]) -> Params:
        mean = weighted_mean(trained, summaries)
        shift = private["user"].mean(0) if bool(where(private["user"])) else torch.zeros(3).double()
        return {**mean, "linear.bias": mean["linear.bias"] + shift}

    report = check_split(Logits(), Split("user"), batches(), joint=joint(Logits(), federated_update=update))
    assert [(v.equation, v.parameter) for v in report.violations] == [(2, "linear.bias")]


def test_a_private_update_that_looks_at_others_in_a_region_violates_equation_3() -> None:
    def update(
        user: int,
        w_f: Params,
        before: Params,
        after: Params,
        trained: Sequence[Params],
        summaries: Sequence[float],
    ) -> Params:
        own = after["user"][user]
        return {"user": after["user"].mean(0) if bool(own.norm() > 50) else own}

    report = check_split(Logits(), Split("user"), batches(), joint=joint(Logits(), private_update=update))
    assert [(v.equation, v.parameter) for v in report.violations] == [(3, "user")]


def test_what_no_point_meets_is_not_found() -> None:
    """The limit that the docstring states: a region beyond all magnitudes."""

    def penalty(private: Params, user: int) -> Tensor:
        return torch.relu(private["user"].norm() - 1e9)

    assert (SCALES, POINTS) == ((0.1, 1.0, 10.0, 100.0, 1000.0), 11)
    assert check_split(Logits(), Split("user"), batches(), joint=joint(Logits(), penalty=penalty)).ok


class Deep(nn.Module):
    """Batch normalisation of its own in a private part, dropout, and a constant that isn't persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.offset = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x * self.scale)) + self.offset


@pytest.mark.parametrize(
    ("model", "private"),
    [
        (Deep(), "head.*"),
        (Deep(), methods.batch_norm_names(Deep())),
        (Noisy(dropout=0.5), methods.batch_norm_names(Noisy())),
        (Weights(), "body.*"),
        (Deep(), "*"),
    ],
    ids=["head with batch norm", "fedbn", "fedbn behind nothing", "lg_fedavg", "all private"],
)
def test_sound_models_stay_sound(model: nn.Module, private: Any) -> None:
    many = [{k: torch.cat([v, v + (k == "x")]) for k, v in b.items()} for b in batches()]
    report = check_split(model, Split(private), many, loss=CROSS_ENTROPY)
    assert report.violations == ()


def test_a_private_body_below_federated_batch_norm_is_a_leak() -> None:
    report = check_split(Deep(), Split("body.*"), batches(), loss=CROSS_ENTROPY)
    assert [(v.equation, v.parameter) for v in report.violations] == [
        (2, "head.1.running_mean"),
        (2, "head.1.running_var"),
    ]


class Scale(nn.Module):
    """A private factor, a variance that training updates, and a set of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.user = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.register_buffer("variance", torch.full((3,), 0.5))
        self.seen: set[int] = set()
        declare(self, updated_buffers=("variance",))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(len(x))
        return x * self.w * self.user / self.variance.sqrt()


def sum_of(net: Net, params: Params, batch: Batch, received: Params) -> Tensor:
    return net(params, batch).sum()


ONES: list[Batch] = [{"x": torch.ones(2, 3)}, {"x": torch.ones(4, 3)}]


def test_a_variance_stays_one_at_every_point() -> None:
    lows: list[float] = []

    def loss(net: Net, params: Params, batch: Batch, received: Params) -> Tensor:
        lows.append(float(params["variance"].min()))
        return sum_of(net, params, batch, received)

    assert check_split(Scale(), Split("user"), ONES, loss=loss).ok
    assert min(lows) >= 0
    assert len(set(lows)) > 1


def test_what_is_no_number_at_some_points_breaks_nothing() -> None:
    lost: list[bool] = []

    def loss(net: Net, params: Params, batch: Batch, received: Params) -> Tensor:
        value = sum_of(net, params, batch, received) + params["user"].sqrt().sum()  # NaN below 0
        lost.append(bool(value.isnan()))
        return value

    assert check_split(Scale(), Split("user"), ONES, loss=loss).ok
    assert set(lost) == {False, True}


@pytest.mark.parametrize(
    ("one", "other", "alike"), [(np.nan, np.nan, True), (np.nan, 1.0, False), (1, 1, True)]
)
def test_not_a_number_is_like_itself_alone(one: float, other: float, alike: bool) -> None:
    assert same(torch.tensor([one, 2.0]), torch.tensor([other, 2.0])) is alike


def test_a_step_of_gradient_descent_by_hand() -> None:
    step = ProbeStep(torch.zeros(()), {"w": torch.tensor(2.0)}, {}, {})
    assert step.trained("w", torch.tensor(1.0)) == pytest.approx(0.8)  # 1 - 0.1 · 2
    assert step.trained("buffer", torch.tensor(1.0)) == 1.0


def test_a_set_that_probes_filled_is_empty_again() -> None:
    model = Scale()
    check_split(model, Split("user"), ONES, loss=sum_of)
    assert model.seen == set()
