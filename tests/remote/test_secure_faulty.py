"""Secure sums across machines with a faulty device: it is named, and the others go on without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeep.engines import Sampler
from fedkeep.privacy.secure import crypto, shamir
from fedkeep.privacy.secure.secure_client import SecureClient
from fedkeep.privacy.secure.secure_messages import Keys
from fedkeep.remote import Packet, secure_fleet
from tests.remote.test_conformance import server_of
from tests.remote.test_secure_sums import DATA, devices_of, events, served

Made = dict[str, dict[str, str]]
LAST = f"user-{len(DATA) - 1}"


def run(folder: Path, bend: Callable[[Made], None], rounds: int = 3, who: int = len(DATA) - 1) -> list[str]:
    """Serve a run of one client a device, of whose cohort are all; return its events.

    Args:
        bend: changes what one of them has made in the steps of a message.
        who: which of them.
    """
    devices = devices_of("fedavg", folder, nodes=len(DATA))
    serve = devices.nodes[who].serve

    def faulty(packet: Packet) -> Packet:
        answer = serve(packet)
        for one in answer.header.get("answers", ()):
            bend(answer.header["made"].setdefault(one["client"], {}))
        return answer

    devices.transport.join(f"node-{who}", faulty)
    served(devices, folder, cohort=len(DATA), rounds=rounds)
    devices.close()
    return events(folder)


def test_who_reveals_wrong_shares_is_named_and_every_round_counts_at_once(tmp_path: Path) -> None:
    def bend(made: Made) -> None:
        made |= {step: dict.fromkeys(of, "00" * 66) for step, of in made.items() if step == "revealed"}

    told = run(tmp_path / "faulty", bend, who=0)
    run(tmp_path / "honest", lambda made: None)
    torch.testing.assert_close(
        server_of(tmp_path / "faulty" / "run"), server_of(tmp_path / "honest" / "run"), rtol=0, atol=0
    )
    assert sum("Client 'user-0' revealed wrong shares of 7 secrets" in text for text in told) == 3
    assert not any("is tried again" in text for text in told)


def test_who_seals_shares_that_do_not_open_is_left_out_of_the_next_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some rounds it is asked again: one that was mended takes part."""
    monkeypatch.setattr(secure_fleet, "PARDON", 3)
    tries = iter([True, True, False])

    def bend(made: Made) -> None:
        if "shares" in made and next(tries, False):
            made["shares"] = dict.fromkeys(made["shares"], "00" * 148)

    told = run(tmp_path, bend, rounds=6)
    assert sum("is tried again" in text for text in told) == 2, "in round 0, and in round 3"
    assert sum(f"cannot open the share that client {LAST!r} sealed for it" in text for text in told) == 12
    assert (
        sum(
            text == f"Client {LAST!r} is left out: its shares are wrong, or it says so of others."
            for text in told
        )
        == 6
    )


def test_who_seals_wrong_shares_for_one_client_is_the_one_that_sits_out(tmp_path: Path) -> None:
    def bend(made: Made) -> None:
        if "shares" in made:
            made["shares"]["user-1"] = "00" * 148

    told = run(tmp_path, bend)
    assert sum("Client 'user-1' took no step of the secure sum." in text for text in told) == 1
    assert sum(text.startswith(f"Client {LAST!r} is left out") for text in told) == 2
    assert not any("is tried again" in text for text in told)


def test_who_says_so_of_several_others_is_left_out_itself(tmp_path: Path) -> None:
    def bend(made: Made) -> None:
        if "keys" in made:  # they are asked for with the vector
            made["masked"] = {"user-0": "", "user-1": "", LAST: "", "a stranger": ""}

    told = run(tmp_path, bend)
    assert [text for text in told if "cannot open" in text] == [
        f"Client {LAST!r} cannot open the share that client 'user-{k}' sealed for it." for k in (0, 1)
    ]
    assert [text for text in told if "is left out" in text] == [
        f"Client {LAST!r} is left out: its shares are wrong, or it says so of others."
    ] * 2


@pytest.mark.parametrize("dealers", [[LAST], ["user-0", "user-3", LAST]])
def test_who_deals_wrong_shares_is_left_out_unless_too_few_would_be_left(
    dealers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares that open and are no shares of the secret; from the third sum on, the second one of which is asked for ahead, they are right."""
    right, wrong = SecureClient.shares, Counter[str]()

    def shares(self: SecureClient, keys: Mapping[str, Keys]) -> dict[str, bytes]:
        made = right(self, keys)
        if self.name in dealers and wrong[self.name] < 2:
            wrong[self.name] += 1
            for to in made:
                key = self._sealing_key(to, self.name, to)
                made[to] = crypto.sealed(key, bytes(2 * shamir.SHARE), self._about(self.name, to))
        return made

    monkeypatch.setattr(SecureClient, "shares", shares)
    told = run(tmp_path, lambda made: None)
    again = [text for text in told if "is tried again" in text]
    out = [text for text in told if "is left out: its shares are wrong" in text]
    assert f"do not give the secrets of {len(dealers)}, e.g. of {dealers[0]!r}: who dealt them" in again[0]
    assert (len(again), len(out)) == (1, 3 if len(dealers) == 1 else 0)


def test_the_keys_of_who_is_not_in_the_next_cohort_are_not_taken(tmp_path: Path) -> None:
    """With more keys than were to begin the others would refuse the next sum, and this one would stay masked."""
    devices = devices_of("fedavg", tmp_path, nodes=len(DATA))
    sampler = Sampler(np.arange(len(DATA)), 4, "independent", 3)
    who = next(iter(set(sampler(0)) - set(sampler(1))))
    serve = devices.nodes[who].serve

    def pushing(packet: Packet) -> Packet:
        answer = serve(packet)
        for one in answer.header.get("answers", ()):
            if one["upload"] is not None:
                answer.header["made"].setdefault(one["client"], {}).setdefault("keys", {"keys": _keys()})
        return answer

    devices.transport.join(f"node-{who}", pushing)
    served(devices, tmp_path, cohort=4, rounds=2)
    devices.close()
    said = [text for text in events(tmp_path) if "joined" not in text and "has 1 clients" not in text]
    assert said == [
        f"The step 'keys' of client 'user-{who}': It is not in the cohort of round 1, and was asked for none."
    ]


def _keys() -> str:
    return SecureClient("x", "r", 2).keys().to_bytes().hex()
