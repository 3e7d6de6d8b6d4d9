"""The data that a device takes part with: of the clients that its owner names, or whose data fit an encoding.

The others' examples are not encoded. Of clients that the owner leaves out they shape no summary.

Data that are encoded already keep their number of classes, see ``FederatedData.meta``.

An example stays in train, valid or test as long as a run lasts, however its device's data grow or shrink.

Where a device divides its examples itself, an example's place in the file decides. One more row above it, and what was
trained on would be tested. So the device keeps a hash of each example beside its part, see ``data.seen``. Those it knows
stay where they were, new ones go where the division puts them, and one that is gone for a while comes back to its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedkeep.core.errors import ConfigError, DataError, did_you_mean
from fedkeep.data import FederatedData
from fedkeep.data.ids import as_id, group_rows
from fedkeep.data.preparation import Encoding, Labels, Raw, Ready, Source
from fedkeep.data.seen import marks_of, moved, parts_of, ranks
from fedkeep.data.splits import mixed, weyl
from fedkeep.experiments.sources import ConfiguredSource

MOST_UNFIT = 10
"""Clients of a device whose data do not fit while it takes part with the others."""


def of_clients(source: Source, clients: Sequence[str], what: str) -> Source:
    """Return the source of these clients alone.

    Args:
        source: has them and others.
        clients: their ids.
        what: names them in messages.

    Raises:
        ConfigError: there are no data of one of them, or it is named twice.
    """
    ids, there = [as_id(client) for client in clients], {str(client) for client in source.ids}
    for place, client in enumerate(ids):
        if client in ids[:place]:
            raise ConfigError("{what}: {client!r} is named twice.", what=what, client=client)
        if client not in there:
            raise ConfigError(
                "{what}: there are no data of {client!r}.{near} There are data of {count} clients.",
                what=what,
                client=client,
                near=did_you_mean(client, sorted(there)),
                count=len(there),
            )
    return _of(source, ids)


def encodable(source: Source, encoding: Encoding) -> tuple[FederatedData, dict[str, DataError]]:
    """Return the data of the clients that fit an encoding, and what is wrong with each of the others.

    Raises:
        DataError: the first fault; none fits or many do not, or the source cannot be cut.
    """
    try:
        return source.encoded(encoding), {}
    except DataError as error:
        faults = dict[str, DataError]()
        if _can_be_cut(source):
            _look(source, encoding, source.ids, faults)
        left = [client for client in source.ids if client not in faults]
        if not left or not 0 < len(faults) <= MOST_UNFIT:
            raise
        try:
            return _of(source, left).encoded(encoding), faults
        except DataError:  # what is wrong is no client's alone
            raise error from None


def _can_be_cut(source: Source) -> bool:
    """Tell whether cutting a source to some of its clients changes nothing of theirs."""
    if isinstance(source, ConfiguredSource):  # who opts out is drawn among all
        return source.settings.opt_out is None and _can_be_cut(source.read)
    return isinstance(source, Raw)


def _look(source: Source, encoding: Encoding, ids: Sequence[str], faults: dict[str, DataError]) -> None:
    """Find clients that do not fit by halves, until they are too many."""
    for half in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
        if not half or len(faults) > MOST_UNFIT:
            continue
        try:
            _of(source, half).encoded(encoding)
        except DataError as error:
            if len(half) == 1:
                faults[half[0]] = error
            else:
                _look(source, encoding, half, faults)


def _of(source: Source, ids: Sequence[str]) -> Source:
    if isinstance(source, ConfiguredSource):
        return replace(source, read=_of(source.read, ids))
    if isinstance(source, Ready):
        return Ready(data=source.data.select(sorted(source.data.index(client) for client in ids)))
    if isinstance(source, Raw):
        names, client = group_rows(source.client)
        wanted = set(ids)
        chosen = np.isin(client, [k for k, name in enumerate(names) if name in wanted]).nonzero()[0]
        made = source.taken(chosen, client=[names[c] for c in client[chosen]])
        columns = {
            name: replace(
                column, elsewhere={c: own for c, own in column.elsewhere.items() if as_id(c) in wanted}
            )
            for name, column in made.columns.items()
            if isinstance(column, Labels)
        }
        return replace(made, columns={**made.columns, **columns})
    raise ConfigError(
        "device.clients: {got} cannot be cut to some clients. Leave it out.", got=type(source).__name__
    )


Parts = Mapping[bytes, int]
"""The part of each of a client's examples, as a place in ``SPLITS``, by the example's hash."""


def settled(
    data: FederatedData, known: Mapping[str, Parts]
) -> tuple[FederatedData, dict[str, dict[bytes, int]], int]:
    """Return data whose known examples are in the parts where they were.

    Args:
        data: as they are divided now.
        known: by client, where its examples were; clients that were not looked at yet have no entry.

    Returns:
        The data, the very same object where nothing has moved; by client, the examples that are new; and how many
        examples of clients with an entry these are.
    """
    marks, now = marks_of(data), parts_of(data)
    names = [name.tobytes() for name in mixed(marks + weyl(ranks(marks)))]
    then, new, joined = now.copy(), dict[str, dict[bytes, int]](), 0
    for number, client in enumerate(map(str, data.ids)):
        there, last, found = known.get(client, {}), dict[int, int](), dict[bytes, int]()
        for row in data.rows(number):
            name, mark = names[row], int(marks[row])
            if name in there:
                then[row] = last[mark] = there[name]
            else:  # of equal ones there are more now: they go where the last of those went
                then[row] = found[name] = last.get(mark, int(now[row]))
        if found:
            new[client] = found
            joined += len(found) if client in known else 0
    return moved(data, then), new, joined
