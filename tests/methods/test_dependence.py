"""HSIC and MMD²: numbers by hand, the formulas written out, batches of one, and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedkeep.methods.dependence import MIXTURE, MMD_WIDTHS, SINGLE, hsic, mmd2

WIDTHS = [SINGLE, MIXTURE, MMD_WIDTHS]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel(x: Tensor, widths: tuple[float, ...]) -> Tensor:
    n = len(x)
    pairs = [[float(((x[i] - x[j]) ** 2).sum()) for j in range(n)] for i in range(n)]
    distance = torch.tensor(pairs, dtype=torch.float64)
    scale = sum(float(distance[i, j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1)) + 1e-8
    return sum((torch.exp(-distance / (m * scale)) for m in widths), torch.zeros(n, n).double())


def hsic_written_out(a: Tensor, b: Tensor, widths: tuple[float, ...]) -> float:
    n = len(a)
    h = torch.eye(n).double() - torch.ones(n, n).double() / n
    return float(torch.trace(kernel(a, widths) @ h @ kernel(b, widths) @ h)) / (n - 1) ** 2


def test_hsic_of_two_examples_by_hand() -> None:
    """Distance = s², so each kernel is e^(−1/m) off the diagonal; tr(KHKH) = (1 − k)², divided by (n − 1)² = 1."""
    a, b = torch.tensor([[0.0], [2.0]]).double(), torch.tensor([[1.0, 5.0], [4.0, 1.0]]).double()
    assert float(hsic(a, b, widths=SINGLE)) == pytest.approx((1 - math.exp(-1)) ** 2, abs=1e-8)  # 0.39957
    mixed = 3 - math.exp(-2) - math.exp(-1) - math.exp(-0.5)
    assert float(hsic(a, b)) == pytest.approx(mixed**2, abs=1e-7)  # 3.5693; the biased 1/n² would give 0.8923


def by_median(x: Tensor) -> Tensor:
    """Return the kernel exp(−d_ij / s²), s² the lower median of d_ij over i < j."""
    n = len(x)
    distance = [[((x[i] - x[j]) ** 2).sum() for j in range(n)] for i in range(n)]
    ordered = sorted((distance[i][j] for i in range(n) for j in range(i + 1, n)), key=Tensor.item)
    scale = ordered[(len(ordered) - 1) // 2] + 1e-8
    return torch.stack([torch.stack([torch.exp(-d / scale) for d in row]) for row in distance])


def test_hsic_by_the_median_by_hand() -> None:
    """Distances of 0, 1, 3 are 1, 4, 9, so s² = 4; of two examples it is the mean's, (1 − 1/e)²."""
    x = torch.tensor([[0.0], [1.0], [3.0]]).double()
    expected = torch.tensor(
        [
            [1, math.exp(-1 / 4), math.exp(-9 / 4)],
            [math.exp(-1 / 4), 1, math.exp(-1)],
            [math.exp(-9 / 4), math.exp(-1), 1],
        ]
    ).double()
    torch.testing.assert_close(by_median(x), expected, rtol=0, atol=1e-7)
    h = torch.eye(3).double() - 1 / 3
    wanted = float(torch.trace(expected @ h @ expected @ h)) / 4
    assert float(hsic(x, x, widths=SINGLE, unit="median")) == pytest.approx(wanted, abs=1e-7)
    a, b = torch.tensor([[0.0], [2.0]]).double(), torch.tensor([[1.0, 5.0], [4.0, 1.0]]).double()
    pair = hsic(a, b, widths=SINGLE, unit="median")
    assert float(pair) == pytest.approx((1 - math.exp(-1)) ** 2, abs=1e-8)
    assert float(hsic(a, b, normalised=True)) == pytest.approx(1, abs=1e-12)  # two examples: both are ±½


@pytest.mark.parametrize("n", [4, 5])
def test_the_forms_without_shrinking_against_the_formulas_written_out(n: int) -> None:
    a, b = normal(n, 3).requires_grad_(), normal(n, 2, seed=1).requires_grad_()
    h = torch.eye(n).double() - 1 / n

    def inner(one: Tensor, two: Tensor) -> Tensor:
        return torch.trace(one @ h @ two @ h)

    k_a, k_b = by_median(a), by_median(b)
    written = inner(k_a, k_b) / (n - 1) ** 2
    found = hsic(a, b, widths=SINGLE, unit="median")
    torch.testing.assert_close(found, written, rtol=1e-9, atol=0)
    for one, two in zip(*(torch.autograd.grad(v, [a, b]) for v in (found, written)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-12)  # the median's gradient too
    scaled = hsic(a, b, widths=SINGLE, normalised=True)
    one, two = (kernel(x.detach(), SINGLE) for x in (a, b))
    assert float(scaled.detach()) == pytest.approx(
        float(inner(one, two) / (inner(one, one) * inner(two, two)).sqrt())
    )
    weight = torch.tensor([1.0] * n + [0.0])
    more = [torch.cat([x.detach(), torch.full((1, x.shape[1]), 1e6).double()]) for x in (a, b)]
    assert float(hsic(*more, weight, SINGLE, unit="median")) == pytest.approx(
        float(found.detach()), rel=1e-12
    )
    assert float(hsic(*more, weight, SINGLE, normalised=True)) == pytest.approx(
        float(scaled.detach()), rel=1e-12
    )


def test_only_the_paper_s_form_rewards_shrinking_features() -> None:
    """d HSIC(c a, b) / dc at c = 1 is Σ a · ∂/∂a."""
    a, b = normal(8, 4).requires_grad_(), normal(8, 4, seed=1)

    def along(**form: object) -> float:
        (slope,) = torch.autograd.grad(hsic(a, b, **form), [a])  # type: ignore[arg-type]
        return float((slope * a).sum().detach())

    assert along() > 0.01  # less by shrinking
    assert abs(along(widths=SINGLE, unit="median")) < 1e-8
    assert abs(along(normalised=True)) < 1e-8


@pytest.mark.parametrize("form", [{"unit": "median"}, {"normalised": True}])
@pytest.mark.parametrize("examples", [1, 4])
def test_equal_examples_pull_nothing_by_any_form(form: dict[str, object], examples: int) -> None:
    same = torch.ones(examples, 3, requires_grad=True)
    result = hsic(same, normal(examples, 3).float(), **form)  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(result, [same])
    assert float(result.detach()) == pytest.approx(0, abs=1e-6)
    assert float(slope.abs().max()) == 0


def test_mmd_of_two_pairs_by_hand() -> None:
    """x = 0, 0 and y = 1, 1: s² = 2/3 (8 of 12 distances are 1); 1 + 1 − 2 e^(−1/(m s²)) for each kernel."""
    x, y = torch.zeros(2, 1).double(), torch.ones(2, 1).double()
    assert float(mmd2(x, y, widths=SINGLE)) == pytest.approx(2 - 2 * math.exp(-1.5), abs=1e-7)  # 1.55374
    expected = sum(2 - 2 * math.exp(-1.5 / m) for m in (0.25, 0.5, 1, 2, 4))
    assert float(mmd2(x, y)) == pytest.approx(expected, abs=1e-7)
    assert float(mmd2(y, y)) == 0


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("shapes", [((6, 3), (6, 3)), ((6, 3), (6, 2))])
def test_against_the_formulas_written_out(
    shapes: tuple[tuple[int, int], ...], widths: tuple[float, ...]
) -> None:
    a, b = (normal(*shape, seed=k) for k, shape in enumerate(shapes))
    assert float(hsic(a, b, widths=widths)) == pytest.approx(hsic_written_out(a, b, widths), rel=1e-9)
    assert float(hsic(a + 1e4, b, widths=widths)) == pytest.approx(hsic_written_out(a, b, widths), rel=1e-7)
    if a.shape == b.shape:
        k = kernel(torch.cat([a, b]), widths)
        expected = float(k[:6, :6].mean() + k[6:, 6:].mean() - 2 * k[:6, 6:].mean())
        assert float(mmd2(a, b, widths=widths)) == pytest.approx(expected, rel=1e-9)


def test_dependent_features_have_a_larger_hsic_than_independent_ones() -> None:
    a, b = normal(64, 2), normal(64, 2, seed=1)
    assert float(hsic(a, a**2)) > 2 * float(hsic(a, b)) > 0
    assert float(hsic(a, torch.ones(64, 3).double())) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("function", [hsic, mmd2])
def test_gradients(function: object) -> None:
    """Bandwidths are constants: differences with the bandwidth held fixed are what the gradient says."""
    a, b = normal(5, 3).requires_grad_(), normal(5, 3, seed=1).requires_grad_()
    found = torch.autograd.grad(function(a, b), [a, b])  # type: ignore[operator]
    assert all(float(g.abs().max()) > 0 for g in found)
    scaled = torch.autograd.grad(function(3 * a, 3 * b), [a, b])  # type: ignore[operator]
    for one, three in zip(found, scaled, strict=True):  # value and slopes don't depend on the features' unit
        torch.testing.assert_close(one, three, rtol=1e-6, atol=1e-9)


def test_no_gradient_flows_through_the_bandwidth() -> None:
    a, b = normal(5, 3), normal(5, 3, seed=1)
    x = a.clone().requires_grad_()
    (found,) = torch.autograd.grad(hsic(x, b, widths=SINGLE), [x])
    scale = sum(float(((a[i] - a[j]) ** 2).sum()) for i in range(5) for j in range(5)) / 20 + 1e-8
    centring = torch.eye(5).double() - 0.2
    right = centring @ kernel(b, SINGLE) @ centring / 16
    slow = torch.zeros(5, 3).double()
    for i in range(5):
        for j in range(5):
            difference = a[i] - a[j]
            slope = math.exp(-float((difference**2).sum()) / scale) * (-2 / scale) * difference
            slow[i] += 2 * right[i, j] * slope
    torch.testing.assert_close(found, slow, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("function", [hsic, mmd2])
@pytest.mark.parametrize("weight", [None, [1.0], [0.0]])
def test_a_batch_of_one_is_zero_and_pulls_nothing(function: object, weight: list[float] | None) -> None:
    a, b = normal(1, 3).requires_grad_(), normal(1, 3, seed=1).requires_grad_()
    given = None if weight is None else torch.tensor(weight)
    result = function(a, b, given)  # type: ignore[operator]
    slopes = torch.autograd.grad(result, [a, b])
    assert (float(result.detach()), *(float(g.abs().max()) for g in slopes)) == (0, 0, 0)


@pytest.mark.parametrize("function", [hsic, mmd2])
def test_padding_is_left_out(function: object) -> None:
    a, b = normal(6, 3), normal(6, 3, seed=1)
    weight = torch.tensor([1.0, 0.0, 3.0, 1.0, 0.0, 1.0])
    keep = weight > 0
    expected = float(function(a[keep], b[keep]))  # type: ignore[operator]
    assert float(function(a, b, weight)) == pytest.approx(expected, rel=1e-12)  # type: ignore[operator]
    a[~keep], b[~keep] = 1e6, -1e6
    assert float(function(a, b, weight)) == pytest.approx(expected, rel=1e-12)  # type: ignore[operator]
    only = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert float(function(a, b, only)) == 0  # type: ignore[operator]


def test_equal_examples_are_finite() -> None:
    same = torch.ones(4, 3, requires_grad=True)
    for result in (hsic(same, normal(4, 3).float()), mmd2(same, torch.ones(4, 3))):
        (slope,) = torch.autograd.grad(result, [same])
        assert torch.isfinite(slope).all()
        assert float(result.detach()) == pytest.approx(0, abs=1e-6)
