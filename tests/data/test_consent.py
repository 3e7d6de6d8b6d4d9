"""Who opts out, by client, by example and by a predicate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, opt_out


def made(clients: int = 5, each: int = 20, split: bool = True) -> FederatedData:
    rows = clients * each
    data = FederatedData(
        {"x": np.arange(rows, dtype=np.float32), "label": np.arange(rows) % 3},
        np.arange(clients + 1) * each,
        [f"c{i}" for i in range(clients)],
    )
    return data.split_per_user((0.5, 0.25, 0.25)) if split else data


def inside(data: FederatedData) -> Any:
    opted = np.asarray(data.columns["opted_in"])
    assert opted.dtype == bool
    return opted


def clients_in(data: FederatedData) -> list[int]:
    opted = inside(data)
    whole = [bool(opted[data.rows(c)].all()) for c in range(len(data))]
    assert whole == [bool(opted[data.rows(c)].any()) for c in range(len(data))]  # wholly in or wholly out
    return [c for c, one in enumerate(whole) if one]


@pytest.mark.parametrize(
    ("n", "q", "remaining"),
    [(5, 0.0, 5), (5, 0.5, 3), (5, 0.9, 1), (50, 0.9, 5), (1, 0.9, 1), (100, 0.29, 71)],
)
def test_clients_are_truncated(n: int, q: float, remaining: int) -> None:
    assert len(clients_in(opt_out(made(n, 4), q))) == remaining


def test_a_larger_fraction_adds_to_those_who_are_out() -> None:
    data = made(20, 4)
    sets = [set(clients_in(opt_out(data, q, seed=3))) for q in (0.2, 0.5, 0.8)]
    assert sets[0] > sets[1] > sets[2]
    assert clients_in(opt_out(data, 0.5, seed=3)) == sorted(sets[1])
    assert any(set(clients_in(opt_out(data, 0.5, seed=s))) != sets[1] for s in range(3))


@given(q=st.floats(0, 0.99), split=st.booleans(), seed=st.integers(0, 3))
def test_examples_of_every_client_and_split(q: float, split: bool, seed: int) -> None:
    data = opt_out(made(split=split), q, by="example", seed=seed)
    for client in range(5):
        for part in ("train", "valid", "test") if split else ("all",):
            opted = inside(data)[data.rows(client, part)]
            assert (~opted).sum() == int(q * len(opted) + 1e-9)
    assert (inside(opt_out(made(split=split), q, by="example", seed=seed)) == inside(data)).all()


def test_a_predicate() -> None:
    data = opt_out(made(), where=lambda columns: np.asarray(columns["label"]) == 1)
    assert (inside(data) == (np.asarray(data.columns["label"]) != 1)).all()
    assert data.meta["opt_out"]["by"] == "predicate"


def test_who_is_out_stays_out() -> None:
    first = opt_out(made(), where=lambda columns: np.asarray(columns["label"]) == 1)
    both = opt_out(first, 0.5, seed=1)
    alone = inside(opt_out(made(), 0.5, seed=1))
    assert (inside(both) == (inside(first) & alone)).all()
    assert both.meta["opt_out"] == {
        "by": "client",
        "fraction": 0.5,
        "seed": 1,
        "training_examples_in": int(inside(both)[both.split_rows("train")].sum()),
    }


def test_the_given_data_keep_their_columns() -> None:
    data = made()
    marked = opt_out(data, 0.5)
    assert "opted_in" not in data.columns
    assert "opt_out" not in data.meta
    assert marked.columns["x"] is data.columns["x"]
    assert marked.batch([0])["opted_in"].dtype.is_floating_point is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1.0},
         ("Wanted a fraction opting out in [0, 1); got 1: nobody would be left to train the federated part. Use the "
          "method 'local' for clients that only learn by themselves.")),
        ({"fraction": -0.1}, "Wanted a fraction opting out in [0, 1); got -0.1. 0 means that all opt in."),
        ({"fraction": float("nan")}, "Wanted a fraction opting out in [0, 1); got nan. 0 means that all opt in."),
        ({"fraction": 0.5, "by": "clients"},
         "Wanted opt-out by 'client' or 'example'; got 'clients'. Did you mean 'client'?"),
        ({}, "Wanted either fraction or where, to say who opts out; got both or neither."),
        ({"fraction": 0.5, "where": lambda c: c["label"] == 0},
         "Wanted either fraction or where, to say who opts out; got both or neither."),
        ({"where": lambda c: c["label"]},
         "Wanted a boolean for each of the 100 examples from the predicate; got int64, shape (100,)."),
        ({"where": lambda c: np.ones(3, bool)},
         "Wanted a boolean for each of the 100 examples from the predicate; got bool, shape (3,)."),
        ({"where": lambda c: np.ones(100, bool)},
         ("Nobody is left: every training example has opted out, so there is nothing to train the federated part on. "
          "Let some opt in, or use the method 'local'.")),
    ],
)  # fmt: skip
def test_faults(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        opt_out(made(), **options)
    assert str(error.value) == message
