"""Finished cells: what one run of a table leaves, kept as JSON and found again by what its numbers depend on.

A table asks for cells; several tables may ask for the same. A finished cell is never computed again, on this machine or
on another that has its file, as long as it was asked for by the same settings, method and data, and the source code's
``NUMERICS`` and the cell's ``revision`` are the same. A cell of others is shown, and marked, until it is computed anew.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from filelock import FileLock
from pydantic import BeforeValidator, TypeAdapter, ValidationError

from fedkeep.core.errors import RunError
from fedkeep.core.files import write_whole
from fedkeep.experiments.config import Config
from fedkeep.experiments.environment import commit
from fedkeep.version import NUMERICS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
SHOWN = 16  # names in a note
OLDEST = 1
"""The numerics of a result that does not say which; version 0.1 did not."""
LATER = {"later": True}
"""Metadata of a field that cells do not have which were finished before there was one."""
Measured = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A number that is null in a file where it is NaN."""


@dataclass(frozen=True, kw_only=True)
class Finished(Generic[R]):
    """A result, and what computed it.

    Attributes:
        result: the cell's.
        numerics: the ``NUMERICS`` of the source code.
        commit: of the source code; empty where it is not known.
        seconds: how long it took; None where the cell does not keep it.
        revised: whether the source code is of another ``revision``.
    """

    result: R
    numerics: int
    commit: str = ""
    seconds: float | None = None
    revised: bool = False

    @property
    def stale(self) -> bool:
        """Whether today's source code may give other numbers."""
        return self.numerics != NUMERICS or self.revised


@dataclass(frozen=True, kw_only=True)
class Slot(Generic[R]):
    """The place of one cell's result.

    Attributes:
        kind: the dataclass of the result.
        file: JSON: an object, or with ``shared`` a list of objects.
        settings: what the result depends on, the method too, but for data and source code, as plain data.
        source: what the data are: the sha256 of their files, or what they were generated from.
        shared: the file holds the results of several cells, which differ in their settings.
        rounded: numbers of the result are written as ``rounded`` says: with seven digits, and NaN and infinity too.
        revision: raised when code of this package changes the numbers of some cells, and no setting shows it.
    """

    kind: type[R]
    file: Path
    settings: Mapping[str, Any]
    source: Mapping[str, Any]
    shared: bool = False
    rounded: bool = False
    revision: int = 0

    @property
    def run(self) -> str:
        """The name of the folder of the run: the file's, which has a digest, and the revision after the first."""
        return self.file.stem + (f"-revision-{self.revision}" if self.revision else "")

    def read(self) -> R | None:
        """Return the result that today's source code would give; None if there is none for these settings and data.

        Raises:
            RunError: the file is damaged.
        """
        found = self.find()
        return None if found is None or found.stale else found.result

    def find(self) -> Finished[R] | None:
        """Return the result for these settings and data, of whatever numerics and revision; None if there is none.

        Raises:
            RunError: the file is damaged.
        """
        for entry in self._entries():
            if self._is_mine(entry):
                return Finished(
                    result=self._decoded(entry),
                    numerics=entry.get("numerics", OLDEST),
                    commit=(entry if "commit" in entry else entry.get("environment", {})).get("commit") or "",
                    seconds=entry.get("seconds"),
                    revised=entry.get("revision", 0) != self.revision,
                )
        return None

    def write(self, result: R, **about: str) -> None:
        """Keep a result, in place of an earlier one for the same settings; a crash on the way leaves the older file.

        Args:
            result: what was computed.
            about: further fields for whoever reads the file, before the result's own.

        Raises:
            RunError: the file, which others share, is damaged.
            ValueError: a number is NaN or infinite, and the slot is not ``rounded``.
        """
        key = {"settings": dict(self.settings), "source": dict(self.source), "numerics": NUMERICS}
        key |= {"revision": self.revision} if self.revision else {}
        entry = {**about, **asdict(result)}
        key |= {} if "environment" in entry else {"commit": commit()}  # an environment has it
        entry = {**(rounded(entry) if self.rounded else entry), **key}
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if not self.shared:
            write_whole(self.file, f"{line}\n".encode())
            return
        with FileLock(
            str(self.file.parent / "lock")
        ):  # another command may keep a cell here at the same time
            others = [e for e in self._entries() if not self._is_mine(e)]
            lines = [*(json.dumps(each, ensure_ascii=False, allow_nan=False) for each in others), line]
            text = ",\n".join(f"  {each}" for each in lines)
            write_whole(self.file, f"[\n{text}\n]\n".encode())

    def _entries(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._damaged("{why}", why=error) from error
        entries = content if self.shared else [content]
        if not isinstance(entries, list):
            raise self._damaged("wanted a list of results; got {got}", got=type(content).__name__)
        for entry in entries:
            if not isinstance(entry, dict) or "settings" not in entry:
                raise self._damaged("wanted an object with settings; got {got}", got=json.dumps(entry)[:40])
        return entries

    def _is_mine(self, entry: Mapping[str, Any]) -> bool:
        return all(_plain(entry.get(n)) == _plain(getattr(self, n)) for n in ("settings", "source"))

    def _decoded(self, entry: Mapping[str, Any]) -> R:
        missing = [f.name for f in fields(self.kind) if f.name not in entry and f.metadata != LATER]
        if missing:
            raise self._damaged("it lacks {missing}", missing=", ".join(missing))
        try:
            return TypeAdapter(self.kind).validate_python(entry)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise self._damaged("{place}: {why}", place=place, why=first["msg"]) from error

    def _damaged(self, fault: str, /, **facts: Any) -> RunError:
        text = "{file} holds no finished cell: " + fault + ". Delete it, and it is computed again."
        return RunError(text, file=self.file, **facts)


def runs_of(results: Path) -> Path:
    """Return the folder of the runs beside results; code of other numerics goes on with none of them."""
    return results / "runs" / f"numerics-{NUMERICS}"


def note_on_stale(found: Mapping[str, Finished[Any] | None]) -> str:
    """Return Markdown about a table's cells, by name, that older source code computed; empty: none."""
    there = {name: finished for name, finished in found.items() if finished is not None}

    def told(title: str, names: list[str], why: str) -> str:
        named = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        return (
            f"**{title}.** {len(names)} of {len(there)} finished cells were computed by code {why}, and are computed "
            f"again when the table is run: {named}."
        )

    revised = [name for name, finished in there.items() if finished.revised]
    older = [name for name, finished in there.items() if finished.stale and not finished.revised]
    rounding = f"whose numbers may differ from today's (`NUMERICS` {NUMERICS}), if only by rounding"
    parts = [told("Older code", revised, "that made other numbers than today's")] if revised else []
    return "\n\n".join(parts + ([told("Older numerics", older, rounding)] if older else []))


def digest(settings: Mapping[str, Any], source: Mapping[str, Any]) -> str:
    """Return ten hexadecimal digits that stand for settings and data, these by the sha256 of their files."""
    text = json.dumps({"settings": settings, "source": dict(source)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def settings_of(config: Config) -> dict[str, Any]:
    """Return what a run's numbers depend on, but for data and code; what has its default value is left out.

    A method of this package is known by the name that the library's has, of which it is a reading.
    """
    settings = config.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
    run = settings.setdefault("run", {"epochs": config.run.epochs})  # 30 is the default
    method = settings["method"] = {"kind": config.method.kind, **settings.get("method", {})}
    if not method.get("optimizer", True):
        del method["optimizer"]  # one that is as Optimizer has it was a default once, and digests have it so
    if method["kind"].startswith(f"{__package__.partition('.')[0]}."):
        method["kind"] = method["kind"].rpartition(":")[2]
    run.pop("workers", None)
    run.pop("device", None)  # the same but for rounding; the environment says which
    run.pop("engine", None)  # all give the same numbers
    if run.pop("centralised", False):
        run["engine"] = "pooled"  # as finished cells, which have their names by a digest of this, have it
    return settings


def rounded(value: Any) -> Any:
    """Return the value with floats of seven digits, which is more than any of them means, and as JSON can have them.

    NaN becomes None, and infinity the text ``inf`` or ``-inf``, which is read as a number where one is wanted.
    """
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        if math.isinf(value):
            return str(value)
        return None if math.isnan(value) else float(f"{value:.7g}")
    return value


def _plain(value: Any) -> Any:
    """Return settings or a source as they come back from a file."""
    return json.loads(json.dumps(dict(value) if isinstance(value, Mapping) else value))
