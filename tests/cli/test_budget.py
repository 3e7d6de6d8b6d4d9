"""``fedkeep budget``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedkeep.privacy import Release, budget_ledger, epsilon
from tests.cli.conftest import Command
from tests.commands import succeeded

SETTINGS = [
    "run.sampling=poisson",
    "method.weighting=uniform",
    "privacy.noise=3.0",
    "privacy.clip=0.1",
    "privacy.delta=0.05",
    "privacy.accountant=rdp",
]


def run(fedkeep: Command, *more: str, code: int = 0) -> str:
    words = [word for setting in (*SETTINGS, *more) for word in ("--set", setting)]
    result = fedkeep("run", "toy.toml", "--out", "r", *words)
    assert result.exit_code == code, result.output
    return result.output


def cells(output: str) -> dict[str, str]:
    lines = (line.rsplit("  ", 1) for line in output.splitlines() if "  " in line)
    return {cell[0].strip(): cell[1].strip() for cell in lines}


def test_what_a_run_has_spent_and_what_that_rests_on(fedkeep: Command) -> None:
    release = Release(rate=0.5, noise=3.0)
    limit = epsilon({release: 3}, 0.05, "rdp")
    run(fedkeep, "run.rounds=2", f"privacy.budget={limit + 1e-6}")
    result = succeeded(fedkeep("budget", "r"))
    shown = cells(result.stdout)
    rdp, pld = "ε by Rényi differential privacy (rdp)", "ε by privacy loss distributions (pld)"
    assert float(shown[rdp]) == pytest.approx(epsilon({release: 2}, 0.05, "rdp"), abs=1e-4)
    assert pld not in shown
    other = cells(fedkeep("budget", "r", "--accountant", "pld").stdout)
    assert float(other[pld]) == pytest.approx(epsilon({release: 2}, 0.05, "pld"), abs=1e-4)
    assert (shown["Rounds charged"], shown["of these run again after a stop"]) == ("2", "0")
    assert shown["Clients in a round, on average"] == "3 of 6 (rate 0.5)"
    assert shown["Rounds that still fit"] == "1"
    assert "The server is trusted: it sees each upload before noise is added." in result.stdout
    assert "nobody can draw it again" in result.stdout
    smaller = cells(fedkeep("budget", "r", "--delta", "0.01").stdout)
    assert float(smaller[rdp]) > float(shown[rdp])


def test_only_the_accountant_that_is_asked_has_to_say(
    fedkeep: Command, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of little noise the other computes for minutes."""
    asked = []
    real = budget_ledger.epsilon
    monkeypatch.setattr(budget_ledger, "epsilon", lambda *given: asked.append(given[2]) or real(*given))
    run(fedkeep)
    assert fedkeep("budget", "r").exit_code == 0
    assert asked == ["rdp"]
    assert fedkeep("budget", "r", "--accountant", "pld").exit_code == 0
    assert asked == ["rdp", "pld"]
    assert refused("budget", "r", "--accountant", "x").startswith(
        "Error: --accountant must be 'pld' or 'rdp'; got 'x'."
    )


def test_a_run_that_would_exceed_its_budget_ends_with_one_line(fedkeep: Command) -> None:
    limit = epsilon({Release(rate=0.5, noise=3.0): 2}, 0.05, "rdp")
    printed = run(fedkeep, f"privacy.budget={limit + 1e-6}", "privacy.noise_seed=1", code=2)
    assert "Error: Round 2 would cost more privacy than is left: 2 rounds have come to" in printed
    shown = fedkeep("budget", "r").stdout
    assert cells(shown)["Rounds that still fit"] == "0"
    assert "this is a simulation, and protects nobody" in shown


def test_bad_input(fedkeep: Command, refused: Callable[..., str]) -> None:
    assert fedkeep("run", "toy.toml", "--out", "plain").exit_code == 0
    assert refused("budget", "plain").startswith(
        "Error: There is no ledger plain/budget.jsonl: the run has no differ"
    )
    assert refused("budget", "nowhere").startswith("Error: There is no run in nowhere")
    run(fedkeep)
    for delta in ("0.5", "0.17", "0", "-1", "nan"):
        assert refused("budget", "r", "--delta", delta) == (
            f"Error: --delta must lie between 0 and 1 / N = 0.167 for N = 6 clients; got {delta}. A larger one would allow "
            f"to publish a client."
        )
    path = Path("r") / "budget.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n")
    assert "is not the ledger that the run knows, of 4 charges" in refused("budget", "r")
    lines[2] = json.dumps(json.loads(lines[2]) | {"round": 9})
    path.write_text("\n".join(lines) + "\n")
    assert refused("budget", "r").startswith("Error: r/budget.jsonl, line 4: damaged or edited")
