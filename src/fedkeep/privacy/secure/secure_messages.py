"""What the two sides of a secure sum send each other, and what both check.

One round, in four steps, each a message of the server and the clients' replies:

1. keys: every client sends new public keys. They may ride on the answer of the round before.
2. shares: the server sends all keys; every client sends shares of its secrets, sealed for each other client.
3. masked: the server hands the shares on, with the order to train; every client sends its masked vector.
4. revealed: the server says who has answered; each of these sends its shares that unmask the sum.

So keys ride on the previous answer, shares on the order, and step 4 goes together with step 2 of the next round: one
message more than without secure sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedkeep.core.errors import SecureSumError

LEAST = 2
"""The fewest clients whose sum may be made: of one it would be that client's own vector."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """A client's public keys of one round, 32 bytes each.

    Attributes:
        sealing: of the key that shares are sealed with (X25519).
        masking: of the key that the masks between two clients follow from (X25519).
        commitment: SHA-256 of the seed of the client's own mask, so that a wrong share of it is found.
    """

    sealing: bytes
    masking: bytes
    commitment: bytes

    def __post_init__(self) -> None:
        for name in ("sealing", "masking", "commitment"):
            value = getattr(self, name)
            if not (isinstance(value, bytes) and len(value) == 32):
                raise SecureSumError(
                    "The key {name!r} must be 32 bytes; got {got!r:.80}.",
                    name=name,
                    got=value,
                )
        if self.sealing == self.masking:
            raise SecureSumError("The keys 'sealing' and 'masking' must differ; they are the same.")

    def to_bytes(self) -> bytes:
        """Return the three keys as 96 bytes."""
        return self.sealing + self.masking + self.commitment

    @classmethod
    def from_bytes(cls, content: bytes) -> Keys:
        """Return what ``to_bytes`` wrote; SecureSumError: it is of another length."""
        return cls(sealing=content[:32], masking=content[32:64], commitment=content[64:])


@dataclass(frozen=True, kw_only=True)
class Revealed:
    """A client's shares that unmask a sum, by whose secret they are of.

    Attributes:
        seeds: of the seeds of those whose vectors are in the sum.
        keys: of the masking keys of those who dropped out. Nobody is in both.
    """

    seeds: Mapping[str, bytes]
    keys: Mapping[str, bytes]


class WrongShareError(SecureSumError):
    """Shares of a secret are not what whose secret it is should have dealt.

    Attributes:
        dealers: ids of those.
    """

    def __init__(self, text: str, /, *, dealers: Collection[str], **facts: Any) -> None:
        super().__init__(text, dealers=sorted(dealers), **facts)
        self.dealers = sorted(dealers)


def check_threshold(threshold: int, clients: Collection[str], what: str) -> None:
    """Raise SecureSumError unless there are enough clients, and the threshold is such that two sums can't be made."""
    if threshold < LEAST:
        raise SecureSumError(
            "The threshold must be at least {LEAST}: the sum of one is its vector; got {got}.",
            LEAST=LEAST,
            got=threshold,
        )
    if len(clients) < threshold:
        raise SecureSumError(
            "{what}: {clients_count} clients, and the threshold is {threshold}. A sum of fewer would say "
            "too much of each. Wait for more, or begin another round.",
            what=what,
            clients_count=len(clients),
            threshold=threshold,
        )
    if 2 * threshold <= len(clients):
        raise SecureSumError(
            "{what}: a threshold of {threshold} is not more than half of {clients_count} clients, so a "
            "server could ask two halves for the secrets of one client's both masks. Raise the threshold.",
            what=what,
            threshold=threshold,
            clients_count=len(clients),
        )


def check_new_keys(keys: Mapping[str, Keys]) -> None:
    """Raise SecureSumError unless all keys of all clients differ."""
    seen: dict[bytes, str] = {}
    for client, each in keys.items():
        for key in (each.sealing, each.masking):
            if key in seen:
                raise SecureSumError(
                    "A mask key is used twice, by {seen!r} and {client!r}: their masks would show differences of "
                    "what they hide. Every client makes new keys for every round.",
                    seen=seen[key],
                    client=client,
                )
            seen[key] = client
