"""Secure sums of both sides: exact with drop-outs, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import SecureSumError
from fedkeep.privacy.secure.ring import FixedPoint
from fedkeep.privacy.secure.secure_client import SecureClient
from fedkeep.privacy.secure.secure_messages import Keys, Revealed
from fedkeep.privacy.secure.secure_server import SecureServer, Spent, threshold_for

RING = FixedPoint(bound=1.0, clients=10)
NAMES = [f"c{k}" for k in range(10)]
SIZE = 50


class Round:
    """A round of ten clients up to some step, and vectors for them.

    Args:
        silent: send keys and then nothing more.
        lost: send shares and then nothing more.
    """

    def __init__(
        self, silent: int = 0, lost: int = 0, threshold: int = 6, round: str = "r", names: Any = NAMES
    ) -> None:
        self.names, rng = list(names), np.random.default_rng(0)
        self.vectors = {n: RING.encode(rng.uniform(-1, 1, SIZE)) for n in self.names}
        self.clients = {n: SecureClient(n, round, threshold) for n in self.names}
        self.server = SecureServer(round, threshold, SIZE, RING.dtype)
        self.sharing, self.left = self.names[silent:], self.names[silent + lost :]

    def shared(self) -> Round:
        for name in self.names:
            self.server.add_keys(name, self.clients[name].keys())
        keys = self.server.keys()
        for name in self.sharing:
            self.server.add_shares(name, self.clients[name].shares(keys))
        return self

    def masked(self) -> Round:
        self.shared()
        for name in self.left:
            shares = self.server.shares_for(name)
            self.server.add_masked(name, self.clients[name].masked(shares, self.vectors[name]))
        return self

    def revealed(self) -> Round:
        self.masked()
        self.survivors = self.server.survivors()
        for name in self.survivors:
            self.server.add_revealed(name, self.clients[name].revealed(self.survivors))
        return self

    @property
    def wanted(self) -> np.ndarray:
        return np.sum([self.vectors[n] for n in self.left], axis=0, dtype=RING.dtype)


@pytest.mark.parametrize(("silent", "lost"), [(0, 0), (0, 3), (3, 0), (1, 2)])
@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_is_exact_whoever_drops_out(
    silent: int, lost: int, bits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.privacy.secure.test_secure_sum.RING", FixedPoint(bound=1.0, clients=10, bits=bits)
    )
    made = Round(silent, lost).revealed()
    assert made.survivors == made.left
    assert made.server.total().dtype == np.dtype(f"uint{bits}")
    made = Round(silent, lost).revealed()
    assert np.array_equal(made.server.total(), made.wanted)


def test_the_threshold_many_suffice_to_unmask() -> None:
    made = Round(lost=2).masked()
    survivors = made.server.survivors()
    for name in survivors[-6:]:
        made.server.add_revealed(name, made.clients[name].revealed(survivors))
    assert np.array_equal(made.server.total(), made.wanted)


def test_what_the_server_sees_of_a_vector_is_random() -> None:
    """The same vector of zeros, masked by 30 rounds' keys: no number of the ring is likelier, none comes twice."""
    seen = []
    for round in range(30):
        made = Round(round=str(round)).shared()
        shares = made.server.shares_for("c3")
        seen.append(made.clients["c3"].masked(shares, np.zeros(SIZE, RING.dtype)))
    values = np.concatenate(seen) / 2.0**32
    assert abs(values.mean() - 0.5) < 5 / np.sqrt(12 * len(values))
    assert abs(values.var() - 1 / 12) < 0.01
    assert len(np.unique(values)) == len(values)


def test_without_one_own_mask_the_sum_of_masked_vectors_says_nothing() -> None:
    made = Round().masked()
    added: np.ndarray = made.server._total
    assert not np.array_equal(added, made.wanted)
    assert np.mean(added == made.wanted) == 0


def test_a_mask_key_is_used_once() -> None:
    made = Round().shared()
    shares = made.server.shares_for("c3")
    made.clients["c3"].masked(shares, made.vectors["c3"])
    with pytest.raises(SecureSumError, match="A mask key used twice would show what it hides"):
        made.clients["c3"].masked(shares, made.vectors["c3"])
    spent, keys = Spent(), SecureClient("a", "r", 2).keys()
    SecureServer("1", 2, 1, RING.dtype, spent).add_keys("a", keys)
    with pytest.raises(SecureSumError, match="'a' sent a key of an earlier round"):
        SecureServer("2", 2, 1, RING.dtype, spent).add_keys("a", keys)


def test_two_clients_of_one_key_are_refused_on_both_sides() -> None:
    made = Round()
    keys = {name: client.keys() for name, client in made.clients.items()}
    keys["c4"] = dataclasses.replace(keys["c4"], masking=keys["c2"].masking)
    with pytest.raises(SecureSumError, match="A mask key is used twice, by 'c2' and 'c4'"):
        made.clients["c0"].shares(keys)
    with pytest.raises(SecureSumError, match="The keys of 'c1' that came back are not its own"):
        made.clients["c1"].shares(
            {**keys, "c4": made.clients["c4"].keys(), "c1": SecureClient("c1", "r", 6).keys()}
        )


@pytest.mark.parametrize(("silent", "lost", "step"), [(5, 0, "shared"), (0, 5, "masked"), (2, 3, "masked")])
def test_fewer_than_the_threshold_are_refused(silent: int, lost: int, step: str) -> None:
    made = getattr(Round(silent, lost), step)()
    with pytest.raises(SecureSumError, match="5 clients, and the threshold is 6"):
        made.server.shares_for("c9") if step == "shared" else made.server.survivors()


def test_clients_refuse_too_few_by_themselves() -> None:
    made = Round().shared()
    client, shares = made.clients["c3"], made.server.shares_for("c3")
    with pytest.raises(SecureSumError, match="'c3' was asked for its vector: 5 clients"):
        client.masked({n: shares[n] for n in list(shares)[:4]}, made.vectors["c3"])
    made = Round().masked()
    with pytest.raises(SecureSumError, match="'c3' was asked to unmask: 5 clients, and the threshold is 6"):
        made.clients["c3"].revealed(NAMES[:5])
    with pytest.raises(SecureSumError, match="the threshold must be|The threshold must be at least 2"):
        Round(threshold=1).shared()
    with pytest.raises(SecureSumError, match="a threshold of 5 is not more than half of 10 clients"):
        Round(threshold=5).shared()


def test_a_client_gives_away_one_secret_of_each_other_and_once() -> None:
    made = Round(lost=2).masked()
    shares = made.clients["c5"].revealed(made.left)
    assert set(shares.keys) == {"c0", "c1"}
    assert set(shares.seeds) == set(made.left)
    with pytest.raises(SecureSumError, match="'c5' was asked for 'revealed' after 'revealed'; wanted once"):
        made.clients["c5"].revealed(made.left[:-1])
    with pytest.raises(SecureSumError, match="asked to unmask a sum that it is not in"):
        made.clients["c6"].revealed([n for n in NAMES if n != "c6"])
    with pytest.raises(SecureSumError, match=r"whose shares it does not hold: \['stranger'\]"):
        made.clients["c7"].revealed([*made.left, "stranger"])


def test_shares_that_were_changed_on_their_way_are_found() -> None:
    made = Round().shared()
    shares = made.server.shares_for("c3")
    bent = {**shares, "c0": shares["c0"][:-1] + bytes([shares["c0"][-1] ^ 1])}
    with pytest.raises(SecureSumError, match="was changed on its way"):
        made.clients["c3"].masked(bent, made.vectors["c3"])
    made = Round().shared()
    shares = made.server.shares_for("c3")
    with pytest.raises(SecureSumError, match="was changed on its way"):
        made.clients["c3"].masked({**shares, "c0": shares["c1"]}, made.vectors["c3"])
    with pytest.raises(SecureSumError, match="got shares of 'stranger', who has sent no keys"):
        Round().shared().clients["c3"].masked({**shares, "stranger": b""}, made.vectors["c3"])


@pytest.mark.parametrize("kind", ["seeds", "keys"])
def test_a_wrong_share_gives_no_wrong_sum_and_is_named(kind: str) -> None:
    made = Round(lost=2).masked()
    survivors = made.server.survivors()
    for name in survivors:
        found = made.clients[name].revealed(survivors)
        if name == "c4":
            whose = "c0" if kind == "keys" else "c5"
            bent = {**getattr(found, kind), whose: bytes(65) + b"\x01"}
            found = dataclasses.replace(found, **{kind: bent})
        made.server.add_revealed(name, found)
    assert np.array_equal(made.server.total(), made.wanted)
    assert made.server.wrong == {"c4": [whose]}


def test_the_server_takes_each_message_once_and_in_its_turn() -> None:
    made = Round().shared()
    with pytest.raises(SecureSumError, match="'keys' of 'c0' came at the step 'shares'"):
        made.server.add_keys("c0", made.clients["c0"].keys())
    with pytest.raises(SecureSumError, match="'shares' of 'c0' came at the step 'shares', a second time"):
        made.server.add_shares("c0", {})
    made = Round().masked()
    with pytest.raises(SecureSumError, match="'masked' of 'c0' came at the step 'masked', a second time"):
        made.server.add_masked("c0", made.vectors["c0"])
    made = Round(lost=1).masked()
    with pytest.raises(SecureSumError, match=r"should be \(50,\) uint32, is \(3,\) uint32"):
        made.server.add_masked("c0", np.zeros(3, np.uint32))
    made.server.survivors()
    with pytest.raises(SecureSumError, match="'masked' of 'c0' came at the step 'revealed'"):
        made.server.add_masked("c0", made.vectors["c0"])
    with pytest.raises(SecureSumError, match="'c3' must reveal seeds of the 9 "):
        made.server.add_revealed("c3", Revealed(seeds={}, keys={}))
    with pytest.raises(SecureSumError, match="The server has shares that unmask: 0 clients"):
        made.server.total()


def test_a_share_for_each_other_client_is_wanted() -> None:
    made = Round()
    for name in NAMES:
        made.server.add_keys(name, made.clients[name].keys())
    shares = made.clients["c0"].shares(made.server.keys())
    with pytest.raises(SecureSumError, match="'c0' must send a share for each other client; it sent 8"):
        made.server.add_shares("c0", {n: s for n, s in shares.items() if n != "c4"})


def test_keys_are_of_32_bytes_and_can_be_agreed_with() -> None:
    with pytest.raises(SecureSumError, match="The key 'masking' must be 32 bytes"):
        Keys(sealing=bytes(32), masking=b"short", commitment=bytes(32))
    made = Round(names="abc", threshold=2)
    keys = {name: client.keys() for name, client in made.clients.items()}
    keys["b"] = dataclasses.replace(keys["b"], sealing=bytes(32))
    with pytest.raises(SecureSumError, match="A public key is none that can be agreed with"):
        made.clients["a"].shares(keys)


def test_thresholds_of_a_share() -> None:
    assert [threshold_for(n, 2 / 3) for n in (1, 2, 3, 10, 100)] == [2, 2, 2, 7, 67]
    assert threshold_for(10, 0.51) == threshold_for(10, 0.1) == 6
    assert threshold_for(11, 0.5) == 6


def test_a_client_goes_on_from_what_it_wrote_at_every_step() -> None:
    """A device's process may end between any two steps; secrets, and the step that was taken, go on in the next."""

    def again(made: Round) -> None:
        plain = {n: json.loads(json.dumps(one.to_plain())) for n, one in made.clients.items()}
        made.clients = {n: SecureClient.from_plain(one) for n, one in plain.items()}

    made = Round(silent=1, lost=2)
    first = made.clients["c5"].keys()
    again(made)
    assert made.clients["c5"].keys() == first
    made.shared()
    again(made)
    for name in made.left:
        shares = made.server.shares_for(name)
        made.server.add_masked(name, made.clients[name].masked(shares, made.vectors[name]))
    again(made)
    with pytest.raises(SecureSumError, match="A mask key used twice would show what it hides"):
        made.clients["c5"].masked(made.server.shares_for("c5"), made.vectors["c5"])
    survivors = made.server.survivors()
    for name in survivors:
        made.server.add_revealed(name, made.clients[name].revealed(survivors))
    again(made)
    with pytest.raises(SecureSumError, match="was asked for 'revealed' after 'revealed'"):
        made.clients["c5"].revealed(survivors)
    assert np.array_equal(made.server.total(), made.wanted)
