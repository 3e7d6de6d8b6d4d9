"""What holds for every method: seeds, resuming, and what leaves a client."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from fedkeep import simulate
from fedkeep.engines import run_round
from fedkeep.methods import METHODS
from tests.methods.table import DATA, ROWS, Watched, trained
from tests.tiny import Rounds, bits, everyone, job, on_server, same_bits

whole = functools.cache(trained)
"""A method's run that was never stopped; two tests look at it."""

KEPT = ["fedper", "ditto", "scaffold", "pfedhn", "fedamp"]
"""Private values, copies, states of clients, states of the server, a part for each client.
``test_one_answer`` goes on from a folder with every method.
"""


def test_the_rows_are_all_methods() -> None:
    assert set(ROWS) == set(METHODS)


@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]
)
def test_another_seed_gives_other_bits(name: str) -> None:
    """That the same seed gives the same is what ``tests/engines/test_conformance.py`` compares workers by."""
    one = whole(name)
    other = simulate(ROWS[name][0]().double(), ROWS[name][1], DATA, rounds=3, cohort=4, seed=4)
    assert not (
        same_bits(on_server(one), on_server(other))
        and same_bits(everyone(one.private, 6), everyone(other.private, 6))
    )


@pytest.mark.parametrize("name", KEPT)
def test_stopped_and_continued_is_never_stopped(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedkeep.experiments.drive as room

    expected, rounds = whole(name), []

    def stop(*arguments: Any) -> Any:
        rounds.append(arguments)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return run_round(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(room, "run_round", stop)
        with pytest.raises(KeyboardInterrupt):
            trained(name, out=tmp_path / "run")
    again = trained(name, out=tmp_path / "run", resume=True)
    assert same_bits(on_server(expected), on_server(again))
    assert list(on_server(expected)) == list(on_server(again))
    assert same_bits(everyone(expected.private, 6), everyone(again.private, 6))


@pytest.mark.parametrize("name", ROWS)
def test_adapting_takes_opted_out_examples_too(name: str) -> None:
    """Nothing leaves, so every phase of adapting is on all of a client's examples."""
    assert all(phase.examples == "all" for phase in ROWS[name][1].adapt.phases)


@pytest.mark.parametrize("name", ROWS)
def test_no_private_name_and_no_private_value_is_in_the_bytes_that_leave(name: str) -> None:
    make, method = ROWS[name]
    model = make().double()
    work, engine = job(method.extend(model) if method.extend else model, method, DATA), Watched()
    rounds = Rounds(work, engine)
    for _ in range(2):
        rounds([0, 1, 2, 3])
    names = method.split.private_names(work.net.initial())
    assert bool(names) == (
        name
        not in (
            "fedavg",
            "fedprox",
            "fine_tuned",
            "fedmmd",
            "fedfusion",
            "per_fedavg",
            "scaffold",
            "feddyn",
            "fedbabu",
            "ifca",
            "pfedhn",
            "moon",
            "knn_per",
            "fedpac",
        )
    )
    for upload in engine.bytes:
        assert not any(f'"{n}"'.encode() in upload for n in names)
        assert b'"client/' not in upload
        for kept in engine.private:
            assert not any(bits(kept[n]) in upload for n in names if kept[n].numel() > 1)
