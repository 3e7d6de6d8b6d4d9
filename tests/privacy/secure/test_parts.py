"""The parts of secure sums: shares by hand, fixed-point numbers, masks."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, SecureSumError
from fedkeep.privacy.secure import crypto, shamir
from fedkeep.privacy.secure.ring import FixedPoint
from tests.refusals import raises

SECRET = bytes(range(32))


def test_any_three_of_five_shares_give_the_secret_and_two_do_not() -> None:
    shares = dict(zip((1, 2, 3, 4, 9), shamir.split(SECRET, 3, (1, 2, 3, 4, 9)), strict=True))
    for places in itertools.combinations(shares, 3):
        assert shamir.join({p: shares[p] for p in places}, 32) == SECRET
    assert shamir.join(shares, 32) == SECRET
    assert shamir.join({2: shamir.split(SECRET, 1, (1, 2))[1]}, 32) == SECRET  # of one, each is enough
    for places in itertools.combinations(shares, 2):
        with pytest.raises(SecureSumError, match="one is wrong, or there are too few"):
            shamir.join({p: shares[p] for p in places}, 32)


def test_shares_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 + 5 x + 2 x² at 1, 2 and 3: 14, 25 and 40; weights for the constant: 3, −3 and 1."""
    drawn = iter([2, 5])
    monkeypatch.setattr("secrets.randbelow", lambda prime: next(drawn))
    shares = shamir.split(bytes([7]), 3, (1, 2, 3))
    assert [int.from_bytes(share, "big") for share in shares] == [14, 25, 40]
    assert shamir.weights((1, 2, 3)) == [3, shamir.PRIME - 3, 1]
    assert shamir.join({1: shares[0], 2: shares[1], 3: shares[2]}, 1) == bytes([7])


def test_shares_of_one_secret_are_new_each_time() -> None:
    assert shamir.split(SECRET, 2, (1, 2)) != shamir.split(SECRET, 2, (1, 2))


@pytest.mark.parametrize(
    ("threshold", "places"), [(3, (1, 2)), (0, (1, 2)), (2, (0, 1)), (2, (1, 1)), (2, (1, -1))]
)
def test_shares_that_make_no_sense_are_refused(threshold: int, places: tuple[int, ...]) -> None:
    with pytest.raises(SecureSumError):
        shamir.split(SECRET, threshold, places)
    with pytest.raises(SecureSumError, match="at most 64 bytes"):
        shamir.split(bytes(65), 1, (1,))


@pytest.mark.parametrize("bits", [32, 64])
def test_sums_are_exact_to_the_step_and_never_wrap(bits: Any) -> None:
    ring = FixedPoint(bound=0.3, clients=7, bits=bits)
    assert 7 * (0.3 / ring.step + 0.5) <= 2 ** (bits - 1) - 1 < 7 * (0.3 / (ring.step / 2) + 0.5)
    rows = np.random.default_rng(0).uniform(-0.3, 0.3, (7, 1000))
    rows[:, 0], rows[:, 1] = 0.3, -0.3  # the largest sums
    total = np.sum([ring.encode(row) for row in rows], axis=0, dtype=ring.dtype)
    exact = [
        sum(int(np.rint(x / ring.step)) for x in column) for column in rows.T
    ]  # whole numbers without an end
    assert [int(x) for x in total] == [x % 2**bits for x in exact]
    assert ring.decode(total).tolist() == [float(x) * ring.step for x in exact]
    for x, column in zip(exact, rows.T, strict=True):
        assert abs(x * Fraction(ring.step) - sum(map(Fraction, column))) <= 7 * Fraction(ring.step) / 2


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 1000])
@pytest.mark.parametrize("bound", [1.0, 0.5, 0.3, 1.0 + 2**-52, 1.0 - 2**-53, 3e-12])
@pytest.mark.parametrize("bits", [32, 64])
def test_the_largest_sums_never_wrap(bits: Any, bound: float, clients: int) -> None:
    """Also where the bound is a power of two: as doubles, 2^63 − 1 and 2^63 are one number."""
    ring = FixedPoint(bound=bound, clients=clients, bits=bits)
    step, most = Fraction(ring.step), 2 ** (bits - 1) - 1
    assert clients * (Fraction(bound) / step + Fraction(1, 2)) <= most
    assert clients * (Fraction(bound) / (step / 2) + Fraction(1, 2)) > most
    total = clients * ring.encode(np.array([bound, -bound])).astype(object)
    assert ring.decode((total % 2**bits).astype(ring.dtype)) == pytest.approx(
        clients * np.array([bound, -bound])
    )


def test_rounding_up_never_makes_a_sum_wrap() -> None:
    """13 numbers of 165,191,049.6 steps are 13 · 165,191,050 = 2^31 + 2 when rounded; half the precision is room."""
    bound = 165191049.6 * 2.0**-20
    ring = FixedPoint(bound=bound, clients=13)
    assert ring.step == 2.0**-19
    total = 13 * int(ring.encode(np.array([bound]))[0])
    assert total <= 2**31 - 1 < 13 * round(bound * 2**20)


def test_fixed_point_by_hand() -> None:
    """3 clients of at most 1: step 2^-29, as 3 · (2^29 + ½) ≤ 2^31 − 1 < 3 · (2^30 + ½)."""
    ring = FixedPoint(bound=1.0, clients=3)
    assert ring.step == 2.0**-29
    assert ring.encode(np.array([0.5, -(2.0**-29), 0.25 * 2.0**-29])).tolist() == [2**28, 2**32 - 1, 0]


@pytest.mark.parametrize("value", [1.0001, -1.0001, np.nan, np.inf, -np.inf, 1e300])
def test_a_value_out_of_range_is_refused_neither_wrapped_nor_cut(value: float) -> None:
    ring = FixedPoint(bound=1.0, clients=3)
    with pytest.raises(SecureSumError, match="numbers of at most 1 in size; number 1 is "):
        ring.encode(np.array([1.0, value, -1.0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 16}, "bits must be 32 or 64; got 16."),
        ({"bound": 0.0}, "bound must be positive; got 0.0."),
        ({"bound": np.inf}, "bound must be finite; got inf."),
        ({"clients": 0}, "clients must be in [1, 1073741824); got 0."),
    ],
)
def test_rings_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    with raises(ConfigError, text=message):
        FixedPoint(**{"bound": 1.0, "clients": 2, **options})


def test_a_mask_is_chacha20_and_two_clients_agree_on_it() -> None:
    one, other = crypto.new_key(), crypto.new_key()
    here = crypto.agreed(one, crypto.public(other), "p")
    assert here == crypto.agreed(other, crypto.public(one), "p")
    assert here != crypto.agreed(other, crypto.public(one), "q")
    assert crypto.public(crypto.key_from(one.private_bytes_raw())) == crypto.public(one)
    # RFC 8439, A.1, test vector 1: a key of zeros, the first block
    first, *some = (np.zeros(size, kind) for size, kind in ((2, np.uint32), (9, np.uint64), (4, np.uint64)))
    crypto.mask(bytes(32), first, 1)
    assert first.astype("<u4").tobytes().hex() == "76b8e0ada0f13d90"
    for vector in some:
        crypto.mask(here, vector, 1)
    assert np.array_equal(some[0][:4], some[1])
    crypto.mask(here, some[0], -1)
    assert not some[0].any()


def test_a_long_mask_made_by_pieces_is_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (np.full(37, 5, np.uint32) for _ in range(2))
    crypto.mask(bytes(32), whole, 1)
    monkeypatch.setattr(crypto, "PIECE", 8)
    crypto.mask(bytes(32), parts, 1)
    assert np.array_equal(parts, whole)


def test_a_sealed_message_is_for_one_place_alone() -> None:
    box = crypto.sealed(bytes(32), b"secret", "here")
    assert crypto.opened(bytes(32), box, "here") == b"secret"
    for key, content, about in (
        (bytes(31) + b"1", box, "here"),
        (bytes(32), box, "there"),
        (bytes(32), b"", "here"),
    ):
        with pytest.raises(SecureSumError, match="was changed on its way"):
            crypto.opened(key, content, about)
