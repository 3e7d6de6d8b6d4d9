"""The campaign of faults on real processes: it goes on where it stopped, and does again only what it is told to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fault_flower
from benchmarks.fault_flower import LEG


def faults(leg: int, wrong: str = "") -> list[dict[str, Any]]:
    numbers = range(leg * LEG, leg * LEG + LEG)
    return [{"leg": leg, "number": n, "kind": "cut", "seconds": 1.0, "wrong": wrong} for n in numbers]


@pytest.mark.parametrize(
    ("words", "tried", "wrong", "code"),
    [([], [2], ["did not end"], 1), (["--again"], [0, 2], [], 0)],
)
def test_a_campaign_goes_on_from_an_earlier_result(
    words: list[str],
    tried: list[int],
    wrong: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leg that was not equal stays in the result, until it is asked for again."""
    legs: list[int] = []

    def leg(folder: Path, seed: int, number: int) -> list[dict[str, Any]]:
        legs.append(number)
        return faults(number)

    monkeypatch.setattr(fault_flower, "RESULTS", tmp_path)
    monkeypatch.setattr(fault_flower, "one_leg", leg)
    earlier = [{"seed": 2, **line} for line in [*faults(0, "did not end"), *faults(1)]]
    result = tmp_path / "faults-flower.json"
    result.write_text(
        json.dumps({"processes": {"lines": [*earlier, *({**e, "seed": 3} for e in faults(0))]}})
    )
    given = ["--seed", "2", "--faults", str(3 * LEG), "--folder", str(tmp_path / "legs"), *words]
    assert fault_flower.main(given) == code
    found = json.loads(result.read_text())["processes"]
    assert legs == tried
    own = [line["number"] for line in found["lines"] if line["seed"] == 2]
    assert (found["faults"], len(own), found["wrong"]) == (4 * LEG, 3 * LEG, wrong)
    assert sorted(own) == list(range(3 * LEG))
