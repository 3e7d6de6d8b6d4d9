"""The table in which devices sum words that nobody knows beforehand: what is in it comes out, or an error."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.data.preparation.table import (
    LANES,
    MOST_CELLS,
    Entry,
    Hash,
    cells_for,
    hash_of,
    lanes_of,
    names_of,
    read_names,
    read_table,
    table_of,
)

RUN = "run"
Told = Mapping[tuple[int, str], tuple[int, int]]
TOLD = st.dictionaries(
    st.tuples(st.integers(0, 3), st.text(max_size=30)),
    st.tuples(st.integers(0, 2**39), st.integers(0, 2**20)),
    max_size=40,
)


def entries(told: Told) -> dict[Hash, Entry]:
    return {
        hash_of(RUN, column, _bytes(text)): Entry(length=len(_bytes(text)), count=count, clients=clients)
        for (column, text), (count, clients) in told.items()
    }


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@settings(max_examples=60)
@given(st.lists(TOLD, min_size=1, max_size=5))
def test_what_devices_enter_comes_out_summed_with_its_names(each: list[Told]) -> None:
    cells = cells_for(sum(map(len, each)))
    total = np.zeros(cells * LANES, np.uint64)
    for told in each:
        total += table_of(entries(told), cells)
    found = read_table(total)
    texts = {hash_of(RUN, column, _bytes(text)): (column, text) for told in each for column, text in told}
    assert found.keys() == texts.keys()
    for one, entry in found.items():
        own = [told[texts[one]] for told in each if texts[one] in told]
        assert (entry.devices, entry.count, entry.clients) == (
            len(own),
            sum(c for c, _ in own),
            sum(n for _, n in own),
        )
        assert entry.length == len(_bytes(texts[one][1]))
    wanted = {one: found[one].length for one in sorted(found)[::2]}
    lanes = np.zeros(lanes_of(wanted), np.uint64)
    for told in each:
        lanes += names_of({hash_of(RUN, c, _bytes(t)): _bytes(t) for c, t in told}, wanted)
    assert read_names(RUN, lanes, wanted) == {one: _bytes(texts[one][1]) for one in wanted}


@pytest.mark.parametrize("count", [1, 3, 30, 100, 300, 1000, 4000])
def test_tables_of_any_size_can_be_emptied(count: int) -> None:
    """Twenty tables of each size, with every word on its own device: the most cells that entries can want."""
    for turn in range(20 if count < 1000 else 3):
        own = {
            hash_of(f"{RUN}{turn}", 0, b"%d" % n): Entry(length=3, count=n, clients=1) for n in range(count)
        }
        cells = cells_for(count)
        assert read_table(table_of(own, cells)) == own
    assert cells < 2 * count + 520


def test_too_many_entries_are_refused_before_memory_is_taken() -> None:
    assert cells_for(600_000) <= MOST_CELLS
    with pytest.raises(DataError, match="unicode_words"):
        cells_for(10**9)
    with pytest.raises(DataError):
        lanes_of({Hash(0, 1, 2): 1 << 40})


def test_a_table_that_was_changed_is_refused_and_nothing_is_made_up() -> None:
    own = {hash_of(RUN, 0, b"%d" % n): Entry(length=1, count=n, clients=1) for n in range(50)}
    table, draw = table_of(own, cells_for(50)), np.random.default_rng(0)
    full = np.flatnonzero(table)
    for place in draw.choice(full, 30, replace=False):
        wrong = table.copy()
        wrong[place] += np.uint64(draw.integers(1, 2**63))
        with pytest.raises(DataError):
            read_table(wrong)
    with pytest.raises(DataError):
        read_table(table * 0 + 1)


def test_a_name_that_is_not_its_hash_is_refused() -> None:
    one = hash_of(RUN, 0, b"word")
    lanes = names_of({one: b"word"}, {one: 4})
    assert read_names(RUN, lanes * 3, {one: 4}) == {one: b"word"}
    assert read_names(RUN, lanes * 0, {one: 4}) == {}
    for wrong in (lanes + np.asarray([1, 0], np.uint64), names_of({one: b"ward"}, {one: 4})):
        with pytest.raises(DataError):
            read_names(RUN, wrong, {one: 4})
    assert hash_of("another run", 0, b"word") != one
