"""Rounds of a store in a file: prepared, kept, dropped, taken back; killed and interrupted in between."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep.core.errors import StoreError
from fedkeep.store import database
from tests.store.build import (
    CLIENTS,
    committed,
    expected,
    killed,
    numbers,
    of_round,
    sqlite,
    state,
    values,
    versions,
)
from tests.store.large import untouched


class TestRounds:
    def test_written_values_are_read_at_once_and_lost_without_a_commit(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 2)
        store.write([0], values(9, 1))
        assert torch.equal(store.read([0])["user"][0], values(9, 1)["user"][0])
        assert store.seen([0]) == [True]
        assert state(killed(tmp_path / "a"), 2) == expected(tmp_path, 2)

    @pytest.mark.parametrize("rounds", [1, 3])
    def test_killed_between_prepare_and_the_runs_commit_the_round_is_dropped(
        self, tmp_path: Path, rounds: int
    ) -> None:
        store = committed(tmp_path / "a", rounds - 1)
        store.write(*of_round(rounds))
        store.prepare(rounds)
        wanted = expected(tmp_path, rounds - 1)
        folder = killed(tmp_path / "a")
        with untouched(folder):
            assert state(folder, rounds - 1, write=False) == wanted
        assert state(folder, rounds - 1) == wanted
        assert state(folder, rounds - 1) == wanted  # and may be dropped again

    def test_killed_after_the_runs_commit_the_round_is_there(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 2)
        store.write(*of_round(3))
        digest = store.prepare(3)
        again = sqlite(killed(tmp_path / "a"))
        again.recover(3, digest)
        assert numbers(again) == expected(tmp_path, 3)
        assert again.digest == digest
        store.apply()
        assert store.digest == digest

    def test_a_round_after_recovery_is_like_any_other(self, tmp_path: Path) -> None:
        """What the dropped round has written is gone from the file, too."""
        store = committed(tmp_path / "a", 2)
        store.write([0, 1, 5], values(77, 3))
        store.prepare(3)
        folder = killed(tmp_path / "a")
        again = sqlite(folder)
        again.recover(2)
        again.write(*of_round(3))
        again.prepare(3)
        again.apply()
        again.rest()
        assert state(folder, 3) == expected(tmp_path, 3)
        assert versions(folder) == versions(tmp_path / "reference-3")

    def test_a_round_may_be_prepared_again(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 2)
        store.write([0, 1, 5], values(77, 3))
        store.prepare(3)
        store.write([1], values(78, 1))
        store.prepare(3)
        store.apply()
        assert torch.equal(
            store.read([1, 5])["count"], torch.cat([values(78, 1)["count"], values(77, 3)["count"][2:]])
        )
        assert [v for v in versions(killed(tmp_path / "a")) if v[0] == 1] == [(1, 1), (1, 3)]

    def test_the_last_round_can_be_taken_back_and_no_earlier_one(self, tmp_path: Path) -> None:
        committed(tmp_path / "a", 3)
        assert state(tmp_path / "a", 2) == expected(tmp_path, 2)
        with pytest.raises(StoreError, match=r"stands at round 3, the run at round 1; restore both"):
            state(tmp_path / "a", 1)

    def test_versions_that_nobody_needs_go_with_the_next_commit(self, tmp_path: Path) -> None:
        committed(tmp_path / "a", 10)
        found = versions(tmp_path / "a")
        last = {c: max(r for r in range(1, 11) if c in of_round(r)[0]) for c in range(CLIENTS)}
        before = {c: max(r for r in range(1, 10) if c in of_round(r)[0]) for c in of_round(10)[0]}
        assert found == sorted({*last.items(), *before.items()})

    def test_a_round_in_which_nobody_wrote(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 2)
        store.prepare(3)
        store.apply()
        assert state(killed(tmp_path / "a"), 3) == expected(tmp_path, 2)

    def test_apply_without_anything_prepared_keeps_what_was_written(self, tmp_path: Path) -> None:
        store = committed(tmp_path / "a", 1)
        store.write([0], values(9, 1))
        store.apply()
        assert torch.equal(store.read([0])["count"], values(9, 1)["count"])

    def test_killed_before_the_first_commit(self, tmp_path: Path) -> None:
        store = sqlite(tmp_path / "a")
        store.write([1], values(1, 1))
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        store.prepare(1)
        shutil.copytree(tmp_path / "a", tmp_path / "c")
        for copy in ("b", "c"):
            assert state(tmp_path / copy, 0)["seen"] == [False] * CLIENTS

    def test_killed_while_the_file_is_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It appears whole, so only what was begun may be lying about."""

        def killed(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                sqlite(tmp_path / "a")
        assert not (tmp_path / "a" / "store.db").exists()
        assert state(tmp_path / "a", 0)["seen"] == [False] * CLIENTS

    @pytest.mark.parametrize(
        "statement", ["BEGIN IMMEDIATE", "INSERT INTO kept", "DELETE FROM kept", "COMMIT"]
    )
    def test_interrupted_inside_prepare_nothing_is_written(
        self, tmp_path: Path, statement: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = committed(tmp_path / "a", 2)
        store.write(*of_round(3))

        def interrupted(name: str) -> Callable[..., Any]:
            call = getattr(database.Database, name)

            def watched(self: database.Database, text: str, *rest: Any) -> Any:
                if text.startswith(statement):
                    raise KeyboardInterrupt
                return call(self, text, *rest)

            return watched

        with monkeypatch.context() as patch, untouched(tmp_path / "a"):
            for name in ("query", "for_each"):
                patch.setattr(database.Database, name, interrupted(name))
            with pytest.raises(KeyboardInterrupt):
                store.prepare(3)
        store.prepare(3)  # this process may go on
        store.apply()
        assert state(killed(tmp_path / "a"), 3) == expected(tmp_path, 3)
