"""A seeded sample of leaky and harmless modules and methods; ``benchmarks.evidence`` tries them all."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.evidence import counted, judged, strictly
from fedkeep.audit import audit
from fedkeep.audit.canaries import MORE, opted_out, out_counts, resampled
from fedkeep.audit.canary_images import (
    carries_exactly,
    describe_code,
    describe_copy,
    made_singly,
    may_carry,
    stands,
    statistics,
)
from fedkeep.data import FederatedData, Ragged
from fedkeep.prove import prove
from fedkeep.prove.proving import OPT_OUT_CHANGES
from tests.evidence.table import AS_DECLARED, BITS_OF_COUNTS, HARMLESS, LEAKY, OUTSIDE

FEW = 2
DRAW = random.Random(0)  # noqa: S311
OWN = [name for name in LEAKY if not name.startswith(("planted", "carried", "blind"))]
SOME_LEAKY = DRAW.sample(OWN, FEW)
SOME_HARMLESS = DRAW.sample([name for name in HARMLESS if not name.startswith(("method", "blind"))], FEW - 1)


def test_there_are_enough() -> None:
    assert len(LEAKY) >= 150
    assert len(HARMLESS) >= 60


@pytest.mark.parametrize("name", [*SOME_LEAKY, "blind: loss_digits", "blind: prototype_term"])
def test_a_leaky_one_is_not_proved(name: str) -> None:
    assert not prove(*LEAKY[name]()).ok


@pytest.mark.parametrize("name", ["examples rotated in a buffer", "judged: 3 times a value"])
def test_what_labels_declare_is_found_by_trying(name: str) -> None:
    assert audit(*LEAKY[name](), rounds=1).leaks
    assert not prove(*LEAKY[name]()).ok


@pytest.mark.parametrize("name", SOME_HARMLESS)
def test_a_harmless_one_is_no_leak_and_is_proved(name: str) -> None:
    found = judged(HARMLESS[name])
    assert (found["audit"], found["proof"]) == (True, True)


def test_what_is_counted() -> None:
    caught, passed = {"audit": False, "proof": True}, {"audit": True, "proof": True}
    found = counted({"a": caught, "b": passed}, {"c": passed, "d": {"audit": True, "proof": False}})
    assert (found["caught"], found["pass both"]) == (1, ["b"])
    assert found["proved, and caught by the audit alone"] == ["a"]
    assert (found["proved"], found["not proved"], found["false leaks"]) == (1, ["d"], [])


def test_what_stands_outside_of_the_table_is_counted_strictly() -> None:
    caught, passed = {"audit": False, "proof": True}, {"audit": True, "proof": True}
    found = strictly({"a": caught}, {"detached_ratio": passed})
    assert (found["leaky"], found["pass both"]) == (2, ["detached_ratio"])
    assert "declares" in found["why they stand outside"]["detached_ratio"]
    assert set(AS_DECLARED) == set(OUTSIDE)
    assert not set(OUTSIDE) & set(LEAKY)


VALUES = np.random.default_rng(0).standard_normal((12, 5))
LOSS = 1 + 0.1 * np.random.default_rng(1).standard_normal((12, 1))


@pytest.mark.parametrize(
    ("left", "how"),
    [
        (LOSS + np.floor(1000 * VALUES[:, :1]), "by a linear map"),
        (np.tanh(VALUES[:, 2:3]), "only grows or falls"),
        (np.floor(8 * VALUES[:, 1:2]), "only grows or falls"),
        (-np.exp(VALUES[:, [3, 3]]), "only grows or falls"),
        (VALUES.sum(1, keepdims=True), "by a linear map"),
        (LOSS, ""),
        (np.log(np.exp(VALUES).sum(1, keepdims=True)), ""),
        (np.exp(VALUES[:, [0, 1]]), ""),
        (np.ones((12, 1)), ""),
        (np.full((12, 1), np.nan), ""),
    ],
)
def test_a_code_is_told_from_a_function_of_all(left: np.ndarray, how: str) -> None:
    found = describe_code(VALUES, left)
    assert how in found
    assert bool(found) == bool(how)


def test_a_code_is_found_behind_the_decimals() -> None:
    assert describe_code(VALUES, LOSS.round(1) + (VALUES[:, :1] + 8) / 1000)
    assert describe_copy(VALUES, VALUES[:, :0], LOSS.round(1) + (VALUES[:, 2:3] + 8) / 1000)
    assert not describe_copy(VALUES, VALUES[:, :0], LOSS)


def test_a_slope_is_told_from_a_code() -> None:
    value, draw = VALUES[:, :1], np.random.default_rng(3)

    def stays(made: Callable[[np.ndarray, float], np.ndarray]) -> bool:
        """Tell whether what is made of the value, and of the examples, is a code."""
        here, elsewhere = 1 + made(value, 1.0), 2 + made(value, -0.4)
        assert describe_code(value, here)
        return stands(
            describe_code, value, here, lambda: elsewhere, lambda s: (s * value, 1 + made(s * value, 1.0))
        )

    assert not stays(lambda u, slope: np.tanh(1e-3 * slope * u))  # as a weak gate or temperature moves a loss
    assert stays(lambda u, slope: 1e-3 * slope * u)  # far away it still is a line
    assert stays(lambda u, slope: np.clip(1e-3 * u, -0.01, 0.01))  # with other examples it is the same line
    assert stays(
        lambda u, slope: slope * u + 1e-5 * draw.standard_normal(u.shape)
    )  # a smooth function would bend
    broken = np.zeros((0, 0))
    assert stands(describe_code, value, 1 + 1e-3 * value, lambda: broken, lambda s: (s * value, broken))


@pytest.mark.parametrize(
    "name", [pytest.param("a weak temperature of 1", marks=pytest.mark.slow), "a weak temperature of 3"]
)
def test_a_loss_that_slopes_is_no_leak(name: str) -> None:
    assert audit(*HARMLESS[name](), rounds=1).leaks == ()
    assert prove(*HARMLESS[name]()).ok


@pytest.mark.parametrize(
    "name", ["loss: only weakly", pytest.param("loss: only weakly, of all", marks=pytest.mark.slow)]
)
def test_a_weak_code_in_a_loss_is_caught(name: str) -> None:
    assert [one.leaves for one in audit(*LEAKY[name](), rounds=1).leaks] == ["loss"]


SOME_BITS = ("one opted-out text more", "the longest opted-out text, of as many")


@pytest.mark.parametrize(
    "bit", [bit if bit in SOME_BITS else pytest.param(bit, marks=pytest.mark.slow) for bit in BITS_OF_COUNTS]
)
def test_numbers_and_lengths_of_opted_out_texts_are_changed_apart(bit: str) -> None:
    proof = prove(*LEAKY[bit]())
    assert [one.leaves for one in proof.items if one.falsifier == OPT_OUT_CHANGES] == ["loss"]
    assert not proof.ok


@pytest.mark.parametrize(
    "bit",
    ["one opted-out text more", pytest.param("two opted-out texts of one length", marks=pytest.mark.slow)],
)
def test_opted_out_texts_are_drawn_anew_in_an_audit(bit: str) -> None:
    assert {one.leaves for one in audit(*LEAKY[bit](), rounds=1).leaks} == {"loss"}


def test_drawn_anew_keeps_clients_and_partitions() -> None:
    data = LEAKY["one opted-out text more"]().data
    rows = opted_out(data)
    *others, none = resampled(data, rows, 0)
    assert not len(opted_out(none))
    for more, other in zip(MORE, others, strict=True):
        assert (other.counts("train") == data.counts("train") + more).all()
        assert (out_counts(other) == out_counts(data) + more).all()
        assert (other.counts("test") == data.counts("test")).all()
        for client in range(len(data)):
            assert set(lengths(other, client)) <= set(lengths(data, client))


def lengths(data: FederatedData, client: int) -> list[int]:
    """Return how long a client's opted-out texts are."""
    text = data.columns["text"]
    assert isinstance(text, Ragged)
    return [len(text[row]) for row in opted_out(data, client)]


def test_draws_stop_only_where_none_to_come_can_make_a_finding() -> None:
    rng = np.random.default_rng(0)
    stopped = 0
    for trial in range(60):
        values = rng.standard_normal((12, 3)) * (1, 10, 100)
        values[-2:] *= (1, 1000)[trial % 2]  # of which the last draws may draw a line
        first, order = values[:, :1], np.argsort(values[:, 0])
        lefts = [rng.standard_normal((12, 2)), first + 0.01 * rng.standard_normal((12, 1)), np.cbrt(first)]
        for steps in range(
            3, 8
        ):  # of eleven: that only grow, from one value to the next but in so many places
            left = np.zeros((12, 1))
            left[order[1:], 0] = np.cumsum(rng.permutation(11) < steps)
            lefts.append(left)
        known = np.concatenate([values, statistics(values)], 1)
        for left in lefts:
            if all(may_carry(known, left[:some]) for some in range(4, 12)):
                continue
            stopped += 1
            assert not describe_code(values, left)
            assert not describe_code(values, left, singly=True)
            assert not describe_copy(values, values.sum(1, keepdims=True), left)
    assert stopped > 60


def test_a_gradient_may_follow_a_value_and_not_be_it() -> None:
    assert carries_exactly(VALUES, 1 - 3 * VALUES[:, 1:2])
    assert not carries_exactly(VALUES, VALUES[:, 1:2] + 1e-3 * VALUES[:, :1])


def test_a_single_value_may_move_a_loss_as_it_likes() -> None:
    assert describe_code(VALUES[:, :1], (VALUES[:, :1] - 9) ** 2) == ""
    assert describe_code(VALUES[:, :1], 3 * VALUES[:, :1])


def test_what_is_made_singly() -> None:
    one, mean = np.eye(3, dtype=bool), np.ones((3, 3), bool)
    assert made_singly(list(one))
    assert not made_singly(list(mean))
    assert not made_singly([])
