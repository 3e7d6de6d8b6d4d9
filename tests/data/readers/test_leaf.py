"""Data sets in LEAF's JSON files, made here in the layout that its scripts write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedkeep.core.errors import DataError
from fedkeep.data.readers import leaf
from tests.refusals import raises

DRAWN = np.random.default_rng(0)
PIXELS = DRAWN.integers(0, 256, (3, 784))
Own = dict[str, tuple[list[Any], list[Any]]]


def content(users: Own, /, **changed: Any) -> dict[str, Any]:
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    numbers = [len(y) for _, y in users.values()]
    return {"users": list(users), "num_samples": numbers, "user_data": data} | changed


def written(folder: Path, train: Own, test: Own | None = None, /, **changed: Any) -> Path:
    parts = {"train": content(train, **changed)} | ({"test": content(test)} if test else {})
    for part, given in parts.items():
        (folder / part).mkdir(parents=True)
        (folder / part / f"all_data_niid_0_keep_0_{part}_9.json").write_text(json.dumps(given))
    return folder


def test_handwriting_becomes_bytes_of_pixels(tmp_path: Path) -> None:
    own = [(PIXELS[n] / 255).tolist() for n in range(3)]
    folder = written(
        tmp_path / "data", {"f0_1": (own[:2], [61, 3]), "f1_2": (own[2:], [0])}, {"f0_1": (own[2:], [1])}
    )
    data = leaf(folder.parent)  # the folder above `data`, too
    assert list(data.ids) == ["f0_1", "f1_2"]
    assert [data.counts(part).tolist() for part in ("train", "test")] == [[2, 1], [1, 0]]
    assert data.columns["image"].dtype == np.uint8
    assert np.array_equal(data.columns["image"], PIXELS[[0, 1, 2, 2]].reshape(4, 1, 28, 28))
    assert (data.meta["classes"], data.columns["label"].tolist()) == (62, [61, 3, 1, 0])


def test_numbers_between_bytes_stay_as_they_are(tmp_path: Path) -> None:
    exact, between = (PIXELS[0] / 255).tolist(), DRAWN.random(784).tolist()
    data = leaf(written(tmp_path, {"a": ([exact], [0]), "b": ([between], [1])}))
    assert data.columns["image"].dtype == np.float32
    assert np.allclose(data.columns["image"].reshape(2, 784), [exact, between], atol=1e-6)


def test_other_numbers_are_features_unless_a_shape_says_more(tmp_path: Path) -> None:
    folder = written(tmp_path, {"a": ([[0.5, -2, 3, 4], [1, 2, 3, 4]], [0, 1])})
    assert leaf(folder).columns["x"].tolist() == [[0.5, -2, 3, 4], [1, 2, 3, 4]]
    assert leaf(folder, shape=[1, 2, 2]).columns["image"].shape == (2, 1, 2, 2)
    with raises(DataError, width=4, wanted=9):
        leaf(folder, shape=[1, 3, 3])


def test_the_next_character_is_the_label(tmp_path: Path) -> None:
    data = leaf(written(tmp_path, {"LEAR": (["to be", "o be "], [" ", "\n"])}))
    names = data.meta["label_names"]
    assert [names[n] for n in data.columns["label"]] == [" ", "\n"]
    assert data.batch(range(2))["text_length"].tolist() == [5, 5]
    assert data.meta["vocabulary"]["size"] == len(names) + 2


def test_tweets_are_texts(tmp_path: Path) -> None:
    rows = [["1", "Mon", "NO_QUERY", "ann", text, [0]] for text in ("good day", "bad day")]
    data = leaf(written(tmp_path, {"ann": (rows, [1, 0])}), tokens="word")
    assert data.meta["vocabulary"]["symbols"] == ["day", "bad", "good"]
    assert data.columns["label"].tolist() == [1, 0]


def comment(*words: str) -> tuple[list[Any], dict[str, Any]]:
    """Return a comment as LEAF's script cuts it: sequences of four words, here."""
    x, y, counts = ["<BOS>", *words, "<EOS>"], [*words, "<EOS>", "<PAD>"], [1.0] * (len(words) + 2)
    fill = -len(x) % 4

    def cut(values: list[Any]) -> list[Any]:
        return [values[n : n + 4] for n in range(0, len(values), 4)]

    targets = {"target_tokens": cut(y + ["<PAD>"] * fill), "count_tokens": cut(counts + [0.0] * fill)}
    return cut(x + ["<PAD>"] * fill), {"subreddit": "a", "created_utc": 1, "score": 0, **targets}


def of_comments(*comments: str) -> tuple[list[Any], list[Any]]:
    x, y = zip(*(comment(*text.split()) for text in comments), strict=True)
    return list(x), list(y)


def test_comments_are_sequences_of_words_and_of_those_that_follow(tmp_path: Path) -> None:
    every: Own = {"1": of_comments("to be or", "be"), "2": of_comments("to")}
    folder = written(tmp_path, every, {"1": of_comments("be new"), "2": ([], [])}, num_samples=[9, 9])
    (folder / "val").mkdir()
    (folder / "val/a_val.json").write_text(json.dumps(content({"2": of_comments("or")})))
    data = leaf(folder)
    names = ["", "?", *data.meta["vocabulary"]["symbols"]]
    assert names[2:] == ["<BOS>", "<EOS>", "be", "to", "or"]
    assert [data.counts(part).tolist() for part in ("train", "valid", "test")] == [[3, 1], [0, 1], [1, 0]]
    x, label = np.asarray(data.columns["input_ids"]), np.asarray(data.columns["label"])
    assert [[names[n] for n in row] for row in x[:3]] == [
        ["<BOS>", "to", "be", "or"],
        ["<EOS>", "", "", ""],
        ["<BOS>", "be", "<EOS>", ""],
    ]
    assert [[names[n] if n >= 0 else None for n in row] for row in label[:3]] == [
        ["to", "be", "or", "<EOS>"],
        [None] * 4,
        ["be", "<EOS>", None, None],
    ]
    test = data.rows(0, "test").start
    assert [names[n] for n in x[test]] == ["<BOS>", "be", "?", "<EOS>"]  # a word that only tests have
    assert (data.meta["task"], data.meta["classes"]) == ("next_token", 7)
    assert leaf(folder, vocabulary=4).meta["vocabulary"]["symbols"] == ["<BOS>", "<EOS>"]


def test_comments_that_are_not_of_the_form(tmp_path: Path) -> None:
    x, y = of_comments("to be or", "be")
    cases: list[tuple[list[Any], list[Any], int]] = [
        (x, [y[0], 3], 1),
        (x, [y[0], y[1] | {"count_tokens": []}], 1),
        ([x[0], [["a"], "b"]], y, 1),
        ([[["<BOS>", 3, "be", "or"], x[0][1]], x[1]], y, 0),
    ]
    for number, (xs, ys, row) in enumerate(cases):
        with raises(DataError, row=row):
            leaf(written(tmp_path / str(number), {"1": (xs, ys)}))
    short = {"target_tokens": [["a"]], "count_tokens": [[1]]}
    with raises(DataError, got=[1, 4]):
        leaf(written(tmp_path / "short", {"1": ([x[0], [["a"]]], [y[0], short])}))


def test_names_of_files_are_read_as_images(tmp_path: Path) -> None:
    (tmp_path / "raw/img_align_celeba").mkdir(parents=True)
    for name, shape in (("1.png", (4, 6, 3)), ("2.png", (6, 8, 3))):
        Image.fromarray(DRAWN.integers(0, 256, shape, dtype=np.uint8)).save(
            tmp_path / "raw/img_align_celeba" / name
        )
    folder = written(tmp_path, {"7": (["1.png", "2.png", "1.png"], [0, 1, 0])})
    image = leaf(folder, size=4).columns["image"]
    assert (image.shape, image.dtype) == ((3, 3, 4, 4), np.uint8)
    assert np.array_equal(image[0], image[2])
    with raises(DataError, got=8, width=6):
        leaf(folder)


def test_a_file_cut_in_half_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path, {"a": ([[1.0, 2.0]], [0])})
    file = next(folder.glob("train/*.json"))
    file.write_bytes(file.read_bytes()[:40])
    with raises(DataError, file=file):
        leaf(folder)


@pytest.mark.parametrize(
    ("users", "changed", "facts"),
    [
        ({"a": ([[1, 2]], [0])}, {"num_samples": [2]}, {"user": "a", "wanted": 2, "x": 1, "y": 1}),
        ({"a": ([[1, 2]], [0, 1])}, {}, {"user": "a", "x": 1, "y": 2}),
        ({"a": ([[1, 2]], [0])}, {"num_samples": []}, {"got": 0, "users": 1}),
        ({"a": ([[1, 2]], [0])}, {"users": None}, {"key": "users", "got": "missing"}),
        ({"a": ([[1, 2]], [0])}, {"user_data": []}, {"key": "user_data", "got": "a list"}),
        ({"a": ([[1, 2]], [0])}, {"users": ["b"]}, {"user": "b", "x": "none"}),
        ({"a": ([[1, 2], [1]], [0, 1])}, {}, {"row": 1, "wanted": "2", "got": "1"}),
        ({"a": ([[1, 2], [1, "x"]], [0, 1])}, {}, {"row": 1, "got": "2 with 'x' among them"}),
        ({"a": ([[1, 2]], [0]), "b": ([[1]], [0])}, {}, {"width": 2, "got": 1}),
        ({"a": ([[1, 2]], [0]), "b": (["x"], [0])}, {}, {"width": 2, "got": "none"}),
        ({"a": ([[1, 2]], [[0]])}, {}, {"column": "y", "got": [0]}),
        ({"a": (["x", 1], [0, 1])}, {}, {"column": "x", "got": 1}),
        ({"a": (["x", "y"], ["a", "bc"])}, {}, {"column": "y", "got": "bc"}),
        ({"a": ([], [])}, {}, {}),
    ],
)
def test_what_is_not_of_the_form_is_named(
    tmp_path: Path, users: Own, changed: dict[str, Any], facts: dict[str, Any]
) -> None:
    with raises(DataError, **facts):
        leaf(written(tmp_path, users, **changed))


def test_a_folder_without_such_files_is_named(tmp_path: Path) -> None:
    for folder, why in ((tmp_path, "has none"), (tmp_path / "no", "does not exist")):
        with raises(DataError, folder=folder, why=why):
            leaf(folder)
