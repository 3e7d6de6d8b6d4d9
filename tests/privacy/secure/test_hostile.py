"""Secure sums against who cheats: crafted shares, keys that come twice, what one round gave sent in another."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedkeep.core.errors import SecureSumError
from fedkeep.privacy.secure import SecureClient, SecureServer, Spent, shamir
from fedkeep.privacy.secure.client import pair_key
from tests.privacy.secure.test_secure_sum import NAMES, RING, Round


@pytest.mark.parametrize(("kind", "what"), [("seeds", "seed"), ("keys", "key")])
def test_a_share_that_is_bent_to_give_another_secret_is_found(kind: str, what: str) -> None:
    """One client knows all places, so it can move the secret by any number; of the other one's mask all is wrong."""
    made = Round(lost=2).masked()
    survivors, whose = made.server.survivors(), "c0" if kind == "keys" else "c5"
    helpers = survivors[: made.server.threshold]
    cheat = helpers.index("c4")
    weight = shamir.weights(tuple(NAMES.index(name) + 1 for name in helpers))[cheat]
    move = 2**100 * pow(weight, -1, shamir.PRIME)  # the secret becomes itself + 2^100
    for name in survivors:
        found = made.clients[name].revealed(survivors)
        if name == "c4":
            shares = getattr(found, kind)
            bent = (int.from_bytes(shares[whose], "big") + move) % shamir.PRIME
            bent_shares = {**shares, whose: bent.to_bytes(shamir.SHARE, "big")}
            found = dataclasses.replace(found, **{kind: bent_shares})
        made.server.add_revealed(name, found)
    with pytest.raises(
        SecureSumError,
        match=f"^The shares of the {what} of '{whose}' give another one: somebody sent a wrong",
    ):
        made.server.total()


@pytest.mark.parametrize(
    ("place", "taken"), [("sealing", "sealing"), ("sealing", "masking"), ("masking", "sealing")]
)
def test_no_key_of_a_client_is_another_ones_whatever_it_is_for(place: str, taken: str) -> None:
    made = Round()
    keys = {name: client.keys() for name, client in made.clients.items()}
    keys["c4"] = dataclasses.replace(keys["c4"], **{place: getattr(keys["c2"], taken)})
    with pytest.raises(SecureSumError, match="A mask key is used twice, by 'c2' and 'c4'"):
        made.clients["c0"].shares(keys)


@pytest.mark.parametrize("place", ["sealing", "masking"])
def test_neither_key_of_an_earlier_round_is_taken_again(place: str) -> None:
    spent, old, new = Spent(), SecureClient("a", "1", 2).keys(), SecureClient("a", "2", 2).keys()
    SecureServer("1", 2, 1, RING.dtype, spent).add_keys("a", old)
    again = dataclasses.replace(new, **{place: getattr(old, place)})
    with pytest.raises(SecureSumError, match="A mask key is used twice: 'a' sent a key of an earlier round"):
        SecureServer("2", 2, 1, RING.dtype, spent).add_keys("a", again)


def test_what_was_sealed_for_one_round_opens_in_no_other() -> None:
    made = Round().shared()
    shares = made.server.shares_for("c3")
    other = SecureClient.from_plain({**made.clients["c3"].to_plain(), "round": "another"})
    with pytest.raises(SecureSumError, match="was changed on its way"):
        other.masked(shares, made.vectors["c3"])


def test_the_mask_of_two_clients_is_of_one_round_alone() -> None:
    made = Round()
    one, other = made.clients["c1"], made.clients["c2"]

    def key(round: str) -> bytes:
        return pair_key(one._masking, other.keys().masking, round, "c1", "c2")

    assert key("r") == pair_key(other._masking, one.keys().masking, "r", "c2", "c1")
    assert key("r") != key("s")


def test_a_vector_whose_secrets_are_not_all_revealed_is_not_unmasked() -> None:
    """Who dropped out after sharing has a key that must be given, or its pair masks stay in the sum."""
    made = Round(lost=2).masked()
    survivors = made.server.survivors()
    found = made.clients["c4"].revealed(survivors)
    for wrong in (
        dataclasses.replace(found, keys={"c0": found.keys["c0"]}),
        dataclasses.replace(found, keys={**found.keys, "c5": found.keys["c0"]}),
        dataclasses.replace(found, seeds={n: s for n, s in found.seeds.items() if n != "c9"}),
    ):
        with pytest.raises(
            SecureSumError, match="'c4' must reveal seeds of the 8 in the sum and keys of the"
        ):
            made.server.add_revealed("c4", wrong)
    for name in survivors:
        made.server.add_revealed(name, found if name == "c4" else made.clients[name].revealed(survivors))
    assert np.array_equal(made.server.total(), made.wanted)
