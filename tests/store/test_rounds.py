"""Rounds of a store in a file: flushed, kept, dropped, taken back; killed and interrupted in between."""

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
    count,
    expected,
    killed,
    lines,
    lines_after,
    numbers,
    of_round,
    sqlite,
    state,
    values,
    versions,
)
from tests.store.large import untouched
from tests.tiny import interrupt


def test_what_counts_is_read_at_once_and_lost_without_a_flush(tmp_path: Path) -> None:
    store = committed(tmp_path / "a", 2)
    count(store, [0], values(9, 1), 3)
    assert torch.equal(store.read([0])["user"][0], values(9, 1)["user"][0])
    assert store.seen([0]) == [True]
    assert state(killed(tmp_path / "a"), 2) == expected(tmp_path, 2)


@pytest.mark.parametrize("rounds", [1, 3])
def test_killed_between_flush_and_the_servers_commit_the_round_is_dropped(
    tmp_path: Path, rounds: int
) -> None:
    committed(tmp_path / "a", rounds)
    wanted = expected(tmp_path, rounds - 1)
    folder = killed(tmp_path / "a")
    with untouched(folder):
        assert state(folder, rounds - 1, write=False) == wanted
    assert state(folder, rounds - 1) == wanted
    assert state(folder, rounds - 1) == wanted  # and may be dropped again


def test_killed_after_the_servers_commit_the_round_is_there(tmp_path: Path) -> None:
    committed(tmp_path / "a", 3)
    assert state(killed(tmp_path / "a"), 3) == expected(tmp_path, 3)


@pytest.mark.parametrize("name", [3, 33])
def test_a_round_that_comes_again(tmp_path: Path, name: int) -> None:
    """Of the same name as what a kill has left, or of another: that one is gone with the transaction that adds it."""
    store = committed(tmp_path / "a", 2)
    count(store, [0, 1, 5], values(77, 3), 3)
    store.flush()
    folder = killed(tmp_path / "a")
    again = sqlite(folder)
    again.begin(lines_after(2))
    who, kept = of_round(3)
    count(again, who, kept, name)
    again.flush()
    found = killed(folder)  # before the server has committed, too
    assert state(found, 2) == expected(tmp_path, 2)
    third = sqlite(folder.parent / found.name)
    attempts = {c: r for r in (1, 2) for c in of_round(r)[0]} | dict.fromkeys(who, name)
    third.begin(lines(attempts))
    wanted = committed(tmp_path / "wanted", 3)
    assert all(torch.equal(v, wanted.read(range(CLIENTS))[n]) for n, v in third.read(range(CLIENTS)).items())
    again.rest()
    assert [a for c, a in versions(folder) if c in who and a > 2] == [name] * len(who)
    assert not [c for c, a in versions(folder) if c == 1 and a == 3]


def test_a_client_that_a_killed_round_was_the_first_of_has_default_values(tmp_path: Path) -> None:
    store = committed(tmp_path / "a", 1)
    count(store, [6], values(7, 1), 2)
    store.flush()
    again = sqlite(killed(tmp_path / "a"))
    again.begin(lines_after(1))
    assert again.seen([6]) == [False]
    assert torch.equal(again.read([6])["user"][0], again.default("user-6")["user"])


def test_a_flush_after_one_that_was_never_committed_keeps_the_older_versions(tmp_path: Path) -> None:
    """The server could not commit, and the process goes on: nothing new counts."""
    store = committed(tmp_path / "a", 3)
    store.flush()
    store.flush()
    assert state(killed(tmp_path / "a"), 2) == expected(tmp_path, 2)


def test_the_last_round_can_be_taken_back_and_no_earlier_one(tmp_path: Path) -> None:
    committed(tmp_path / "a", 9).rest()
    assert state(tmp_path / "a", 8) == expected(tmp_path, 8)
    with pytest.raises(StoreError, match="Restore the whole run from one copy"):
        state(tmp_path / "a", 2)


def test_versions_that_nobody_needs_go_with_the_next_flush(tmp_path: Path) -> None:
    committed(tmp_path / "a", 10)
    last = {c: max(r for r in range(1, 11) if c in of_round(r)[0]) for c in range(CLIENTS)}
    before = {c: max(r for r in range(1, 10) if c in of_round(r)[0]) for c in of_round(10)[0]}
    assert versions(tmp_path / "a") == sorted({*last.items(), *before.items()})


def test_what_is_staged_and_not_named_is_never_written(tmp_path: Path) -> None:
    store = committed(tmp_path / "a", 2)
    store.stage(0, {n: v[0] for n, v in values(5, 1).items()}, 3)
    store.drop()
    store.flush()
    assert state(killed(tmp_path / "a"), 2) == expected(tmp_path, 2)
    with pytest.raises(StoreError) as error:
        store.begin(lines({0: 3}))
    assert "'user-0'" in str(error.value)
    assert "attempt 3" in str(error.value)


def test_killed_before_the_first_commit(tmp_path: Path) -> None:
    store = sqlite(tmp_path / "a")
    count(store, [1], values(1, 1), 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    store.flush()
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    for copy in ("b", "c"):
        assert state(tmp_path / copy, 0)["seen"] == [False] * CLIENTS


def test_killed_while_the_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears whole, so only what was begun may be lying about."""

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sqlite(tmp_path / "a")
    assert not (tmp_path / "a" / "store.db").exists()
    assert state(tmp_path / "a", 0)["seen"] == [False] * CLIENTS


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "INSERT INTO kept", "DELETE FROM kept", "COMMIT"])
def test_interrupted_inside_a_flush_nothing_is_written(
    tmp_path: Path, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = committed(tmp_path / "a", 2)
    count(store, *of_round(3), 3)

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
            store.flush()
    store.flush()  # this process may go on
    assert state(killed(tmp_path / "a"), 3) == expected(tmp_path, 3)


@pytest.mark.parametrize("mark", [1, 3, 6])
def test_what_counted_at_the_mark_outlives_any_kill_and_goes_after_the_next_mark(
    tmp_path: Path, mark: int
) -> None:
    store, wanted = sqlite(tmp_path / "a"), numbers(committed(tmp_path / "b", mark))
    for round in range(1, 9):
        count(store, *of_round(round), round)
        if round in (mark, 8):
            store.mark()
        if mark <= round < 8:
            for flushed in (False, True):
                if flushed:
                    store.flush()
                again = sqlite(killed(tmp_path / "a"))
                if flushed or round > mark:
                    again.begin(lines_after(round - (not flushed)), lines_after(mark))
                    assert numbers(again.marked()) == wanted
                    assert numbers(again) == numbers(
                        committed(tmp_path / f"c-{round}-{flushed}", round - (not flushed))
                    )
        store.flush()
    for round in (9, 10):
        count(store, *of_round(round), round)
        store.flush()
    store.rest()
    named = [
        {c: max(r for r in range(1, n + 1) if c in of_round(r)[0]) for c in range(CLIENTS)}
        for n in (8, 9, 10)
    ]
    assert {*versions(tmp_path / "a")} <= {pair for one in named for pair in one.items()}
