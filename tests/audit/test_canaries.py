"""Canaries: whose examples an audit takes, and which values it puts in their place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedkeep.audit.bench import Bench
from fedkeep.audit.canaries import (
    kept_rows,
    opted_out,
    out_counts,
    planted,
    replaced,
    single,
    small,
    sources,
    with_opt_out,
)
from tests.audit.clients import users
from tests.audit.leaks import Own, furl
from tests.tiny import classes, texts


def test_a_few_examples_of_each_partition_are_kept() -> None:
    data = classes(counts=(40, 3, 0, 7), valid=9, test=2)
    few = small(data, 3)
    assert list(few.ids) == ["user-0", "user-1", "user-3"]  # user-2 trains nothing
    assert [few.counts(part).tolist() for part in ("train", "valid", "test")] == [
        [12, 3, 7],
        [4] * 3,
        [2] * 3,
    ]
    rows = np.asarray(data.rows(0, "train"))
    chosen = np.asarray(few.columns["x"])[list(few.rows(0, "train"))]
    assert (chosen[0] == np.asarray(data.columns["x"])[rows[0]]).all()
    assert (chosen[-1] == np.asarray(data.columns["x"])[rows[-1]]).all()


def test_a_client_with_opted_in_and_opted_out_examples_comes_first() -> None:
    data = classes(counts=(4, 4, 4), opted_in=True)
    opted = np.ones(data.examples, bool)
    opted[list(data.rows(2, "train"))[:2]] = False
    data.columns["opted_in"] = opted
    assert list(small(data, 1).ids) == ["user-2"]


def test_rows_left_out_leave_the_others_as_they_were() -> None:
    data = classes(counts=(5, 4))
    without = kept_rows(data, np.setdiff1d(np.arange(data.examples), [1, data.rows(1, "valid")[0]]))
    assert without.counts("train").tolist() == [4, 4]
    assert without.counts("valid").tolist() == [2, 1]
    assert (np.asarray(without.columns["x"])[:4] == np.asarray(data.columns["x"])[[0, 2, 3, 4]]).all()


@pytest.mark.parametrize("data", [classes(counts=(5, 4)), texts()])
def test_every_replaced_row_is_another_and_no_other_row(data: object) -> None:
    rows = np.asarray([0, 2])
    other = replaced(data, rows, 1)  # type: ignore[arg-type]
    for name, column in data.columns.items():  # type: ignore[attr-defined]
        for row in range(3):
            assert np.array_equal(column[row], other.columns[name][row]) == (row == 1), name
        assert len(other.columns[name]) == len(column)
    assert set(np.unique(other.columns["label"])) <= set(np.unique(data.columns["label"]))  # type: ignore[attr-defined]


def test_who_shows_most_stands_in_front() -> None:
    """Neither who sorts first, nor rows that are only judged, nor rows that nobody may train on."""
    data = users(a=(0, 2, 0, 1), b=(1, 0, 0, 0), c=(4, 0, 1, 0), d=(4, 0, 1, 1), e=(5, 1, 1, 1))
    assert list(small(data, 4).ids) == ["e", "d", "c", "b"]
    assert list(small(data, 1).ids) == ["e"]


def test_a_kind_of_examples_that_others_have_alone_comes_with_them() -> None:
    data = users(a=(4, 0, 0, 0), b=(4, 0, 0, 0), c=(4, 0, 0, 0), d=(0, 0, 0, 2), e=(0, 2, 1, 0))
    few = small(data, 3)
    assert list(few.ids) == ["a", "b", "d", "e", "c"]
    assert Bench(Own(), furl(), few, 0).here == 4
    assert Bench(Own(), furl(), small(classes(), 3), 0).here == 2


def test_of_many_examples_those_on_either_side_of_consent_are_kept() -> None:
    few = small(users(a=(500, 1, 0, 0), b=(1, 500, 0, 0)), 2)
    assert few.counts("train").tolist() == [13, 5]
    assert [len(opted_out(few, client)) for client in (0, 1)] == [1, 4]
    assert out_counts(few).tolist() == [1, 4]


def test_a_column_of_one_value_is_told_and_a_label_of_one_class_replaced() -> None:
    data = classes(counts=(3, 2))
    data.columns.update(
        label=np.ones(data.examples, int),
        town=np.full(data.examples, 7),
        new=np.arange(data.examples) % 2 == 0,
    )
    other = replaced(data, np.arange(3), 1)
    assert other.columns["label"][:4].tolist() == [0, 0, 0, 1]
    assert (np.asarray(other.columns["new"])[:3] != np.asarray(data.columns["new"])[:3]).all()
    assert single(data) == ["town"]


def test_opt_out_is_planted_at_each_client_that_has_opted_out_none() -> None:
    data = with_opt_out(users(a=(3, 1, 0, 0), b=(4, 0, 0, 0)))
    assert [opted_out(data, client).tolist() for client in (0, 1)] == [[3], [5]]


def test_opt_out_is_planted_where_nobody_opted_out() -> None:
    data = with_opt_out(classes(counts=(6, 1)))
    assert opted_out(data, 0).tolist() == [1, 4]
    assert opted_out(data, 1).tolist() == []


def test_canaries_move_everything_and_keep_variances_positive() -> None:
    kept = {
        "user": torch.zeros(3),
        "norm.running_var": torch.full((4,), 0.01),
        "norm.count": torch.tensor(3),
        "client/pick": torch.tensor(0),
    }
    found = planted(kept, kept, {"user"}, 1)
    assert all(bool((found[n] != v).all()) for n, v in kept.items())
    assert bool((found["norm.running_var"] > 0).all())
    assert planted(kept, ["user"], {"user"}, 1)["client/pick"] is kept["client/pick"]
    assert [str(s) for s in sources(kept, {"user"})] == [
        "private parameter user",
        "private buffer norm.running_var",
        "private buffer norm.count",
        "kept state pick",
    ]


def test_many_sources_are_put_together() -> None:
    kept = {f"own.layer{k}.{end}": torch.zeros(1) for k in range(8) for end in ("weight", "bias")}
    assert [s.label for s in sources(kept, kept)] == [f"own.layer{k}.*" for k in range(8)]
    kept |= {f"own.more{k}.weight": torch.zeros(1) for k in range(8)}
    (one,) = sources(kept, kept)
    assert one.label == "own.*"
    assert set(one.names) == set(kept)
