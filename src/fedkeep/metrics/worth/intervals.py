"""Intervals for a mean gain over clients, with seeds crossed with clients.

Y_ks is client k's mean gain under seed s, Ȳ_k and Ȳ_s are its means over seeds and over clients, and m is the mean of
all: each client counts once. The interval is m ± t √(A + B), with P(|T_f| < t) = 95 %. A is the variance that comes from clients, B the
one that comes from seeds, and f = (A + B)² / (A² / f_A + B² / (S − 1)) (Satterthwaite, 1946). With one seed B is 0, and
the interval is about these trained models. Where nothing varies A + B is 0: the ends are then the mean, which is no
interval of anything, and ``Paired.interval`` gives none.

No bootstrap over clients, no weights by variance and no mixed model: in simulations they cover too seldom.
``benchmarks/worth_coverage.py`` measures how often these intervals cover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Floats = np.ndarray[Any, np.dtype[np.float64]]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its interval, 95 % where nothing else is said."""

    mean: float
    low: float
    high: float


def users_like_these(y: Floats, inside: float = 0.95) -> Floats:
    """Return mean, low and high end for users like these: the clients are a sample of many more.

    A = Var_k(Ȳ_k) / K with f_A = K − 1, and B = max(0, Var_s(Ȳ_s) / S − C) with
    C = Σ (Y_ks − Ȳ_k − Ȳ_s + m)² / ((K − 1) (S − 1) K S).

    Args:
        y: (..., S, K) mean gain of each client under each seed; at least two clients.
        inside: the interval's level.

    Returns:
        (..., 3).
    """
    return _around(*_spread_of_users(y), inside)


def _spread_of_users(y: Floats) -> tuple[Floats, Floats, Floats, Floats, int]:
    """Return m, A, B, A² / f_A and S."""
    seeds, clients = y.shape[-2:]
    by_client, by_seed, mean = y.mean(-2), y.mean(-1), y.mean((-2, -1))
    a = by_client.var(-1, ddof=1) / clients
    b = np.zeros_like(a)
    if seeds > 1:
        rest = y - by_client[..., None, :] - by_seed[..., :, None] + mean[..., None, None]
        c = (rest**2).sum((-2, -1)) / ((clients - 1) * (seeds - 1) * clients * seeds)
        b = np.maximum(0.0, by_seed.var(-1, ddof=1) / seeds - c)
    return mean, a, b, a**2 / (clients - 1), seeds


def these_users(y: Floats, variance: Floats, examples: Floats, inside: float = 0.95) -> Floats:
    """Return mean, low and high end for these users: only their test examples, and the seeds, are a sample.

    A = Σ v_k with v_k = Var_i(d̄_ki) / (n_k K²) and f_A = A² / Σ (v_k² / (n_k − 1)); B = Var_s(Ȳ_s) / S.

    Args:
        y: (..., S, K) mean gain of each client under each seed.
        variance: (..., K) sample variance over a client's examples of the gain, averaged over seeds first.
        examples: (..., K) each client's number of examples, at least two.
        inside: the interval's level.

    Returns:
        (..., 3).
    """
    return _around(*_spread_of_examples(y, variance, examples), inside)


def chance_of_users(y: Floats) -> Floats:
    """Return (...) two-sided p of a mean gain of 0 for users like these: at most 5 % where the interval leaves 0 out.

    NaN where all gains are the same and not 0: nothing says how much of them is chance.

    Args:
        y: as for ``users_like_these``.
    """
    return _chance(*_spread_of_users(y))


def chance_of_examples(y: Floats, variance: Floats, examples: Floats) -> Floats:
    """Return (...) two-sided p of a mean gain of 0 for these users; the arguments are those of ``these_users``."""
    return _chance(*_spread_of_examples(y, variance, examples))


def _spread_of_examples(
    y: Floats, variance: Floats, examples: Floats
) -> tuple[Floats, Floats, Floats, Floats, int]:
    """Return m, A, B, A² / f_A and S."""
    seeds, clients = y.shape[-2:]
    v = variance / (examples * clients**2)
    b = y.mean(-1).var(-1, ddof=1) / seeds if seeds > 1 else np.zeros(y.shape[:-2])
    return y.mean((-2, -1)), v.sum(-1), b, (v**2 / (examples - 1)).sum(-1), seeds


def jackknife(whole: float, without: Sequence[float] | Floats) -> Interval:
    """Return the interval of a number that pools all clients, leaving out one client at a time; K − 1 degrees.

    Args:
        whole: the number over all clients.
        without: (K,) the number without each client in turn; at least two. Where one is NaN, both ends are.
    """
    left = np.asarray(without, np.float64)
    clients = len(left)
    a = np.asarray((clients - 1) / clients * ((left - left.mean()) ** 2).sum())
    found = _around(np.asarray(whole), a, np.zeros(()), a**2 / (clients - 1), 1)
    return Interval(*map(float, found))


def _around(
    mean: Floats, a: Floats, b: Floats, a_squared_over_degrees: Floats, seeds: int, inside: float = 0.95
) -> Floats:
    total, degrees = _total(mean, a, b, a_squared_over_degrees, seeds)
    half = t_quantile(degrees, inside) * np.sqrt(total)
    return np.stack([mean, mean - half, mean + half], -1)


def _chance(mean: Floats, a: Floats, b: Floats, a_squared_over_degrees: Floats, seeds: int) -> Floats:
    total, degrees = _total(mean, a, b, a_squared_over_degrees, seeds)
    t = np.divide(np.abs(mean), np.sqrt(total), out=np.zeros(np.shape(total)), where=total != 0)
    found: Floats = np.clip(1 - t_inside(np.minimum(t, 1e8), degrees), 0.0, 1.0)
    return np.where((total == 0) & (mean != 0), np.nan, found)


def _total(
    mean: Floats, a: Floats, b: Floats, a_squared_over_degrees: Floats, seeds: int
) -> tuple[Floats, Floats]:
    """Return A + B, 0 where it is rounding alone, and f; 1 in place of f where A + B is 0."""
    total = np.where(a + b <= (1e-12 * mean) ** 2, 0.0, a + b)
    parts = a_squared_over_degrees + (b**2 / (seeds - 1) if seeds > 1 else 0.0)
    return total, np.divide(total**2, parts, out=np.ones(np.shape(total)), where=(total > 0) & (parts > 0))


def t_quantile(degrees: Floats | float, inside: float = 0.95) -> Floats:
    """Return t with P(|T| < t) = ``inside`` for Student's T, by bisection.

    Args:
        degrees: (...) degrees of freedom, whole or not, at least 1.
        inside: the probability.
    """
    f, place = np.unique(np.asarray(degrees, np.float64), return_inverse=True)
    low, high = np.zeros_like(f), np.full_like(f, 1e4)
    for _ in range(64):
        middle = (low + high) / 2
        above = t_inside(middle, f) > inside
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    found: Floats = ((low + high) / 2)[place].reshape(np.shape(degrees))
    return found


def t_inside(t: Floats | float, degrees: Floats | float) -> Floats:
    """Return P(|T| < t) for Student's T.

    With T = √f tan θ that is 2 Γ((f + 1) / 2) / (√π Γ(f / 2)) times the integral of cos^(f−1) θ from 0 to
    arctan(t / √f), here by Gauss and Legendre's rule. Beyond 12 / √f the cosine's power is below 1e-30; cut there, the
    rule's places lie where the area is, however large f is. SciPy has it too; fedkeep does without that dependency.
    """
    t, f = np.asarray(t, np.float64), np.asarray(degrees, np.float64)
    top = np.minimum(np.arctan2(t, np.sqrt(f)), 12 / np.sqrt(f))
    angle = top[..., None] * (_NODES + 1) / 2
    halves = torch.from_numpy(np.stack([(f + 1) / 2, f / 2]))
    above, below = torch.lgamma(halves).numpy()
    area = top / 2 * ((np.cos(angle) ** (f[..., None] - 1)) @ _WEIGHTS)
    found: Floats = 2 / math.sqrt(math.pi) * np.exp(above - below) * area
    return found
