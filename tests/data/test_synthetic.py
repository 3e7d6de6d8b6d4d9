from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedkeep.core.errors import DataError
from fedkeep.data import (
    CharVocabulary,
    FederatedData,
    Ragged,
    many_user_text,
    toy,
    vocabulary_from,
)
from fedkeep.data.synthetic import _lexicon, _spread
from tests.engines.reference import step
from tests.refusals import raises


def column(data: FederatedData, name: str) -> np.ndarray:
    return np.asarray(data.columns[name])


def text(data: FederatedData) -> Ragged:
    ragged = data.columns["text"]
    assert isinstance(ragged, Ragged)
    return ragged


@pytest.fixture(scope="module")
def multiclass() -> FederatedData:
    return many_user_text()


@pytest.fixture(scope="module")
def binary() -> FederatedData:
    return many_user_text(100, 150, kind="binary")


def test_same_seed_same_data(multiclass: FederatedData) -> None:
    assert many_user_text().fingerprint() == multiclass.fingerprint()
    assert many_user_text(seed=1).fingerprint()["columns"] != multiclass.fingerprint()["columns"]


def test_the_shape_of_the_data(multiclass: FederatedData) -> None:
    assert len(multiclass) == 80
    assert multiclass.meta["classes"] == 10
    assert multiclass.meta["task"] == "multiclass"
    assert set(multiclass.batch([0])) == {"text", "text_length", "label"}
    counts = multiclass.counts()
    assert abs(counts.mean() - 100) < 1
    assert counts.max() > 3 * counts.min()  # users differ much in how much they wrote
    assert set(np.unique(column(multiclass, "label"))) == set(range(10))
    lengths = np.diff(text(multiclass).offsets)
    assert lengths.min() >= 10
    assert lengths.max() <= 40


@pytest.mark.parametrize("seed", range(3))
def test_the_user_is_worth_25_points(seed: int) -> None:
    for kind in ("multiclass", "binary"):
        meta = many_user_text(kind=kind, seed=seed).meta
        assert 0.8 < meta["best"] < 0.95
        assert meta["best"] - meta["best_global"] > 0.25


def test_clicks_are_rare(binary: FederatedData) -> None:
    assert 0.1 < column(binary, "label").mean() < 0.2
    assert binary.meta["classes"] == 2
    low, high = np.quantile(binary.meta["traits"]["click_rate"], [0.1, 0.9])
    assert high > 2 * low


def test_a_text_names_its_topic(multiclass: FederatedData) -> None:
    """Words of a text that other topics use too are common words; every text has one that none of them uses."""
    vocabulary = vocabulary_from(multiclass.meta["vocabulary"])
    assert isinstance(vocabulary, CharVocabulary)
    topics = column(multiclass, "_topic")
    texts = [set(vocabulary.decode(row).split()) for row in text(multiclass)]
    owner: dict[str, set[int]] = {}
    for words, topic in zip(texts, topics, strict=True):
        for word in words:
            owner.setdefault(word, set()).add(int(topic))
    for words, topic in zip(texts, topics, strict=True):
        assert {frozenset(owner[word]) for word in words} >= {frozenset([int(topic)])}
    assert sum(len(topics) > 1 for topics in owner.values()) == 5


def test_bayes_accuracy_by_brute_force() -> None:
    """Count instead of compute: with thousands of examples of each user and topic, frequencies show the best rule."""
    data = many_user_text(users=4, examples=40_000, classes=5, choices=4, topics=3, strength=2.0, skew=0.1)
    label, topic = column(data, "label"), column(data, "_topic")
    user = data.clients_of(np.arange(data.examples))
    train, test = data.split_rows("train"), data.split_rows("test")
    seen = np.zeros((4, 3, 5))
    np.add.at(seen, (user[train], topic[train], label[train]), 1)
    personal = (seen.argmax(axis=2)[user[test], topic[test]] == label[test]).mean()
    shared = (seen.sum(axis=0).argmax(axis=1)[topic[test]] == label[test]).mean()
    error = 4 * np.sqrt(0.25 / len(test))  # four standard errors, 1.6 points
    assert personal == pytest.approx(data.meta["best"], abs=error)
    assert shared == pytest.approx(data.meta["best_global"], abs=error)
    assert data.meta["best"] - data.meta["best_global"] > 2 * error  # so the two cannot be mistaken


def test_best_auc_by_brute_force() -> None:
    data = many_user_text(users=4, examples=40_000, topics=3, kind="binary", skew=0.1)
    label, topic = column(data, "label"), column(data, "_topic")
    user = data.clients_of(np.arange(data.examples))
    train, test = data.split_rows("train"), data.split_rows("test")
    seen, clicked = np.zeros((4, 3)), np.zeros((4, 3))
    np.add.at(seen, (user[train], topic[train]), 1)
    np.add.at(clicked, (user[train], topic[train]), label[train])

    def area(score: np.ndarray) -> float:
        positive, negative = score[label[test] == 1], score[label[test] == 0]
        draw = np.random.default_rng(0)
        a, b = draw.choice(positive, 400_000), draw.choice(negative, 400_000)
        return float((a > b).mean() + (a == b).mean() / 2)

    rate = clicked / seen
    assert area(rate[user[test], topic[test]]) == pytest.approx(data.meta["best"], abs=0.01)
    shared = (clicked.sum(axis=0) / seen.sum(axis=0))[topic[test]]
    assert area(shared) == pytest.approx(data.meta["best_global"], abs=0.01)


def test_probabilities_are_calibrated(binary: FederatedData) -> None:
    chance, label = column(binary, "_best"), column(binary, "label")
    edges = np.quantile(chance, np.linspace(0, 1, 9))
    for low, high in pairwise(edges):
        inside = (chance >= low) & (chance <= high)
        error = 4 * np.sqrt(chance[inside].mean() / inside.sum())
        assert label[inside].mean() == pytest.approx(chance[inside].mean(), abs=error)


def test_best_is_stated_anew_for_fewer_clients(multiclass: FederatedData) -> None:
    few = multiclass.select(np.arange(5))
    assert few.meta["best"] == column(few, "_best")[few.split_rows("test")].mean()
    assert few.meta["best"] != multiclass.meta["best"]
    assert len(few.meta["traits"]["most_used_label"]) == 5
    again = multiclass.split_per_user((0.5, 0.0, 0.5), seed=9)
    assert again.meta["best"] == column(again, "_best")[again.split_rows("test")].mean()


def test_traits_follow_the_labels(multiclass: FederatedData) -> None:
    label = column(multiclass, "label")
    for client in (0, 41, 79):
        most = np.bincount(label[multiclass.rows(client)]).argmax()
        assert multiclass.meta["traits"]["most_used_label"][client] == f"label {most}"


def test_a_small_model_comes_close_to_the_best() -> None:
    """Learn P(label | topic, user) from the training rows with a factor model: the gap to the best is small."""
    data = many_user_text(users=60, examples=100)
    topic, label = torch.from_numpy(column(data, "_topic")), torch.from_numpy(column(data, "label"))
    user = torch.from_numpy(data.clients_of(np.arange(data.examples)))
    by_topic, by_user = torch.zeros(6, 10, requires_grad=True), torch.zeros(60, 10, requires_grad=True)
    optimizer = torch.optim.Adam([by_topic, by_user], lr=0.2)
    train, test = torch.from_numpy(data.split_rows("train")), torch.from_numpy(data.split_rows("test"))
    for _ in range(60):
        loss = F.cross_entropy(by_topic[topic[train]] + by_user[user[train]], label[train])
        step(optimizer, (loss + 0.001 * by_user.square().sum(1).mean()))
    right = (by_topic[topic[test]] + by_user[user[test]]).argmax(1) == label[test]
    assert abs(right.double().mean().item() - data.meta["best"]) < 0.03


def test_lexicon_and_directions() -> None:
    draw = np.random.default_rng(0)
    words = _lexicon(60, draw)
    assert len(set(words)) == 60
    assert {len(word) for word in words} == {4, 6}
    spread = _spread(4, 3, draw)  # four points that keep away from each other are a tetrahedron
    assert (spread @ spread.T)[~np.eye(4, dtype=bool)] == pytest.approx(-1 / 3, abs=5e-3)
    assert np.linalg.norm(_spread(1, 2, draw)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"kind": "ternary"}, {"what": "Wanted kind", "got": "ternary"}),
        (
            {"users": 0},
            {"users": 0, "examples": 100, "topics": 6, "trait_size": 3, "rate": 0.15},
        ),
        (
            {"kind": "binary", "rate": 1.0},
            {"users": 80, "examples": 100, "topics": 4, "trait_size": 2, "rate": 1.0},
        ),
        (
            {"trait_size": 1},
            {"users": 80, "examples": 100, "topics": 6, "trait_size": 1, "rate": 0.15},
        ),
        ({"classes": 3}, {"classes": 3, "choices": 5}),
        ({"skew": 100.0}, {"skew": 100.0}),
        ({"skew": -1.0}, {"skew": -1.0}),
        ({"strength": float("inf")}, {"strength": float("inf")}),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, object], facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        many_user_text(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("task", "classes"), [("multiclass", 3), ("binary", 2), ("regression", 1)])
def test_toy(task: str, classes: int) -> None:
    data = toy(users=5, examples=10, features=2, task=task, dtype="float64")
    assert len(data) == 5
    assert data.meta["classes"] == classes
    batch = data.batch(data.rows(0, "train"))
    assert batch["x"].shape == (data.count(0, "train"), 2)
    assert batch["x"].dtype == torch.float64
    assert batch["label"].dtype == (torch.float64 if task == "regression" else torch.int64)
    assert (
        data.fingerprint() == toy(users=5, examples=10, features=2, task=task, dtype="float64").fingerprint()
    )
    assert ((data.counts() >= 5) & (data.counts() <= 15)).all()


def test_toy_of_no_task() -> None:
    with raises(DataError, got="ranking", users=8, examples=20, features=4, classes=3):
        toy(task="ranking")


@pytest.mark.parametrize(
    ("make", "size"),
    [
        *((make, size) for make in (toy, many_user_text) for size in ("users", "examples")),
        *((many_user_text, size) for size in ("classes", "topics", "trait_size")),
    ],
)
def test_sizes_that_no_memory_holds(make: Any, size: str) -> None:
    with pytest.raises(DataError) as error:
        make(**{size: 10**9})
    assert str(error.value).startswith(
        "Generated data hold at most 100,000,000 numbers, as they are for tests and "
    )
    assert str(error.value).endswith("Take fewer users, examples, features, topics or classes.")
