"""Secure sums against who cheats: crafted shares, keys that come twice, what one round gave sent in another."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedkeep.core.errors import SecureSumError
from fedkeep.privacy.secure import crypto, shamir
from fedkeep.privacy.secure.secure_client import SecureClient, pair_key
from fedkeep.privacy.secure.secure_messages import Revealed, WrongShareError
from fedkeep.privacy.secure.secure_server import SecureServer, Spent
from tests.privacy.secure.test_secure_sum import NAMES, RING, Round


@pytest.mark.parametrize("kind", ["seeds", "keys"])
def test_a_share_that_is_bent_to_give_another_secret_is_found_and_left_out(kind: str) -> None:
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
    assert np.array_equal(made.server.total(), made.wanted)
    assert made.server.wrong == {"c4": [whose]}


@pytest.mark.parametrize(
    ("liars", "noticed"), [("2", "2"), ("7", "7"), ("25", "25"), ("28", "28"), ("89", ""), ("9", "")]
)
def test_the_sum_is_made_without_those_who_reveal_wrong_shares_as_long_as_enough_are_left(
    liars: str, noticed: str
) -> None:
    """Clients 8 and 9 are looked at only where the six before them do not give the secrets."""
    made = _lied_to(Round(lost=2).masked(), [f"c{k}" for k in liars])
    assert np.array_equal(made.server.total(), made.wanted)
    wrong = {liar: set(whose) for liar, whose in made.server.wrong.items()}
    assert wrong == {f"c{k}": set(NAMES) for k in noticed}


def test_with_too_few_honest_ones_there_is_no_sum_and_nobody_is_blamed() -> None:
    made = _lied_to(Round(lost=2).masked(), ["c2", "c3", "c4"])
    with pytest.raises(WrongShareError, match="8 clients revealed do not give the secrets of 10") as error:
        made.server.total()
    assert error.value.dealers == []
    with pytest.raises(WrongShareError) as error:
        _lied_to(Round(lost=4).masked(), ["c5"], ["c7"]).server.total()
    assert error.value.dealers == [], "of six all are needed, so it may be who revealed as well as who dealt"


def test_who_deals_wrong_shares_is_named() -> None:
    made = Round()
    for name in NAMES:
        made.server.add_keys(name, made.clients[name].keys())
    keys = made.server.keys()
    dealer = made.clients["c3"]
    for name in NAMES:
        shares = made.clients[name].shares(keys)
        if name == "c3":
            for other in shares:
                key = dealer._sealing_key(other, "c3", other)
                shares[other] = crypto.sealed(key, bytes(2 * shamir.SHARE), dealer._about("c3", other))
        made.server.add_shares(name, shares)
    for name in NAMES:
        vector = made.clients[name].masked(made.server.shares_for(name), made.vectors[name])
        made.server.add_masked(name, vector)
    for name in made.server.survivors():
        made.server.add_revealed(name, made.clients[name].revealed(NAMES))
    with pytest.raises(WrongShareError, match="do not give the secrets of 1, e.g. of 'c3'") as error:
        made.server.total()
    assert error.value.dealers == ["c3"]


@pytest.mark.parametrize("content", [b"short", bytes(2 * shamir.SHARE + 1)])
def test_shares_of_another_length_are_noticed_when_they_come(content: bytes) -> None:
    made = Round().shared()
    dealer, shares = made.clients["c1"], made.server.shares_for("c3")
    shares["c1"] = crypto.sealed(dealer._sealing_key("c3", "c1", "c3"), content, dealer._about("c1", "c3"))
    shares["c2"] = b""
    with pytest.raises(WrongShareError, match=r"'c3' cannot open what \['c1', 'c2'\] sealed for it") as error:
        made.clients["c3"].masked(shares, made.vectors["c3"])
    assert error.value.dealers == ["c1", "c2"]


@pytest.mark.parametrize("length", [0, 65, 67, 1_000_000])
def test_the_server_takes_no_shares_of_another_length(length: int) -> None:
    """Two that reveal a megabyte for each secret would have it work for minutes; of sealed ones no others hear."""
    made = Round()
    for name in NAMES:
        made.server.add_keys(name, made.clients[name].keys())
    shares = made.clients["c4"].shares(made.server.keys())
    with pytest.raises(SecureSumError, match=f"A share of 'c4' should be 148 bytes, is {length}"):
        made.server.add_shares("c4", {**shares, "c2": bytes(length)})
    made.server.add_shares("c4", shares)
    made = Round(lost=2).masked()
    survivors = made.server.survivors()
    for name in survivors:
        found = made.clients[name].revealed(survivors)
        for kind, whose in (("seeds", "c5"), ("keys", "c0")) if name == "c4" else ():
            wrong = dataclasses.replace(found, **{kind: {**getattr(found, kind), whose: bytes(length)}})
            with pytest.raises(SecureSumError, match=f"A share of 'c4' should be 66 bytes, is {length}"):
                made.server.add_revealed(name, wrong)
        made.server.add_revealed(name, found)
    assert np.array_equal(made.server.total(), made.wanted)


@pytest.mark.parametrize("place", ["sealing", "masking"])
def test_a_key_that_nobody_can_agree_with_is_refused_before_others_get_it(place: str) -> None:
    server, keys = SecureServer("r", 2, 1, RING.dtype), SecureClient("a", "r", 2).keys()
    with pytest.raises(SecureSumError, match="A public key is none that can be agreed with"):
        server.add_keys("a", dataclasses.replace(keys, **{place: bytes(32)}))
    with pytest.raises(SecureSumError, match="'sealing' and 'masking' must differ"):
        dataclasses.replace(keys, sealing=keys.masking)


def _lied_to(made: Round, liars: list[str], about: list[str] = NAMES) -> Round:
    """Let clients reveal, some of them wrong shares of these."""
    survivors = made.server.survivors()
    for name in survivors:
        found = made.clients[name].revealed(survivors)
        if name in liars:
            found = Revealed(
                seeds={n: bytes(66) if n in about else share for n, share in found.seeds.items()},
                keys={n: bytes(66) if n in about else share for n, share in found.keys.items()},
            )
        made.server.add_revealed(name, found)
    return made


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
    with pytest.raises(SecureSumError, match="'a' sent a key of an earlier round"):
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
