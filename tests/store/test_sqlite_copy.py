"""A copy of a SQLite store that is being written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import RunError
from fedkeep.store import Default, SqliteStore

DEFAULT = Default({"u": torch.zeros(2)})
IDS = ["a", "b"]


def test_a_copy_holds_what_was_committed_and_opens_like_a_store(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "one", DEFAULT, IDS, run="r")
    store.write([0], {"u": torch.tensor([[1.0, 2.0]])})
    digest = store.prepare(1)
    store.apply()
    store.write([1], {"u": torch.tensor([[3.0, 4.0]])})  # not committed
    (tmp_path / "two").mkdir()
    store.copy(tmp_path / "two" / "store.db")
    store.rest()
    copy = SqliteStore(tmp_path / "two", DEFAULT, IDS, run="r", create=False)
    copy.recover(1, digest)
    assert copy.read([0, 1])["u"].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    copy.write([1], {"u": torch.tensor([[5.0, 6.0]])})
    copy.prepare(2)
    copy.apply()
    copy.rest()


def test_a_copy_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "one", DEFAULT, IDS, run="r")
    with pytest.raises(
        RunError, match=r"^Cannot write .*store\.db: .* Free some space or check the rights\.$"
    ):
        store.copy(tmp_path / "nowhere" / "store.db")
    store.rest()
