from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import DataError
from fedkeep.data import movielens
from tests.refusals import raises

SMALL = "196\t242\t3\t881250949\n22\t377\t1\t878887116\n196\t51\t2\t881250950\n"
LARGE = "1::1193::5::978300760\n2::661::3::978302109\n1::661::4.5::978302268\n"


def test_the_100k_format(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text(SMALL)
    data = movielens(tmp_path)
    assert list(data.ids) == ["22", "196"]
    assert data.meta["task"] == "regression"
    assert data.meta["items"] == 3
    assert data.meta["item_ids"] == [51, 242, 377]
    batch = data.batch(range(3))
    assert batch["item"].tolist() == [2, 1, 0]
    assert batch["item"].dtype == torch.int64
    assert batch["label"].tolist() == [1.0, 3.0, 2.0]
    assert batch["label"].dtype == torch.float32
    assert batch["time"].tolist() == [878887116, 881250949, 881250950]
    assert set(data.meta["source"]) == {"u.data"}
    split = data.split_per_user(order="chronological")
    assert split.batch(split.rows(1, "test"))["item"].tolist() == [0]


@pytest.mark.parametrize("name", ["ratings.dat", "copy.txt"])
def test_the_1m_format(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LARGE)
    data = movielens(tmp_path if name == "ratings.dat" else tmp_path / name)
    assert list(data.ids) == ["1", "2"]
    assert data.meta["item_ids"] == [661, 1193]
    assert data.batch(range(3))["item"].tolist() == [1, 0, 0]
    assert data.batch(range(3))["label"].tolist() == [5.0, 4.5, 3.0]


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("u.data", "196\t242\t3", r"wanted user, movie, rating, time between '\t'; got '196\t242\t3'."),
        (
            "u.data",
            "196\t242\t3\t1\t2",
            r"wanted user, movie, rating, time between '\t'; got '196\t242\t3\t1\t2'.",
        ),
        ("u.data", "a\t242\t3\t1", r"wanted user, movie, rating, time between '\t'; got 'a\t242\t3\t1'."),
        ("u.data", "", r"wanted user, movie, rating, time between '\t'; got ''."),
        ("u.data", "1\t2\t6\t1", "wanted a rating of 0.5 to 5; got 6."),
        ("u.data", "1\t2\tnan\t1", "wanted a rating of 0.5 to 5; got nan."),
        ("ratings.dat", "1\t2\t3\t4", r"wanted user, movie, rating, time between '::'; got '1\t2\t3\t4'."),
    ],
)
def test_bad_lines(tmp_path: Path, name: str, line: str, expected: str) -> None:
    path = tmp_path / name
    path.write_text((SMALL if name == "u.data" else LARGE) + line + "\n")
    with raises(DataError, text=f"{path}, line 4: {expected}"):
        movielens(path)


def test_a_folder_without_ratings(tmp_path: Path) -> None:
    with raises(DataError, said="none is there. Check the folder"):
        movielens(tmp_path)
    (tmp_path / "u.data").touch()
    with raises(DataError, said="is empty. Fetch it again"):
        movielens(tmp_path)


@pytest.mark.parametrize("column", [0, 1, 3])
@pytest.mark.parametrize("value", [str(2**63), "-" + "9" * 30, "7" * 5000])
def test_integers_that_are_too_large(tmp_path: Path, column: int, value: str) -> None:
    cells = ["1", "2", "3", "4"]
    cells[column] = value
    (tmp_path / "u.data").write_text("1\t2\t3\t4\n" + "\t".join(cells) + "\n")
    with pytest.raises(DataError, match="line 2: wanted user, movie, rating, time between"):
        movielens(tmp_path)


@pytest.mark.parametrize("name", ["ratings.csv", "copy.txt"])
def test_ratings_in_csv(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("userId,movieId,rating,timestamp\n7,30,4.5,100\n7,10,0.5,90\n")
    data = movielens(tmp_path if name == "ratings.csv" else tmp_path / name)
    assert list(data.ids) == ["7"]
    assert data.batch(range(2))["label"].tolist() == [4.5, 0.5]
    assert data.meta["item_ids"] == [10, 30]
