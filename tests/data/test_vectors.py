from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import TokenVocabulary, WordVectors, read_word_vectors
from tests.refusals import raises

GLOVE = "the 1 2\na -0.5 3e-1\n. 0 0\n"


def text(path: Path, content: str = GLOVE, name: str = "v.txt") -> Path:
    data = content.encode()
    (path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path / name


def npz(path: Path, **arrays: Any) -> Path:
    given = {"words": np.array([b"the", b"a"]), "vectors": np.array([[1, 2], [3, 4]], np.float16)} | arrays
    np.savez(path / "v.npz", **{name: array for name, array in given.items() if array is not None})
    return path / "v.npz"


@pytest.mark.parametrize(
    ("content", "name"),
    [(GLOVE, "v.txt"), ("3 2\n" + GLOVE, "v.vec"), (GLOVE.replace("\n", " \n"), "v.txt.gz")],
)
def test_text_of_glove_and_word2vec(tmp_path: Path, content: str, name: str) -> None:
    vectors = read_word_vectors(text(tmp_path, content, name))
    assert vectors.words == ("the", "a", ".")
    assert vectors.vectors.dtype == np.float32
    assert np.array_equal(vectors.vectors, np.array([[1, 2], [-0.5, 0.3], [0, 0]], np.float32))
    assert vectors.width == 2
    some = read_word_vectors(tmp_path / name, keep=["a", "unheard"])
    assert (some.words, some.vectors.tolist()) == (("a",), [[-0.5, np.float32(0.3)]])


def test_a_word_with_spaces(tmp_path: Path) -> None:
    found = read_word_vectors(text(tmp_path, GLOVE + ". . . 7 8\n"))
    assert found.words[-1] == ". . ."
    assert found.vectors[-1].tolist() == [7, 8]


def test_npz(tmp_path: Path) -> None:
    vectors = read_word_vectors(npz(tmp_path))
    assert vectors.words == ("the", "a")
    assert vectors.vectors.dtype == np.float32
    assert vectors.vectors.tolist() == [[1, 2], [3, 4]]
    texts = read_word_vectors(npz(tmp_path, words=np.array(["ä", "the"])), keep={"ä"})
    assert (texts.words, texts.vectors.tolist()) == (("ä",), [[1, 2]])


def test_of_a_word_that_comes_twice_the_first_vector_counts(tmp_path: Path) -> None:
    vectors = read_word_vectors(text(tmp_path, GLOVE + "the 7 7\n"))
    assert vectors.words == ("the", "a", ".")
    assert vectors.vectors[0].tolist() == [1, 2]
    twice = read_word_vectors(npz(tmp_path, words=np.array([b"a", b"a"])))
    assert (twice.words, twice.vectors.tolist()) == (("a",), [[1, 2]])


def test_the_table_of_a_vocabulary() -> None:
    vectors = WordVectors(("a", "b"), np.array([[1, 2], [3, 4]], np.float32))
    vocabulary = TokenVocabulary(["b", "new", "a"])
    table = vectors.table(vocabulary)
    assert table.shape == (5, 2)
    assert table.dtype == np.float32
    assert table[[0, 2, 4]].tolist() == [[0, 0], [3, 4], [1, 2]]
    drawn = table[[1, 3]]  # unknown, and the word without a vector
    assert ((np.abs(drawn) <= 0.1) & (drawn != 0)).all()
    assert np.array_equal(table, vectors.table(vocabulary))
    other = vectors.table(vocabulary, seed=1)
    assert np.array_equal(table[[0, 2, 4]], other[[0, 2, 4]])
    assert not (table[[1, 3]] == other[[1, 3]]).any()
    many = vectors.table(TokenVocabulary(["a", *(f"w{n}" for n in range(5000))]))[3:]
    assert (many.min(), many.max(), many.mean()) == pytest.approx((-0.1, 0.1, 0.0), abs=2e-3)


def test_vectors_of_another_language() -> None:
    with raises(DataError, rows=4, shown="'B', 'C', 'D'"):
        WordVectors(("a",), np.ones((1, 2), np.float32)).table(TokenVocabulary(["B", "C", "D", "E"]))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "The data file {path} is empty. Fetch it again."),
        ("3 2\n", "{path} is truncated: its first line announces 3 words; it holds 0."),
        ("4 2\n" + GLOVE, "{path} is truncated: its first line announces 4 words; it holds 3."),
        (
            "3 3\n" + GLOVE,
            ("{path}, line 2: wanted a word and 3 numbers between single spaces; got 3 cells: 'the 1 2'."),
        ),
        (
            GLOVE + "b 1\n",
            "{path}, line 4: wanted a word and 2 numbers between single spaces; got 2 cells: 'b 1'.",
        ),
        (
            GLOVE + "b 1 1 2\n",
            "{path}, line 4: wanted a word and 2 numbers between single spaces; got 4 cells: 'b 1 1 2'.",
        ),
        (
            GLOVE + " 1 2\n",
            "{path}, line 4: wanted a word and 2 numbers between single spaces; got 3 cells: ' 1 2'.",
        ),
        (
            GLOVE + "\nb 1 2\n",
            "{path}, line 4: wanted a word and 2 numbers between single spaces; got 1 cells: ''.",
        ),
        (
            GLOVE + "b  1 2\n",
            "{path}, line 4: wanted a word and 2 numbers between single spaces; got 4 cells: 'b  1 2'.",
        ),
        (
            GLOVE + " b 1 2\n",
            "{path}, line 4: wanted a word and 2 numbers between single spaces; got 4 cells: ' b 1 2'.",
        ),
        ("the\n", "{path}, line 1: wanted a word and 1 numbers between single spaces; got 1 cells: 'the'."),
        (
            GLOVE + "b 1 x\n",
            "{path}, line 4: wanted numbers behind 'b'; could not convert string to float: 'x'.",
        ),
        (GLOVE + "b 1 nan\n", "{path}, line 4: the vector of 'b' holds NaN or infinity."),
        (GLOVE + "b 1 1e99\n", "{path}, line 4: the vector of 'b' holds NaN or infinity."),
    ],
)
def test_bad_text(tmp_path: Path, content: str, expected: str) -> None:
    path = text(tmp_path, content)
    with raises(DataError, text=expected.format(path=path)):
        read_word_vectors(path)


@pytest.mark.parametrize(
    ("arrays", "facts"),
    [
        (
            {"words": None},
            {"said": "wanted the arrays 'words' and 'vectors'; 'words' is not"},
        ),
        ({"words": np.array(["a"])}, {"got": 1, "vectors_count": 2}),
        (
            {"words": np.array([1, 2])},
            ({"shape": (2,), "shape_2": (2, 2)}),
        ),
        (
            {"vectors": np.ones(2)},
            ({"shape": (2,), "shape_2": (2,)}),
        ),
        ({"words": np.array([b"a", b""])}, {"row": 1}),
        ({"words": np.array([b"a", b"\xff"])}, {"row": 1, "word": b"\xff"}),
        ({"vectors": np.array([[1, 2], [np.inf, 1]])}, {"row": "a"}),
        (
            {"words": np.zeros(0, "S1"), "vectors": np.zeros((0, 2))},
            {"said": "holds no word"},
        ),
        (
            {"words": np.array(["a", "b"], object)},
            {"said": "is damaged or no .npz file of plain arrays (it holds"},
        ),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
    path = npz(tmp_path, **arrays)
    with raises(DataError, **facts):
        read_word_vectors(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "v.npz"
    with raises(DataError, said="which does not exist. Check the path; in a", where="does not exist"):
        read_word_vectors(path)
    path.write_bytes(b"PK no archive")
    with pytest.raises(DataError, match="is damaged or no .npz file of plain arrays"):
        read_word_vectors(path)
    path = text(tmp_path)
    with raises(
        DataError,
        said="words that are wanted. Is it the right one?",
        reason="has none of the 1 words that are wanted",
    ):
        read_word_vectors(path, keep=["unheard"])


DATA = os.environ.get("FEDKEEP_DATA", "")


@pytest.mark.skipif(
    not (DATA and Path(DATA, "word_vectors").is_dir()),
    reason="set FEDKEEP_DATA to a folder that holds word_vectors/ to test the real data",
)
def test_the_real_vectors() -> None:
    vectors = read_word_vectors(Path(DATA, "word_vectors", "word_vectors_200d.npz"))
    assert vectors.vectors.shape == (50_000, 200)
    assert np.linalg.norm(vectors.vectors, axis=1).mean() == pytest.approx(3, abs=0.5)
    place = {word: row for row, word in enumerate(vectors.words)}
    unit = vectors.vectors / np.linalg.norm(vectors.vectors, axis=1, keepdims=True)
    near = unit @ unit[place["good"]]
    assert "great" in {vectors.words[row] for row in np.argsort(-near)[:10]}


def test_a_first_line_that_promises_too_much(tmp_path: Path) -> None:
    path = tmp_path / "v.txt"
    path.write_text("7" * 5000 + " 3\na 1 2 3\n")
    with pytest.raises(DataError, match="line 2: wanted a word and 1 numbers between single spaces"):
        read_word_vectors(path)
