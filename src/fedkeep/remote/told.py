"""What of a summary goes into which secure sum before the first round, on a device and on the server.

numbers    sums, counts of rows, and how many words, labels, categories and items there are in all
words      the table of these, see ``data.preparation.table``
names      the texts of those that the encoding needs
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, raising
from fedkeep.data.preparation import Summary
from fedkeep.data.preparation.table import (
    LANES,
    MOST_CELLS,
    QUARTERS,
    Entry,
    Hash,
    hash_of,
    lanes_of,
    names_of,
    read_names,
    table_of,
)
from fedkeep.remote.messages import Portion


def size_of(portion: Portion, form: Summary) -> int:
    """Return how many lanes a part takes, given a summary of the same form.

    Raises:
        DataError: too many.
    """
    if portion.what == "numbers":
        return sum(form.widths)
    if portion.what == "names":
        return lanes_of(_wanted(portion))
    if not 0 < portion.cells <= MOST_CELLS or portion.cells % QUARTERS:
        raise DataError(
            "Wanted a table of at most {most} cells, in quarters; got {got}.",
            most=MOST_CELLS,
            got=portion.cells,
        )
    return portion.cells * LANES


def lanes_told(portion: Portion, told: Summary, run: str) -> NDArray[np.uint64]:
    """Return what a device adds, uint64 (lanes,).

    Raises:
        DataError: it is too much for the sum.
    """
    size_of(portion, told)
    if portion.what == "numbers":
        return told.numbers
    texts = _hashed(told, run)
    if portion.what == "names":
        return names_of({one: text for one, (text, _) in texts.items()}, _wanted(portion))
    entries = {
        one: Entry(length=len(text), count=count, clients=clients)
        for one, (text, (count, clients)) in texts.items()
    }
    return table_of(entries, portion.cells)


def names_portion(form: Summary, entries: Mapping[Hash, Entry]) -> Portion:
    """Return the part that names what the encoding needs of all devices' entries."""
    wanted = dict[Hash, int]()
    for number, name in enumerate(form.open):
        own = {one: (e.count, e.clients) for one, e in entries.items() if one.column == number}
        kept = form.columns[name].needed(own, form.clients_a_word)
        wanted |= {one: entries[one].length for one in sorted(kept)}
    return Portion(what="names", wanted=tuple((*one, length) for one, length in wanted.items()))


def with_names(
    form: Summary, portion: Portion, entries: Mapping[Hash, Entry], total: NDArray[np.uint64], run: str
) -> Summary:
    """Return a summary with the entries that were named.

    Raises:
        DataError: a name is not that of its hash.
    """
    names, columns = read_names(run, total, _wanted(portion)), form.open
    with raising(
        DataError,
        "A name that devices have summed is none of its column. Begin a new run.",
        ValueError,
        IndexError,
    ):
        return form.with_entries(
            {
                (columns[one.column], text.decode("utf-8", "surrogatepass")): (
                    entries[one].count,
                    entries[one].clients,
                )
                for one, text in names.items()
            }
        )


def _hashed(told: Summary, run: str) -> dict[Hash, tuple[bytes, tuple[int, int]]]:
    """Return by hash the text of each entry, and its numbers."""
    number, found = {name: n for n, name in enumerate(told.open)}, {}
    for (name, word), numbers in told.entries.items():
        text = word.encode("utf-8", "surrogatepass")
        found[hash_of(run, number[name], text)] = text, numbers
    return found


def _wanted(portion: Portion) -> dict[Hash, int]:
    return {Hash(*one[:3]): one[3] for one in portion.wanted}
