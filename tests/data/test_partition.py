"""Partitions of images: who gets what, by hand and for any sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.data import (
    FederatedData,
    ImageSet,
    by_size,
    class_counts,
    dirichlet,
    feature_shift,
    majority,
    shards,
)
from fedkeep.data.partition import apportion
from tests.refusals import raises


def images(classes: int = 10, train: int = 60, test: int = 20, seed: int = 0) -> ImageSet:
    """Return a set with so many images a class, in mixed order; every image shows its own number."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([rng.permutation(np.repeat(np.arange(classes), n)) for n in (train, test)])
    shown = np.zeros((len(labels), 1, 2, 2), np.uint8)
    shown[:, 0, 0, 0], shown[:, 0, 0, 1] = np.arange(len(labels)) // 256, np.arange(len(labels)) % 256
    return ImageSet(shown, labels, classes * train, [f"class {c}" for c in range(classes)], "squares")


def numbers(data: FederatedData, split: str = "all", client: int | None = None) -> list[int]:
    rows = data.split_rows(split) if client is None else data.rows(client, split)
    return [int(n) for n in np.asarray(data.columns["_image"])[rows]]


def sound(data: FederatedData, source: ImageSet) -> None:
    """No image is used twice, each stands with its own pixels and label, and the class counts are those."""
    used = numbers(data)
    assert len(set(used)) == len(used)
    assert (data.columns["image"] == source.images[used]).all()  # type: ignore[comparison-overlap]
    assert (data.columns["label"] == source.labels[used]).all()  # type: ignore[comparison-overlap]
    assert max(numbers(data, "train")) < source.train
    for split in ("train", "valid", "test"):
        for c, row in enumerate(class_counts(data, split)):
            own = source.labels[numbers(data, split, c)]
            assert row.tolist() == np.bincount(own, minlength=source.classes).tolist()


# --- majority classes


def test_majority_classes_by_hand() -> None:
    source = images()
    data = majority(source, 5, 0.8, train=50, valid=10, test=5)
    sound(data, source)
    own = np.array(data.meta["partition"]["classes"])
    assert sorted(own.ravel().tolist()) == list(range(10))  # no class is two clients' majority
    for split, first, second, rest in (("train", 20, 20, 10), ("valid", 4, 4, 2), ("test", 2, 2, 1)):
        counts = class_counts(data, split)
        for row, (a, b) in zip(counts, own, strict=True):
            assert (row[a], row[b], row.sum() - row[a] - row[b]) == (first, second, rest)
    assert data.columns["image"].dtype == np.uint8  # type: ignore[union-attr]
    assert list(data.ids) == [f"client-{i}" for i in range(5)]
    assert set(data.batch([0])) == {"image", "label"}
    assert data.meta["partition"] == {"kind": "majority", "p": 0.8, "classes": own.tolist(), "seed": 0}
    assert min(numbers(data, "valid")) >= source.train  # from the official test images


@pytest.mark.parametrize(
    ("p", "size", "first", "second"),
    [
        (0.9, 500, 225, 225),  # 450; the authors' int() gave 449 of 500 in all
        (1.0, 5, 3, 2),  # the odd image goes to the first class
        (0.7, 5, 2, 2),  # 3.5 rounds up to 4
        (0.5, 5, 2, 1),  # 2.5 rounds up to 3
        (0.29, 50, 8, 7),  # 14.5, one bit below it in floating point
        (0.2, 10, 1, 1),
        (0.1, 4, 0, 0),  # 0.4 rounds to none
    ],
)
def test_rounding(p: float, size: int, first: int, second: int) -> None:
    data = majority(images(train=250), 1, p, train=size, valid=0)
    a, b = data.meta["partition"]["classes"][0]
    row = class_counts(data, "train")[0]
    assert row.sum() == size
    assert (row[a], row[b]) == (first, second)


@settings(max_examples=40)
@given(
    clients=st.integers(1, 5),
    p=st.floats(0.05, 1.0),
    train=st.integers(1, 24),
    valid=st.integers(0, 12),
    test=st.integers(0, 8),
    per_client=st.integers(1, 2),
    pools=st.tuples(st.sampled_from(["train", "test"]), st.sampled_from(["train", "test"])),
    seed=st.integers(0, 3),
)
def test_any_majority(
    clients: int, p: float, train: int, valid: int, test: int, per_client: int, pools: Any, seed: int
) -> None:
    source = images(train=50, test=25)

    def drawn() -> FederatedData:
        return majority(
            source,
            clients,
            p,
            train,
            valid,
            test=test,
            majority_classes=per_client,
            valid_from=pools[0],
            test_from=pools[1],
            seed=seed,
        )

    data = drawn()
    sound(data, source)
    assert data.fingerprint() == drawn().fingerprint()
    own = np.array(data.meta["partition"]["classes"])
    assert len(set(own.ravel().tolist())) == clients * per_client
    for split, size in (("train", train), ("valid", valid), ("test", test)):
        assert data.counts(split).tolist() == [size] * clients
        counts = class_counts(data, split)
        mine = np.stack([row[classes] for row, classes in zip(counts, own, strict=True)])
        assert (np.abs(mine.sum(axis=1) - p * size) <= 0.5 + 1e-9).all()
        assert (mine.max(axis=1) - mine.min(axis=1) <= 1).all()
        assert (np.diff(mine, axis=1) <= 0).all()  # the odd one in the first
    for split, pool in zip(("valid", "test"), pools, strict=True):
        assert all((n < source.train) == (pool == "train") for n in numbers(data, split))


def test_the_rest_is_drawn_evenly() -> None:
    data = majority(images(train=1000), 5, 0.2, train=1000, valid=0)
    # p = 0.2 of ten classes is an even division: 100 a class, by chance around it outside the majority.
    counts = class_counts(data, "train")
    assert np.abs(counts - 100).max() < 45  # 4.5 standard deviations


def test_other_seeds_draw_otherwise_and_a_larger_valid_keeps_train() -> None:
    source = images()
    base = majority(source, 5, 0.8, 20, 10, seed=1)
    other, wider = majority(source, 5, 0.8, 20, 10, seed=2), majority(source, 5, 0.8, 20, 20, seed=1)
    assert base.meta["partition"]["classes"] != other.meta["partition"]["classes"]
    assert numbers(base, "train") != numbers(other, "train")
    assert numbers(base, "train") == numbers(wider, "train")


def test_cifar100_can_hold_its_validation_images_out_of_training() -> None:
    source = images(classes=100, train=10, test=2)
    data = majority(source, 50, 1.0, 4, 16, valid_from="train")
    sound(data, source)
    assert sorted(numbers(data)) == list(range(source.train))  # every training image, once


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (
            (5, 0.0, 10, 5),
            {"got": 0.0},
        ),
        (
            (5, 1.1, 10, 5),
            {"got": 1.1},
        ),
        (
            (5, float("nan"), 10, 5),
            {"said": "Wanted a fraction p of majority classes in (0, 1]; got nan"},
        ),
        ((5, 0.5, 0, 5), {"wanted": "train", "least": 1, "got": 0}),
        ((5, 0.5, 5, -1), {"wanted": "valid", "least": 0, "got": -1}),
        ((5, 0.5, 2.5, 1), {"wanted": "train", "least": 1, "got": 2.5}),
        (
            (6, 0.8, 10, 5),
            (
                {
                    "clients": 6,
                    "each": "2 majority classes and no overlap",
                    "needed": 12,
                    "name": "squares",
                    "there": 10,
                    "missing": 2,
                }
            ),
        ),
        (
            (5, 0.8, 160, 5),
            (
                {
                    "clients": 5,
                    "each": "160 official train examples",
                    "needed": 800,
                    "name": "squares",
                    "there": 600,
                    "missing": 200,
                }
            ),
        ),
        (
            (5, 0.8, 10, 41),
            (
                {
                    "clients": 5,
                    "each": "41 official test examples",
                    "needed": 205,
                    "name": "squares",
                    "there": 200,
                    "missing": 5,
                }
            ),
        ),
        (
            (2, 0.8, 160, 5),
            (
                {
                    "wanted": 64,
                    "pool": "train",
                    "label_name": "class 3",
                    "name": "squares",
                    "there": 60,
                    "missing": 16,
                    "classes": 4,
                }
            ),
        ),
    ],
)
def test_what_cannot_be_drawn(arguments: Any, facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        majority(images(), *arguments)


def test_how_many_are_missing_for_the_rest() -> None:
    # 15 of the three majority classes are there, but of the fourth class only 10.
    with raises(DataError, client="client-0", wanted=15, left=10):
        majority(images(classes=4, train=10), 1, 0.5, train=30, valid=0, majority_classes=3)


def test_a_set_without_test_images() -> None:
    whole = images()
    source = ImageSet(whole.images[:600], whole.labels[:600], 600, whole.label_names, "lossless")
    with raises(DataError, name="lossless", split="valid"):
        majority(source, 5, 0.8, 10, 5)

    assert majority(source, 5, 0.8, 10, 5, valid_from="train").count(0, "valid") == 5
    with raises(DataError, got="trian"):
        majority(source, 5, 0.8, 10, 5, valid_from="trian")  # type: ignore[arg-type]


# --- the others


@settings(max_examples=25)
@given(clients=st.integers(1, 8), alpha=st.floats(0.2, 20), valid=st.floats(0, 0.5), seed=st.integers(0, 3))
def test_any_dirichlet(clients: int, alpha: float, valid: float, seed: int) -> None:
    source = images()
    data = dirichlet(source, clients, alpha, least=3, valid=valid, seed=seed)
    sound(data, source)
    assert (
        data.fingerprint() == dirichlet(source, clients, alpha, least=3, valid=valid, seed=seed).fingerprint()
    )
    assert sorted(numbers(data)) == list(range(len(source)))  # every image
    assert sorted(numbers(data, "test")) == list(range(source.train, len(source)))
    inside = data.counts("train") + data.counts("valid")
    assert inside.min() >= 3
    assert data.counts("train").min() >= 1
    assert (np.abs(data.counts("valid") - valid * inside) <= 0.5 + 1e-9).all()
    learnt = class_counts(data, "train") + class_counts(data, "valid")
    assert np.abs(class_counts(data, "test") - learnt * 20 / 60).max() < 1  # tested on what it trains on


def test_a_large_alpha_is_even_and_a_small_one_is_not() -> None:
    source = images(train=200)
    even = class_counts(dirichlet(source, 5, 1e6, valid=0), "train")
    assert np.abs(even - 40).max() <= 1
    skewed = class_counts(dirichlet(source, 5, 0.1, valid=0), "train")
    assert (skewed.max(axis=0) > 100).sum() >= 6  # most classes lie mainly with one client


@settings(max_examples=25)
@given(clients=st.integers(1, 20), per_client=st.integers(1, 4), seed=st.integers(0, 3))
def test_any_shards(clients: int, per_client: int, seed: int) -> None:
    source = images()
    data = shards(source, clients, per_client, valid=0.2, seed=seed)
    sound(data, source)
    assert data.fingerprint() == shards(source, clients, per_client, valid=0.2, seed=seed).fingerprint()
    size = 600 // (clients * per_client)
    assert (data.counts("train") + data.counts("valid")).tolist() == [size * per_client] * clients
    trained = set(source.labels[numbers(data, "train") + numbers(data, "valid")].tolist())
    held = range(source.train, len(source))
    assert sorted(numbers(data, "test")) == [n for n in held if source.labels[n] in trained]
    if 60 % size or size * clients * per_client < 600:
        return  # a shard may lie across two classes
    seen = ((class_counts(data, "train") + class_counts(data, "valid")) > 0).sum(axis=1)
    assert seen.max() <= per_client


@settings(max_examples=25)
@given(clients=st.integers(1, 10), sigma=st.floats(0, 3), seed=st.integers(0, 3))
def test_any_sizes(clients: int, sigma: float, seed: int) -> None:
    source = images()
    data = by_size(source, clients, sigma=sigma, valid=0.1, seed=seed)
    sound(data, source)
    assert data.fingerprint() == by_size(source, clients, sigma=sigma, valid=0.1, seed=seed).fingerprint()
    assert sorted(numbers(data)) == list(range(len(source)))
    assert (data.counts("train") + data.counts("valid")).min() >= 2


def test_sizes_by_hand() -> None:
    data = by_size(images(), 3, sizes=[1, 2, 7], valid=0)
    assert data.counts("train").tolist() == [61, 121, 418]  # 2 each, and 594 as 59.4 : 118.8 : 415.8
    assert data.meta["partition"] == {"kind": "by_size", "sizes": [1.0, 2.0, 7.0], "seed": 0, "valid": 0}
    assert np.ptp(by_size(images(), 4, sigma=0, valid=0).counts("train")) == 0


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (
            lambda s: dirichlet(s, 5, 0.0),
            {"got": 0.0},
        ),
        (
            lambda s: dirichlet(s, 61, 1.0),
            {
                "clients": 61,
                "each": "at least 10 examples",
                "needed": 610,
                "name": "squares",
                "there": 600,
                "missing": 10,
            },
        ),
        (
            lambda s: dirichlet(s, 50, 0.01),
            {"alpha": 0.01, "clients": 50, "least": 10},
        ),
        (
            lambda s: dirichlet(s, 5, 1.0, valid=1.0),
            {"got": 1.0},
        ),
        (
            lambda s: shards(s, 301),
            {
                "clients": 301,
                "each": "2 shards",
                "needed": 602,
                "name": "squares",
                "there": 600,
                "missing": 2,
            },
        ),
        (lambda s: shards(s, 0), {"wanted": "clients", "least": 1, "got": 0}),
        (lambda s: by_size(s, 2, sizes=[1, 0]), {"wanted": 2, "got": [1, 0]}),
        (
            lambda s: by_size(s, 2, sigma=-1),
            {"got": -1},
        ),
        (
            lambda s: by_size(s, 4, sigma=1000),
            {"said": "The clients' sizes add up to infinity"},
        ),
        (
            lambda s: by_size(s, 2, sizes=[1e308, 1e308]),
            {"said": "The clients' sizes add up to infinity"},
        ),
        (
            lambda s: by_size(s, 301),
            {
                "clients": 301,
                "each": "at least two examples",
                "needed": 602,
                "name": "squares",
                "there": 600,
                "missing": 2,
            },
        ),
    ],
)
def test_other_faults(make: Callable[[ImageSet], FederatedData], facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        make(images())


def test_noise_grows_from_client_to_client_and_is_drawn_once() -> None:
    grey = ImageSet(np.full((400, 1, 8, 8), 127, np.uint8), np.arange(400) % 4, 300, list("abcd"), "grey")
    data = feature_shift(grey, 4, 0.2)
    pixels = np.asarray(data.columns["image"]).astype(float) / 255
    for client in range(4):
        for split in ("train", "valid", "test"):
            found = pixels[data.rows(client, split)].std()
            assert found == pytest.approx(0.2 * (client + 1) / 4, rel=0.1)
    assert sorted(numbers(data)) == list(range(400))
    assert data.counts("train").tolist() == [67, 67, 67, 67]
    assert data.meta["partition"] == {"kind": "feature_shift", "sigma": 0.2, "seed": 0, "valid": 0.1}
    assert np.array_equal(data.columns["image"], feature_shift(grey, 4, 0.2).columns["image"])
    assert not np.array_equal(data.columns["image"], feature_shift(grey, 4, 0.2, seed=1).columns["image"])
    black = ImageSet(np.zeros((8, 1, 8, 8), np.uint8), np.arange(8) % 2, 8, list("ab"), "black")
    shown = np.asarray(feature_shift(black, 1, 5.0).columns["image"])
    assert 0.4 < (shown == 0).mean() < 0.6  # cut off at 0, not gone round
    assert (shown == 255).mean() > 0.35


@given(total=st.integers(0, 500), weights=st.lists(st.floats(0, 10), min_size=1, max_size=8))
def test_apportion(total: int, weights: list[float]) -> None:
    given_ = np.array(weights)
    assume(given_.sum() > 1e-3)
    got = apportion(total, given_)
    assert got.sum() == total
    assert (np.abs(got - total * given_ / given_.sum()) < 1).all()


def test_apportion_by_hand() -> None:
    assert apportion(10, np.array([1, 1, 1])).tolist() == [4, 3, 3]
    assert apportion(7, np.array([5, 3, 0, 2])).tolist() == [
        4,
        2,
        0,
        1,
    ]  # 3.5, 2.1, 0, 1.4: the largest remainder
    assert apportion(3, np.zeros(2)).tolist() == [0, 0]


def test_a_partition_is_saved_with_its_data(tmp_path: Path) -> None:
    data = majority(images(), 5, 0.8, 20, 10)
    data.save(tmp_path / "kept")
    again = FederatedData.load(tmp_path / "kept")
    assert again.fingerprint() == data.fingerprint()
    assert again.meta["partition"] == data.meta["partition"]


def test_classes_are_needed_to_count_them() -> None:
    data = FederatedData({"x": np.ones((2, 1)), "label": np.array([0.5, 1.5])}, [0, 2], ["a"])
    with raises(DataError, said="Wanted data with a class per example, to"):
        class_counts(data)


# --- sets of images


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (
            {"images": np.zeros((2, 4, 4), np.uint8)},
            {"shape": (2, 4, 4)},
        ),
        (
            {"images": np.zeros((2, 1, 4, 4))},
            {"shape": (2, 1, 4, 4)},
        ),
        (
            {"labels": np.zeros(3, np.int64)},
            {"wanted": 2, "shape": (3,)},
        ),
        ({"train": 0}, {"images": 2, "got": 0}),
        (
            {"labels": np.array([0, 7])},
            {"largest": 1, "got": 7, "row": 1, "more": 0},
        ),
    ],
)
def test_images_that_are_no_set(changes: dict[str, Any], facts: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "images": np.zeros((2, 1, 4, 4), np.uint8),
        "labels": np.array([0, 1]),
        "train": 1,
        "label_names": "ab",
        "name": "mine",
    }
    assert len(ImageSet(**good)) == 2
    with raises(DataError, **facts):
        ImageSet(**{**good, **changes})


@pytest.mark.parametrize(
    "divide",
    [lambda of: dirichlet(of, 3, 100.0), lambda of: by_size(of, 3, sigma=0.0), lambda of: shards(of, 3, 2)],
    ids=["dirichlet", "by_size", "shards"],
)
def test_test_images_of_a_class_that_nobody_trains_on_are_said_to_be_left_out(
    divide: Callable[[ImageSet], FederatedData],
) -> None:
    whole = images(4)
    rows = np.flatnonzero((whole.labels < 2) | (np.arange(len(whole)) >= whole.train))
    few = ImageSet(whole.images[rows], whole.labels[rows], 120, whole.label_names, "few")
    with pytest.warns(UserWarning, match="official test examples of few are left out") as said:
        data = divide(few)
    assert str(said[0].message) == (
        "40 of the 80 official test examples of few are left out: nobody has a training example of their classes, 'class 2' "
        "and 1 more."
    )
    assert data.counts("test").sum() == 40
    assert class_counts(data, "test").sum(0).tolist() == [20, 20, 0, 0]


@pytest.mark.parametrize(
    ("valid", "test", "counts"), [(0.1, 0.1, [48, 6, 6]), (0.0, 0.5, [30, 0, 30]), (0.9, 0.9, [1, 54, 5])]
)
def test_without_official_test_images_each_client_holds_some_out(
    valid: float, test: float, counts: list[int]
) -> None:
    whole = images()
    source = ImageSet(whole.images[:600], whole.labels[:600], 600, whole.label_names, "lossless")
    data = shards(source, 10, valid=valid, test=test)
    sound(data, source)
    assert [data.count(3, split) for split in ("train", "valid", "test")] == counts
    assert data.meta["partition"]["test"] == test
    with raises(DataError, what="test", got=1):
        shards(source, 10, test=1)
    assert "test" not in shards(whole, 10).meta["partition"]
