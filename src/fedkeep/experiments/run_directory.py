"""A run's folder, and the commit that makes all of a round durable, or none of it.

    run.json                what ran: configuration, seeds, environment, data, split (reports read this)
    config.toml             the configuration file as given, if there was one
    partition.safetensors   which images each client has, where images were divided among them
    records.jsonl           what was measured; the same bytes for the same run
    timings.jsonl           how long it took
    server-N.safetensors    server state after round N
    private/                private states (a table with a journal)
    commit.json             the last finished round: the one file whose replacement commits it

Commit of round t: append records, write the private journal and the server state, flush all, then replace
``commit.json``; only then change the private table. Killed anywhere, ``open`` returns to the last commit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors.torch import load, save
from torch import Tensor

from fedkeep.core.describe import differences
from fedkeep.core.errors import RunError
from fedkeep.core.files import remove_leftovers, write_whole
from fedkeep.core.params import Params
from fedkeep.core.records import Record, to_line
from fedkeep.store import PrivateStore

FORMAT = 1
COMMITTED = ("round", "server", "server_sha256", "records_bytes", "timings_bytes")


class RunDirectory:
    """One run's folder, locked by this process until ``close``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(str(folder / "lock"))
        self.state: dict[str, Any] = {}

    @classmethod
    def create(cls, folder: Path, info: Mapping[str, Any]) -> RunDirectory:
        """Make a new run's folder.

        Raises:
            RunError: the folder exists and is not empty, or can't be written.
        """
        if folder.exists() and (
            not folder.is_dir() or any(p.name != "lock" and p.suffix != ".part" for p in folder.iterdir())
        ):
            raise RunError(
                f"{folder} already exists and is not empty. Resume that run (resume=True, on the command line "
                f"--resume), or name another folder."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"Cannot make the run's folder {folder}: {error.strerror}.") from error
        run = cls(folder)
        run._acquire()
        try:
            run.write_info({**info, "format": FORMAT})
        except RunError:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any] | None = None) -> RunDirectory:
        """Open a run's folder to go on with it.

        Args:
            folder: the run's folder.
            identity: what the caller is about to run; must equal what the folder was made for.

        Raises:
            RunError: no run is there, it is damaged or in use, or it was made for something else.
        """
        info = read_info(folder)
        if identity is not None:
            lines = differences(json.loads(json.dumps(identity)), info.get("identity"))
            if lines:
                shown = "\n  ".join(lines[:8])
                raise RunError(
                    f"{folder} is a run of another configuration, so it cannot be resumed with this one:\n  {shown}\n"
                    f"Use the settings it was made with, or name another folder."
                )
        run = cls(folder)
        run._acquire()
        try:
            run.state = run._committed()
        except RunError:
            run.close()
            raise
        return run

    def _committed(self) -> dict[str, Any]:
        path = self.folder / "commit.json"
        if path.exists():
            state = _read_json(path)
            missing = [key for key in COMMITTED if key not in state]
            if missing:
                raise RunError(f"{path} is damaged: it lacks {missing}. Restore the run from a copy.")
            return state
        if any(p.name != "server-1.safetensors" for p in self.folder.glob("server-*.safetensors")):
            raise RunError(
                f"{path} is missing, but the run has finished rounds. Restore the run from a copy."
            )
        return {}

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise RunError(
                f"{self.folder} is in use by another process. Wait for it, or name another folder."
            ) from error
        for place in (self.folder, self.folder / "private"):  # both are ours, and locked
            remove_leftovers(place)

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()

    @property
    def round(self) -> int:
        """The last committed round; 0 if none."""
        return int(self.state.get("round", 0))

    def read_info(self) -> dict[str, Any]:
        """Return the content of ``run.json``."""
        return read_info(self.folder)

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Replace ``run.json``."""
        write_whole(self.folder / "run.json", (json.dumps(info, indent=1) + "\n").encode())

    def recover(self, store: PrivateStore) -> Params | None:
        """Return to the last commit and give the server's state there, or None before the first commit.

        Raises:
            RunError, StoreError: a file that the commit names is missing or damaged.
        """
        store.recover(self.round)
        for name in ("records", "timings"):
            self._truncate(self.folder / f"{name}.jsonl", int(self.state.get(f"{name}_bytes", 0)))
        if not self.state:
            return None
        path = self.folder / self.state["server"]
        for other in self.folder.glob("server-*.safetensors*"):
            if other != path:
                other.unlink()
        return load_verified(path, self.state["server_sha256"])

    @staticmethod
    def _truncate(path: Path, size: int) -> None:
        if not path.exists() and size == 0:
            return
        if not path.exists() or path.stat().st_size < size:
            raise RunError(
                f"{path} is shorter than the {size} bytes that were committed; restore the run from a copy."
            )
        os.truncate(path, size)

    def commit(
        self,
        round: int,
        server: Mapping[str, Tensor],
        store: PrivateStore,
        records: Sequence[Record],
        timings: Sequence[Record],
        extra: Mapping[str, Any],
    ) -> None:
        """Make a finished round durable: all of it, or none.

        Raises:
            RunError: the disk is full or can't be written; the last committed round is kept.
        """
        sizes = {
            f"{name}_bytes": self._append(self.folder / f"{name}.jsonl", lines)
            for name, lines in (("records", records), ("timings", timings))
        }
        store.prepare(round)
        content = save({n: t.detach().cpu().contiguous().clone() for n, t in server.items()})
        name = f"server-{round}.safetensors"
        write_whole(self.folder / name, content)
        previous = self.state.get("server")
        state = {
            "round": round,
            "server": name,
            "server_sha256": hashlib.sha256(content).hexdigest(),
            **sizes,
            **extra,
        }
        write_whole(self.folder / "commit.json", json.dumps(state).encode())
        self.state = state
        store.apply()
        if previous and previous != name:
            (self.folder / previous).unlink(missing_ok=True)

    @staticmethod
    def _append(path: Path, records: Sequence[Record]) -> int:
        try:
            with open(path, "ab") as file:
                file.write("".join(map(to_line, records)).encode())
                file.flush()
                os.fsync(file.fileno())
                return file.tell()
        except OSError as error:
            raise RunError(
                f"Cannot write {path}: {error.strerror or error}. Nothing was lost: the last finished round is kept. "
                f"Free some space or check the rights, then resume."
            ) from error


def read_info(folder: Path) -> dict[str, Any]:
    """Return the content of a run's ``run.json``.

    Raises:
        RunError: there is no run, it is damaged, or it was written by a later fedkeep.
    """
    if not (folder / "run.json").exists():
        raise RunError(
            f"{folder} holds no run: there is no run.json in it. Name the folder that a run wrote."
        )
    info = _read_json(folder / "run.json")
    if info.get("format") != FORMAT:
        raise RunError(
            f"{folder} has the format {info.get('format')!r}; this fedkeep reads format {FORMAT}. Update fedkeep."
        )
    return info


def load_verified(path: Path, sha256: str) -> Params:
    """Return a safetensors file's tensors after checking its hash.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"Cannot read {path}: {error.strerror}. Restore the run from a copy.") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise RunError(f"{path} is damaged: its hash is not the committed one. Restore the run from a copy.")
    return load(content)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged: {error}. Restore the run from a copy.") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it holds no object. Restore the run from a copy.")
    return content
