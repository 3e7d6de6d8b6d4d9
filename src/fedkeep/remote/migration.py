"""A new run that begins with the private states of an older one: by name, where shapes and types agree.

What does not agree is never guessed: the run is refused on this device, or those values begin at defaults, as wished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from fedkeep.core.errors import StoreError
from fedkeep.core.params import Params
from fedkeep.methods import Kept, newest
from fedkeep.methods.client import by_share
from fedkeep.remote.device_file import DeviceFile
from fedkeep.remote.device_store import Accept, MissingError, OnMissing, last_accepted
from fedkeep.store import Default, Line
from fedkeep.store.rows import RowFormat

OnChange = Literal["refuse", "anew"]
RULES: dict[str, Accept] = {"newest": newest, "by_share": by_share}


def migrated(
    old: DeviceFile,
    versions: Mapping[str, Line],
    default: Default,
    *,
    encoding: str,
    on_change: OnChange,
    on_missing: OnMissing,
) -> Iterator[tuple[str, Params]]:
    """Yield what each client begins the new run with.

    Args:
        old: the old run's states.
        versions: by client, the version that the old run's server accepted last.
        default: of the new run.
        encoding: the digest of the new run's encoding: where it is another, a row of a table stands for another word,
            so every value counts as changed.
        on_change: about values that are new, gone, or of another shape or type: ``"refuse"``, or begin them ``"anew"``.
        on_missing: about clients whose version is not there: likewise, or begin with the ``"older"`` version that is.

    Raises:
        StoreError: says what changed or is missing, and what to do.
    """
    same, changes = _compared(old, default, encoding)
    if changes and on_change == "refuse":
        raise StoreError(
            f"The private states of the run {old.run!r} do not fit the new one: {'; '.join(changes)}. Continue with "
            f"what they were made with, or let what changed start from default values: on_change = 'anew'."
        )
    for client, line in versions.items():
        try:
            before = _accepted(old, client, line)
        except MissingError:
            rows = [] if on_missing == "anew" else old.versions(client)
            older = last_accepted(rows, line.version)
            if on_missing == "refuse" or (on_missing == "older" and older is None):
                raise
            before = {} if older is None else old.values(older)
        yield client, {**default(client), **{name: before[name] for name in same if name in before}}


def opted_out(old: DeviceFile, default: Default, encoding: str) -> list[str]:
    """Return which of the values that are taken over opted-out examples may have made; see ``migrated``."""
    made = {*old.about.opted_out, *old.about.agreed.get("opted_out", ())}
    return sorted(made.intersection(_compared(old, default, encoding)[0]))


def _compared(old: DeviceFile, default: Default, encoding: str) -> tuple[list[str], list[str]]:
    """Return the names of the values that are as they were, and what has changed."""
    there = {str(name): f"{kind} {shape}" for name, kind, shape in old.about.columns}
    here = {str(name): f"{kind} {shape}" for name, kind, shape in RowFormat(default.initial).columns()}
    same = [name for name in here if there.get(name) == here[name]]
    changes = [f"{name!r} is {_change(there, here, name)}" for name in {**there, **here} if name not in same]
    if encoding != old.about.agreed.get("encoding"):
        return [], ["the encoding is another", *changes]
    return same, changes


def _change(there: Mapping[str, str], here: Mapping[str, str], name: str) -> str:
    if name not in there:
        return "new"
    return f"{here[name]}, and was {there[name]}" if name in here else "gone"


def _accepted(old: DeviceFile, client: str, line: Line) -> Params:
    """Return the values of the version that the old run's server accepted last."""
    rows = {row.attempt: row for row in old.versions(client)}
    row = rows.get(line.attempt)
    if row is None:
        raise MissingError(
            f"This device does not have version {line.version} of what client {client!r} keeps in the run "
            f"{old.run!r}. Restore it from a copy, or let the client start from an older version or default values: on_missing = 'older' or "
            f"'anew'."
        )
    after = old.values(row)
    name = str(old.about.agreed.get("accept"))
    if row.accepted or RULES.get(name) is newest:
        return after
    parent = rows.get(row.parent)
    if parent is None or name not in RULES:
        raise MissingError(
            f"Version {line.version} of what client {client!r} keeps in the run {old.run!r} was never accepted on "
            f"this device. Finish that run, or let the client start from an older version or default values: on_missing = "
            f"'older' or 'anew'."
        )
    return RULES[name](Kept.of(old.values(parent)), Kept.of(after), line.share).flat
