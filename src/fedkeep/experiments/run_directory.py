"""A run's folder, and the commit that makes all of a round durable, or none of it.

    run.json                what ran: the run's id, configuration, seeds, environment, data, split (reports read this)
    config.toml             the configuration file as given, if there was one
    encoding.json           how the data were turned into numbers, where they were
    seen.safetensors        hashes of the examples, and in which part each is, for a run that goes on from this one
    records.jsonl           what was measured; the same bytes for the same run
    timings.jsonl           how long it took
    ledger.jsonl            which version of each client's private state counts, a line for each round
    server-N.safetensors    server state after round N: the last, and the best on ``valid`` so far
    examples-N.safetensors  every test example's result after round N, the best on ``valid`` so far
    private/store.db        private states (SQLite)
    adapting/               what clients have adapted to in a round that is not committed yet, see ``personalize.kept``
    commit.json             the last finished round: the one file whose replacement commits it

Commit of round t: the clients' side flushes its versions in one transaction; records and ledger are appended, the server
state is written, all is flushed; then ``commit.json`` is replaced. Nothing follows. Killed anywhere, ``open`` returns to
the last commit, whose ledger says which of the private versions count, and its beginning, which counted at the best round.
``commit.json`` holds checksums of all that the round consists of and the run's id, which is in the private store too,
so what was damaged, lost, restored from another time or taken from another run is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import Timeout
from safetensors.torch import save
from torch import Tensor

from fedkeep.core.describe import differences
from fedkeep.core.errors import FedkeepError, NonFiniteError, RoundError, RunError, StoreError, raising
from fedkeep.core.files import (
    append_of_run,
    check_tensors,
    layout,
    load_verified,
    remove_leftovers,
    write_of_run,
)
from fedkeep.core.locks import NO_LOCKS, Lock, take_lock
from fedkeep.core.params import Params, check_finite
from fedkeep.core.records import Extent, Record, read_records, to_line
from fedkeep.core.run_files import GROWING, Commit, Moment, numerics_of, read_commit, read_info
from fedkeep.core.sealed import FORMAT, sealed_bytes
from fedkeep.privacy.budget_ledger import FILE as LEDGER
from fedkeep.store import Default, SqliteStore, VersionLedger
from fedkeep.tasks.results import ExampleResults, read_examples
from fedkeep.version import NUMERICS

LEFTOVER = re.compile(r"(\w+\.jsonl?|config\.toml|store\.db|[\w-]+\.safetensors)(\.[0-9a-f]{16})?\.part")

__all__ = ["RunDirectory", "check_tensors", "layout", "load_verified", "new_run_id", "read_info"]


class RunDirectory:
    """One run's folder, locked by this process until ``close``.

    Attributes:
        folder: the folder.
        id: the run's id, made once.
        last: the last finished round.
        best: of a folder that was recovered, the server's state after the best round; None: none was judged.
        marked: likewise, which of the clients' versions counted then.
        writable: False if it was opened to be read; then nothing in it is touched.
    """

    def __init__(self, folder: Path, info: Mapping[str, Any], writable: bool = True) -> None:
        self.folder, self.id, self.writable = folder, str(info["run"]), writable
        self.last = Commit(run=self.id)
        self.best: Params | None = None
        self.marked: VersionLedger | None = None
        self._hashes = {name: hashlib.sha256() for name in GROWING}
        self._next_info: dict[str, Any] | None = None  # of a run that is to have another length
        self._store: SqliteStore | None = None
        self._lock = locked(folder) if writable or is_lockable(folder) else None
        if writable:
            remove_leftovers(folder)

    @classmethod
    def create(cls, folder: Path, info: Mapping[str, Any], *, run_id: str = "") -> RunDirectory:
        """Make a new run's folder, of a new id if none is given.

        Raises:
            RunError: the folder exists and is not empty, or can't be written.
        """
        with raising(
            RunError,
            "Cannot make the run's folder {folder}: {why}. Name another: --out FOLDER, in Python out=...",
            OSError,
            folder=folder,
        ):
            _check_free(folder)
            folder.mkdir(parents=True, exist_ok=True)
        content = {**info, "format": FORMAT, "run": run_id or new_run_id(), "numerics": NUMERICS}
        run = cls(folder, content)
        with run._closed_on_error():
            _check_free(folder)  # another process may have made a run here before it was locked
            run.write_info(content)
        return run

    @classmethod
    def open(
        cls,
        folder: Path,
        identity: Mapping[str, Any] | None = None,
        *,
        write: bool = True,
        length: Mapping[str, Any] | None = None,
    ) -> RunDirectory:
        """Open a run's folder to go on with it, or to read it.

        Args:
            folder: the run's folder.
            identity: what the caller is about to run; must equal what the folder was made for, but for the number of
                rounds, where nothing that the run did depends on it.
            write: False to read only: nothing in the folder is touched.
            length: what ``run.json`` is to say of a run of another length: entries that replace those there.

        Raises:
            RunError: no run is there, it is damaged or in use, it was made for something else, or it is to go on and
                was begun under other ``NUMERICS``.
        """
        run = cls(folder, read_info(folder), write)
        with run._closed_on_error():
            run._begin(identity, length or {})
        return run

    def _begin(self, identity: Mapping[str, Any] | None, length: Mapping[str, Any]) -> None:
        """Read what the folder says, now that nobody else writes it, and compare it with what is to be run."""
        folder, info = self.folder, self.read_info()
        self.id = str(info["run"])
        lines = [] if identity is None else differences(_plain(identity), info.get("identity"))
        other_length = len(lines) == 1 and lines[0].startswith("rounds: ")
        if lines and not other_length:
            told = [line for line in lines if not line.startswith("rounds: ")]  # which may be another
            shown = "\n  ".join(told[:8])
            raise RunError(
                "{folder} is a run of another configuration, so it cannot be resumed with this one:\n  {value}\n"
                "Use the settings it was made with, or name another folder.",
                folder=folder,
                value=shown,
            )
        there = numerics_of(info)
        if identity is not None and there != NUMERICS and (other_length or info.get("status") != "finished"):
            raise RunError(
                "{folder} was begun by a fedkeep whose numbers may differ from this one's (NUMERICS {there} there, "
                "{numerics} here), so it does not go on with this one. Go on with that one, or name another folder.",
                folder=folder,
                there=there,
                numerics=NUMERICS,
            )
        self.last = read_commit(folder, info)
        if identity is not None and other_length:
            self._next_info = of_length(folder, info, identity, length, self.last)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder, with its private states in one file."""
        if self._store is not None:
            self._store.rest()
        if self._lock is not None:
            self._lock.release()

    @property
    def round(self) -> int:
        """The last committed round; 0 if none."""
        return self.last.round

    @property
    def extra(self) -> dict[str, Any]:
        """The state that the last commit saved."""
        return dict(self.last.extra)

    def read_info(self) -> dict[str, Any]:
        """Return the content of ``run.json``."""
        return read_info(self.folder)

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Replace ``run.json``."""
        write_of_run(self.folder / "run.json", sealed_bytes(info))

    def charged(self, mark: Mapping[str, Any]) -> None:
        """Note how far the ledger of privacy has come, see ``privacy.budget_ledger``."""
        self.write_info({**self.read_info(), "charged": dict(mark)})

    def store(self, default: Default, ids: Sequence[str]) -> SqliteStore:
        """Return the run's store of private states; ``recover`` lets the committed versions count.

        Raises:
            StoreError: it is missing, of another run, or was made for other parameters or clients.
        """
        self._store = SqliteStore(
            self.folder / "private", default, ids, run=self.id, write=self.writable, create=self.round == 0
        )
        return self._store

    def history(self) -> list[Record]:
        """Return the committed records."""
        return list(read_records(self.folder / "records.jsonl", self.last.records))

    def examples(self) -> ExampleResults | None:
        """Return the committed results of examples; None where there are none.

        Raises:
            RunError: the file is missing or damaged.
        """
        return read_examples(self.folder, self.last)

    def recover(self, ledger: VersionLedger, store: SqliteStore | None = None) -> Params | None:
        """Return to the last commit and give the server's state there, or None before the first commit.

        Nothing is changed before all that the commit names was looked at.

        Args:
            ledger: a new one, which takes over what was committed.
            store: of the clients' private states, where they live here; the committed versions count from then on.

        Raises:
            RunError, StoreError: a file that the commit names is missing or damaged.
        """
        state, last, best = None, self.last, self.last.best
        if self.round:
            state = self._state(last.server, last.server_sha256, last.tensors)
            self.best = None if not best.server else state
            if best.server not in ("", last.server):
                self.best = self._state(best.server, best.sha256, best.tensors)
            self.examples()
        for name in GROWING:
            extent: Extent = getattr(self.last, name)
            content = extent.read(self.folder / f"{name}.jsonl")
            self._hashes[name] = hashlib.sha256(content)
            if name == "ledger":
                ledger.read(content)
                if best.server:
                    self.marked = ledger.at(content[: best.ledger])
        if store is not None:
            store.begin(ledger.seen(), None if self.marked is None else self.marked.seen())
        if self.writable:
            self._clean()
            self._write_config()
        return state

    def _state(self, name: str, sha256: str, tensors: Mapping[str, str]) -> Params:
        """Return a state of the server that a commit names."""
        path = self.folder / name
        found = load_verified(path, sha256)
        check_tensors(path, tensors, layout(found), found)
        return found

    def _write_config(self) -> None:
        """Write ``config.toml`` where it is missing; where the run's length has changed, replace it."""
        path = self.folder / "config.toml"
        if self._next_info is not None:
            path.unlink(missing_ok=True)  # killed here, the text in run.json does for both
            self.write_info(self._next_info)
        text = self.read_info().get("config_text")
        if text and not path.exists():
            write_of_run(path, str(text).encode())

    def _clean(self) -> None:
        """Drop what a round that was never committed has left."""
        with raising(
            RunError,
            "Cannot write to {folder}: {why}. A run must be writable to go on with it.",
            OSError,
            folder=self.folder,
        ):
            for name in GROWING:
                path, extent = self.folder / f"{name}.jsonl", getattr(self.last, name)
                if path.exists() and path.stat().st_size > extent.size:
                    os.truncate(path, extent.size)
            for path in (*self.folder.iterdir(), *(self.folder / "private").glob("*")):
                old = re.fullmatch(r"(server|examples)-\d+\.safetensors", path.name)
                if (old and path.name not in files_of(self.last)) or LEFTOVER.fullmatch(path.name):
                    path.unlink()

    def commit(
        self,
        round: int,
        server: Mapping[str, Tensor],
        ledger: VersionLedger,
        flush: Callable[[], None],
        records: Sequence[Record],
        timings: Sequence[Record],
        extra: Mapping[str, Any],
        examples: ExampleResults | None = None,
        best: int = 0,
    ) -> None:
        """Make a finished round durable: all of it, or none.

        Args:
            round: its number.
            server: the server's state.
            ledger: which versions of the clients count; what it has noted since the last commit is appended.
            flush: makes those versions durable, where the clients live here.
            records, timings: what was measured in it.
            extra: what the run wants back.
            examples: every test example's result so far; once committed, the same are not written again.
            best: the number of the best round so far: this one, or one that is committed; 0: none was judged.

        Raises:
            RunError: the disk is full or can't be written, or a file was changed meanwhile; the last committed round is
                kept.
        """
        flush()
        grown = {
            "records": "".join(map(to_line, records)).encode(),
            "timings": "".join(map(to_line, timings)).encode(),
            "ledger": ledger.written(),
        }
        extents = {name: self._append(name, content) for name, content in grown.items()}
        state = {n: t.detach().cpu().contiguous().clone() for n, t in server.items()}
        check_finite(state, f"The server's state after round {round}")
        content = save(state)
        name = f"server-{round}.safetensors"
        write_of_run(self.folder / name, content)
        named, found = self._examples(examples)
        now = Moment(
            server=name,
            sha256=hashlib.sha256(content).hexdigest(),
            tensors=layout(state),
            ledger=extents["ledger"].size,
        )
        before = self.last
        last = Commit(
            run=self.id,
            round=round,
            server=name,
            server_sha256=now.sha256,
            tensors=now.tensors,
            best={round: now, before.round: before.moment}.get(best, before.best) if best else before.best,
            extra=extra,
            **extents,
            examples=named,
            examples_sha256=found,
        )
        write_of_run(self.folder / "commit.json", last.to_bytes())
        self.last = last
        for old in files_of(before) - files_of(last):
            (self.folder / old).unlink(missing_ok=True)

    def _examples(self, examples: ExampleResults | None) -> tuple[str, str]:
        """Write results of examples that are new; return the file's name and hash."""
        name = "" if examples is None else f"examples-{examples.round}.safetensors"
        if examples is None or name == self.last.examples:
            return name, self.last.examples_sha256 if name else ""
        content = save(examples.to_tensors())
        write_of_run(self.folder / name, content)
        return name, hashlib.sha256(content).hexdigest()

    def _append(self, name: str, content: bytes) -> Extent:
        """Add lines to a file that grows; return its whole extent."""
        path, before = self.folder / f"{name}.jsonl", getattr(self.last, name)
        found = self._hashes[name].copy()
        found.update(content)
        append_of_run(path, content, before.size)
        self._hashes[name] = found
        return Extent(before.size + len(content), found.hexdigest())


def files_of(commit: Commit) -> set[str]:
    """Return the files of tensors that a commit names."""
    return {commit.server, commit.examples, commit.best.server} - {""}


def _check_free(folder: Path) -> None:
    if folder.exists() and (
        not folder.is_dir() or any(p.name != "lock" and p.suffix != ".part" for p in folder.iterdir())
    ):
        raise RunError(
            "{folder} already exists and is not empty.{holds} For a new run name another folder: --out FOLDER, in "
            "Python out=...",
            folder=folder,
            holds=_held(folder) if (folder / "run.json").is_file() else "",
        )


def _held(folder: Path) -> str:
    """Return what to say of the run in a folder: how far it is, and how it is gone on with."""
    command = f"fedkeep run {folder} --resume" if (folder / "config.toml").is_file() else "resume=True"
    try:
        info = read_info(folder)
        if info.get("status") == "finished":
            return f" It holds a finished run, which {command} shows again."
        stands = f"after round {read_commit(folder, info).round} of {info.get('rounds')}"
    except RunError as error:
        return f" It holds a run that cannot be read: {error}"
    return f" It holds a run that is not finished; it stands {stands}. {command} goes on with it."


def new_run_id() -> str:
    """Return a random id for a run."""
    return secrets.token_hex(16)


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


@contextmanager
def failure_noted(directory: RunDirectory | None) -> Iterator[None]:
    """Say in ``run.json`` that the run goes on, and where it ends in an error, by which."""
    info = {} if directory is None else directory.read_info()
    if directory is not None and info.pop("error", None) is not None:
        directory.write_info({**info, "status": "running"})
    try:
        yield
    except Exception as error:
        if directory is not None:
            kind = "" if isinstance(error, FedkeepError) else f"{type(error).__name__}: "
            with suppress(RunError):  # a full disk may be the error
                about = {"status": "failed", "error": f"{kind}{error}"}
                directory.write_info({**directory.read_info(), **about})
        raise


def is_lockable(folder: Path) -> bool:
    """Whether a folder that is only read can be locked: a copy on a read-only disk cannot."""
    path = folder / "lock"
    return path.exists() and os.access(path, os.W_OK)


def damaged_plan(path: Path) -> RunError:
    """Return what to say of a file in which several runs keep their plan."""
    return RunError("{file} is damaged. Restore it, or name another folder with --out.", file=path)


def in_use(folder: Path) -> bool:
    """Whether a process is at work on a run."""
    try:
        locked(folder, 0.0).release()
    except RunError:
        return True
    return False


PATIENCE = 0.5
"""Seconds, in which whoever asked whether a folder is in use has let go of its lock."""


def locked(folder: Path, patience: float = PATIENCE) -> Lock:
    """Return a folder's lock, held.

    Args:
        folder: which.
        patience: seconds to wait for another process.

    Raises:
        RunError: another process has it, or it can't be taken.
    """
    try:
        return take_lock(folder / "lock", patience)
    except Timeout as error:
        raise RunError(
            "{folder} is in use by another process. Wait for it, or name another folder.",
            folder=folder,
        ) from error
    except OSError as error:
        advice = "" if error.errno in NO_LOCKS else " It must be writable to go on with it."
        raise RunError(
            "Cannot lock {folder}: {why}.{advice}", folder=folder, why=error.strerror or error, advice=advice
        ) from error


def of_length(
    folder: Path,
    info: Mapping[str, Any],
    identity: Mapping[str, Any],
    length: Mapping[str, Any],
    last: Commit,
) -> dict[str, Any]:
    """Return what ``run.json`` is to say once the run has another number of rounds.

    Args:
        folder: the run's folder.
        info: what ``run.json`` says now.
        identity: what is to be run.
        length: entries that replace those there.
        last: the last finished round.

    Raises:
        RunError: what the run did depends on its length.
    """
    before, rounds = info["identity"]["rounds"], identity["rounds"]
    if rounds < last.round:
        raise RunError(
            "{folder} has finished {round} rounds already, so it cannot end after {rounds}. Name at least "
            "{round}, or another folder.",
            folder=folder,
            round=last.round,
            rounds=rounds,
        )
    every = identity["evaluate_every"]
    waits = rounds == last.extra.get("pending")  # to be judged with the next round's training
    ends = last.round and last.round in (before, rounds)
    if every and ends and (waits or last.round % every):
        raise RunError(
            "{folder} is a run of {before} rounds and has finished {round}, so it cannot end after {rounds}: "
            "with evaluate_every = {every}, a run of {rounds} judges round {round} otherwise. Name another "
            "folder.",
            folder=folder,
            before=before,
            round=last.round,
            rounds=rounds,
            every=every,
        )
    places = list(_scheduled(identity))
    if places:
        raise RunError(
            "{folder} is a run of {before} rounds and cannot be continued to {rounds}: the learning rate of "
            "{places} follows the run's length, so its rounds so far would have been others. Only a "
            "constant schedule can be continued; name another folder.",
            folder=folder,
            before=before,
            rounds=rounds,
            places=" and ".join(places),
        )
    old = ("analyses", "error")  # of a run that ended elsewhere
    kept = {key: value for key, value in info.items() if key not in old}
    now = {"identity": {**info["identity"], "rounds": rounds}, "rounds": rounds, "status": "running"}
    return {**kept, **length, **now}


def _scheduled(value: Any, path: str = "") -> Iterator[str]:
    """Yield the places of a description where a schedule is not constant."""
    if isinstance(value, Mapping):
        if value.get("schedule", "constant") != "constant":
            yield f"{path} ({value['schedule']})"
        for key, inner in value.items():
            yield from _scheduled(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _scheduled(inner, f"{path}[{number}]")


STAY = (RunError, StoreError, NonFiniteError, RoundError)


@contextmanager
def removed_if_it_fails(folder: Path | None) -> Iterator[Path | None]:
    """Give a run's folder; remove it where it was made inside and a fault came before the first round of its own.

    One stays that was there before, that holds a round or a ledger of privacy, or that another process has; one that
    can go on, as the folder itself was at fault, such as its full disk; and one whose training diverged.
    """
    there = folder is None or os.path.exists(folder)
    try:
        yield folder
    except Exception as error:
        if folder is not None and not there and not isinstance(error, STAY) and folder.is_dir():
            with suppress(OSError), take_lock(folder / "lock"):
                if not ((folder / LEDGER).exists() or _has_rounds(folder)):
                    shutil.rmtree(folder, ignore_errors=True)
        raise


def _has_rounds(folder: Path) -> bool:
    """Tell whether rounds of its own are committed, beyond what it took over from the run that it continues."""
    if not (folder / "commit.json").exists():
        return False
    try:
        info = read_info(folder)
        began: int = (info.get("continues") or {"round": 0})["round"]
        return read_commit(folder, info).round > began
    except RunError:
        return True  # damaged: there may be some
