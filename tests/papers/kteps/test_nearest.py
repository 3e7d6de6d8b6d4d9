from __future__ import annotations

from typing import Any

import pytest
import torch

from fedkeep.core.errors import ConfigError, DataError
from fedkeep_papers.kteps.neighbours import common_neighbours, nearest
from tests.refusals import raises

# By hand: seen from row 0, cosines are 1, 1/√2, 0, −1 and 0; inner products 1, 5, 2, −3 and 0.
TABLE = torch.tensor([[1.0, 0.0], [5.0, 5.0], [2.0, 0.0], [-3.0, 0.0], [0.0, 0.0]])


def test_nearest_by_hand() -> None:
    assert nearest(TABLE, 0, 3) == [2, 1, 4]
    assert nearest(TABLE, 0, 3, "inner") == [1, 2, 4]
    assert nearest(TABLE, 0, 99) == [2, 1, 4, 3]
    assert nearest(TABLE, 4, 2) == [0, 1]  # a zero vector is as far from all: the lower row first


def test_common_neighbours_by_hand() -> None:
    moved = TABLE.clone()
    moved[1] = torch.tensor([-5.0, 5.0])  # cosines from row 0: −1/√2, 1, −1, 0, so the order is 2, 4, 1, 3
    assert common_neighbours(TABLE, moved, 0, (1, 2, 3, 4)) == {1: 1, 2: 1, 3: 3, 4: 4}
    assert common_neighbours(TABLE, TABLE, 0, (2,), "inner") == {2: 2}


def test_a_rotation_keeps_all_neighbours() -> None:
    torch.manual_seed(0)
    table = torch.randn(50, 6)
    rotation = torch.linalg.qr(torch.randn(6, 6)).Q
    for similarity in ("cosine", "inner"):
        assert common_neighbours(table, table @ rotation, 7, (10,), similarity) == {10: 10}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "row", "k", "similarity", "kind", "message"),
    [
        (
            TABLE,
            0,
            0,
            "cosine",
            ConfigError,
            "Neighbours want a similarity 'cosine' or 'inner' and k of at least 1; got 'cosine' and 0.",
        ),
        (
            TABLE,
            0,
            1,
            "dot",
            ConfigError,
            "Neighbours want a similarity 'cosine' or 'inner' and k of at least 1; got 'dot' and 1.",
        ),
        (
            TABLE,
            5,
            1,
            "cosine",
            DataError,
            "Neighbours want a finite table (n, d) and a row of it; got shape (5, 2), row 5.",
        ),
        (
            TABLE * torch.nan,
            0,
            1,
            "cosine",
            DataError,
            "Neighbours want a finite table (n, d) and a row of it; got shape (5, 2), row 0.",
        ),
    ],
)
def test_what_is_refused(
    table: Any, row: int, k: int, similarity: Any, kind: type[Exception], message: str
) -> None:
    with raises(kind, text=message):
        nearest(table, row, k, similarity)


def test_tables_of_different_rows() -> None:
    with raises(DataError, count=5, second=3, ks=[1]):
        common_neighbours(TABLE, TABLE[:3], 0, (1,))
