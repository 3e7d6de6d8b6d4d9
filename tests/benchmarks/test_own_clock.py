"""The benchmark of users' own models by the clock: its cases, and what it makes of its seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.contenders.plain import Plain as PlainOfWorkload
from benchmarks.more_cases import ALL, EIGHT, PEERED, cohorts
from benchmarks.own_cases import CASES
from benchmarks.own_clock import check, page, quartiles
from benchmarks.own_models import Plain
from benchmarks.workloads import OWN, workload

NEW = [name for name in ALL if name not in CASES]


@pytest.mark.parametrize("name", NEW)
def test_a_model_fits_its_data(name: str) -> None:
    case = ALL[name]
    data = case.data()
    batch = data.batch(np.arange(2, 6))
    label = batch.pop("label")
    loss = case.plain(case.module()(**batch), label)
    assert torch.isfinite(loss)
    assert data.counts("train").min() >= 40
    assert len(data) >= case.cohort


def test_there_are_eight_strangers_and_no_cohort_twice() -> None:
    assert (len(ALL), len(EIGHT)) == (29, 8)
    every = cohorts(40, 10, 3)
    assert every == cohorts(40, 10, 3)
    assert [len(set(one)) for one in every] == [10] * 3


@pytest.mark.parametrize("name", ["MLP, 0.2 M", "LSTM with attention"])
def test_other_libraries_train_the_same_clients_from_the_same_values(name: str) -> None:
    case, clients = ALL[name], [3, 1, 4]
    torch.manual_seed(0)
    ours, theirs = Plain(case, case.module(), case.data()), PlainOfWorkload(workload(OWN + name, 3))
    for turn in range(2):
        ours.round(turn, clients)
        theirs.round(turn, clients)
    assert name in PEERED
    for value, known in ours.start.items():
        assert torch.allclose(theirs.state()[value], known, rtol=1e-6, atol=1e-7)


def row(model: str, over: list[float], share: float, engine: float) -> dict[str, Any]:
    return {
        "model": model,
        "engine": "workers",
        "over_better_plain": over,
        "of_ceiling": [share] * 3,
        "cpu_seconds": {"plain, 1 thread": 1.0, "auto": 0.5},
        "chosen_over_best_engine": engine,
        "over_peers": {"pfl, 1 thread": [1.5, 2.0, 2.5], "pfl, 2 threads": [1.0, over[1], 2.0]},
    }


def test_what_misses_its_target_is_named() -> None:
    good, slow = row("good", [1.4, 1.6, 1.8], 0.95, 1.0), row("slow", [0.7, 0.8, 0.9], 0.5, 1.3)
    check([good])
    with pytest.raises(AssertionError) as error:
        check([slow, good])
    said = str(error.value)
    assert ("median is 1.20" in said, said.count("slow:"), said.count("good:")) == (True, 3, 0)
    assert "| slow | workers | 0.80 (0.70, 0.90) | 0.50 | 2.00 | 1.30 | 0.8 |  |" in page([good, slow])
    assert "| 1.20 | | | 1 of 2 | | |" in page([good, slow])
    assert quartiles(np.array([1.0, 2.0, 3.0])) == [1.5, 2.0, 2.5]
