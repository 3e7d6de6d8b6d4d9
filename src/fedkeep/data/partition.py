"""Dividing labelled images, or other examples, among clients: by majority classes, Dirichlet, shards of classes, by size,
or evenly with noise that differs.

Every partition is drawn from named streams of its seed, uses no image twice, keeps the images as uint8 in the column
``image`` and the number of each image in its set in the column ``_image``, which stays out of
batches. ``meta["partition"]`` says how it was made. Where examples belong to a domain or a user already, no partition
is needed: ``FederatedData.from_columns(client=domain, ...)``; a partition of such a source deals them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, check_choice, warn
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.columns import Ragged, Rows
from fedkeep.data.federated import FederatedData
from fedkeep.data.images import Unowned
from fedkeep.data.splits import SPLITS
from fedkeep.tasks import of_numbers

Counts = NDArray[np.int64]
Source = Literal["train", "test"]
T = TypeVar("T")
TINY = 1e-9  # keeps a half a half, and a whole number whole, where a product falls short by its last bit


def majority(
    images: Unowned[T],
    clients: int,
    p: float,
    train: int,
    valid: int,
    *,
    test: int = 0,
    majority_classes: int = 2,
    valid_from: Source = "test",
    test_from: Source = "test",
    seed: int = 0,
) -> T:
    """Give every client a fraction p of its images from classes that are nobody else's majority.

    Each client in turn draws ``majority_classes`` classes from those that no earlier client took. Then each draws p·N
    of its N images from its classes in equal parts; only after all of these draws, each draws the other (1−p)·N
    uniformly from what remains of the other classes. Numbers are rounded, a half upwards, and odd images go to the
    first classes. Validation and test images are drawn likewise, with the same classes and p (mixture of experts,
    arXiv:2010.02056, experiments, in the order of the authors' code of November 2020).

    Splits that share an official set draw all their majorities before any of them draws the rest.

    Args:
        images: to divide.
        clients: their number; ``clients · majority_classes`` classes are needed.
        p: fraction in (0, 1]. With ten classes 0.2 is an even division.
        train: images per client for training, from the official training images.
        valid: images per client for validation.
        test: images per client for a test set of their own (the paper reports on the validation images).
        majority_classes: classes per client.
        valid_from, test_from: the official images, "train" or "test", that these are drawn from.
        seed: of all draws.

    Raises:
        DataError: p or a number is out of range, or there are too few classes or images: says how many are missing.
    """
    if not 0 < p <= 1:
        raise DataError(
            "Wanted a fraction p of majority classes in (0, 1]; got {got}. 1 means nothing but these.", got=p
        )
    sizes = {"train": train, "valid": valid, "test": test}
    _check_whole(0, valid=valid, test=test)
    _check_whole(1, train=train, clients=clients, majority_classes=majority_classes)
    wanted = clients * majority_classes
    what = f"{majority_classes} majority classes and no overlap"
    _check_enough(images, clients, what, wanted, images.classes, "classes")
    drawn = numpy_generator(seed, "partition/classes").permutation(images.classes)[:wanted]
    own = drawn.reshape(clients, majority_classes)
    pools: dict[str, dict[str, int]] = {}
    for split, pool in (("train", "train"), ("valid", valid_from), ("test", test_from)):
        if sizes[split]:
            pools.setdefault(_official(images, split, pool), {})[split] = sizes[split]
    parts = {split: [np.zeros(0, np.int64)] * clients for split in SPLITS}
    for pool, wanted_of in pools.items():
        parts |= _drawn(images, pool, wanted_of, own, p, seed)
    about = {"kind": "majority", "p": float(p), "classes": own.tolist(), "seed": seed}
    return images.dealt(list(zip(*(parts[split] for split in SPLITS), strict=True)), about)


def _check_enough(images: Unowned[T], clients: int, each: str, needed: int, there: int, of: str) -> None:
    """Raise DataError where clients need more than there is."""
    if needed > there:
        raise DataError(
            "{clients} clients with {each} each need {needed:,} {of}; {name} has {there:,}, {missing:,} are missing. "
            "Take fewer clients, or less for each.",
            clients=clients,
            each=each,
            needed=needed,
            of=of,
            name=images.name,
            there=there,
            missing=needed - there,
        )


def _drawn(
    images: Unowned[T], pool: str, sizes: Mapping[str, int], own: Counts, p: float, seed: int
) -> dict[str, list[Rows]]:
    """Draw the splits that share an official set: all majorities, then the rest; image numbers by split and client."""
    quota = {split: _quota(size, p, own.shape[1]) for split, size in sizes.items()}
    rows = np.arange(images.train) if pool == "train" else np.arange(images.train, len(images))
    each = sum(sizes.values())
    what = f"{each} official {pool} examples"
    _check_enough(images, len(own), what, len(own) * each, len(rows), f"official {pool} examples")
    _enough(images, pool, images.labels[rows], own, np.sum(list(quota.values()), axis=0))
    free = np.zeros(len(images), bool)
    free[rows] = True

    def draw(rng: np.random.Generator, among: NDArray[np.bool_], number: int) -> Rows:
        chosen = rng.choice(np.flatnonzero(free & among), number, replace=False)
        free[chosen] = False
        return chosen

    parts: dict[str, list[Rows]] = {}
    for split in sizes:
        parts[split] = []
        for i, classes in enumerate(own):
            rng = numpy_generator(seed, f"partition/{split}/majority", f"client-{i}")
            taken = [draw(rng, images.labels == c, n) for c, n in zip(classes, quota[split], strict=True)]
            parts[split].append(np.concatenate(taken))
    for split, size in sizes.items():
        rest = size - int(quota[split].sum())
        for i, classes in enumerate(own if rest else ()):
            foreign = ~np.isin(images.labels, classes)
            left = int((free & foreign).sum())
            if left < rest:
                raise DataError(
                    "{client} wants {wanted} {split} examples outside its majority classes; {left} of the official "
                    "{pool} examples of {name} are left. Take fewer clients or examples, or a larger p.",
                    client=f"client-{i}",
                    wanted=rest,
                    split=split,
                    left=left,
                    pool=pool,
                    name=images.name,
                )
            rng = numpy_generator(seed, f"partition/{split}/rest", f"client-{i}")
            parts[split][i] = np.concatenate([parts[split][i], draw(rng, foreign, rest)])
    return parts


def dirichlet(
    images: Unowned[T],
    clients: int,
    alpha: float,
    *,
    least: int = 10,
    valid: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
) -> T:
    """Divide each class among the clients by proportions drawn from Dirichlet(alpha, …, alpha).

    All images are used, but for test images of classes without training images, which a warning counts. The official
    test images become the clients' test images, each class in the same proportions as its training images (Yurochkin et
    al., ICML 2019; test sets divided likewise, so that a client is tested on what it trains on).

    Args:
        images: to divide.
        clients: their number.
        alpha: small for clients with few classes, large for equal ones.
        least: training and validation images that every client gets at least; the draw is repeated until it does.
        valid: fraction of a client's images held out of its training.
        test: likewise for its tests, where there are no official test images.
        seed: of all draws.

    Raises:
        DataError: a number is out of range, or a thousand draws left some client with fewer than ``least`` images.
    """
    _check_whole(1, clients=clients, least=least)
    if not 0 < alpha < np.inf:
        raise DataError(
            "Wanted a concentration alpha above 0; got {got}. Usual ones lie between 0.1 and 10.", got=alpha
        )
    labels = images.labels[: images.train]
    per_class = np.bincount(labels, minlength=images.classes)
    _check_enough(
        images, clients, f"at least {least} examples", clients * least, images.train, "training examples"
    )
    for attempt in range(1000):
        rng = numpy_generator(seed, "partition/dirichlet", round=attempt)
        shares = rng.dirichlet(np.full(clients, float(alpha)), images.classes)  # (classes, clients)
        if not np.isfinite(shares).all():
            continue
        counts = np.stack([apportion(int(n), s) for n, s in zip(per_class, shares, strict=True)], axis=1)
        if counts.sum(axis=1).min() >= least:
            about = {"kind": "dirichlet", "alpha": float(alpha), "seed": seed}
            return _divided(images, _dealt(labels, counts, seed, "train"), valid, test, seed, about)
    raise DataError(
        "A thousand draws from Dirichlet({alpha}) left one of {clients} clients with fewer than "
        "{least} examples. Take a larger alpha, fewer clients or a smaller least.",
        alpha=alpha,
        clients=clients,
        least=least,
    )


def shards(
    images: Unowned[T],
    clients: int,
    per_client: int = 2,
    *,
    valid: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
) -> T:
    """Sort the training images by class, cut them into ``clients · per_client`` equal shards, deal these out.

    The pathological partition: most clients see ``per_client`` classes (McMahan et al., AISTATS 2017, §3). Images
    beyond equal shards, drawn at random, stay unused. Test images: each class in the proportions of its training
    images.

    Raises:
        DataError: a number is out of range, or there are fewer images than shards.
    """
    _check_whole(1, clients=clients, per_client=per_client)
    number = clients * per_client
    size = images.train // number
    _check_enough(images, clients, f"{per_client} shards", number, images.train, "training examples")
    mixed = numpy_generator(seed, "partition/shards/images").permutation(images.train)[: number * size]
    by_class = mixed[np.argsort(images.labels[mixed], kind="stable")]
    dealt = numpy_generator(seed, "partition/shards").permutation(number).reshape(clients, per_client)
    own = [by_class.reshape(number, size)[row].ravel() for row in dealt]
    return _divided(
        images, own, valid, test, seed, {"kind": "shards", "per_client": per_client, "seed": seed}
    )


def by_size(
    images: Unowned[T],
    clients: int,
    *,
    sigma: float = 1.0,
    sizes: Sequence[float] | None = None,
    valid: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
) -> T:
    """Divide the images evenly by class but unequally by number: sizes in proportion to exp(sigma · z), z normal.

    Args:
        images: to divide; all are used, test images in the proportions of the training images.
        clients: their number; each gets at least two training images.
        sigma: spread of the logarithm of the sizes; 0 gives equal sizes.
        sizes: the clients' sizes in proportion, instead of drawn ones.
        valid: fraction of a client's images held out of its training.
        test: likewise for its tests, where there are no official test images.
        seed: of all draws.

    Raises:
        DataError: a number is out of range, or there are too few images.
    """
    _check_whole(1, clients=clients)
    if not 0 <= sigma < np.inf:
        raise DataError("Wanted a spread sigma of 0 or more; got {got}. Usual ones are 0.5 to 2.", got=sigma)
    _check_enough(images, clients, "at least two examples", 2 * clients, images.train, "training examples")
    if sizes is None:
        with np.errstate(over="ignore"):
            relative = np.exp(sigma * numpy_generator(seed, "partition/sizes").standard_normal(clients))
    else:
        relative = np.asarray(sizes, dtype=np.float64)
        if relative.shape != (clients,) or not (np.isfinite(relative) & (relative > 0)).all():
            raise DataError(
                "Wanted {wanted} sizes above 0, one per client; got {got}.", wanted=clients, got=list(sizes)
            )
    if not sum(relative.tolist()) < np.inf:
        raise DataError("The clients' sizes add up to infinity. Take a smaller sigma, or smaller sizes.")
    numbers = 2 + apportion(images.train - 2 * clients, relative)
    mixed = numpy_generator(seed, "partition/by_size").permutation(images.train)
    own = np.split(mixed, np.cumsum(numbers)[:-1])
    drawn = {"sigma": float(sigma)} if sizes is None else {"sizes": relative.tolist()}
    return _divided(images, own, valid, test, seed, {"kind": "by_size", **drawn, "seed": seed})


def feature_shift(
    images: Unowned[T],
    clients: int,
    sigma: float = 0.1,
    *,
    valid: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
) -> T:
    """Divide the images evenly, and add normal noise of the standard deviation sigma · i / clients to those of client i.

    Clients are counted from 1; each example gets its noise once, in every split (Li et al., "Federated Learning on Non-IID
    Data Silos: An Experimental Study", ICDE 2022, noise-based feature imbalance).

    Args:
        images: to divide; all are used, test images in the proportions of the training images.
        clients: their number.
        sigma: the last client's noise: of bytes on the scale from 0 to 1; of other numbers in units of their standard
            deviations. Dates, categories and truth values stay as they are.
        valid: fraction of a client's images held out of its training.
        test: likewise for its tests, where there are no official test images.
        seed: of all draws.

    Raises:
        DataError: a number is out of range, there are too few images, or no numbers to add noise to.
    """
    _check_whole(1, clients=clients)
    if not 0 < sigma < np.inf:
        raise DataError("Wanted a noise sigma above 0; got {got}. Usual ones are 0.05 to 0.5.", got=sigma)
    _check_enough(images, clients, "an example", clients, images.train, "training examples")
    own = np.array_split(numpy_generator(seed, "partition/feature_shift").permutation(images.train), clients)
    about = {"kind": "feature_shift", "sigma": float(sigma), "seed": seed}
    levels = [sigma * (i + 1) / clients for i in range(clients)]
    return _divided(images, own, valid, test, seed, about, levels)


PARTITIONS: dict[str, Callable[..., Any]] = {
    divide.__name__: divide for divide in (majority, dirichlet, shards, by_size, feature_shift)
}
"""Partitions by the name that a configuration gives them."""


def class_counts(data: FederatedData, split: str = "all") -> Counts:
    """Return how many examples of each class each client has in a split, int64 (clients, classes).

    Raises:
        DataError: no such split, or labels that are no classes.
    """
    label = data.columns.get("label")
    if label is None or isinstance(label, Ragged) or of_numbers(data.meta["task"]) or label.ndim != 1:
        raise DataError("Wanted data with a class per example, to count classes; these have none.")
    rows, classes = data.split_rows(split), int(data.meta["classes"])
    cells = data.clients_of(rows) * classes + label[rows]
    return np.bincount(cells, minlength=len(data) * classes).reshape(len(data), classes)


def apportion(total: int, weights: NDArray[Any]) -> Counts:
    """Return whole numbers in proportion to weights that add up to ``total``: the largest remainders round up.

    Ties go to the earlier entry; weights that are all 0 give zeros.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if not shares.sum() > 0:
        return np.zeros(len(shares), np.int64)
    exact = total * (shares / shares.sum())
    floor: Counts = np.floor(exact + TINY).astype(np.int64)
    up = np.argsort(floor - exact, kind="stable")[: total - int(floor.sum())]
    floor[up] += 1
    return floor


def _quota(size: int, p: float, classes: int) -> Counts:
    """Return the majority images of each of a client's classes: p · size rounded, odd ones to the first."""
    number = int(np.floor(p * size + 0.5 + TINY))
    each, odd = divmod(number, classes)
    return np.asarray([each + (place < odd) for place in range(classes)], dtype=np.int64)


def _enough(images: Unowned[T], pool: str, labels: NDArray[np.int64], own: Counts, quota: Counts) -> None:
    have = np.bincount(labels, minlength=images.classes)
    short = {
        int(c): (int(have[c]), int(n)) for row in own for c, n in zip(row, quota, strict=True) if n > have[c]
    }
    if short:
        c, (there, wanted) = next(iter(short.items()))
        missing = sum(n - m for m, n in short.values())
        raise DataError(
            "Wanted {wanted} official {pool} examples of the majority class {label_name!r}; {name} has "
            "{there}. {missing} are missing in {classes} classes. Take fewer examples per client or a "
            "smaller p, or draw from the other official set.",
            wanted=wanted,
            pool=pool,
            label_name=images.label_names[c],
            name=images.name,
            there=there,
            missing=missing,
            classes=len(short),
        )


def _dealt(labels: NDArray[np.int64], counts: Counts, seed: int, split: str) -> list[Rows]:
    """Deal the images of each class, shuffled, to the clients by counts (clients, classes)."""
    own: list[list[Rows]] = [[] for _ in counts]
    for c in range(counts.shape[1]):
        rng = numpy_generator(seed, f"partition/{split}/deal", str(c))
        pieces = np.split(rng.permutation(np.flatnonzero(labels == c)), np.cumsum(counts[:, c]))
        for mine, piece in zip(own, pieces, strict=False):
            mine.append(piece)
    return [np.concatenate(mine) for mine in own]


def _divided(
    images: Unowned[T],
    own: Sequence[Rows],
    valid: float,
    test: float,
    seed: int,
    about: Mapping[str, Any],
    sigma: Sequence[float] = (),
) -> T:
    """Hold validation images out of the clients' training images, and add test images like their training images.

    Where there are no official test images, a fraction ``test`` is held out, too. ``sigma`` is each client's noise.
    """
    for what, share in (("validation", valid), ("test", test)):
        if not 0 <= share < 1:
            raise DataError(
                "Wanted a fraction of {what} examples in [0, 1); got {got}. A usual one is 0.1.",
                what=what,
                got=share,
            )
    labels = images.labels
    counts = np.stack([np.bincount(labels[rows], minlength=images.classes) for rows in own])
    held = labels[images.train :]
    per_class = np.bincount(held, minlength=images.classes)
    _tell_left_out(images, np.where(counts.any(0), 0, per_class))
    shares = np.stack([apportion(int(n), counts[:, c]) for c, n in enumerate(per_class)], axis=1)
    official = [images.train + rows for rows in _dealt(held, shares, seed, "test")]
    held_out = {"valid": float(valid)} | ({} if len(held) else {"test": float(test)})
    parts = []
    for i, rows in enumerate(own):
        mixed = numpy_generator(seed, "partition/valid", f"client-{i}").permutation(rows)
        first, number = (
            min(int(np.floor(share * len(rows) + 0.5 + TINY)), len(rows) - 1)
            for share in (valid, 0 if len(held) else valid + test)
        )
        number = max(first, number)
        parts.append((mixed[number:], mixed[:first], official[i] if len(held) else mixed[first:number]))
    return images.dealt(parts, {**about, **held_out}, sigma)


def _tell_left_out(images: Unowned[T], left_out: Counts) -> None:
    """Warn of test images, by class, that go to nobody as nobody trains on their class."""
    if len(classes := np.flatnonzero(left_out)):
        more = f" and {len(classes) - 1} more" if len(classes) > 1 else ""
        warn(
            f"{left_out.sum():,} of the {len(images) - images.train:,} official test examples of {images.name} are "
            f"left out: nobody has a training example of their classes, {images.label_names[classes[0]]!r}{more}."
        )


def _official(images: Unowned[T], split: str, pool: str) -> str:
    check_choice(f"Wanted {split}_from", pool, ("train", "test"), DataError)
    if pool == "test" and images.train == len(images):
        raise DataError(
            "{name} has no official test examples to draw {split} examples from. Say {split}_from='train'.",
            name=images.name,
            split=split,
        )
    return pool


def _check_whole(minimum: int, /, **given: int) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
            raise DataError(
                "Wanted {wanted} as a whole number of at least {least}; got {got!r}.",
                wanted=name,
                least=minimum,
                got=value,
            )
