"""How a canary shows in what left: as itself, as a copy of lower precision, a multiple, a sum, a size, a linear image.

What changes with a canary is found by changing it, and no search could find more. This says what the change looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
DRAWS = 7
"""Canaries that are compared: the old values, others, and last the sum of the first two of these less the old."""
LARGEST = 1 << 22
"""Products of entries that left and entries of the canary, above which copies are looked for at multiples alone."""
PRECISIONS = ((1e-5, ""), (1e-3, ", in half precision"), (8e-3, ", in bfloat16"), (4e-2, ", in 8 bits"))
IN_LAST_BITS = "in the last bits"
LOW = 1e-3
"""A change below this part of the values is in their last bits."""


def describe_image(canaries: Array, left: Array) -> str:
    """Say what an image is of its canary: a few words, or an empty text where it only changes with it.

    Args:
        canaries: (draws, k) the values that were planted; the first row is what stood there before.
        left: (draws, m) what left, likewise.
    """
    if not np.isfinite(left).all():
        return ""
    if canaries.shape[1] > 1 and (exact := _values(canaries, left)):
        return exact
    moved, change = canaries[1:] - canaries[0], left[1:] - left[0]
    if not change.any():
        return ""
    size = np.abs(left).max()
    low = np.abs(change).max() < LOW * size
    for words in (_copy(moved, change), _statistic(canaries, left), _additive(change)):
        if words:
            return words + (", in the last bits" if low else "")
    return IN_LAST_BITS if low else ""


def describe_code(canaries: Array, left: Array, *, singly: bool = False) -> str:
    """Say how numbers that may tell of a canary carry one of its values: a few words; empty: they do not.

    A loss is a function of all values that it is computed with. It carries one where it follows that one alone: by a
    linear map, or, where the canary has several values, by a map that only grows or only falls.

    Args:
        canaries: (draws, k) the values that were planted, independent of each other.
        left: (draws, m) what left.
        singly: whether it is enough that one of the numbers that left only grows or falls.
    """
    moving = _moving(digits(left))
    if not moving.shape[1]:
        return ""
    some = canaries[:, np.unique(np.linspace(0, canaries.shape[1] - 1, MOST_VALUES).astype(int))]
    for words, value in (("a value", some), ("a sum, norm or largest of the values", statistics(canaries))):
        if np.abs(_correlation(value, moving)).max() > 1 - STRAIGHT:
            return f"carries {words}, by a linear map"
    moving = _moving(left)
    follows = _one_follows(some, moving) if singly else any(_follows(one, moving) for one in some.T)
    if canaries.shape[1] > 1 and follows:
        return "carries a value, by a map that only grows or falls"
    return ""


SLOPE, SAME = 0.1, 0.1
"""A change below this part of what left may be a slope; maps are the same that differ by less than this part."""
FAR = (32.0, 1024.0, 32768.0)
"""Sizes of larger values."""
Describe = Callable[[Array, Array], str]


def stands(
    describe: Describe,
    values: Array,
    left: Array,
    elsewhere: Callable[[], Array],
    far: Callable[[float], tuple[Array, Array]],
) -> bool:
    """Tell whether what looks like a code is one, and not the slope of a loss, as smooth functions are lines nearby.

    A change of a tenth of what left would bend a smooth function. A smaller one is a code where it is one with larger
    values, or by the same map with other examples; a loss's slope is made of these.

    Args:
        describe: says what what left is of the values, ``describe_code`` or ``describe_image``; it did.
        values: (draws, k).
        left: (draws, m) what left.
        elsewhere: makes what leaves with other examples, (draws, m); of another shape: it cannot be told.
        far: makes larger values, and what leaves with these, in as many draws.
    """
    if describe(values, left[:, _wide(left)]):
        return True
    other = elsewhere()
    if other.shape != left.shape:
        return True
    here, there = digits(left), digits(other)
    spread = here - here.mean(0)
    off = spread - (there - there.mean(0))
    same = np.sqrt((off**2).sum(0)) <= SAME * np.sqrt((spread**2).sum(0))
    if describe(values, here[:, same]):
        return True
    for scale in FAR:
        large, out = far(scale)
        if _wide(out).any():
            return bool(describe(large, out[:, _wide(out)]))
    return False


def _wide(left: Array) -> NDArray[np.bool_]:
    """Tell of which numbers the changes are large beside all that left, (m,): some may be small differences of these."""
    finite = np.isfinite(left).all(0)
    change = np.ptp(np.where(finite, left, 0.0), axis=0)
    found: NDArray[np.bool_] = change > SLOPE * np.abs(left[:, finite]).max(initial=0.0)
    return found


def statistics(values: Array) -> Array:
    """Return of values (draws, k) sum, norm, largest and smallest, (draws, 4)."""
    return np.stack([values.sum(1), np.sqrt((values**2).sum(1)), values.max(1), values.min(1)], 1)


def may_carry(values: Array, left: Array) -> bool:
    """Tell whether ``describe_code`` or ``describe_copy`` may still say something, after the first of the draws.

    Neither a linear map of all draws nor one that only grows is left when some of the draws already deny it.

    Args:
        values: (draws, k) of all draws: the values, and their sums.
        left: (some, m) what left in the first of these.
    """
    some, draws = len(left), len(values)
    first, moving = values[:some], digits(left)
    moving = moving[:, np.isfinite(moving).all(0)]
    if some < 3 or first.size * moving.shape[1] > LARGEST:
        return True
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (
            3 * STRAIGHT * values.var(0) * draws / (first.var(0) * some)
        )  # what all draws may be off a line
    if not (share < 1).all() or (_correlation(first, moving) ** 2 >= 1 - share[:, None]).any():
        return True
    steps = draws - some  # that the draws to come may add
    return _one_follows(first, _finite(left), least=max(0, (draws - 1) // 2 - steps))


def digits(left: Array) -> Array:
    """Return numbers, and what is behind their decimals: a loss may be rounded, and carry a code behind."""
    return (
        np.concatenate([left, *(np.fmod(left, 10.0**-k) for k in range(5))], 1)
        if left.shape[1] <= FEW
        else left
    )


FEW = 64
EXACT = 1e-9


def carries_exactly(canaries: Array, left: Array) -> bool:
    """Tell whether a number that left is one of the values, up to a factor and something constant."""
    moving = _moving(left)
    whole = canaries.shape[1] > 1 and moving.shape[1] and canaries.shape[1] * moving.shape[1] <= LARGEST
    return bool(whole) and bool(np.abs(_correlation(canaries, moving)).max() > 1 - EXACT)


def describe_copy(values: Array, sums: Array, left: Array) -> str:
    """Say whether numbers that are made of many examples carry one number of an example, or a sum of these.

    Args:
        values: (draws, k) the numbers in examples, independent of each other.
        sums: (draws, w) sums over examples of each number.
        left: (draws, m) what left.
    """
    moving = _moving(digits(left))[:, :MOST_VALUES]
    if values.shape[1] < 2 or not moving.shape[1]:
        return ""
    some = values[:, np.unique(np.linspace(0, values.shape[1] - 1, MOST_VALUES).astype(int))]
    for words, value in (("a value", some), ("a sum of the values", sums)):
        if value.shape[1] and np.abs(_correlation(value, moving)).max() > 1 - STRAIGHT:
            return f"carries {words}, by a linear map"
    if _one_follows(some, _moving(left)):
        return "carries a value, by a map that only grows or falls"
    return ""


def _finite(left: Array) -> Array:
    """Return the numbers that are finite in all draws."""
    found: Array = left[:, np.isfinite(left).all(0)]
    return found


def _moving(left: Array) -> Array:
    """Return the numbers that are finite in all draws, and not the same in all."""
    found = _finite(left)
    moving: Array = found[:, found.min(0, initial=np.inf) < found.max(0, initial=-np.inf)]
    return moving


AT_ONCE = 16


def _one_follows(values: Array, left: Array, least: int | None = None) -> bool:
    """Tell whether one of the numbers that left only grows or only falls with one of the values, by many steps.

    ``least``: how many; None: more than half.
    """
    order = np.argsort(values, axis=0, kind="stable")  # (draws, k)
    least = (len(values) - 1) // 2 + 1 if least is None else least
    most = left.shape[1] if values.size * left.shape[1] <= LARGEST else 0
    for place in range(0, most, AT_ONCE):
        steps = np.diff(left[:, place : place + AT_ONCE][order], axis=0)  # (draws - 1, k, some)
        one_way = (steps >= 0).all(0) | (steps <= 0).all(0)
        if (one_way & ((steps != 0).sum(0) >= least)).any():
            return True
    return False


def made_singly(moved: Sequence[NDArray[np.bool_]]) -> bool:
    """Tell whether most of what left is of single examples; ``moved`` says for each example what changes with it."""
    by = np.stack(moved) if moved else np.zeros((1, 0), bool)
    alone = by.sum(0) == 1
    return bool(len(by) > 1 and alone.sum() > 1 and 2 * alone.sum() >= by.any(0).sum())


MOST_VALUES = 4096
STRAIGHT = 1e-4


def _correlation(values: Array, left: Array) -> Array:
    """Return the correlation of each value with each number that left, (k, m), over the draws."""
    one, two = values - values.mean(0), left - left.mean(0)
    sizes = np.sqrt((one**2).sum(0))[:, None] * np.sqrt((two**2).sum(0))
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.where(sizes > 0, one.T @ two / sizes, 0.0)
    return found


def _follows(value: NDArray[Any], left: Array) -> bool:
    """Tell whether all that left only grows or only falls with a value, and some of it by many steps."""
    steps = np.diff(left[np.argsort(value)], axis=0)
    one_way = (steps >= 0).all(0) | (steps <= 0).all(0)
    return bool(one_way.all()) and bool(((steps != 0).sum(0) >= len(steps) // 2).any())


def _values(canaries: Array, left: Array) -> str:
    """Look for the values themselves, in the precisions that they may travel in."""
    for canary, out in list(zip(canaries, left, strict=True))[1:]:
        for kind, words in ((np.float32, ""), (np.float16, ", in half precision")):
            with np.errstate(over="ignore"):
                sought = np.unique(canary.astype(kind).astype(np.float64))
            there = np.unique(out.astype(np.float32).astype(np.float64))
            sought, there = (v[np.abs(v) > 1e-3] for v in (sought, there))
            both = np.isin(there, sought).sum()
            if both > 1 and 2 * both >= min(len(sought), len(there)):
                return "the values themselves" + words
    return ""


def _copy(moved: Array, change: Array) -> str:
    """Look for a stretch of what left that moves as the canary does, up to a factor."""
    k, m = moved.shape[1], change.shape[1]
    if not 1 < k <= m:
        return _scalar_copy(moved, change) if k == 1 else ""
    step = 1 if m * k <= LARGEST else k
    windows = np.lib.stride_tricks.sliding_window_view(change[0], k)[::step]  # (places, k)
    cosine = _cosine(windows, moved[0])
    place = int(np.argmax(np.abs(cosine)))
    stretches = change[:, place * step : place * step + k]
    again = np.abs([_cosine(s[None], c)[0] for s, c in zip(stretches, moved, strict=True)])
    off = float(np.sqrt(max(0.0, 1 - (again**2).mean())))
    factor = float(stretches[0] @ moved[0] / (moved[0] @ moved[0]))
    for most, words in PRECISIONS:
        if off < most and (k > 2 or off < 1e-5):
            return ("a copy" if abs(factor - 1) < 0.02 else f"{factor:.3g} times the values") + words
    return ""


def _scalar_copy(moved: Array, change: Array) -> str:
    for most, words in PRECISIONS[:2]:
        if _proportional(moved[:, 0], change).min(initial=1.0) < most:
            return "a multiple of the value" + words
    return ""


def _proportional(wanted: NDArray[Any], change: Array) -> Array:
    """Return for each entry how far its changes are from a multiple of ``wanted``, relative to their size."""
    size = np.sqrt((change**2).sum(0) * (wanted**2).sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.where(size > 0, wanted @ change / size, 0.0)
    found: Array = np.sqrt(np.maximum(0.0, 1 - cosine**2))
    return found


def _cosine(windows: Array, canary: Array) -> Array:
    size = np.sqrt((windows**2).sum(1)) * np.sqrt((canary**2).sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.where(size > 0, windows @ canary / size, 0.0)
    return found


def _statistic(canaries: Array, left: Array) -> str:
    """Look for one number made of the canary: its sum, size or largest entry."""
    if len(canaries) < 5 or left.shape[1] > 4096:
        return ""
    change = left - left.mean(0)
    for words, value in (
        ("the sum of the values", canaries.sum(1)),
        ("the norm of the values", np.sqrt((canaries**2).sum(1))),
        ("the squared norm of the values", (canaries**2).sum(1)),
        ("the largest of the values", canaries.max(1)),
        ("the smallest of the values", canaries.min(1)),
    ):
        wanted = value - value.mean()
        if wanted.any() and _proportional(wanted, change).min(initial=1.0) < 1e-3:
            return words
    return ""


def _additive(change: Array) -> str:
    """Tell whether the image of a sum is the sum of the images: the last canary is the sum of the first two."""
    size = np.abs(change).max(0)
    off = np.abs(change[-1] - change[0] - change[1])
    moving = size > 0
    both = (change[0] != 0) & (change[1] != 0)
    return "a linear image" if both.any() and bool((off[moving] < 1e-4 * size[moving]).all()) else ""
