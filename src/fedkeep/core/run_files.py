"""What ``run.json`` and ``commit.json`` of a run's folder say, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fedkeep.core.errors import RunError, near_path, raising
from fedkeep.core.records import NONE, Extent
from fedkeep.core.sealed import FORMAT, read_sealed, sealed_bytes

FIRST_NUMERICS = 2
"""The ``NUMERICS`` of runs of format 2 that do not say which: there was no other until runs said it."""
SERVER = re.compile(r"server-([1-9]\d{0,17})\.safetensors")
EXAMPLES = re.compile(r"examples-([1-9]\d{0,17})\.safetensors")


MOST_NAMED = 5
"""How many runs are named that stand in a folder that is none itself."""
GROWING = ("records", "timings", "ledger")
"""Files of a run's folder, ``NAME.jsonl``, that only grow: a commit says how much of each belongs to it."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The server's state after a round, and how much of the ledger goes with it.

    Attributes:
        server: the name of the file with the state; empty where there is none.
        sha256: of that file.
        tensors: dtype and shape of each tensor in it, by name.
        ledger: how many bytes of ``ledger.jsonl`` say which of the clients' versions counted then.
    """

    server: str = ""
    sha256: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    ledger: int = 0

    @property
    def round(self) -> int:
        """The round; 0 where there is none."""
        found = SERVER.fullmatch(self.server)
        return int(found[1]) if found else 0


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A run's last finished round.

    Attributes:
        run: the run's id.
        round: the round's number; 0 before the first.
        server: the name of the file with the server's state.
        server_sha256: of that file.
        tensors: dtype and shape of each tensor in it, by name.
        records, timings, ledger: how much of ``records.jsonl``, ``timings.jsonl`` and ``ledger.jsonl`` belongs to it.
        examples: the name of the file with every test example's result; empty where there is none.
        examples_sha256: of that file.
        best: after the round that is the best so far; empty where none was judged.
        extra: what the run wants back, e.g. its best round so far.
    """

    run: str
    round: int = 0
    server: str = ""
    server_sha256: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    records: Extent = NONE
    timings: Extent = NONE
    ledger: Extent = NONE
    examples: str = ""
    examples_sha256: str = ""
    best: Moment = Moment()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def examples_round(self) -> int:
        """The round of the results of examples; 0 where there are none."""
        found = EXAMPLES.fullmatch(self.examples)
        return int(found[1]) if found else 0

    @property
    def chosen(self) -> int:
        """The round that the run's answer is of: the best, or where none was judged the last."""
        return self.best.round or self.round

    @property
    def moment(self) -> Moment:
        """This round, as one that may be the best."""
        return Moment(
            server=self.server, sha256=self.server_sha256, tensors=self.tensors, ledger=self.ledger.size
        )

    def to_bytes(self) -> bytes:
        """Return the content of ``commit.json``."""
        extents = {
            name: {"bytes": extent.size, "sha256": extent.sha256}
            for name, extent in ((name, getattr(self, name)) for name in GROWING)
        }
        return sealed_bytes({"format": FORMAT, **asdict(self), **extents})


def read_info(folder: Path) -> dict[str, Any]:
    """Return the content of a run's ``run.json``.

    Raises:
        RunError: there is no run, it is damaged, or it was written by another fedkeep.
    """
    if not (folder / "run.json").exists():
        raise RunError("There is no run in {file}: {why}", file=folder, why=_what_instead(folder))
    info = read_sealed(folder / "run.json")
    if not isinstance(info.get("run"), str) or not info["run"]:
        raise RunError(
            "{file} is damaged: it lacks the run's id. Restore the run from a copy.", file=folder / "run.json"
        )
    return info


TRAIN = "; fedkeep run CONFIG --out FOLDER writes one."


def _what_instead(folder: Path) -> str:
    """Return what there is in place of a run's folder, and what to name."""
    if folder.is_file():
        train = f" fedkeep run {folder} --out FOLDER trains it and writes one." * (folder.suffix == ".toml")
        return f"it is a file. Name the folder that a run wrote.{train}"
    if not folder.exists():
        near = near_path(folder)
        return f"there is no such folder.{near or ' Name the folder that a run wrote'}{'' if near else TRAIN}"
    found = sorted(str(one.parent) for one in islice(folder.glob("*/run.json"), MOST_NAMED))
    inside = f" It holds others that do: {', '.join(found)}." if found else ""
    return f"there is no run.json in it. Name the folder that a run wrote.{inside}"


def numerics_of(info: Mapping[str, Any]) -> int:
    """Return the ``NUMERICS`` that a run was begun under; ``info`` is the content of its ``run.json``."""
    return int(info.get("numerics", FIRST_NUMERICS))


def read_commit(folder: Path, info: Mapping[str, Any]) -> Commit:
    """Return a run's last commit; ``info`` is the content of its ``run.json``.

    Raises:
        RunError: ``commit.json`` is damaged, of another run, or missing though there are finished rounds.
    """
    path = folder / "commit.json"
    if path.exists() or path.is_symlink():
        commit = _parsed(path, read_sealed(path))
        if commit.run != info["run"]:
            raise RunError(
                "{file} is of the run {got}, but run.json of the run {wanted}. Restore both from the same "
                "copy.",
                file=path,
                got=commit.run,
                wanted=info["run"],
            )
        if commit.round > _rounds(info):
            raise RunError(
                "{file} stands at round {round}, but run.json knows {rounds} rounds only. Restore both from "
                "the same copy.",
                file=path,
                round=commit.round,
                rounds=_rounds(info),
            )
        if info.get("status") == "finished" and commit.round < _rounds(info):
            raise RunError(
                "{file} stands at round {round}, but run.json says that all {rounds} rounds are finished. "
                "Restore both from the same copy.",
                file=path,
                round=commit.round,
                rounds=_rounds(info),
            )
        return commit
    finished = info.get("status") == "finished" and _rounds(info) > 0
    if finished or any(p.name != "server-1.safetensors" for p in folder.glob("server-*.safetensors")):
        raise RunError(
            "{file} is missing, but the run has finished rounds. Restore the run from a copy.", file=path
        )
    return Commit(run=info["run"])


def _rounds(info: Mapping[str, Any]) -> int:
    rounds = info.get("rounds")
    return rounds if type(rounds) is int else 0


def _parsed(path: Path, content: Mapping[str, Any]) -> Commit:
    plain = {key: value for key, value in content.items() if key != "format"}
    with raising(
        RunError,
        "{file} is damaged: it lacks {why}. Restore the run from a copy.",
        KeyError,
        TypeError,
        file=path,
    ):
        grown = {key: Extent(content[key]["bytes"], content[key]["sha256"]) for key in GROWING}
        last = Commit(**(plain | grown | {"best": Moment(**content["best"])}))
    if last.round < 1 or last.server != f"server-{last.round}.safetensors":
        raise RunError(
            "{file} is damaged: it names {name!r} as the server's state. Restore the run from a copy.",
            file=path,
            name=last.server,
        )
    if last.best.round > last.round or last.best.ledger > last.ledger.size:
        raise RunError(
            "{file} is damaged: it names {best!r} as the best round's state. Restore the run from a copy.",
            file=path,
            best=last.best.server,
        )
    if last.examples and not 0 < last.examples_round <= last.round:
        raise RunError(
            "{file} is damaged: it names {examples!r} as the results of examples. Restore the run from a "
            "copy.",
            file=path,
            examples=last.examples,
        )
    return last
