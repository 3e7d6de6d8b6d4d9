"""The server's side of one secure sum."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np

from fedkeep.core.errors import SecureSumError
from fedkeep.privacy.secure import crypto, shamir
from fedkeep.privacy.secure.secure_client import SECRET, pair_key
from fedkeep.privacy.secure.secure_messages import (
    LEAST,
    Keys,
    Revealed,
    WrongShareError,
    check_new_keys,
    check_threshold,
)

TRIES = 200
"""Choices of clients whose shares are tried, at most, where some are wrong."""
_Secret = tuple[Literal["seeds", "keys"], str]
"""A client's seed, or its masking key."""


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
                "A mask key is used twice: {client!r} sent a key of an earlier round, so two of its vectors "
                "would have the same mask. Every client makes new keys for every round.",
                client=client,
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

    Attributes:
        wrong: once there is a total, who has revealed wrong shares of whose secrets, as far as it was looked: the
            shares of as many clients as the threshold are enough.
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
        self.wrong: dict[str, list[str]] = {}
        self._step = "keys"

    def add_keys(self, client: str, keys: Keys) -> None:
        """Take a client's keys, step 1; SecureSumError: it has sent some already, or one was used before or is none."""
        self._expect("keys", client, client not in self._keys)
        for key in (keys.sealing, keys.masking):
            crypto.agreed(crypto.new_key(), key, "")  # else the others could not
        self.spent.spend(client, keys)
        self._keys[client] = keys

    def keys(self) -> dict[str, Keys]:
        """Return all keys, for every client; none is taken afterwards."""
        check_threshold(self.threshold, self._keys, "The server has keys")
        check_new_keys(self._keys)
        self._step = "shares"
        return dict(sorted(self._keys.items()))

    def add_shares(self, client: str, shares: Mapping[str, bytes]) -> None:
        """Take a client's sealed shares, step 2; SecureSumError: not one for each other client, or one is none."""
        self._expect("shares", client, client in self._keys and client not in self._boxes)
        if set(shares) != set(self._keys) - {client}:
            raise SecureSumError(
                "{client!r} must send a share for each other client; it sent {shares_count}.",
                client=client,
                shares_count=len(shares),
            )
        _check_lengths(client, shares.values(), 2 * shamir.SHARE + crypto.SEAL)
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
                "The masked vector of {client!r} should be ({size},) {dtype}, is {shape} {dtype_2}.",
                client=client,
                size=self.size,
                dtype=self._total.dtype,
                shape=vector.shape,
                dtype_2=vector.dtype,
            )
        self._total += vector
        self._in.add(client)

    def survivors(self) -> list[str]:
        """Return whose vectors are in the sum, for these; none is taken afterwards."""
        check_threshold(self.threshold, self._in, "The server has vectors")
        self._step = "revealed"
        return sorted(self._in)

    def add_revealed(self, client: str, shares: Revealed) -> None:
        """Take a client's shares, step 4; SecureSumError: not one of each that was asked for, or one is none."""
        self._expect("revealed", client, client in self._in and client not in self._revealed)
        lost = set(self._boxes) - self._in
        if set(shares.seeds) != self._in or set(shares.keys) != lost:
            raise SecureSumError(
                "{client!r} must reveal seeds of the {there} in the sum and keys of the {lost_count} "
                "others; it revealed {seeds_count} and {keys_count}.",
                client=client,
                there=len(self._in),
                lost_count=len(lost),
                seeds_count=len(shares.seeds),
                keys_count=len(shares.keys),
            )
        _check_lengths(client, (*shares.seeds.values(), *shares.keys.values()), shamir.SHARE)
        self._revealed[client] = shares

    def total(self) -> np.ndarray:
        """Return the sum of the vectors of ``survivors``, in the ring; the server has it no more.

        Raises:
            WrongShareError: of some secrets, or of all, no shares were found that give them.
            SecureSumError: fewer than the threshold have revealed their shares.
        """
        self._expect("revealed", "the server", True)
        check_threshold(self.threshold, self._revealed, "The server has shares that unmask")
        secrets, total = self._secrets(), self._total
        self._step, self._total = "done", self._total[:0]
        for (kind, name), secret in secrets.items():
            if kind == "seeds":
                crypto.mask(secret, total, -1)
                continue
            key = crypto.key_from(secret)
            for other in sorted(self._in):
                own = pair_key(key, self._keys[other].masking, self.round, name, other)
                crypto.mask(
                    own, total, -1 if other < name else 1
                )  # the survivor has added it, or taken it off
        return total

    def _secrets(self) -> dict[_Secret, bytes]:
        """Return the secrets that unmask the sum, as clients have committed to them; note who sent wrong shares."""
        missing: list[_Secret] = [("seeds", name) for name in sorted(self._in)]
        missing += [("keys", name) for name in sorted(set(self._boxes) - self._in)]
        found, by_choice = dict[_Secret, bytes](), list[tuple[Sequence[str], list[_Secret]]]()
        for helpers in islice(self._choices(), TRIES):
            joined = self._joined(helpers, missing)
            right = [one for one in missing if self._fits(one, joined[one])]
            found |= {one: joined[one] for one in right}
            by_choice.append((helpers, right))
            missing = [one for one in missing if one not in found]
            if not missing:
                break
        if missing:
            raise WrongShareError(
                "The shares that {revealed} clients revealed do not give the secrets of {count}, "
                "e.g. of {client!r}: who dealt them dealt wrong ones, or too many revealed wrong ones.",
                dealers={name for _, name in missing}
                if found and len(self._revealed) > self.threshold
                else (),
                revealed=len(self._revealed),
                count=len(missing),
                client=missing[0][1],
            )
        if len(by_choice) > 1:
            self._compare(by_choice, found)
        return found

    def _choices(self) -> Iterator[Sequence[str]]:
        """Yield choices of as many helpers as the threshold: each is left out in turn, then so in other orders."""
        names, mixed = sorted(self._revealed), np.random.default_rng(0)
        spare = len(names) - self.threshold
        while True:
            for first in range(0, len(names), spare or len(names)):
                yield (names + names)[first : first + self.threshold]
            if not spare:
                return
            mixed.shuffle(names)

    def _compare(
        self, by_choice: Sequence[tuple[Sequence[str], Sequence[_Secret]]], found: Mapping[_Secret, bytes]
    ) -> None:
        """Note whose shares give other secrets than were found, in the place of one that was right."""
        for helpers, right in by_choice:
            for other in sorted(set(self._revealed) - set(helpers)) if right else ():
                joined = self._joined([other, *helpers[1:]], right)
                if wrong := [name for (kind, name) in right if joined[kind, name] != found[kind, name]]:
                    self.wrong.setdefault(other, []).extend(wrong)

    def _joined(self, helpers: Sequence[str], wanted: Sequence[_Secret]) -> dict[_Secret, bytes]:
        """Return what the helpers' shares of secrets give; nothing, where it is of another length."""
        places = {name: k for k, name in enumerate(sorted(self._keys), 1)}
        weights, joined = shamir.weights(tuple(places[h] for h in helpers)), dict[_Secret, bytes]()
        for kind, name in wanted:
            shares = (getattr(self._revealed[h], kind)[name] for h in helpers)
            try:
                joined[kind, name] = shamir.weighted(zip(weights, shares, strict=True), SECRET)
            except SecureSumError:
                joined[kind, name] = b""
        return joined

    def _fits(self, one: _Secret, secret: bytes) -> bool:
        """Return whether a secret is the one that its client has committed to."""
        kind, keys = one[0], self._keys[one[1]]
        if kind == "seeds":
            return hashlib.sha256(secret).digest() == keys.commitment
        return bool(secret) and crypto.public(crypto.key_from(secret)) == keys.masking

    def _expect(self, step: str, client: str, right: bool) -> None:
        if self._step != step or not right:
            raise SecureSumError(
                "{step!r} of {client!r} came at the step {now!r}, a second time, or of somebody who takes "
                "no part. Each client sends each message once.",
                step=step,
                client=client,
                now=self._step,
            )


def _check_lengths(client: str, shares: Iterable[bytes], wanted: int) -> None:
    """Raise SecureSumError at a share of another length; to join long ones takes long."""
    if wrong := [share for share in shares if len(share) != wanted]:
        raise SecureSumError(
            "A share of {client!r} should be {wanted} bytes, is {wrong_count}.",
            client=client,
            wanted=wanted,
            wrong_count=len(wrong[0]),
        )


def threshold_for(count: int, share: float) -> int:
    """Return the threshold for so many clients: a share of them, rounded up, more than half, and at least two."""
    return max(math.ceil(share * count), count // 2 + 1, LEAST)
