"""Reductions for uploads that can't be trusted: by hand, how many poisoned clients each stands, what honest ones pay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import Phase, Split, averaging, methods, sgd, simulate
from fedkeep.core.errors import UploadError
from fedkeep.core.params import Params
from fedkeep.methods import ClippedMean, Global, Krum, Median, Reduction, TrimmedMean, WeightedMean
from fedkeep.split import Upload
from tests.tiny import Logits, classes, same_bits

START = {"w": torch.zeros(2, dtype=torch.float64), "count": torch.tensor(0)}
TABLE = {"t": torch.zeros(4, 1, dtype=torch.float64)}


def upload(w: Any, count: int = 0, weight: float = 1.0) -> Upload:
    trained = {"w": torch.as_tensor(w, dtype=torch.float64), "count": torch.tensor(count)}
    return Split().upload({**START, "w": torch.zeros_like(trained["w"])}, trained, weight)


def reduced(rule: Reduction, uploads: dict[str, Upload], start: Params = START) -> Params:
    found = rule.begin(Global(params=start), start, sorted(uploads))
    for client, one in uploads.items():
        found.add(client, one)
    return found.value().params


def named(rows: Any, **options: Any) -> dict[str, Upload]:
    return {f"c{k:02}": upload(row, k, **options) for k, row in enumerate(rows)}


def test_the_trimmed_mean_by_hand() -> None:
    rows = [[1, 9], [2, -50], [3, 8], [4, 7], [1000, 6]]
    assert reduced(TrimmedMean(share=0.2), named(rows))["w"].tolist() == [3, 7]
    assert reduced(TrimmedMean(share=0.4), named(rows))["w"].tolist() == [3, 7]
    assert reduced(TrimmedMean(share=0.19), named(rows))["w"].tolist() == [202, -4]  # nothing is cut off
    assert reduced(TrimmedMean(share=0.2), named(rows))["count"] == 0


def test_a_share_that_is_no_binary_number_cuts_off_whole_clients() -> None:
    rows = [[k, 0] for k in range(9)] + [[1e9, 0]]
    assert reduced(TrimmedMean(share=0.3), named(rows))["w"][0] == np.mean([3, 4, 5, 6])


def test_krum_by_hand() -> None:
    """Five uploads, one faulty: scores over the 2 nearest. 0: 1 + 4; 1: 1 + 1; 2: 1 + 4; 4: 4 + 9; 100: far away."""
    rows = [[0, 0], [1, 0], [2, 0], [4, 0], [100, 0]]
    found = reduced(Krum(faulty=1), named(rows))
    assert found["w"].tolist() == [1, 0]
    assert found["count"] == 1  # of the upload that was taken
    assert reduced(Krum(faulty=1, taken=3), named(rows))["w"].tolist() == [1, 0]  # of 0, 1 and 2
    assert reduced(Krum(faulty=1, taken=4), named(rows))["w"].tolist() == [1.75, 0]


def test_clipped_norms_by_hand() -> None:
    """‖(3, 4)‖ = 5 is cut to 1; whatever weight is claimed, each counts once."""
    uploads = {"a": upload([3, 4], weight=1e9), "b": upload([0.3, 0.4]), "c": upload([0, 0])}
    found = reduced(ClippedMean(bound=1.0), uploads)
    torch.testing.assert_close(found["w"], torch.tensor([0.3, 0.4]).double())
    assert not ClippedMean(bound=1.0).is_sum
    assert ClippedMean(bound=1.0).weight(7.0) == 1.0


def test_rows_that_a_client_does_not_hold_have_not_changed() -> None:
    def some(rows: list[int], values: list[float]) -> Upload:
        which = torch.tensor(rows)
        trained = {"t": torch.tensor(values, dtype=torch.float64).unsqueeze(1)}
        return Split().upload({"t": TABLE["t"][which]}, trained, 1.0, {"t": which})

    uploads = {"a": some([0, 1], [1, 2]), "b": some([0, 3], [3, 4]), "c": some([0, 1], [5, 6])}
    trimmed = reduced(TrimmedMean(share=0.34), uploads, TABLE)
    assert trimmed["t"].flatten().tolist() == [3, 2, 0, 0]
    near = reduced(Krum(faulty=0), uploads, TABLE)  # a: 8 of c's 32 …: a is 24 from b, b 44 from c
    assert near["t"].flatten().tolist() == [1, 2, 0, 0]


HONEST = 20
CENTRE = np.array([1.0, -2.0])


def poisoned(bad: int, where: float, seed: int = 0) -> dict[str, Upload]:
    """Return 20 clients about a centre with deviation 1, ``bad`` of which send one far point instead."""
    rows = CENTRE + np.random.default_rng(seed).standard_normal((HONEST, 2))
    rows[:bad] = where
    return named(rows)


def error(rule: Reduction, bad: int, where: float) -> float:
    """Return the mean distance from the centre over 30 rounds."""
    sizes = [
        np.linalg.norm(reduced(rule, poisoned(bad, where, seed))["w"].numpy() - CENTRE) for seed in range(30)
    ]
    return float(np.mean(sizes))


@pytest.mark.parametrize(
    ("rule", "stands", "falls"),
    [
        (Median(), 9, 11),
        (TrimmedMean(share=0.25), 5, 6),
        (TrimmedMean(share=0.45), 9, 10),
        (Krum(faulty=8), 8, 12),
        (Krum(faulty=8, taken=5), 8, 12),
        (WeightedMean(by="uniform"), 0, 1),
    ],
    ids=["median", "trimmed 5", "trimmed 9", "krum", "multi-krum", "mean"],
)
@pytest.mark.parametrize("where", [1e6, -1e6])
def test_how_many_poisoned_clients_each_stands(
    rule: Reduction, stands: int, falls: int, where: float
) -> None:
    assert error(rule, stands, where) < 2.5
    assert error(rule, falls, where) > 1e3


def test_clipped_norms_stand_any_number_up_to_their_share_of_the_bound() -> None:
    """k poisoned clients of 20 move the mean by at most 2 · bound · k / 20, however far they pull."""
    rule = ClippedMean(bound=5.0)
    for bad in (1, 4, 10):
        clean, pulled = reduced(rule, poisoned(0, 0.0))["w"], reduced(rule, poisoned(bad, 1e6))["w"]
        assert float((clean - pulled).norm()) <= 2 * 5.0 * bad / HONEST + 1e-9


def test_what_they_cost_honest_clients() -> None:
    """Without any poison, over 30 rounds of 20 clients: mean error in units of the mean's, 1 / √20 · 1.25."""
    mean = error(WeightedMean(by="uniform"), 0, 0.0)
    costs = {
        "trimmed": error(TrimmedMean(share=0.25), 0, 0.0) / mean,
        "median": error(Median(), 0, 0.0) / mean,
        "multi-krum": error(Krum(faulty=8, taken=5), 0, 0.0) / mean,
        "krum": error(Krum(faulty=8), 0, 0.0) / mean,
        "clipped, bound not reached": error(ClippedMean(bound=100.0), 0, 0.0) / mean,
        "clipped, bound reached": error(ClippedMean(bound=1.0), 0, 0.0) / mean,
    }
    assert costs["clipped, bound not reached"] == 1
    assert 1 < costs["trimmed"] < costs["median"] < costs["multi-krum"] < costs["krum"] < 5
    assert costs["clipped, bound reached"] > 3  # the centre itself is at √5


def test_kept_uploads_are_declared_and_clipped_ones_are_not_kept() -> None:
    data = classes(counts=(8, 9, 7, 5, 6))
    local = Phase(batch_size=4, optimizer=sgd(0.1))
    size = sum(v.numel() * 8 for v in Logits().double().state_dict().values())

    def held(rule: Reduction) -> list[float]:
        method = methods.fedavg(local=local, server=averaging().but(reduce=rule))
        run = simulate(Logits().double(), method, data, rounds=2, cohort=5)
        return [r.value for r in run.history if r.metric == "held_bytes"]

    assert held(TrimmedMean(share=0.2)) == held(Krum(faulty=1)) == [5.0 * size] * 2
    assert held(ClippedMean(bound=1.0)) == []
    assert not (TrimmedMean().is_sum)
    assert not (Krum().is_sum)
    assert not (ClippedMean().is_sum)


def test_loose_ones_are_the_mean() -> None:
    uploads = poisoned(0, 0.0)
    mean = reduced(WeightedMean(by="uniform"), uploads)
    assert same_bits({"w": reduced(ClippedMean(bound=1e9), uploads)["w"]}, {"w": mean["w"]})
    torch.testing.assert_close(reduced(TrimmedMean(share=0.0), uploads)["w"], mean["w"])


def test_krum_of_too_few_is_refused() -> None:
    with pytest.raises(UploadError, match="Krum wants at least 5 uploads.*1.*1.*4"):
        reduced(Krum(faulty=1), named([[0, 0]] * 4))
    with pytest.raises(UploadError, match="Krum wants at least 6 uploads.*1.*5.*5"):
        reduced(Krum(faulty=1, taken=5), named([[0, 0]] * 5))
