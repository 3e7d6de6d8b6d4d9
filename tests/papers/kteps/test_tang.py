from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData
from fedkeep_papers.kteps.tang import tang
from tests.refusals import raises

IMDB = {"train": [(10, "great <sssss> great film"), (9, "good"), (1, "bad")], "test": [(2, "bad film")]}
YELP = {"train": [(5, "great food"), (3, "good food")], "test": [(1, "great"), (2, "")]}


def write(path: Path, rows: list[tuple[int, str]]) -> None:
    text = "".join(f"u1\t\tp{n}\t\t{rating}\t\t{words}\n" for n, (rating, words) in enumerate(rows))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def folder(path: Path) -> Path:
    write(path / "imdb.train.txt.ss", IMDB["train"])
    write(path / "imdb.test.txt.ss", IMDB["test"])
    write(path / "imdb.dev.txt.ss", [(0, "no reader sees this")])
    write(path / "yelp-2013-train.txt.ss.gz", YELP["train"])
    write(path / "yelp-2013-test.ss", YELP["test"])
    write(path / "yelp-2014-train.txt.ss", [(4, "fine")])
    write(path / "yelp-2014-test.txt.ss", [(4, "fine")])
    return path


def texts(data: FederatedData, client: str, split: str) -> list[str]:
    symbols = ["<pad>", "<unk>", *data.meta["vocabulary"]["symbols"]]
    batch = data.batch(data.rows(data.index(client), split))
    return [" ".join(symbols[i] for i in ids if i) for ids in batch["text"].tolist()]


def test_what_is_read(tmp_path: Path) -> None:
    data = tang(folder(tmp_path))
    assert list(data.ids) == ["imdb", "yelp-2013", "yelp-2014"]
    assert [data.counts(s).tolist() for s in ("train", "valid", "test")] == [[3, 2, 1], [0, 0, 0], [1, 2, 1]]
    assert (data.meta["name"], data.meta["task"], data.meta["classes"]) == ("tang", "multiclass", 5)
    assert data.meta["label_names"] == ["1", "2", "3", "4", "5"]
    assert sorted(data.meta["source"]) == [
        "imdb.test.txt.ss",
        "imdb.train.txt.ss",
        "yelp-2013-test.ss",
        "yelp-2013-train.txt.ss.gz",
        "yelp-2014-test.txt.ss",
        "yelp-2014-train.txt.ss",
    ]
    # IMDB's ten levels are merged by neighbours: 10 and 9 → 4, 1 and 2 → 0. Yelp's five only start at 0.
    assert data.batch(data.rows(0, "train"))["label"].tolist() == [4, 4, 0]
    assert data.batch(data.rows(0, "test"))["label"].tolist() == [0]
    assert data.batch(data.rows(1))["label"].tolist() == [4, 2, 0, 1]
    assert texts(data, "imdb", "train") == ["great <sssss> great film", "good", "bad"]
    assert texts(data, "yelp-2013", "test") == ["great", "<unk>"]


def test_separators_may_be_dropped(tmp_path: Path) -> None:
    data = tang(folder(tmp_path), separators="drop", max_length=3)
    assert texts(data, "imdb", "train") == ["great great film", "good", "bad"]
    assert "<sssss>" not in data.meta["vocabulary"]["symbols"]


def test_all_levels_by_hand(tmp_path: Path) -> None:
    write(tmp_path / "imdb-train.ss", [(rating, "a") for rating in range(1, 11)])
    write(tmp_path / "imdb-test.ss", [(1, "a")])
    data = tang(tmp_path, levels={"imdb": 10})
    assert data.batch(data.rows(0, "train"))["label"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("levels", [{}, {"imdb": 7}, {"imdb": 0}])
def test_levels_that_make_no_five_classes(tmp_path: Path, levels: dict[str, int]) -> None:
    with raises(DataError, said="levels of rating each", corpora=levels):
        tang(tmp_path, levels=levels)


def test_a_missing_or_doubled_file(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "yelp-2014-test.txt.ss").unlink()
    with raises(DataError, name="yelp-2014", split="test"):
        tang(tmp_path)
    write(tmp_path / "imdb-train.ss", IMDB["train"])
    with raises(DataError, name="imdb", split="train", found=["imdb-train.ss", "imdb.train.txt.ss"]):
        tang(tmp_path)
    with pytest.raises(DataError, match=r"got \[\]\. Put it there"):
        tang(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "u\t\tp\t\t3",
            "wanted user, product, rating, text with two tabs between them; got 'u\\t\\tp\\t\\t3'.",
        ),
        (
            "u\tp\t3\tgood",
            "wanted user, product, rating, text with two tabs between them; got 'u\\tp\\t3\\tgood'.",
        ),
        ("u\t\tp\t\t6\t\tgood", "wanted a rating of 1 to 5; got '6'."),
        ("u\t\tp\t\t0\t\tgood", "wanted a rating of 1 to 5; got '0'."),
        ("u\t\tp\t\tfour\t\tgood", "wanted a rating of 1 to 5; got 'four'."),
        ("u\t\tp\t\t²\t\tgood", "wanted a rating of 1 to 5; got '²'."),
    ],
)
def test_a_bad_line(tmp_path: Path, line: str, expected: str) -> None:
    folder(tmp_path)
    path = tmp_path / "yelp-2014-train.txt.ss"
    path.write_text(f"u\t\tp\t\t 5\t\tgood\t\tindeed\n{line}\n", encoding="utf-8")
    with raises(DataError, text=f"{path}, line 2: {expected}"):
        tang(tmp_path)
