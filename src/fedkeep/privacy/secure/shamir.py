"""Shares of a secret, any ``threshold`` of which give it again, and fewer of which say nothing.

Source: Shamir, How to share a secret, 1979. The secret is the constant of a polynomial of degree threshold − 1 whose
other coefficients are random; shares are its values at different places.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

from fedkeep.core.errors import SecureSumError

PRIME = 2**521 - 1
SHARE = 66
"""Bytes of a share."""
LONGEST = 64
"""Bytes of a secret, at most."""


def split(secret: bytes, threshold: int, places: Sequence[int]) -> list[bytes]:
    """Return a share for each place.

    Args:
        secret: at most 64 bytes.
        threshold: how many shares give it again.
        places: different numbers above 0.

    Raises:
        SecureSumError: the secret is too long, a place is 0 or comes twice, or there are fewer than the threshold.
    """
    if len(secret) > LONGEST or len(set(places)) < len(places) or not all(0 < p < PRIME for p in places):
        raise SecureSumError(
            "Shares want a secret of at most {LONGEST} bytes and different places above 0.",
            LONGEST=LONGEST,
        )
    if not 1 <= threshold <= len(places):
        raise SecureSumError(
            "{places_count} shares cannot have a threshold of {threshold}.",
            places_count=len(places),
            threshold=threshold,
        )
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = []
    for place in places:
        value = 0
        for coefficient in (*coefficients, int.from_bytes(secret, "big")):
            value = (value * place + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE, "big"))
    return shares


def join(shares: Mapping[int, bytes], length: int) -> bytes:
    """Return the secret of this many bytes that shares by place give, as many as the threshold.

    Raises:
        SecureSumError: they are no shares of one secret of this length, e.g. fewer than the threshold.
    """
    return weighted(zip(weights(tuple(shares)), shares.values(), strict=True), length)


def weighted(shares: Iterable[tuple[int, bytes]], length: int) -> bytes:
    """Return the secret of shares beside the ``weights`` of their places; as for ``join``."""
    total = sum(weight * int.from_bytes(share, "big") for weight, share in shares) % PRIME
    if total >= 256**length:
        raise SecureSumError("Shares of a secret do not fit together: one is wrong, or there are too few.")
    return total.to_bytes(length, "big")


def weights(places: tuple[int, ...]) -> list[int]:
    """Return what each place's value counts for the constant: Π p_j / (p_j − p_i) over the others."""
    found = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found
