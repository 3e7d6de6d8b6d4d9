"""From paired results to one record: who gains, groups, fairness, and results that don't fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedkeep.core.errors import DataError
from fedkeep.metrics.worth.gains import Paired, worth
from fedkeep.metrics.worth.intervals import these_users, users_like_these
from tests.refusals import raises


def paired(better: list[int], worse: list[int], same: list[int], **more: Any) -> Paired:
    """One seed; client k has so many examples that our model, the reference, or both get right."""
    ours = [[1] * b + [0] * w + [1] * s for b, w, s in zip(better, worse, same, strict=True)]
    theirs = [[0] * b + [1] * w + [1] * s for b, w, s in zip(better, worse, same, strict=True)]
    client = np.repeat(np.arange(len(ours)), [len(own) for own in ours])
    rows = [np.array([[value for own in side for value in own]], np.int8) for side in (ours, theirs)]
    ids = tuple(f"user-{k}" for k in range(len(ours)))
    return Paired(clients=ids, seeds=(0,), client=client, ours=rows[0], theirs=rows[1], **more)


def test_each_client_counts_once() -> None:
    found = worth(paired([1, 9], [0, 1], [1, 30]))
    assert found.gain.tolist() == [0.5, 0.2]
    assert found.examples.tolist() == [2, 40]
    assert found.these.mean == pytest.approx(0.35)
    assert found.headline is found.these  # two clients


def test_a_clients_own_interval_is_students() -> None:
    found = worth(paired([3, 1], [1, 0], [6, 0]))
    d = np.array([1, 1, 1, -1, 0, 0, 0, 0, 0, 0])
    half = stats.t.ppf(0.975, 9) * d.std(ddof=1) / 10**0.5
    assert found.spans[0] == pytest.approx([0.2 - half, 0.2 + half], rel=1e-9)
    assert np.isnan(found.spans[1]).all()  # one example
    assert found.these is None


def test_no_interval_of_right_answers_goes_beyond_all_of_them() -> None:
    """Student's of two examples was ± 1270 points."""
    for more in ([0], [0] * 11):
        found = worth(paired([1, *more], [1, *more], [0, *(2 for _ in more)]))
        assert found.spans[0].tolist() == [-1, 1]
        assert -1 <= found.these.low <= found.these.mean <= found.these.high <= 1
    losses = np.array([[5.0, -5.0, 1.0, -1.0]])
    ids, client = ("a", "b"), np.array([0, 0, 1, 1])
    free = worth(Paired(clients=ids, seeds=(0,), client=client, ours=losses, theirs=0 * losses))
    assert free.spans[0][1] > 5


@pytest.mark.parametrize("better", [0, 1])
def test_without_differences_that_vary_no_interval_is_known(better: int) -> None:
    """It was of no width, as if nothing could be by chance."""
    for clients, examples in ((3, 2), (12, 10)):
        found = worth(
            paired([better * examples] * clients, [0] * clients, [(1 - better) * examples] * clients)
        )
        assert found.like_these is found.these is None
        assert not found.helps
        assert np.isnan(found.spans).all()
    some = worth(paired([2, 1], [0, 0], [0, 1]))  # the first client's examples differ alike, all the same
    assert np.isnan(some.spans).all(1).tolist() == [True, False]
    assert some.these is not None


def test_users_are_named_by_false_discoveries_among_those_with_seven_differences() -> None:
    # p of better: 2^-20, (1 + 7) / 2^7 = 0.0625, 2^-6 (six differences), and for the third client 1
    found = worth(paired([20, 6, 6, 0], [0, 1, 0, 20], [5, 5, 5, 5]))
    assert found.verdicts == ("better", "", "", "worse")
    assert found.tested == 3
    assert (found.count("better"), found.count("worse")) == (1, 1)
    # better: q = 2^-19, 0.125 and 2^-5; −2 ln 0.125 = 4.16 ≤ 5.99, with 2^-5 11.1 > 9.49, with all 37 > 12.6
    assert (found.at_least_better, found.at_least_worse) == (2, 1)


def test_both_directions_have_a_rate_of_their_own() -> None:
    """One correction of both directions together would name nobody here."""
    found = worth(paired([10] * 2 + [7] * 8, [1] * 2 + [7] * 8, [3] * 10))
    assert found.verdicts[:2] == ("better", "better")
    p = stats.binom.sf(9, 11, 0.5)
    assert 2 * p * 10 / 2 > 0.05 >= p * 10 / 2


def test_seeds_are_summed_example_by_example() -> None:
    ours = np.ones((3, 8), np.int8)
    theirs = np.zeros((3, 8), np.int8)
    theirs[:2, 7] = 1  # the last example differs under the last seed only
    client = np.repeat([0, 1], 4)
    p = Paired(clients=("a", "b"), seeds=(0, 1, 2), client=client, ours=ours, theirs=theirs)
    assert [f.differing for f in p.flips()] == [4, 4]
    assert p.variance == pytest.approx([0.0, np.var([1, 1, 1, 1 / 3], ddof=1)])
    found = worth(p)
    y = np.array([[1.0, 0.75], [1.0, 0.75], [1.0, 1.0]])
    assert (found.like_these.low, found.like_these.high) == pytest.approx(
        np.clip(users_like_these(y)[1:], -1, 1).tolist()
    )
    wanted = these_users(y, p.variance, np.array([4.0, 4.0]))
    assert (found.these.low, found.these.high) == pytest.approx(np.clip(wanted[1:], -1, 1).tolist())
    # π = mean of (x / 3)² = (7 + 1/9) / 8 = 0.8889, and (2.65 √0.8889 + 0.84 √0.8789)² = 10.797
    assert found.needed == 1080


def test_the_worst_tenth_is_chosen_on_validation() -> None:
    gains = [5] * 20
    gains[3] = gains[17] = 0
    ours, theirs = np.full(20, 0.6), np.full(20, 0.5)
    ours[[3, 8]] = 0.1, 0.2  # least gain on validation; client 8 gains on test
    theirs[[2, 9]] = 0.0, 0.1  # the reference is worst there
    found = worth(paired(gains, [0] * 20, [5] * 20, valid=np.stack([ours, theirs])))
    assert found.worst.clients == 2
    assert found.worst.gain.mean == pytest.approx(0.25)  # clients 3 and 8
    assert not found.worst.alike
    assert found.worst_off.gain.mean == pytest.approx(0.5)
    assert worth(paired(gains, [0] * 20, [5] * 20)).worst is None


@pytest.mark.parametrize(("clients", "tenth"), [(3, 1), (19, 1), (20, 2), (29, 2)])
def test_a_tenth_is_rounded_down_and_is_one_client_at_least(clients: int, tenth: int) -> None:
    """Ten more clients have no validation: they count in no tenth."""
    every = clients + 10
    valid = np.zeros((2, every))
    valid[:, clients:] = np.nan
    found = worth(paired([5] * every, [0] * every, [5] * every, valid=valid)).worst
    assert found.clients == tenth


def test_quarters_by_training_examples_keep_equals_together() -> None:
    trained = np.array([5] * 20 + [8] * 10 + [9] * 10)
    better = [0, 2] * 10 + [1, 3] * 10
    found = worth(paired(better, [0] * 40, [10 - b for b in better], trained=trained)).by_examples
    assert [(g.clients, g.least, g.most, g.alike) for g in found] == [
        (20, 5, 5, True),
        (10, 8, 8, True),
        (10, 9, 9, True),
    ]
    assert [round(g.gain.mean, 3) for g in found if g.gain] == [0.1, 0.2, 0.2]


def test_fairness_is_the_spread_over_clients() -> None:
    found = worth(paired([1, 0, 2], [0, 1, 0], [1, 1, 0])).fairness
    theirs, ours = [0.5, 1.0, 0.0], [1.0, 0.5, 1.0]
    assert found.deviation == pytest.approx((np.std(theirs), np.std(ours)))
    assert found.lowest == pytest.approx((0.1, 0.6))


def test_losses_have_no_number_of_examples_needed() -> None:
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(12), 20)
    theirs = -rng.exponential(1, (1, 240))
    p = Paired(
        clients=tuple(map(str, range(12))),
        seeds=(4,),
        client=client,
        ours=theirs + 0.1 + 0.01 * theirs,
        theirs=theirs,
    )
    found = worth(p)
    assert found.needed is None
    assert found.helps
    assert found.like_these.mean == pytest.approx(p.means(p.differences).mean())


GOOD: dict[str, Any] = {
    "clients": ("a", "b"),
    "seeds": (0,),
    "client": np.array([0, 0, 1]),
    "ours": np.ones((1, 3)),
    "theirs": np.zeros((1, 3)),
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "seeds": ({"seeds": (0, 1)}, "wanted two arrays of shape (seeds, examples) = (2, 3)"),
    "no seed": ({"seeds": (), "ours": np.ones((0, 3))}, "with at least one seed"),
    "nan": ({"ours": np.array([[1.0, np.nan, 0.0]])}, "a value is NaN or infinite"),
    "a client without examples": ({"client": np.zeros(3, int)}, "each of the 2 clients wants an example"),
    "trained": ({"trained": np.ones(3)}, "trained wants the shape (2,); got (3,)"),
    "valid": ({"valid": np.ones(2)}, "valid wants the shape (2, 2); got (2,)"),
}


@pytest.mark.parametrize("name", BAD)
def test_results_that_do_not_fit_are_named(name: str) -> None:
    Paired(**GOOD)
    with raises(DataError, said=BAD[name][1]):
        Paired(**{**GOOD, **BAD[name][0]})
