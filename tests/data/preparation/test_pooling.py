"""What leaves of summaries in secure sums: numbers in lanes, whose sums are the numbers' sums to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.data.columns import Ragged
from fedkeep.data.preparation import Encoding, Raw, Rules, Summary, merged
from fedkeep.data.preparation.feature_columns import Features, Target, Targets
from fedkeep.data.preparation.label_columns import Labels
from fedkeep.data.preparation.numbers import KeyColumn, Times
from fedkeep.data.preparation.pooling import LIMB, ROOM, SQUARE, SUM, from_lanes, to_lanes
from fedkeep.data.preparation.series_columns import Series
from fedkeep.data.preparation.texts import Texts

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
VALUES = [0.0, 1.5, -2.25, LARGEST, -LARGEST, SMALLEST, -SMALLEST, 1e-30, 123456789.0, np.nan, 0.1, -7.0]


def number(width: int) -> st.SearchStrategy[int]:
    most = (1 << LIMB * width - 1 - ROOM) - 1
    return st.integers(-most, most) | st.sampled_from([0, 1, -1, most, -most])


@given(st.data(), st.lists(st.integers(1, SQUARE), min_size=1, max_size=5), st.integers(1, 6))
def test_sums_of_lanes_stand_for_the_sums_of_numbers(
    data: st.DataObject, widths: list[int], count: int
) -> None:
    each = [[data.draw(number(width)) for width in widths] for _ in range(count)]
    total = np.zeros(sum(widths), np.uint64)
    for one in each:
        total += to_lanes(one, widths)
    assert from_lanes(total, widths) == tuple(map(sum, zip(*each, strict=True)))


@pytest.mark.parametrize("value", [1 << LIMB * 2 - 1 - ROOM, -1 << LIMB * 2 - ROOM])
def test_a_number_without_room_is_refused_and_not_wrapped(value: int) -> None:
    with pytest.raises(DataError):
        to_lanes([value], [2])


def test_there_is_room_for_any_float32_a_hundred_billion_times() -> None:
    rows, largest = 10**11, int(LARGEST) + 1
    to_lanes([largest * rows << 172, -largest * rows << 172, largest**2 * rows << 344], [SUM, SUM, SQUARE])


def columns(values: Sequence[float], place: int) -> Raw:
    """Return a device's data with a column of every kind that pools numbers."""
    table = np.asarray(values, np.float64).reshape(-1, 2)
    known = np.nan_to_num(table, nan=3.0)
    rows = len(table)
    return Raw(
        client=[f"{place}-{row % 2}" for row in range(rows)],
        split=["train"] * rows,
        columns={
            "x": Features(
                names=("a", "b"),
                values=np.column_stack([table[:, 0], np.arange(rows) % 2]),
                kinds={"b": "category"},
                levels={"b": (f"only-{place}", "all")},
            ),
            "rest": Features(names=("c",), values=table[:, 1:], standardise=False),
            "y": Target(values=known[:, 0]),
            "several": Targets(names=("u", "v"), values=known),
            "plain": Target(values=known[:, 1], standardise=False),
            "steps": Series(
                names=("s",), values=Ragged(known.reshape(-1, 1), np.arange(rows + 1) * 2), max_length=1
            ),
            "time": Times(values=known[:, 0] if place else np.arange(rows)),
            "item": KeyColumn(values=np.arange(rows) + place),
            "label": Labels(values=[f"c{row % 3}" for row in range(rows)]),
            "text": Texts(
                values=["so so good", "é 好"] * (rows // 2) + ["end"] * (rows % 2),
                tokens="word",
                size=9,
                max_length=5,
            ),
        },
    )


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from(VALUES), min_size=2, max_size=12), min_size=2, max_size=5))
def test_summaries_pooled_in_lanes_are_those_merged_in_the_clear(each: list[list[float]]) -> None:
    told = [columns(one[: len(one) // 2 * 2], place).summary(Rules()) for place, one in enumerate(each)]
    total = np.zeros_like(told[0].numbers)
    for one in told:
        total += one.numbers
    blank = merged(one.blank for one in told)
    summed, entries = blank.with_numbers(total)
    assert entries == sum(len(one.entries) for one in told)
    found = summed.with_entries(merged(told).entries)
    assert found == merged(told)
    assert Encoding.of(found).to_json() == Encoding.of(merged(told)).to_json()


def test_a_blank_holds_no_number_of_the_data_and_its_form() -> None:
    one, other = (
        columns(values, 1).summary(Rules()) for values in ([1.5, np.nan, 2, 3], [7, 8.25, 1, 2, 3, 4])
    )
    assert one != other
    for told in (one, other):
        blank = Summary.from_json(told.blank.to_json())
        assert blank.form == told.form
        assert not blank.numbers.any()
        assert blank.widths == told.widths
        assert blank.entries == {}
    assert one.blank.to_json() == other.blank.to_json()


def test_sums_that_contradict_each_other_are_refused() -> None:
    told = columns([1.5, 2.5], 0).summary(Rules())
    wrong = told.numbers
    wrong[0:2] = 0xFFFFFFFF  # the count of a feature's rows, below 0
    with pytest.raises(DataError):
        told.blank.with_numbers(wrong)
    with pytest.raises(DataError):
        told.blank.with_numbers(wrong[1:])
