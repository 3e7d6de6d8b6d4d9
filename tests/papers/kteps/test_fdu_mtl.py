from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, TokenVocabulary, text_statistics
from fedkeep_papers.kteps.fdu_mtl import DOMAINS, fdu_mtl
from tests.refusals import raises

TWO = ("books", "MR")
REVIEWS: list[dict[str, Any]] = [
    {"domain": "books", "split": "train", "label": 1, "text": "good  book , a good one"},
    {"domain": "books", "split": "train", "label": 0, "text": "bad"},
    {"domain": "books", "split": "test", "label": 0, "text": "bad book unseen"},
    {"domain": "MR", "split": "train", "label": 1, "text": "good\x85film bad"},
    {"domain": "MR", "split": "train", "label": 0, "text": " "},
    {"domain": "MR", "split": "train", "label": 0, "text": "bad book unseen"},
    {"domain": "MR", "split": "test", "label": 1, "text": ""},
]


def folder(path: Path, reviews: Any = REVIEWS) -> Path:
    lines = (one if isinstance(one, str) else json.dumps(one) for one in reviews)
    (path / "fdu_mtl.jsonl.gz").write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))
    return path


def texts(data: FederatedData, client: str, split: str) -> list[list[str]]:
    symbols = ["<pad>", "<unk>", *data.meta["vocabulary"]["symbols"]]
    batch = data.batch(data.rows(data.index(client), split))
    return [
        [symbols[i] for i in ids[:n]]
        for ids, n in zip(batch["text"].tolist(), batch["text_length"].tolist(), strict=True)
    ]


def test_what_is_read(tmp_path: Path) -> None:
    data = fdu_mtl(folder(tmp_path), domains=TWO, max_length=4)
    assert list(data.ids) == ["MR", "books"]
    assert [data.counts(s).tolist() for s in ("train", "valid", "test")] == [[3, 2], [0, 0], [1, 1]]
    assert (data.meta["name"], data.meta["task"], data.meta["classes"]) == ("fdu_mtl", "multiclass", 2)
    assert data.meta["label_names"] == ["negative", "positive"]
    file = tmp_path / "fdu_mtl.jsonl.gz"
    assert data.meta["source"] == {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    # By hand: books counts good 2, book 1, "," 1, a 1, one 1, bad 1; MR counts good\x85film 1, bad 2, book 1, unseen 1.
    assert data.meta["vocabulary"]["symbols"] == [
        "bad",
        "book",
        "good",
        ",",
        "a",
        "good\x85film",
        "one",
        "unseen",
    ]
    assert texts(data, "books", "train") == [["good", "book", ",", "a"], ["bad"]]
    assert texts(data, "MR", "train") == [["good\x85film", "bad"], ["<unk>"], ["bad", "book", "unseen"]]
    assert texts(data, "MR", "test") == [["<unk>"]]  # an empty review has one token
    assert data.batch(data.split_rows("train"))["label"].tolist() == [1, 0, 0, 1, 0]
    assert set(data.batch([0])) == {"text", "text_length", "label"}


def test_words_of_test_reviews_are_unknown_and_the_vocabulary_is_cut(tmp_path: Path) -> None:
    reviews = [r for r in REVIEWS if r["text"] != "bad book unseen" or r["domain"] == "books"]
    data = fdu_mtl(folder(tmp_path, reviews), domains=TWO)
    assert texts(data, "books", "test") == [["bad", "book", "<unk>"]]
    cut = fdu_mtl(tmp_path, domains=TWO, vocabulary=2)
    assert cut.meta["vocabulary"]["symbols"] == ["bad", "good"]
    assert cut.meta["vocabulary"]["size"] == 4  # padding and unknown come on top
    given = fdu_mtl(tmp_path, domains=TWO, vocabulary=TokenVocabulary(["one"]))
    assert texts(given, "books", "train") == [["<unk>"] * 5 + ["one"], ["<unk>"]]


def test_leaked_reviews_are_dropped(tmp_path: Path) -> None:
    data = fdu_mtl(folder(tmp_path), domains=TWO, drop_duplicates=True)
    # MR trains on a test review of books: a leak too, as all domains train one model.
    assert data.meta["dropped_duplicates"] == 1
    assert texts(data, "MR", "train") == [["good\x85film", "bad"], ["<unk>"]]
    assert "dropped_duplicates" not in fdu_mtl(tmp_path, domains=TWO).meta


def many(train: int = 20, test: int = 10) -> list[dict[str, Any]]:
    return [
        {"domain": d, "split": s, "label": n % 2, "text": f"{d} {s} {n}"}
        for d in TWO
        for s, count in (("train", train), ("test", test))
        for n in range(count)
    ]


def words(data: FederatedData, split: str) -> set[str]:
    return {" ".join(text) for client in data.ids for text in texts(data, client, split)}


def test_a_validation_part_is_drawn_from_train(tmp_path: Path) -> None:
    data = fdu_mtl(folder(tmp_path, many()), domains=TWO, valid=6)
    assert [data.counts(s).tolist() for s in ("train", "valid", "test")] == [[14, 14], [6, 6], [10, 10]]
    whole = fdu_mtl(tmp_path, domains=TWO)
    assert words(data, "train") < words(whole, "train")
    # What validates does not shape the vocabulary: its numbers are unknown unless they train somewhere.
    assert "<unk>" in {word for text in words(data, "valid") for word in text.split()}
    assert data.fingerprint() == fdu_mtl(tmp_path, domains=TWO, valid=6).fingerprint()
    assert data.fingerprint() != fdu_mtl(tmp_path, domains=TWO, valid=6, seed=1).fingerprint()
    with raises(DataError, wanted=20, client="MR", rows=20):
        fdu_mtl(tmp_path, domains=TWO, valid=20)


def test_fewer_reviews(tmp_path: Path) -> None:
    data = fdu_mtl(folder(tmp_path, many()), domains=TWO, limit=12, valid=2)
    assert [data.counts(s).tolist() for s in ("train", "valid", "test")] == [[10, 10], [2, 2], [10, 10]]
    assert data.fingerprint() != fdu_mtl(tmp_path, domains=TWO, limit=12, valid=2, seed=1).fingerprint()
    with raises(DataError, name="limit", got=0):
        fdu_mtl(tmp_path, domains=TWO, limit=0)


def test_the_files_as_they_were_published(tmp_path: Path) -> None:
    for domain in TWO:
        (tmp_path / f"{domain}.task.train").write_text("1\tgood\u2028one\n0\tbad\n", encoding="utf-8")
        (tmp_path / f"{domain}.task.test").write_bytes("1\tcafé\n".encode("latin-1"))
    data = fdu_mtl(tmp_path, domains=TWO)
    assert data.meta["vocabulary"]["symbols"] == ["bad", "good\u2028one"]
    assert [data.counts(s).tolist() for s in ("train", "test")] == [[2, 2], [1, 1]]
    assert sorted(data.meta["source"]) == sorted(f"{d}.task.{s}" for d in TWO for s in ("train", "test"))
    given = fdu_mtl(tmp_path, domains=TWO, vocabulary=TokenVocabulary(["café"]))
    assert texts(given, "MR", "test") == [["café"]]
    (tmp_path / "MR.task.train").write_text("1\tgood\nbad\n")
    with raises(DataError, number=2, line="bad"):
        fdu_mtl(tmp_path, domains=TWO)
    (tmp_path / "books.task.test").unlink()
    with pytest.raises(DataError) as error:
        fdu_mtl(tmp_path, domains=TWO)
    missing = tmp_path / "books.task.test"
    assert str(error.value) == f"Wanted the data file {missing}, which does not exist. Check the path."


def test_a_missing_file_or_domain(tmp_path: Path) -> None:
    file = tmp_path / "fdu_mtl.jsonl.gz"
    for domains, expected in [
        (TWO, f"Wanted the data file {file}, which does not exist. Check the path."),
        (["book"], f"FDU-MTL has no domain 'book'; it has {', '.join(DOMAINS)}. Did you mean 'books'?"),
        ([], "Wanted at least one domain of FDU-MTL; got none."),
    ]:
        with raises(DataError, text=expected):
            fdu_mtl(tmp_path, domains=domains)
    folder(tmp_path)
    for domains, split, domain in [(None, "train", "apparel"), (("MR", "dvd"), "train", "dvd")]:
        with raises(DataError, split=split, domain=domain):
            fdu_mtl(tmp_path, domains=domains)
    folder(tmp_path, REVIEWS[:-1])
    with pytest.raises(DataError, match="has no test reviews of the domain 'MR'"):
        fdu_mtl(tmp_path, domains=TWO)


def line(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (REVIEWS[0] | changes).items() if value is not ...}


OUT_OF_RANGE = "wanted a domain of FDU-MTL, the split 'train' or 'test', and the label 0 or 1; got "


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("[1, 2]", "wanted a JSON object; got list."),
        (line(label=True), "wanted 'label' to be int; got True."),
        (line(text=...), "wanted 'text' to be str; it has only ['domain', 'label', 'split']."),
        (line(label=2), OUT_OF_RANGE + "'books', 'train' and 2."),
        (line(split="dev"), OUT_OF_RANGE + "'books', 'dev' and 1."),
        (line(domain="film"), OUT_OF_RANGE + "'film', 'train' and 1."),
    ],
)
def test_a_bad_line(tmp_path: Path, bad: Any, expected: str) -> None:
    folder(tmp_path, [REVIEWS[0], "", bad])
    with raises(DataError, text=f"{tmp_path / 'fdu_mtl.jsonl.gz'}, line 3: {expected}"):
        fdu_mtl(tmp_path, domains=TWO)


def test_the_statistics_of_the_clients(tmp_path: Path) -> None:
    data = fdu_mtl(folder(tmp_path), domains=TWO, max_length=2, vocabulary=3)  # bad, book, good
    mr, books = text_statistics(data)
    assert (mr.client, mr.train, mr.valid, mr.test, mr.different_words) == ("MR", 3, 0, 1, 2)  # bad, book
    assert mr.mean_words == pytest.approx((2 + 0 + 3) / 3)  # before the cut
    assert (books.mean_words, books.different_words) == (3.5, 3)
    with raises(DataError, column="label", columns=["label", "text"]):
        text_statistics(data, "label")


DATA = os.environ.get("FEDKEEP_DATA", "")


@pytest.mark.skipif(
    not (DATA and Path(DATA, "fdu_mtl").is_dir()),
    reason="set FEDKEEP_DATA to a folder that holds fdu_mtl/ to test the real data",
)
def test_the_real_reviews() -> None:
    data = fdu_mtl(Path(DATA, "fdu_mtl"))
    assert sorted(data.ids) == sorted(DOMAINS)
    assert int(data.counts("train").sum()) == 25_380
    assert data.counts("test").tolist() == [400] * 16
    assert data.meta["vocabulary"]["size"] == 50_002
    lengths = data.batch(data.split_rows("train"))["text_length"]
    assert int(lengths.min()) == 1
    assert int(lengths.max()) == 200
    clean = fdu_mtl(Path(DATA, "fdu_mtl"), drop_duplicates=True)
    assert clean.meta["dropped_duplicates"] == 726
    assert int(np.asarray(clean.counts("train")).sum()) == 25_380 - 726
