"""A client's side of one secure sum."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from fedkeep.core.errors import SecureSumError
from fedkeep.privacy.secure import crypto, shamir
from fedkeep.privacy.secure.secure_messages import (
    Keys,
    Revealed,
    WrongShareError,
    check_new_keys,
    check_threshold,
)

SECRET = 32


class SecureClient:
    """What a client does in one round; its methods are called once each, in order, and refuse anything else.

    Its vector gets a mask of its own, and one with each other client, which the other takes off. The secrets of both
    are shared among all, and the client gives away shares of one kind of secret for each other client, never of both:
    of the own mask's seed, where that client's vector is in the sum, or of its masking key, where it dropped out.

    Args:
        name: the client's id.
        round: what the sum is of, e.g. the run's id and the round's number; masks are bound to it.
        threshold: how many clients must be there at every step; more than half of those that begin.
    """

    def __init__(self, name: str, round: str, threshold: int) -> None:
        self.name, self.round, self.threshold = name, round, threshold
        self._sealing, self._masking = crypto.new_key(), crypto.new_key()
        self._seed = os.urandom(SECRET)
        self._keys: dict[str, Keys] = {}
        self._own: bytes = b""
        self._held: dict[str, bytes] = {}
        self._step = "keys"

    def keys(self) -> Keys:
        """Return the public keys, step 1; the same at every call."""
        return Keys(
            sealing=crypto.public(self._sealing),
            masking=crypto.public(self._masking),
            commitment=hashlib.sha256(self._seed).digest(),
        )

    def shares(self, keys: Mapping[str, Keys]) -> dict[str, bytes]:
        """Return shares of this client's secrets, sealed for each other client, step 2.

        Args:
            keys: of all who begin, this client among them.

        Raises:
            SecureSumError: there are too few, a key comes twice, or this client's are not its own.
        """
        self._move("keys", "shares")
        check_threshold(self.threshold, keys, f"{self.name!r} was asked for shares")
        check_new_keys(keys)
        if keys.get(self.name) != self.keys():
            raise SecureSumError(
                "The keys of {name!r} that came back are not its own.",
                name=self.name,
            )
        self._keys = dict(sorted(keys.items()))
        places = range(1, len(keys) + 1)
        secrets = (self._masking.private_bytes_raw(), self._seed)
        halves = zip(*(shamir.split(secret, self.threshold, places) for secret in secrets), strict=True)
        made = {name: key + seed for name, (key, seed) in zip(self._keys, halves, strict=True)}
        self._own = made.pop(self.name)
        return {
            to: crypto.sealed(self._sealing_key(to, self.name, to), pair, self._about(self.name, to))
            for to, pair in made.items()
        }

    def masked(self, shares: Mapping[str, bytes], values: np.ndarray) -> np.ndarray:
        """Return the masked vector, step 3.

        Args:
            shares: by sender, what others sealed for this client. Who sent none dropped out already.
            values: the vector as whole numbers of a ring, see ``FixedPoint``.

        Raises:
            WrongShareError: shares can't be opened: they were changed, or sealed wrongly.
            SecureSumError: there are too few; or it is called again: a mask key used twice.
        """
        self._move("shares", "masked")
        check_threshold(self.threshold, {*shares, self.name}, f"{self.name!r} was asked for its vector")
        if unknown := sorted(set(shares) - (set(self._keys) - {self.name})):
            raise SecureSumError(
                "{name!r} got shares of {unknown!r}, who has sent no keys.",
                name=self.name,
                unknown=unknown[0],
            )
        opened = {sender: self._opened(sender, content) for sender, content in shares.items()}
        if wrong := [sender for sender, pair in opened.items() if len(pair) != 2 * shamir.SHARE]:
            raise WrongShareError(
                "{name!r} cannot open what {dealers} sealed for it: it was changed on its way, or sealed wrongly.",
                name=self.name,
                dealers=wrong,
            )
        self._held = {**opened, self.name: self._own}
        total = values.copy()
        crypto.mask(self._seed, total, 1)
        for other in sorted(shares):
            key = pair_key(self._masking, self._keys[other].masking, self.round, self.name, other)
            crypto.mask(key, total, 1 if self.name < other else -1)
        return total

    def revealed(self, survivors: Collection[str]) -> Revealed:
        """Return the shares that unmask the sum, step 4.

        Args:
            survivors: whose vectors are in the sum, this client among them.

        Raises:
            SecureSumError: there are too few, or somebody is among them who sent no shares; or it is called again:
                a second list could give away both secrets of a client.
        """
        self._move("masked", "revealed")
        check_threshold(self.threshold, survivors, f"{self.name!r} was asked to unmask")
        if self.name not in survivors or set(survivors) - set(self._held):
            raise SecureSumError(
                "{name!r} was asked to unmask a sum that it is not in, or that clients are in whose shares "
                "it does not hold: {survivors}.",
                name=self.name,
                survivors=sorted(set(survivors) - set(self._held)),
            )
        return Revealed(
            seeds={name: self._held[name][shamir.SHARE :] for name in survivors},
            keys={n: pair[: shamir.SHARE] for n, pair in self._held.items() if n not in survivors},
        )

    def to_plain(self) -> dict[str, Any]:
        """Return all its secrets as plain values, for a device whose process ends between two steps."""
        return {
            "name": self.name,
            "round": self.round,
            "threshold": self.threshold,
            "step": self._step,
            "sealing": self._sealing.private_bytes_raw().hex(),
            "masking": self._masking.private_bytes_raw().hex(),
            "seed": self._seed.hex(),
            "own": self._own.hex(),
            "held": {name: pair.hex() for name, pair in self._held.items()},
            "keys": {name: keys.to_bytes().hex() for name, keys in self._keys.items()},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SecureClient:
        """Return the client that ``to_plain`` wrote, at the step where it was."""
        one = cls(plain["name"], plain["round"], plain["threshold"])
        one._sealing, one._masking = (
            crypto.key_from(bytes.fromhex(plain[key])) for key in ("sealing", "masking")
        )
        one._seed, one._own, one._step = (
            bytes.fromhex(plain["seed"]),
            bytes.fromhex(plain["own"]),
            plain["step"],
        )
        one._held = {name: bytes.fromhex(pair) for name, pair in plain["held"].items()}
        one._keys = {name: Keys.from_bytes(bytes.fromhex(keys)) for name, keys in plain["keys"].items()}
        return one

    def _move(self, wanted: str, to: str) -> None:
        if self._step != wanted:
            twice = " A mask key used twice would show what it hides." if to == "masked" else ""
            raise SecureSumError(
                "{name!r} was asked for {to!r} after {step!r}; wanted once, after {wanted!r}.{twice} Begin "
                "another round with new keys.",
                name=self.name,
                to=to,
                step=self._step,
                wanted=wanted,
                twice=twice,
            )
        self._step = to

    def _opened(self, sender: str, content: bytes) -> bytes:
        """Return a sender's shares; nothing, where its box does not open."""
        key = self._sealing_key(sender, sender, self.name)
        try:
            return crypto.opened(key, content, self._about(sender, self.name))
        except SecureSumError:
            return b""

    def _sealing_key(self, other: str, sender: str, receiver: str) -> bytes:
        return crypto.agreed(self._sealing, self._keys[other].sealing, self._about(sender, receiver))

    def _about(self, sender: str, receiver: str) -> str:
        return f"fedkeep shares\x1f{self.round}\x1f{sender}\x1f{receiver}"


def pair_key(key: object, theirs: bytes, round: str, one: str, other: str) -> bytes:
    """Return the key of the mask between two clients, the same whichever of them asks."""
    first, second = sorted((one, other))
    return crypto.agreed(key, theirs, f"fedkeep mask\x1f{round}\x1f{first}\x1f{second}")
