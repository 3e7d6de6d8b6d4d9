"""A run interrupt, interrupted or out of disk at any instant of a commit loses nothing and resumes to the same bits."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import Phase, Run, simulate
from fedkeep.core.errors import FedkeepError, RunError
from fedkeep.core.records import read_records
from fedkeep.core.run_files import read_info
from fedkeep.data import toy
from fedkeep.methods import fedavg
from fedkeep.models import Linear
from fedkeep.store.database import Database
from fedkeep.store.versions import NONCE_BITS
from tests.experiments.runs import run, stopped
from tests.tiny import Logits, interrupt, lasting

pytestmark = pytest.mark.usefixtures("same_id")


def test_what_was_written_after_the_last_commit_is_dropped(tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "run"
    stopped(out, 2)
    with open(out / "records.jsonl", "a") as file:
        file.write('{"round": 3, "torn')
    (out / "server-3.safetensors").write_bytes(b"half a file")
    (out / "server-3.safetensors.part").write_bytes(b"half a file")
    (out / "examples-3.safetensors").write_bytes(b"half a file")
    (out / "commit.json.part").write_bytes(b"{")
    run(out, resume=True)
    (out / "commit.json.part").unlink(missing_ok=True)
    assert lasting(out) == whole


def test_a_start_that_was_killed_can_be_started_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "lock").write_bytes(b"")
    (out / "run.json.part").write_bytes(b'{"na')
    run(out, rounds=1)


def failing(call: str, number: int, error: BaseException) -> Callable[..., Any]:
    """Return ``os.<call>``, but its ``number``-th call fails."""
    real, count = getattr(os, call), 0

    def maybe(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            raise error
        return real(*arguments, **options)

    return maybe


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fills_up_at_any_instant_loses_nothing(
    tmp_path: Path, whole: dict[str, bytes], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every flush (rename) of rounds 1 and 2 fails once; afterwards the run resumes to the same bits."""
    messages = []
    for number in range(2, 22 if call == "fsync" else 8):
        out = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(call, number, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
            with pytest.raises(FedkeepError) as error:
                run(out)
        messages.append(str(error.value))
        run(out, resume=(out / "run.json").exists())
        assert lasting(out) == whole
    assert all("No space left on device" in m for m in messages)
    assert all("Nothing was lost" in m and "resume" in m for m in messages)
    assert {m.split(":")[0].split("/")[-1] for m in messages} >= {"store.db", "commit.json"}


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "COMMIT"])
def test_a_disk_that_fills_up_while_private_states_are_written_loses_nothing(
    tmp_path: Path, whole: dict[str, bytes], number: int, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, query, count = tmp_path / "run", Database.query, 0

    def full(self: Database, text: str, *rest: Any) -> sqlite3.Cursor:
        nonlocal count
        count += text == "BEGIN IMMEDIATE"
        if text == statement and count == number:
            raise sqlite3.OperationalError("database or disk is full")
        return query(self, text, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "query", full)
        with pytest.raises(RunError) as error:
            run(out)
    assert str(error.value) == (
        f"Cannot write {out / 'private' / 'store.db'}: database or disk is full. Nothing was lost: the last finished "
        f"round is kept. Free some space or check the rights, then resume."
    )
    run(out, resume=True)
    assert lasting(out) == whole


@pytest.mark.parametrize("number", [3, 8, 14])
def test_an_interrupt_inside_a_commit_loses_nothing(
    tmp_path: Path, whole: dict[str, bytes], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing("fsync", number, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run(out)
    run(out, resume=True)
    assert lasting(out) == whole


class Interrupted(Logits):
    """Its ``left``-th forward is interrupted, as by Ctrl-C."""

    left = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).left -= 1
        if type(self).left == 0:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("left", [1, 5, 9, 14])
def test_an_interrupt_inside_a_round_leaves_the_last_commit(
    tmp_path: Path, whole: dict[str, bytes], left: int
) -> None:
    out = tmp_path / "run"
    Interrupted.left = left
    with pytest.raises(KeyboardInterrupt):
        run(out, model=Interrupted())
    Interrupted.left = 0
    committed = len(list(read_records(out / "records.jsonl"))) if (out / "records.jsonl").exists() else 0
    round = json.loads((out / "commit.json").read_text())["round"] if (out / "commit.json").exists() else 0
    assert (committed == 0) == (round == 0)
    run(out, resume=True, model=Interrupted())  # the folder is free again
    assert {n: v for n, v in lasting(out).items() if n != "run.json"} == whole


@pytest.mark.skipif(os.name != "posix", reason="files are told apart by inode")
def test_all_that_a_commit_names_is_flushed_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kill -9 cannot show, a loss of power would. Private states are flushed by SQLite: see tests/store."""
    out = tmp_path / "run"
    sync, replace = os.fsync, os.replace
    flushed: dict[int, int] = {}  # inode → its change time when it was flushed
    commits = 0

    def fsync(handle: int) -> None:
        sync(handle)
        stat = os.fstat(handle)
        flushed[stat.st_ino] = stat.st_mtime_ns

    def rename(source: Path, target: Path) -> None:
        nonlocal commits
        if target.name == "commit.json":
            commits += 1
            copy = shutil.copytree(out / "private", tmp_path / f"private-{commits}")
            with closing(sqlite3.connect(copy / "store.db")) as sql:
                assert sql.execute(f"SELECT max(attempt) >> {NONCE_BITS} FROM kept").fetchone() == (commits,)
            named = ["records.jsonl", "timings.jsonl", "ledger.jsonl", f"server-{commits}.safetensors"]
            named += [p.name for p in out.glob("examples-*.safetensors")]
            for name in [*named, source.relative_to(out)]:
                stat = (out / name).stat()
                assert flushed.get(stat.st_ino) == stat.st_mtime_ns, name
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    run(out)
    assert commits == 4


def test_a_run_that_was_killed_before_its_first_round_decides_its_engine_as_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = toy(users=100, examples=12, features=4, classes=3)

    def started(**more: Any) -> Run:
        phase = Phase(batch_size=4, epochs=3)
        torch.manual_seed(0)
        return simulate(Linear(4, 3), fedavg(local=phase), data, rounds=1, cohort=100, progress=False, **more)

    whole = started(out=tmp_path / "whole")
    assert whole.engine == "vectorised"

    with monkeypatch.context() as patched:
        patched.setattr("fedkeep.experiments.simulate.Drive.go", interrupt)
        patched.setattr("fedkeep.experiments.simulate.Auto.decide", interrupt)
        with pytest.raises(KeyboardInterrupt):
            started(out=tmp_path / "killed")
    again = started(out=tmp_path / "killed", resume=True)
    assert again.engine == "vectorised"
    assert read_info(tmp_path / "killed")["engine"] == "vectorised"
    assert [(r.metric, r.value) for r in again.history] == [(r.metric, r.value) for r in whole.history]
