"""How two sets of features of one batch are related: HSIC (are they dependent?) and MMD² (are they alike?).

Both look at examples through Gaussian kernels of several widths, in units of the mean squared distance within the
batch. Examples of weight 0 (padding) don't count; other weights are not told apart. Features in float16 are computed
with in float32: in float16 the 1e-8 that guards a division is 0, and squares soon are infinite.

The unit is a constant to the gradient, as in the code that these kernels come from. So HSIC does not depend on the
features' length, but its gradient says that shorter features are better. Two forms are without that, as the gradient
flows into their unit: HSIC by the median of the distances, and normalised HSIC.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

TINY = 1e-30
MIXTURE = (0.5, 1.0, 2.0)
SINGLE = (1.0,)
MMD_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)


def hsic(
    a: Tensor,
    b: Tensor,
    weight: Tensor | None = None,
    widths: tuple[float, ...] = MIXTURE,
    *,
    unit: Literal["mean", "median"] = "mean",
    normalised: bool = False,
) -> Tensor:
    """Return the biased empirical HSIC of two features of the same examples; 0 for fewer than two examples.

    (n − 1)⁻² tr(K_a H K_b H), H = I − 11ᵀ/n. Source: Gretton et al., Measuring Statistical Dependence with
    Hilbert-Schmidt Norms, 2005, eq. 9; KTEPS (arXiv 2107.11956), eq. 7, with the kernels of its first author's
    published code (FedKWS-UI).

    Args:
        a: (n, p).
        b: (n, q).
        weight: (n,) of the examples; those of weight 0 are left out.
        widths: m of each kernel exp(−‖x − x'‖² / (m s²)), whose sum is taken; s² is the feature's own mean squared
            distance between different examples, and no gradient flows into it.
        unit: ``"median"``: s² is the median of those distances (of an even number the lower one), and the gradient
            flows into it: neither shrinking nor growing changes the value, and the gradient knows.
        normalised: HSIC(a, b) / √(HSIC(a, a) HSIC(b, b)), in [0, 1], 0 where all of one are equal (Cortes, Mohri and
            Rostamizadeh, Algorithms for Learning Kernels Based on Centered Alignment, 2012, definition 2); the gradient
            flows into s² likewise.
    """
    kind, a, b = a.dtype, _wide(a), _wide(b)
    counted = _counted(a, weight)
    centring, others = _centring(counted)
    if unit == "median" or normalised:
        k_a, k_b = (_free_of_length(x, counted, widths, unit) for x in (a, b))
    elif a.shape == b.shape:  # both at once: a batch is small, and what costs is the number of operations
        k_a, k_b = gaussians(torch.stack((a, b)), centring, others, widths).unbind()
    else:
        k_a, k_b = (gaussians(x, centring, others, widths) for x in (a, b))
    if not normalised:
        return ((centring @ k_a @ centring * k_b).sum() / others**2).to(kind)
    plain = [k_a.square().sum(), k_b.square().sum()]
    k_a, k_b = centring @ k_a @ centring, centring @ k_b @ centring
    left = [k_a.square().sum(), k_b.square().sum()]
    least = (10 * torch.finfo(k_a.dtype).eps) ** 2  # of equal features centring leaves rounding alone
    varies = torch.stack([x > least * y for x, y in zip(left, plain, strict=True)]).all()
    return ((k_a * k_b).sum() / (left[0] * left[1] + TINY).sqrt() * varies).to(kind)


def mmd2(
    x: Tensor, y: Tensor, weight: Tensor | None = None, widths: tuple[float, ...] = MMD_WIDTHS
) -> Tensor:
    """Return the biased MMD² of two features of the same examples; 0 for fewer than two examples.

    mean K_xx + mean K_yy − 2 mean K_xy. Source: Gretton et al., A Kernel Two-Sample Test, 2012, eq. 5, with the five
    kernels of FedMMD in published code of KTEPS's first author (FedRepo).

    Args:
        x: (n, p).
        y: (n, p).
        weight: as for ``hsic``.
        widths: as for ``hsic``; s² is taken over the 2n examples of x and y together.
    """
    kind, x, y = x.dtype, _wide(x), _wide(y)
    counted = _counted(x, weight)
    n = counted.sum()
    kernel = gaussians(torch.cat((x, y)), *_centring(torch.cat((counted, counted))), widths)
    share = counted * (n > 1) / n.clamp_min(1)
    signed = torch.cat((share, -share))
    return (kernel * signed.outer(signed)).sum().to(kind)


def gaussians(x: Tensor, centring: Tensor, others: Tensor, widths: tuple[float, ...]) -> Tensor:
    """Return Σ_m exp(−‖x_i − x_j‖² / (m s²)), shape (..., n, n), of x, shape (..., n, p).

    s² = the mean of ‖x_i − x_j‖² over i ≠ j, + 1e-8. ``centring`` and ``others`` are H and n − 1; differences of
    centred numbers lose fewer digits.
    """
    x = centring @ x
    with torch.no_grad():  # Σ_ij ‖x_i − x_j‖² = 2n Σ ‖x_i‖² where Σ x_i = 0
        scale = x.square().sum((-2, -1), keepdim=True) * (2 / others) + 1e-8
    products = x @ (x / scale).mT
    squares = products.diagonal(dim1=-2, dim2=-1)
    exponent = 2 * products - squares.unsqueeze(-1) - squares.unsqueeze(-2)
    if len(widths) == 1:
        return torch.exp(exponent / widths[0])
    inverse = exponent.new_tensor([1 / m for m in widths]).reshape(-1, *[1] * exponent.dim())
    return torch.exp(exponent * inverse).sum(0)


def _free_of_length(
    x: Tensor, counted: Tensor, widths: tuple[float, ...], unit: Literal["mean", "median"]
) -> Tensor:
    """Return Σ_m exp(−‖x_i − x_j‖² / (m s²)), shape (n, n), of x, shape (n, p); the gradient flows into s².

    s² = the mean or the lower median of ‖x_i − x_j‖² over i < j, + 1e-8.
    """
    distance = (x.unsqueeze(1) - x.unsqueeze(0)).square().sum(-1)
    pairs = torch.ones_like(distance).triu(1) * counted.outer(counted)
    if unit == "mean":
        scale = (distance * pairs).sum() / pairs.sum().clamp_min(1)
    else:
        far = torch.where(pairs > 0, distance, math.inf).flatten().sort().values
        middle = (pairs.sum().long() - 1).clamp_min(0) // 2
        scale = far.gather(0, middle.unsqueeze(0))
        scale = torch.where(scale.isfinite(), scale, 0.0)
    return sum((torch.exp(-distance / (m * (scale + 1e-8))) for m in widths), torch.zeros_like(distance))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float16 else x


def _counted(x: Tensor, weight: Tensor | None) -> Tensor:
    return x.new_ones(len(x)) if weight is None else (weight > 0).to(x.dtype)


def _centring(counted: Tensor) -> tuple[Tensor, Tensor]:
    """Return H = diag(c) − c cᵀ / n, with zeros for what doesn't count, and n − 1 (at least 1)."""
    n = counted.sum()
    return counted.diag() - counted.outer(counted) / n.clamp_min(1), (n - 1).clamp_min(1)
