"""588 leaks outside the channels, carriers × places: labels alone call none of them independent or declared."""

from __future__ import annotations

import pytest

from fedkeep.core.errors import MethodError
from fedkeep.prove import prove, proving
from tests.methods.table import DATA
from tests.prove.planted import CARRIERS, PLACES

FEW = {
    ("sum", "term"),
    ("item", "finish"),
    ("set", "buffer"),
    ("numpy", "start"),
    ("shape", "sends"),
    ("mapped", "finish"),
    ("script", "sends"),
    ("script's method", "start"),
    ("callback's list", "buffer"),
    ("sum", "server"),
    ("callback", "term"),
    ("callback's split", "sends"),
    ("poisson", "sends"),
    ("statistics", "finish"),
    ("nested", "sends"),
    ("mapped file", "finish"),
    ("freed", "buffer"),
    ("freed, by an old constructor", "sends"),
    ("mapped before", "finish"),
    ("shared before", "start"),
    ("a thread's number", "buffer"),
    ("a thread's tensor", "finish"),
    ("gradient hook", "buffer"),
    ("undispatched", "buffer"),
    ("without functions", "start"),
    ("file", "sends"),
    ("class", "start"),
    ("inferred where", "finish"),
    ("inferred norm", "buffer"),
    ("array beneath", "finish"),
    ("array before", "sends"),
    ("buffer beneath", "buffer"),
    ("address before", "start"),
}


def found(carrier: str, place: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(proving, "falsified", lambda made, seed, allowed: {})
    model, method, leaves = PLACES[place](carrier)
    try:
        proof = prove(model, method, DATA)
    except MethodError:  # fedkeep itself refuses a hook that draws random numbers
        return "unknown"
    return "proved" if proof.ok else proof.verdict(leaves)


@pytest.mark.parametrize(("carrier", "place"), sorted(FEW))
def test_a_planted_leak_is_not_proved(carrier: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(carrier, place, monkeypatch) in ("path named", "unknown")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_no_planted_leak_is_proved(carrier: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(carrier, place, monkeypatch) in ("path named", "unknown")
