"""Terms, by numbers worked out by hand; every term moves a gradient; padding changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods import terms
from fedkeep.methods.added_parts import OnCopy, with_copy
from fedkeep.methods.apfl import OnMixedModel
from fedkeep.methods.asp_mtl import AddPrivateModel, AdversarialLoss
from fedkeep.methods.branches import TwoBranches
from fedkeep.methods.fedfusion import AddFusion, FusionLoss
from fedkeep.methods.fedmmd import TwoStreams
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.kteps import BranchLoss
from fedkeep.methods.per_fedavg import AfterOneStep
from fedkeep.methods.pfedme import Apart
from fedkeep.methods.pfl_da import AddGate, MixtureLoss
from fedkeep.methods.terms import Term
from tests.methods.parts import Parts
from tests.refusals import raises
from tests.tiny import Logits


class Given(nn.Module):
    """Returns its column ``x`` times its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Tasks(nn.Module):
    """Two tasks, one output each."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"topic": self.user * x, "stars": self.user * x[:, 0]}


def value(term: Term, batch: Batch, module: nn.Module | None = None) -> float:
    net = Net(module or Given())
    return float(term(net, net.initial(), batch, {}))


LOGITS = torch.tensor(
    [[math.log(1), math.log(3)], [math.log(4), math.log(1)], [0.0, 0.0]], dtype=torch.float64
)
LABELS = torch.tensor([1, 1, 0])
LOSSES = [math.log(4 / 3), math.log(5), math.log(2)]  # softmax: 3/4, 1/5, 1/2


def test_cross_entropy_by_hand() -> None:
    assert value(terms.cross_entropy(), {"x": LOGITS, "label": LABELS}) == pytest.approx(
        sum(LOSSES) / 3, abs=1e-15
    )


def test_smoothed_labels_by_hand() -> None:
    """0.8 + 0.1 of the label's share and 0.1 of the other's: softmax 3/4 and 1/4, label 1."""
    batch = {"x": LOGITS[:1], "label": LABELS[:1]}
    expected = 0.9 * math.log(4 / 3) + 0.1 * math.log(4)
    assert value(terms.cross_entropy(smoothing=0.2), batch) == pytest.approx(expected, abs=1e-15)
    several = terms.cross_entropy("topic", "topic", smoothing=0.2)
    assert value(several, {"x": LOGITS[:1], "topic": LABELS[:1]}, Tasks()) == pytest.approx(
        expected, abs=1e-15
    )
    with raises(MethodError, text="smoothing must be in [0, 1); got 1.0."):
        terms.cross_entropy(smoothing=1.0)


def test_cross_entropy_takes_the_column_named() -> None:
    batch = {"x": LOGITS, "topic": LABELS, "label": 1 - LABELS}
    assert value(terms.cross_entropy("topic"), batch) == pytest.approx(sum(LOSSES) / 3, abs=1e-15)


def test_examples_are_weighted() -> None:
    weight = torch.tensor([1.0, 0.0, 3.0])
    expected = (LOSSES[0] + 3 * LOSSES[2]) / 4
    assert value(terms.cross_entropy(), {"x": LOGITS, "label": LABELS, "weight": weight}) == pytest.approx(
        expected, abs=1e-15
    )


def test_squared_error_by_hand() -> None:
    batch = {"x": torch.tensor([1.0, 2.0, 5.0]).double(), "label": torch.tensor([0.0, 4.0, 4.0])}
    assert value(terms.squared_error(), batch) == (1 + 4 + 1) / 3
    assert value(terms.squared_error(), {**batch, "weight": torch.tensor([1.0, 2.0, 0.0])}) == (1 + 8) / 3
    assert value(terms.squared_error(), {**batch, "label": torch.tensor([0, 4, 4])}) == 2.0


def test_squared_error_does_not_broadcast() -> None:
    """(B, 1) against (B,) would silently compare every output with every label."""
    batch = {"x": torch.tensor([[1.0], [2.0], [5.0]]).double(), "label": torch.tensor([1.0, 2.0, 5.0])}
    try:
        assert value(terms.squared_error(), batch) == 0.0
    except MethodError as error:
        assert "(3, 1)" in str(error)  # noqa: PT017


def test_l2_penalty_by_hand() -> None:
    net = Net(Given())
    params = {"user": torch.tensor([1.0, -2.0]), "head.w": torch.tensor([[3.0]]), "n": torch.tensor(7)}
    assert (
        float(terms.l2_penalty("user")(net, params, {}, {})) == 2.5
    )  # half of 1 + 4; the norm itself is 2.236
    assert float(terms.l2_penalty("*")(net, params, {}, {})) == 7.0
    with raises(MethodError, there=["user", "head.w", "n"], pattern="usr"):
        terms.l2_penalty("usr")(net, params, {}, {})


def test_terms_add_and_scale() -> None:
    batch = {"x": LOGITS, "label": LABELS}
    term = terms.cross_entropy() + 0.5 * terms.l2_penalty("w") + 2 * terms.cross_entropy()
    assert value(term, batch) == pytest.approx(3 * sum(LOSSES) / 3 + 0.25, abs=1e-14)
    assert term == terms.cross_entropy() + 0.5 * terms.l2_penalty("w") + 2 * terms.cross_entropy()
    with pytest.raises(TypeError, match="Term is no term: it lacks __call__"):
        value(Term(), batch)


MULTI = {
    "x": LOGITS,
    "topic": torch.tensor([1, -1, 0]),
    "stars": torch.tensor([1.0, float("nan"), 2.0], dtype=torch.float64),
}


def test_multi_task_by_hand() -> None:
    loss = terms.multi_task(
        {"topic": terms.cross_entropy("topic", "topic"), "stars": terms.squared_error("stars", "stars")},
        {"stars": 0.5},
    )
    topic = (LOSSES[0] + LOSSES[2]) / 2  # the example without a label is left out of the mean
    stars = ((0 - 1) ** 2 + (0 - 2) ** 2) / 2
    assert value(loss, MULTI, Tasks()) == pytest.approx(topic + 0.5 * stars, abs=1e-14)


def test_a_task_that_nobody_labelled_is_zero_and_pulls_nothing() -> None:
    batch = {**MULTI, "topic": torch.tensor([-1, -1, -1]), "stars": torch.full((3,), float("nan")).double()}
    loss = terms.multi_task(
        {"topic": terms.cross_entropy("topic", "topic"), "stars": terms.squared_error("stars", "stars")}
    )
    net = Net(Tasks())
    params = {n: v.requires_grad_() for n, v in net.initial().items()}
    result = loss(net, params, batch, {})
    (slope,) = torch.autograd.grad(result, [params["user"]])
    assert (result.item(), slope.item()) == (0.0, 0.0)


def test_examples_without_a_label_pull_nothing() -> None:
    loss = terms.squared_error("stars", "stars")
    net = Net(Tasks())
    slopes = []
    for rows in (slice(None), [0, 2]):
        params = {n: v.requires_grad_() for n, v in net.initial().items()}
        batch = {n: v[rows] for n, v in MULTI.items()}
        slopes.append(float(torch.autograd.grad(loss(net, params, batch, {}), [params["user"]])[0]))
    assert math.isfinite(slopes[0])
    assert slopes[0] == pytest.approx(slopes[1], abs=1e-15)


def test_tasks_that_do_not_fit_are_refused() -> None:
    with raises(MethodError, unknown=["stars"], terms=["topic"]):
        terms.multi_task({"topic": terms.cross_entropy()}, {"stars": 1.0})
    with pytest.raises(MethodError, match="but the tasks are"):
        terms.multi_task({})
    with raises(MethodError, there=["stars", "topic"], missing="the loss asks for task 'topics'."):
        value(terms.cross_entropy("topic", "topics"), MULTI, Tasks())


ALL = {
    "cross_entropy": terms.cross_entropy(),
    "l2_penalty": terms.l2_penalty("user"),
    "sum": 0.1 * terms.cross_entropy() + terms.l2_penalty("*"),
    "scaled": 0.01 * terms.l2_penalty("linear.*"),
    "proximal": Proximal(0.5),
    "on copy": OnCopy(terms.cross_entropy() + Proximal(0.5)),
    "on mixture": OnMixedModel(0.5, terms.cross_entropy()),
    "apart": Apart(0.5),
    "after one step": AfterOneStep(0.5),
    "after one step, exactly": AfterOneStep(0.5, order="exact"),
    "branches": BranchLoss(diversity=0.5, transfer=0.5),
    "diversity": BranchLoss(diversity=0.5, transfer=0.0),
    "transfer": BranchLoss(diversity=0.0, transfer=0.5),
    "two streams": TwoStreams(0.5),
    "fusion": FusionLoss(),
    "mixture": MixtureLoss(),
    "adversarial": AdversarialLoss(adversarial=0.5, difference=0.3),
}
EXTENDED: dict[str, Callable[[nn.Module], nn.Module]] = {
    **dict.fromkeys(("branches", "diversity", "transfer"), TwoBranches()),
    "two streams": lambda module: module,
    "fusion": AddFusion("conv"),
    "mixture": AddGate(),
    "adversarial": AddPrivateModel(3),
}
"""What a term's method adds to the model; the others' terms see a linear model and its copy."""


def slopes_of(term: Term, batch: Batch, name: str = "") -> Params:
    extend = EXTENDED.get(name)
    net = Net(extend(Parts().double()) if extend else with_copy(Logits()).double())
    received = {n: v for n, v in net.initial().items() if not n.startswith(("own.", "private."))}
    draw = torch.Generator().manual_seed(
        1
    )  # away from what was received, and from what is the same in both branches
    params = {
        n: (v + 0.3 * torch.randn(v.shape, generator=draw, dtype=v.dtype)).requires_grad_()
        for n, v in net.initial().items()
    }
    found = torch.autograd.grad(term(net, params, batch, received), list(params.values()), allow_unused=True)
    return {n: torch.zeros_like(params[n]) if g is None else g for n, g in zip(params, found, strict=True)}


def example(rows: int = 5) -> Batch:
    draw = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(rows, 3, generator=draw, dtype=torch.float64),
        "label": torch.randint(0, 3, (rows,), generator=draw),
        "client": torch.full((rows,), 1),
    }


@pytest.mark.parametrize("name", ALL)
def test_every_term_moves_a_gradient_that_scales_with_it(name: str) -> None:
    once, thrice = slopes_of(ALL[name], example(), name), slopes_of(3 * ALL[name], example(), name)
    assert any(float(v.abs().max()) > 0 for v in once.values())
    for parameter in once:
        torch.testing.assert_close(thrice[parameter], 3 * once[parameter])


@pytest.mark.parametrize("name", ALL)
def test_the_content_of_padding_changes_no_bit(name: str) -> None:
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0])
    batch = {**example(), "weight": weight}
    other = {**batch, "x": torch.where(weight[:, None] > 0, batch["x"], 1e6), "label": batch["label"].clone()}
    other["label"][weight == 0] = 2
    one, two = slopes_of(ALL[name], batch, name), slopes_of(ALL[name], other, name)
    assert all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize("name", ALL)
def test_padding_equals_leaving_examples_out(name: str) -> None:
    batch = example()
    padded = {n: torch.cat([v, torch.zeros_like(v[:3])]) for n, v in batch.items()}
    padded["weight"] = torch.tensor([1.0] * 5 + [0.0] * 3)
    one, two = slopes_of(ALL[name], batch, name), slopes_of(ALL[name], padded, name)
    for n in one:
        torch.testing.assert_close(one[n], two[n], rtol=1e-14, atol=1e-15)


def test_a_batch_of_padding_alone_pulls_nothing() -> None:
    batch = {**example(), "weight": torch.zeros(5)}
    assert all(float(v.abs().max()) == 0 for v in slopes_of(terms.cross_entropy(), batch).values())


@pytest.mark.parametrize("weight", [None, torch.ones(2)])
def test_no_label_is_left_out_without_a_word(weight: Tensor | None) -> None:
    batch = {"input": torch.ones(2, 3), "label": torch.tensor([0, -100])}
    if weight is not None:
        batch["weight"] = weight
    net = Net(nn.Linear(3, 2))
    with pytest.raises(IndexError, match="-100"):
        terms.cross_entropy()(net, net.initial(), batch, {})


def test_several_labels_want_as_many_logits() -> None:
    with raises(MethodError, wanted=(3, 3), got=(3, 2)):
        value(terms.binary_cross_entropy(), {"x": LOGITS, "label": torch.zeros(3, 3)})


def test_cross_entropy_of_numbers() -> None:
    net = Net(torch.nn.Linear(2, 3))
    batch = {"input": torch.zeros(2, 2), "label": torch.tensor([0.5, 1.0])}
    with raises(MethodError, label="label"):
        terms.cross_entropy()(net, net.initial(), batch, {})
