"""Numbers and a map that describe a table of user vectors: does it hold what users have in common?

FURL shows t-SNE maps only (FURL §5.3, Fig. 4 and 5); the numbers here say the same without an eye to judge. They are
computed here, not by scikit-learn, so that they do not depend on what is installed; t-SNE alone needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.errors import DataError, check_range, needing
from fedkeep.metrics.scores import floats

Vectors = Tensor | np.ndarray[Any, Any]
Traits = Vectors | Sequence[Any]
Floats = np.ndarray[Any, np.dtype[np.float64]]
_CHUNK = 512  # rows of the distance matrix held at once


def knn_agreement(vectors: Vectors, traits: Traits, k: int = 10) -> float:
    """Return the mean share of a user's k nearest others (Euclidean) that have the user's own trait.

    Users at exactly the k-th distance share the places left, so equal vectors (users never trained) give the
    same number in whatever order they come. Compare it with `chance_agreement`.

    Args:
        vectors: (n, p), one row a user.
        traits: n categories, any hashable values, or a tensor of numbers.
        k: neighbours; n − 1 where fewer users exist.

    Returns:
        A fraction; NaN with fewer than two users.

    Raises:
        DataError: the numbers of rows differ, k < 1, a vector is not finite or a trait is NaN.
    """
    table, codes = _table(vectors, len(traits)), _codes(traits)
    if len(table) < 2:
        return math.nan
    return float(np.mean(list(_neighbour_means(table, k, lambda rows: codes[None, :] == codes[rows, None]))))


def chance_agreement(traits: Traits) -> float:
    """Return the `knn_agreement` expected of vectors that know nothing: Σ n_c (n_c − 1) / (n (n − 1))."""
    n = len(traits)
    counts = np.bincount(_codes(traits), minlength=1).astype(np.float64)
    return float((counts * (counts - 1)).sum() / (n * (n - 1))) if n > 1 else math.nan


def knn_r2(vectors: Vectors, traits: Vectors | Sequence[float], k: int = 10) -> float:
    """Return how well the mean trait of a user's k nearest others predicts the user's own (continuous) trait.

    R² = 1 − Σ(trait − neighbours' mean)² / Σ(trait − mean)²: 1 is perfect, 0 or less is chance.

    Args:
        vectors: (n, p), one row a user.
        traits: n numbers, e.g. click-through rates.
        k: neighbours; n − 1 where fewer users exist. Ties as in `knn_agreement`.

    Returns:
        R²; NaN with fewer than two users or where all traits are equal.

    Raises:
        DataError: the numbers of rows differ, k < 1 or a vector or trait is not finite.
    """
    table, wanted = _table(vectors, len(traits)), floats(traits)
    if not np.isfinite(wanted).all():
        raise DataError("knn_r2 wants finite traits; leave out users whose trait is not known.")
    spread = float(((wanted - wanted.mean()) ** 2).sum()) if len(wanted) else 0.0
    if len(table) < 2 or spread == 0:
        return math.nan
    guess = np.array(
        list(_neighbour_means(table, k, lambda rows: np.broadcast_to(wanted, (len(rows), len(wanted)))))
    )
    return 1 - float(((wanted - guess) ** 2).sum()) / spread


def silhouette(vectors: Vectors, traits: Traits) -> float:
    """Return the mean silhouette (Rousseeuw 1987) of users grouped by trait, in [−1, 1].

    s = (b − a) / max(a, b) with a the mean Euclidean distance to the own group's others and b that to the
    nearest other group; 0 for a user alone in its group.

    Returns:
        The mean; NaN with fewer than two traits.

    Raises:
        DataError: the numbers of rows differ, a vector is not finite or a trait is NaN.
    """
    table, codes = _table(vectors, len(traits)), _codes(traits)
    groups = int(codes.max()) + 1 if len(codes) else 0
    if groups < 2:
        return math.nan
    size = np.bincount(codes, minlength=groups).astype(np.float64)
    member = torch.nn.functional.one_hot(torch.from_numpy(codes), groups).to(torch.float64)
    total = 0.0
    for rows, distance in _distances(table):
        sums = (torch.from_numpy(distance) @ member).numpy()  # (rows, groups)
        own = codes[rows]
        place = np.arange(len(rows))
        inside = sums[place, own] / np.maximum(size[own] - 1, 1)
        means = sums / size
        means[place, own] = np.inf
        outside = means.min(1)
        larger = np.maximum(inside, outside)
        score = np.divide(outside - inside, larger, out=np.zeros_like(larger), where=larger > 0)
        total += float(score[size[own] > 1].sum())
    return total / len(codes)


def linear_cka(a: Vectors, b: Vectors) -> float:
    """Return the linear centred kernel alignment of two tables of vectors (Kornblith et al. 2019, eq. 3–4).

    ‖BᵀA‖²_F / (‖AᵀA‖_F ‖BᵀB‖_F) with centred columns: 1 where one is a rotated, scaled copy of the other.

    Args:
        a: (n, p), one row a user.
        b: (n, q), the same users in the same order.

    Returns:
        A number in [0, 1]; NaN where one table has no variance.

    Raises:
        DataError: the numbers of rows differ or a vector is not finite.
    """
    left, right = _table(a, len(b)), _table(b, len(a))
    if not len(left):
        return math.nan
    left, right = left - left.mean(0), right - right.mean(0)
    scale = float(np.linalg.norm(left.T @ left) * np.linalg.norm(right.T @ right))
    return float(np.linalg.norm(right.T @ left) ** 2) / scale if scale > 0 else math.nan


@dataclass(frozen=True, slots=True)
class UserMap:
    """A two-dimensional map of user vectors.

    Attributes:
        points: (n, 2) coordinates; they have no unit, only nearness means something.
        note: how the map was made, in words; says so where it is not what was asked for, and why.
    """

    points: Floats
    note: str


def user_map(vectors: Vectors, perplexity: float = 30.0, seed: int = 0) -> UserMap:
    """Map user vectors to the plane: by t-SNE where scikit-learn is installed, else by principal components.

    Raises:
        DataError: as for ``tsne``.
    """
    if importlib.util.find_spec("sklearn") is not None:
        return tsne(vectors, perplexity, seed)
    found = principal_components(vectors)
    return replace(found, note=f"{found.note} (for t-SNE install scikit-learn)")


def principal_components(vectors: Vectors) -> UserMap:
    """Map user vectors (n, p), one row a user, to the plane of their two principal components.

    Raises:
        DataError: a vector is not finite.
    """
    table = _table(vectors, None)
    return UserMap(_principal(table - table.mean(0) if len(table) else table), "principal components")


def tsne(vectors: Vectors, perplexity: float = 30.0, seed: int = 0) -> UserMap:
    """Map user vectors to the plane with t-SNE, started from their principal components.

    The perplexity is lowered to (n − 1) / 3 where users are few. Fewer than 4 users, or users that are all
    equal, are shown by their principal components.

    Args:
        vectors: (n, p), one row a user.
        perplexity: about the number of neighbours that each user keeps near.
        seed: of t-SNE's random numbers.

    Raises:
        DataError: perplexity is not positive or a vector is not finite.
        ConfigError: scikit-learn is not installed.
    """
    table = _table(vectors, None)
    check_range("(0, inf]", DataError, perplexity=perplexity)
    with needing("t-SNE", "scikit-learn", "maps"):
        manifold = importlib.import_module("sklearn.manifold")
    n = len(table)
    centred = table - table.mean(0) if n else table
    if n < 4 or not np.any(centred):
        return UserMap(_principal(centred), "principal components: too few different users for t-SNE")
    used = min(float(perplexity), (n - 1) / 3)
    if table.shape[1] < 2:
        centred = np.pad(centred, ((0, 0), (0, 1)))
    points = manifold.TSNE(
        n_components=2, perplexity=used, init="pca", learning_rate="auto", random_state=seed, n_jobs=1
    ).fit_transform(centred.astype(np.float32))
    note = f"t-SNE, perplexity {used:g}, PCA initialisation, seed {seed}"
    if used < perplexity:
        note += f" (perplexity lowered from {perplexity:g}: only {n} users)"
    return UserMap(np.asarray(points, dtype=np.float64), note)


def _principal(centred: Floats) -> Floats:
    """Return the first two principal components, (n, 2), zeros where there are none."""
    points = np.zeros((len(centred), 2))
    if centred.size and np.any(centred):
        u, s, _ = np.linalg.svd(centred, full_matrices=False)
        width = min(2, len(s))
        points[:, :width] = u[:, :width] * s[:width]
    return points


def _neighbour_means(table: Floats, k: int, values: Any) -> Iterator[float]:
    """Yield for each user the mean of ``values(rows)[row, other]`` over its k nearest others, ties shared."""
    check_range("[1, inf]", DataError, k=k)
    k = min(k, len(table) - 1)
    for rows, distance in _distances(table):
        distance[np.arange(len(rows)), rows] = np.inf
        limit = np.partition(distance, k - 1, axis=1)[:, k - 1 : k]
        closer, level = distance < limit, distance == limit
        value = values(rows)
        shared = (value * level).sum(1) / level.sum(1) * (k - closer.sum(1))
        yield from ((value * closer).sum(1) + shared) / k


def _distances(table: Floats) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int64]], Floats]]:
    """Yield (rows, their Euclidean distances to all), a chunk of rows at a time, differences taken exactly."""
    whole = torch.from_numpy(table)
    for start in range(0, len(table), _CHUNK):
        part = whole[start : start + _CHUNK]
        distance = torch.cdist(part, whole, compute_mode="donot_use_mm_for_euclid_dist")
        yield np.arange(start, start + len(part)), distance.numpy()


def _codes(traits: Traits) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return each trait's number, in order of first appearance."""
    values = [t.item() if isinstance(t, Tensor) else t for t in traits]  # a tensor is equal to itself alone
    if any(isinstance(value, float | np.floating) and value != value for value in values):
        raise DataError(
            "Traits: one is NaN. Leave out users whose trait is not known, or name it, e.g. None."
        )
    known: dict[Any, int] = {}
    return np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)


def _table(vectors: Vectors, rows: int | None) -> Floats:
    """Return the vectors as a float64 array (n, p), checked."""
    array = floats(vectors)
    if array.ndim != 2 or (rows is not None and len(array) != rows):
        wanted = "(n, p)" if rows is None else f"({rows}, p)"
        raise DataError(
            "User vectors: wanted shape {wanted}, one row a user; got {got}.",
            wanted=wanted,
            got=array.shape,
        )
    array = np.ascontiguousarray(array)
    if not np.isfinite(array).all():
        raise DataError("User vectors: a value is NaN or infinite.")
    return array
