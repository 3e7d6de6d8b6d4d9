"""A new run that begins with the private states of an older one: by name, where shapes and types agree.

Where the encoding has been extended, values have grown with it: old entries first, the others as in default values.
What does not agree is never guessed: the run is refused on this device, or those values begin at defaults, as wished.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fedkeep.core.errors import StoreError
from fedkeep.core.params import Params
from fedkeep.data.preparation import Encoding
from fedkeep.experiments.continuing import compared, enlarged, grown, growth_of, sizes_of
from fedkeep.methods import newest
from fedkeep.methods.client import accepted, by_share
from fedkeep.remote.device_file import DeviceFile, first_values
from fedkeep.remote.device_store import Accept, MissingError, OnMissing, last_accepted
from fedkeep.store import Default, Line

OnChange = Literal["refuse", "anew"]
RULES: dict[str, Accept] = {"newest": newest, "by_share": by_share}


def migrated(
    old: DeviceFile,
    versions: Mapping[str, Line],
    default: Default,
    *,
    encoding: Mapping[str, Any],
    on_change: OnChange,
    on_missing: OnMissing,
) -> Iterator[tuple[str, Params]]:
    """Yield what each client begins the new run with.

    Args:
        old: the old run's states.
        versions: by client, the version that the old run's server accepted last.
        default: of the new run.
        encoding: of the new run, as JSON. Where it does not extend the old run's, a row of a table stands for another
            word, so every value counts as changed.
        on_change: about values that are new, gone, or of another shape or type: ``"refuse"``, or begin them ``"anew"``.
        on_missing: about clients whose version is not there: likewise, or begin with the ``"older"`` version that is.

    Raises:
        StoreError: says what changed or is missing, and what to do.
    """
    growth = _growth(old.about.agreed["encoded"], encoding)
    same, changes = _compared(old, default, growth)
    if changes and versions and on_change == "refuse":
        raise StoreError(
            "The private states of the run {old!r} do not fit the new one: {changes}. Continue with "
            "what they were made with, or let what changed start from default values: on_change = 'anew'.",
            old=old.run,
            changes="; ".join(changes),
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
        first = default(client)
        taken = {
            name: enlarged(name, before[name], first[name], growth or set())
            for name in same
            if name in before
        }
        yield client, {**first, **taken}


def opted_out(old: DeviceFile, default: Default, encoding: Mapping[str, Any]) -> list[str]:
    """Return which of the values that are taken over opted-out examples may have made; see ``migrated``."""
    made = {*old.about.opted_out, *old.about.agreed.get("opted_out", ())}
    return sorted(
        made.intersection(_compared(old, default, _growth(old.about.agreed["encoded"], encoding))[0])
    )


def _growth(was: Mapping[str, Any], now: Mapping[str, Any]) -> set[int] | None:
    """Return by how much an axis may have grown with the encoding; None: it is another one."""
    if was == now:
        return set()
    older, newer = (Encoding.from_json(json.dumps(one)) for one in (was, now))
    return growth_of(grown(sizes_of(older), sizes_of(newer))) if newer.extends(older) else None


def _compared(old: DeviceFile, default: Default, growth: set[int] | None) -> tuple[list[str], list[str]]:
    """Return the names of the values that are taken over, and what has changed."""
    same, changes = compared(first_values(old.about.columns), default.initial, growth or set())
    told = [f"{name!r} is {change}" for name, change in changes.items()]
    return ([], ["the encoding is another", *told]) if growth is None else (same, told)


def _accepted(old: DeviceFile, client: str, line: Line) -> Params:
    """Return the values of the version that the old run's server accepted last."""
    rows = {row.attempt: row for row in old.versions(client)}
    row = rows.get(line.attempt)
    if row is None:
        raise MissingError(
            "This device does not have version {version} of what client {client!r} keeps in the run "
            "{old!r}. Restore it from a copy, or let the client start from an older version or default values: on_missing = 'older' or "
            "'anew'.",
            version=line.version,
            client=client,
            old=old.run,
        )
    after = old.values(row)
    name = str(old.about.agreed.get("accept"))
    if row.accepted or RULES.get(name) is newest:
        return after
    parent = rows.get(row.parent)
    if parent is None or name not in RULES:
        raise MissingError(
            "Version {version} of what client {client!r} keeps in the run {old!r} was never accepted on "
            "this device. Finish that run, or let the client start from an older version or default values: on_missing = "
            "'older' or 'anew'.",
            version=line.version,
            client=client,
            old=old.run,
        )
    whose = f"{client!r} in round {row.round}"
    return accepted(RULES[name], old.values(parent), after, line.share, whose)
