"""Rounds of stores in a file: flushed, kept, dropped, taken back; killed and interrupted in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeep.core.errors import StoreError
from fedkeep.store import database
from tests.store.build import (
    CLIENTS,
    DEVICE,
    FILE,
    IDS,
    KINDS,
    LARGE,
    Kind,
    count,
    expected,
    killed,
    lines,
    lines_after,
    numbers,
    of_round,
    stage,
    untouched,
    values,
)


@KINDS
def test_what_counts_is_read_at_once_and_lost_without_a_flush(tmp_path: Path, kind: Kind) -> None:
    store = kind.trained(tmp_path / "a", 2)
    count(store, [0], values(9, 1), 3)
    assert torch.equal(store.read([0])["user"][0], values(9, 1)["user"][0])
    assert store.seen([0]) == [True]
    assert kind.state(killed(tmp_path / "a"), 2) == expected(2)
    assert kind.outcome(killed(tmp_path / "a"), 3) == "refused"


@KINDS
@pytest.mark.parametrize("rounds", [1, 3])
def test_killed_between_flush_and_the_servers_commit_the_round_is_dropped(
    tmp_path: Path, kind: Kind, rounds: int
) -> None:
    kind.trained(tmp_path / "a", rounds)
    folder = killed(tmp_path / "a")
    if kind.reads:
        with untouched(folder):
            assert kind.state(folder, rounds - 1, write=False) == expected(rounds - 1)
    assert kind.state(folder, rounds - 1) == expected(rounds - 1)
    assert kind.state(folder, rounds - 1) == expected(rounds - 1)  # and may be dropped again


@KINDS
def test_killed_after_the_servers_commit_the_round_is_there(tmp_path: Path, kind: Kind) -> None:
    store = kind.trained(tmp_path / "a", 3)
    assert kind.state(killed(tmp_path / "a"), 3) == expected(3)
    store.begin(lines_after(3))
    assert numbers(store) == expected(3)


@KINDS
@pytest.mark.parametrize("name", [3, 33])
def test_a_round_that_comes_again(tmp_path: Path, kind: Kind, name: int) -> None:
    """Of the same name as what a kill has left, or of another."""
    store = kind.trained(tmp_path / "a", 2)
    store.begin(lines_after(2))
    kind.write(store, [0, 1, 5], values(77, 3), 3)
    folder = killed(tmp_path / "a")
    again = kind.open(folder)
    again.begin(lines_after(2))
    who, kept = of_round(3)
    kind.write(again, who, kept, name)
    assert kind.state(killed(folder), 2) == expected(2)  # before the server has committed, too
    third = kind.open(killed(folder))
    third.begin(lines({c: r for r in (1, 2) for c in of_round(r)[0]} | dict.fromkeys(who, name)))
    assert numbers(third) == expected(3)
    if kind is FILE:  # what the kill has left is gone with the transaction that adds the round
        again.rest()
        assert [a for c, a in kind.versions(folder) if c in who and a > 2] == [name] * len(who)
        assert not [c for c, a in kind.versions(folder) if c == 1 and a == 3]


@KINDS
def test_a_client_that_a_killed_round_was_the_first_of_has_default_values(tmp_path: Path, kind: Kind) -> None:
    store = kind.trained(tmp_path / "a", 1)
    kind.write(store, [6], values(7, 1), 2)
    again = kind.open(killed(tmp_path / "a"))
    again.begin(lines_after(1))
    assert again.seen([6]) == [False]
    assert torch.equal(again.read([6])["user"][0], again.default("user-6")["user"])


@KINDS
def test_a_flush_after_one_that_was_never_committed_keeps_the_older_versions(
    tmp_path: Path, kind: Kind
) -> None:
    """The server could not commit, and the process goes on: nothing new counts."""
    store = kind.trained(tmp_path / "a", 3)
    store.flush()
    store.flush()
    assert kind.state(killed(tmp_path / "a"), 2) == expected(2)


@KINDS
def test_the_last_round_can_be_taken_back_and_no_earlier_one(tmp_path: Path, kind: Kind) -> None:
    kind.at_rest(tmp_path / "a", 9)
    assert kind.state(tmp_path / "a", 8) == expected(8)
    with pytest.raises(
        StoreError, match=r"'user-.* (Restore the whole run from one copy|give it the newer folder)"
    ):
        kind.state(tmp_path / "a", 2)


def test_versions_that_nobody_needs_go_with_the_next_flush(tmp_path: Path) -> None:
    FILE.at_rest(tmp_path / "a", 10)
    last = {c: max(r for r in range(1, 11) if c in of_round(r)[0]) for c in range(CLIENTS)}
    before = {c: max(r for r in range(1, 10) if c in of_round(r)[0]) for c in of_round(10)[0]}
    assert FILE.versions(tmp_path / "a") == sorted({*last.items(), *before.items()})


@KINDS
def test_what_is_staged_and_not_named_is_never_written(tmp_path: Path, kind: Kind) -> None:
    store = kind.trained(tmp_path / "a", 2)
    stage(store, [0], values(5, 1), 3)
    store.drop()
    store.flush()
    assert kind.state(killed(tmp_path / "a"), 2) == expected(2)
    assert (kind.client(0), 3) not in kind.versions(killed(tmp_path / "a"))
    with pytest.raises(StoreError, match=r"'user-0'.*(attempt 3|this device has none)"):
        store.begin(lines({0: 3}))


@KINDS
def test_killed_before_the_first_commit(tmp_path: Path, kind: Kind) -> None:
    store = kind.open(tmp_path / "a")
    count(store, [1], values(1, 1), 1)
    before = killed(tmp_path / "a")
    store.flush()
    for copy in (before, killed(tmp_path / "a")):
        assert kind.state(copy, 0) == expected(0)


@KINDS
@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "INSERT INTO kept", "DELETE FROM kept", "COMMIT"])
def test_interrupted_inside_a_flush_nothing_is_written(
    tmp_path: Path, kind: Kind, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = kind.trained(tmp_path / "a", 2)

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
            kind.train(store, 3)
    kind.again(store, 3)
    assert kind.state(killed(tmp_path / "a"), 3) == expected(3)


@KINDS
@pytest.mark.parametrize("best", [1, 3, 6])
def test_the_versions_of_the_best_round_outlive_any_kill_and_go_after_the_next_best(
    tmp_path: Path, kind: Kind, best: int
) -> None:
    folder = tmp_path / "a"
    store = kind.open(folder, initial=LARGE.initial)
    for round in range(1, 15):
        now = 8 if round >= 8 else best if round >= best else 0
        kind.train(store, round, LARGE, best=now, flush=False)
        for flushed in (False, True):
            if flushed:
                store.flush()
            last = round if flushed else round - 1
            if best <= last < 8:
                assert kind.at_best(killed(folder), last, best, LARGE) == expected(best, LARGE)
                assert kind.state(killed(folder), last, LARGE) == expected(last, LARGE)
    assert kind.at_best(killed(folder), 14, 8, LARGE) == expected(8, LARGE)
    kind.rest(store)
    for client in range(CLIENTS):
        took_part = [r for r in range(1, 15) if client in LARGE.of(r)[0]]
        needed = {max(r for r in took_part if r <= now) for now in (8, 13, 14)}
        if kind is DEVICE:  # the last accepted version, one before it, and what is staged
            needed.update(took_part[-3 if 14 in took_part else -2 :])
        name = client if kind is FILE else IDS[client]
        assert {attempt for who, attempt in kind.versions(folder) if who == name} == needed
