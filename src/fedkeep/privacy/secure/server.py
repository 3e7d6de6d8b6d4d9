"""The server's side of one secure sum."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedkeep.core.errors import SecureSumError
from fedkeep.privacy.secure import crypto, shamir
from fedkeep.privacy.secure.client import SECRET, pair_key
from fedkeep.privacy.secure.messages import LEAST, Keys, Revealed, check_new_keys, check_threshold

WRONG = "The shares of the {} of {!r} give another one: somebody sent a wrong share."


@dataclass
class Spent:
    """The public keys of all rounds so far, as hashes; a server keeps it from round to round.

    None is ever dropped, as a key that was revealed once stays known: 100,000 clients' keys take 20 MiB of memory.
    """

    seen: set[bytes] = field(default_factory=set)

    def spend(self, client: str, keys: Keys) -> None:
        """Note keys; SecureSumError: one of them was used before."""
        hashes = {hashlib.sha256(key).digest() for key in (keys.sealing, keys.masking)}
        if hashes & self.seen:
            raise SecureSumError(
                f"A mask key is used twice: {client!r} sent a key of an earlier round, so two of its vectors would "
                f"have the same mask. Every client makes new keys for every round."
            )
        self.seen |= hashes


class SecureServer:
    """What the server does in one round. It adds masked vectors as they come, so it holds one of them and the sum.

    Args:
        round: as for ``SecureClient``.
        threshold: as for ``SecureClient``.
        size: of a vector.
        dtype: of its whole numbers, see ``FixedPoint``.
        spent: the keys of earlier rounds.
    """

    def __init__(
        self, round: str, threshold: int, size: int, dtype: np.dtype[Any], spent: Spent | None = None
    ) -> None:
        self.round, self.threshold, self.size = round, threshold, size
        self.spent = spent or Spent()
        self._keys: dict[str, Keys] = {}
        self._boxes: dict[str, dict[str, bytes]] = {}
        self._total = np.zeros(size, dtype)
        self._in: set[str] = set()
        self._revealed: dict[str, Revealed] = {}
        self._step = "keys"

    def add_keys(self, client: str, keys: Keys) -> None:
        """Take a client's keys, step 1; SecureSumError: it has sent some already, or one was used before."""
        self._expect("keys", client, client not in self._keys)
        self.spent.spend(client, keys)
        self._keys[client] = keys

    def keys(self) -> dict[str, Keys]:
        """Return all keys, for every client; none is taken afterwards."""
        check_threshold(self.threshold, self._keys, "The server has keys")
        check_new_keys(self._keys)
        self._step = "shares"
        return dict(sorted(self._keys.items()))

    def add_shares(self, client: str, shares: Mapping[str, bytes]) -> None:
        """Take a client's sealed shares, step 2; SecureSumError: not one for each other client."""
        self._expect("shares", client, client in self._keys and client not in self._boxes)
        if set(shares) != set(self._keys) - {client}:
            raise SecureSumError(
                f"{client!r} must send a share for each other client; it sent {len(shares)}."
            )
        self._boxes[client] = dict(shares)

    def shares_for(self, client: str) -> dict[str, bytes]:
        """Return what others sealed for a client, by sender; none is taken afterwards."""
        check_threshold(self.threshold, self._boxes, "The server has shares")
        self._step = "masked"
        return {sender: box[client] for sender, box in self._boxes.items() if sender != client}

    def add_masked(self, client: str, vector: np.ndarray) -> None:
        """Add a client's masked vector, step 3; SecureSumError: wrong size or type, or a second one."""
        self._expect("masked", client, client in self._boxes and client not in self._in)
        if vector.shape != (self.size,) or vector.dtype != self._total.dtype:
            raise SecureSumError(
                f"The masked vector of {client!r} should be ({self.size},) {self._total.dtype}, is {vector.shape} "
                f"{vector.dtype}."
            )
        self._total += vector
        self._in.add(client)

    def survivors(self) -> list[str]:
        """Return whose vectors are in the sum, for these; none is taken afterwards."""
        check_threshold(self.threshold, self._in, "The server has vectors")
        self._step = "revealed"
        return sorted(self._in)

    def add_revealed(self, client: str, shares: Revealed) -> None:
        """Take a client's shares, step 4; SecureSumError: not one of each that was asked for."""
        self._expect("revealed", client, client in self._in and client not in self._revealed)
        lost = set(self._boxes) - self._in
        if set(shares.seeds) != self._in or set(shares.keys) != lost:
            raise SecureSumError(
                f"{client!r} must reveal seeds of the {len(self._in)} in the sum and keys of the {len(lost)} others; "
                f"it revealed {len(shares.seeds)} and {len(shares.keys)}."
            )
        self._revealed[client] = shares

    def total(self) -> np.ndarray:
        """Return the sum of the vectors of ``survivors``, in the ring.

        Raises:
            SecureSumError: fewer than the threshold have revealed their shares, or a share is wrong.
        """
        self._expect("revealed", "the server", True)
        check_threshold(self.threshold, self._revealed, "The server has shares that unmask")
        places = {name: k for k, name in enumerate(sorted(self._keys), 1)}
        helpers = sorted(self._revealed)[: self.threshold]
        weights = dict(zip(helpers, shamir.weights(tuple(places[h] for h in helpers)), strict=True))
        total = self._total.copy()
        for name in sorted(self._in):
            seed = self._joined(weights, {h: self._revealed[h].seeds[name] for h in helpers})
            if hashlib.sha256(seed).digest() != self._keys[name].commitment:
                raise SecureSumError(WRONG.format("seed", name))
            total -= crypto.mask(seed, self.size, total.dtype)
        for name in sorted(set(self._boxes) - self._in):
            key = crypto.key_from(self._joined(weights, {h: self._revealed[h].keys[name] for h in helpers}))
            if crypto.public(key) != self._keys[name].masking:
                raise SecureSumError(WRONG.format("key", name))
            for other in sorted(self._in):
                one = crypto.mask(pair_key(key, self._keys[other].masking, self.round, name, other), self.size,
                                  total.dtype)  # fmt: skip
                if other < name:  # the survivor has added it
                    total -= one
                else:
                    total += one
        self._step = "done"
        return total

    @staticmethod
    def _joined(weights: Mapping[str, int], shares: Mapping[str, bytes]) -> bytes:
        return shamir.weighted(((weights[h], share) for h, share in shares.items()), SECRET)

    def _expect(self, step: str, client: str, right: bool) -> None:
        if self._step != step or not right:
            raise SecureSumError(
                f"{step!r} of {client!r} came at the step {self._step!r}, a second time, or of somebody who takes no "
                f"part. Each client sends each message once."
            )


def threshold_for(count: int, share: float) -> int:
    """Return the threshold for so many clients: a share of them, rounded up, more than half, and at least two."""
    return max(math.ceil(share * count), count // 2 + 1, LEAST)
