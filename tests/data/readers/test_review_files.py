from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, review_files
from tests.refusals import raises


def write(path: Path, *rows: tuple[object, ...], header: str = "text,label") -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")


def shown(data: FederatedData, client: str, split: str) -> list[tuple[str, int]]:
    symbols = ["<pad>", "<unk>", *data.meta["vocabulary"]["symbols"]]
    batch = data.batch(data.rows(data.index(client), split))
    return [
        (" ".join(symbols[i] for i in ids if i), label)
        for ids, label in zip(batch["text"].tolist(), batch["label"].tolist(), strict=True)
    ]


def test_a_file_for_each_client_and_split(tmp_path: Path) -> None:
    write(tmp_path / "shop.a.train.csv", ("good soap", "pos"), ("bad soap", "neg"), ("new soap", "pos"))
    write(tmp_path / "shop.a.test.csv", ("new soap", "pos"))
    lines = [json.dumps({"text": t, "label": y}) for t, y in (("bad tea", "neg"), ("", "pos"))]
    (tmp_path / "b.train.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "b.test.tsv").write_text('text\tlabel\n"good tea"\tpos\n')
    (tmp_path / "b.dev.tsv").write_text("text\tlabel\nbad milk\tneg\n")
    (tmp_path / ".hidden.csv").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    data = review_files(tmp_path, max_length=5)
    assert list(data.ids) == ["b", "shop.a"]
    assert (data.meta["name"], data.meta["task"]) == (tmp_path.name, "multiclass")
    assert (data.meta["classes"], data.meta["label_names"]) == (2, ["neg", "pos"])
    assert data.meta["vocabulary"]["symbols"] == ["soap", "bad", "good", "new", "tea"]
    assert shown(data, "shop.a", "train") == [("good soap", 1), ("bad soap", 0), ("new soap", 1)]
    assert shown(data, "b", "train") == [("bad tea", 0), ("<unk>", 1)]
    assert shown(data, "b", "valid") == [("bad <unk>", 0)]
    assert shown(data, "b", "test") == [("good tea", 1)]
    assert sorted(data.meta["source"]) == [
        "b.dev.tsv",
        "b.test.tsv",
        "b.train.jsonl.gz",
        "shop.a.test.csv",
        "shop.a.train.csv",
    ]
    clean = review_files(tmp_path, drop_duplicates=True, valid=1)
    assert clean.meta["dropped_duplicates"] == 1
    assert [clean.counts(s).tolist() for s in ("train", "valid", "test")] == [[1, 1], [2, 1], [1, 1]]


def test_a_split_in_a_column_and_labels_with_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(
            tmp_path / f"{name}.csv",
            ("w x", 1, "train"),
            ("x", 0, "validation"),
            ("y", 1, "test"),
            header="words,stars,part",
        )
    data = review_files(tmp_path, text="words", label="stars", split="part", label_names=["1", "0"])
    assert data.meta["vocabulary"]["symbols"] == ["w", "x"]
    assert shown(data, "a", "train") == [("w x", 0)]
    assert shown(data, "b", "valid") == [("x", 1)]


def test_without_a_split_all_texts_shape_the_vocabulary(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", *((f"w{n}", n % 2) for n in range(10)))
    data = review_files(tmp_path)
    assert data.bounds is None
    assert len(data.meta["vocabulary"]["symbols"]) == 10
    assert data.split_per_user().counts("train").tolist() == [8]
    for name, value in {"valid": 2, "limit": 3, "drop_duplicates": True}.items():
        with raises(
            DataError,
            text=(
                f"{name} wants reviews that are split into train and test; these are not split. Call "
                f"data.split_per_user() without it."
            ),
        ):
            review_files(tmp_path, **{name: value})  # type: ignore[arg-type]


def test_reviews_that_would_come_twice_and_those_that_opted_out_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ("w", 1))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    with raises(DataError, name="a.csv.gz", client="a", part="whole"):
        review_files(tmp_path)
    (tmp_path / "a.csv.gz").unlink()
    (tmp_path / "a.csv").unlink()
    for part in ("valid", "dev"):
        write(tmp_path / f"a.{part}.csv", ("w", 1))
    with pytest.raises(DataError, match=r"a.dev.csv and a.valid.csv are both the valid file"):
        review_files(tmp_path)
    (tmp_path / "a.dev.csv").unlink()
    write(tmp_path / "a.valid.csv", ("w", 1, "false"), header="text,label,opted_in")
    with pytest.raises(DataError, match="has a column 'opted_in', which this reader would not heed"):
        review_files(tmp_path)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with raises(DataError, said="Wanted a folder with a file of reviews for", what="file of reviews"):
        review_files(nowhere)
    with raises(DataError, said="holds no file of reviews. Wanted one for", what="file of reviews"):
        review_files(tmp_path)
    write(tmp_path / "a.csv", ("w", 1))
    write(tmp_path / "b.train.csv", ("w", 1))
    with raises(DataError, column="split"):
        review_files(tmp_path)
    (tmp_path / "a.csv").unlink()
    write(tmp_path / "b.train.csv", ("w", 1, "train"), header="text,label,split")
    with raises(DataError, column="split"):
        review_files(tmp_path)


def test_a_bad_row_is_named_by_its_own_file(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ("w", 1))
    write(tmp_path / "b.csv", ("w", 1), ("w", -1))
    with raises(DataError, label="-1"):
        review_files(tmp_path)
    write(tmp_path / "b.csv", ("w", 1), header="words,label")
    with raises(DataError, column="text"):
        review_files(tmp_path)


def test_a_column_of_splits_that_somebody_names_must_be_in_every_file_whose_name_tells_none(
    tmp_path: Path,
) -> None:
    write(tmp_path / "a.csv", ("w", 1, "train"), ("v", 0, "test"), header="text,label,part")
    write(tmp_path / "b.test.csv", ("w", 1))
    with raises(DataError, column="prt"):
        review_files(tmp_path, split="prt")

    data = review_files(tmp_path, split="part")
    assert [data.counts(s).tolist() for s in ("train", "test")] == [[1, 0], [1, 1]]
