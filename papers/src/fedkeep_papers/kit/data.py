"""What the papers' readers of real data say where there is none, or a line is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkeep.core.errors import DataError


def needs_data(name: str) -> DataError:
    """Return what to say of a reproduction that is given no folder of data."""
    return DataError(
        "{name} reads real data. Name its folder with --data DIR or the variable FEDKEEP_DATA.", name=name
    )


def check_fields(path: Path, number: int, entry: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    """Raise DataError unless the object on a line of a file has each field, of its type."""
    for name, kind in fields.items():
        if type(entry.get(name)) is not kind:  # and not isinstance: true is no integer here
            raise DataError(
                "{path}, line {number}: wanted {name!r} to be {wanted}; {got}.",
                path=path,
                number=number,
                name=name,
                wanted=kind.__name__,
                got=f"got {entry[name]!r}" if name in entry else f"it has only {sorted(entry)}",
            )
