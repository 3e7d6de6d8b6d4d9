"""Who opts out, by client, by example and by a predicate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep import methods
from fedkeep.core.errors import DataError
from fedkeep.core.seeds import numpy_generator
from fedkeep.data import FederatedData, Ragged, add_censored, consent, opt_out
from fedkeep.experiments.simulate import train_counts
from tests.refusals import raises


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
        *(
            (
                {"fraction": wrong},
                (
                    f"Wanted a fraction opting out in [0, 1); got {wrong}. At 0 all opt in; at 1 nobody would be left to train "
                    "the federated part: use the method 'local' for clients that only learn by themselves."
                ),
            )
            for wrong in (1.0, -0.1, float("nan"))
        ),
        (
            {"fraction": 0.5, "by": "clients"},
            "Wanted opt-out by 'client' or 'example'; got 'clients'. Did you mean 'client'?",
        ),
        ({}, "Wanted either fraction or where, to say who opts out; got both or neither."),
        (
            {"fraction": 0.5, "where": lambda c: c["label"] == 0},
            "Wanted either fraction or where, to say who opts out; got both or neither.",
        ),
        (
            {"where": lambda c: c["label"]},
            "Wanted a boolean for each of the 100 examples from the predicate; got int64, shape (100,).",
        ),
        (
            {"where": lambda c: np.ones(3, bool)},
            "Wanted a boolean for each of the 100 examples from the predicate; got bool, shape (3,).",
        ),
        (
            {"where": lambda c: np.ones(100, bool)},
            (
                "Nobody is left: every training example has opted out, so there is nothing to train the federated part on. "
                "Let some opt in, or use the method 'local'."
            ),
        ),
    ],
)
def test_faults(options: dict[str, Any], message: str) -> None:
    with raises(DataError, text=message):
        opt_out(made(), **options)


def test_censored_copies_go_in_while_the_raw_examples_stay_out() -> None:
    texts = [[n, n] for n in range(100)]
    source = FederatedData(
        {"x": np.arange(100, dtype=np.float32), "text": Ragged.from_rows(texts), "label": np.arange(100) % 3},
        np.arange(6) * 20,
        [f"c{i}" for i in range(5)],
    ).split_per_user((0.5, 0.25, 0.25))
    data = opt_out(source, 0.5)
    out = [c for c in range(5) if c not in clients_in(data)]
    both = add_censored(
        data, lambda raw: {"x": -np.asarray(raw["x"]), "text": Ragged.from_rows([[7]] * len(raw["x"]))}
    )
    x, text = np.asarray(both.columns["x"]), both.columns["text"]
    assert len(out) == 2
    assert both.meta["opt_out"]["censored_copies"] == 20
    for client in range(5):
        old, new = data.rows(client, "train"), both.rows(client, "train")
        assert len(new) == (20 if client in out else 10)
        raw, copies = new[:10], new[10:]
        assert (x[raw] == np.asarray(data.columns["x"])[old]).all()
        assert (inside(both)[raw] == (client not in out)).all()
        assert inside(both)[copies].all()
        assert (x[copies] == -x[raw][: len(copies)]).all()
        assert [text[row].tolist() for row in copies] == [[7]] * len(copies)  # type: ignore[union-attr]
        assert [text[row].tolist() for row in raw] == [[int(v)] * 2 for v in x[raw]]  # type: ignore[union-attr]
        labels = np.asarray(both.columns["label"])
        assert (labels[copies] == labels[raw][: len(copies)]).all()
        for split in ("valid", "test"):
            assert (
                x[both.rows(client, split)] == np.asarray(data.columns["x"])[data.rows(client, split)]
            ).all()


@pytest.mark.parametrize(
    ("data", "censor", "facts"),
    [
        (made(), lambda raw: {}, {"said": "Wanted data with a column 'opted_in'; there is none"}),
        (
            opt_out(made(), 0.0),
            lambda raw: {},
            {"said": "No training example has opted out, so there is nothing to"},
        ),
        (
            opt_out(made(), 0.5),
            lambda raw: {"y": raw["x"]},
            {"column": "y", "raw": ["label", "opted_in", "x"]},
        ),
        (
            opt_out(made(), 0.5),
            lambda raw: {"x": raw["x"][:, None]},
            ({"column": "x", "wanted": "float32, shape () a row", "got": "float32, shape (1,) a row"}),
        ),
        (
            opt_out(made(), 0.5),
            lambda raw: {"x": raw["x"][1:]},
            {"wanted": 20, "column": "x", "got": 19},
        ),
    ],
)
def test_faults_of_copies(data: FederatedData, censor: Any, facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        add_censored(data, censor)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.float32])
def test_ones_and_zeros_opt_in_and_out(kind: type) -> None:
    """As indices they would choose rows 0 and 1."""
    truths = np.arange(100) % 3 > 0
    data = made()
    columns = {**data.columns, "opted_in": truths.astype(kind)}
    told = FederatedData(columns, data.offsets, list(data.ids), data.bounds, data.meta)
    assert np.array_equal(inside(told), truths)
    counts = train_counts(told, methods.fedavg())
    assert counts.tolist() == [int(truths[told.rows(c, "train")].sum()) for c in range(5)]


@pytest.mark.parametrize(
    ("column", "facts"),
    [
        (np.array([0, 1, 2, 1]), {"column": "opted_in", "row": 2, "got": 2}),
        (
            np.array([1.0, np.nan, 0, 1]),
            {"column": "opted_in", "row": 1},
        ),
        (
            np.ones((4, 1), bool),
            {"column": "opted_in", "got": (4, 1)},
        ),
        (
            Ragged.from_rows([[1]] * 4),
            {"column": "opted_in"},
        ),
    ],
)
def test_what_says_neither_in_nor_out_is_refused(column: Any, facts: dict[str, Any]) -> None:
    with raises(DataError, **facts):
        FederatedData({"x": np.zeros(4), "opted_in": column}, [0, 4], ["a"])


def test_no_stream_is_made_where_none_of_the_examples_are_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = FederatedData.from_columns(
        ["a"] * 12, {"x": np.ones((12, 1))}, ["train"] * 8 + ["valid"] * 3 + ["test"]
    )
    made: list[str] = []

    def counted(seed: int, purpose: str, client: str = "") -> np.random.Generator:
        made.append(purpose)
        return numpy_generator(seed, purpose, client)

    monkeypatch.setattr(consent, "numpy_generator", counted)
    inside = opt_out(data, 0.25, by="example").columns["opted_in"]
    assert made == ["opt_out/train"]
    drawn = numpy_generator(0, "opt_out/train", "a").permutation(8)[:2]
    assert np.flatnonzero(~np.asarray(inside, bool)).tolist() == sorted(drawn.tolist())
