"""JSON files that vouch for themselves, by a key ``seal``, a checksum of all the rest; and formats of all that is on disk.

A seal finds damage and hasty edits, not malice: whoever changes a file on purpose can seal it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkeep.core.errors import FedkeepError, RunError

FORMAT = 4
"""The format of run folders. Folders of another format are named and not read."""


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain data with their checksum under ``seal``."""
    plain = json.loads(json.dumps({k: v for k, v in content.items() if k != "seal"}))
    return {**plain, "seal": _checksum(plain)}


def sealed_bytes(content: Mapping[str, Any]) -> bytes:
    """Return what ``read_sealed`` reads."""
    return (json.dumps(seal(content), indent=1) + "\n").encode()


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Tell whether the checksum under ``seal`` is that of the rest."""
    return content.get("seal") == _checksum({k: v for k, v in content.items() if k != "seal"})


def unread(path: Path, error: OSError) -> RunError:
    """Return what to say of a run's file that cannot be read."""
    return RunError(
        "Cannot read {file}: {strerror}. Restore the run from a copy.", file=path, strerror=error.strerror
    )


def damaged(path: Path, error: Exception) -> RunError:
    """Return what to say of a run's file that is not as it was written."""
    return RunError("{file} is damaged: {error}. Restore the run from a copy.", file=path, error=error)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON file's object.

    Raises:
        RunError: the file cannot be read or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from error
    if not isinstance(content, dict):
        raise RunError(
            "{file} is damaged: wanted an object, got {got}. Restore the run from a copy.",
            file=path,
            got=type(content).__name__,
        )
    return content


def read_sealed(path: Path) -> dict[str, Any]:
    """Return a sealed file's object, without its seal.

    Raises:
        RunError: the file cannot be read, is of another format, or is not as it was written.
    """
    content = read_json(path)
    check_format(path, content.get("format"), FORMAT)
    if "seal" not in content:
        raise RunError("{file} is damaged: it has no checksum. Restore the run from a copy.", file=path)
    if not is_sealed(content):
        raise RunError(
            "{file} is damaged or was edited: its checksum is not that of its content. Restore the run "
            "from a copy.",
            file=path,
        )
    return {key: value for key, value in content.items() if key != "seal"}


def check_format(
    what: Path | str,
    found: Any,
    reads: int,
    error: type[FedkeepError] = RunError,
    *,
    anew: str = "run it again",
) -> None:
    """Raise where something on a disk is of another format than this fedkeep reads.

    Args:
        what: a file, or what it is, for the message.
        found: its format; None: it says none.
        reads: the only format that is read.
        error: the kind of error.
        anew: how to have it in this fedkeep's format, where it is of an older one.
    """
    if type(found) is int and found == reads:
        return
    older = found is None or (type(found) is int and 0 <= found < reads)
    raise error(
        "{what} has {got}; this fedkeep reads format {reads}. {todo}",
        what=what,
        got="no format" if found is None else f"the format {found!r}",
        reads=reads,
        todo=f"It is of an older fedkeep: {anew}, or read it with that one." if older else "Update fedkeep.",
    )


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
