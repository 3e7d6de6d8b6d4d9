"""``fedkeep budget``: what a run with differential privacy has spent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from fedkeep.cli.output import say, show_table
from fedkeep.cli.settings import RunArgument
from fedkeep.core.errors import ConfigError, check_choice
from fedkeep.core.run_files import read_commit, read_info

if TYPE_CHECKING:
    from fedkeep.privacy.accounting import Accountant
    from fedkeep.privacy.ledger import Ledger


def budget(
    run: RunArgument,
    delta: Annotated[float | None, typer.Option("--delta", help="Another δ than the run's.")] = None,
    accountant: Annotated[
        str | None, typer.Option("--accountant", help="Another accountant than the run's: pld or rdp.")
    ] = None,
) -> None:
    """Print ε of all rounds that a run was charged for, what is left of its budget, and what ε rests on.

    RUN is the folder that fedkeep run wrote, of a configuration with a table [privacy].
    """
    from fedkeep.privacy.ledger import FILE, Ledger, marks

    if accountant is not None:
        check_choice("--accountant must be", accountant, list(WORDS))
    info = read_info(run)
    ledger = Ledger.read(run / FILE, info["run"], marks(info, read_commit(run, info).extra))
    terms, shown = ledger.terms, ledger.terms.delta if delta is None else delta
    if delta is not None and not 0 < delta * terms.clients < 1:
        raise ConfigError(
            f"--delta must lie between 0 and 1 / N = {1 / terms.clients:.3g} for N = {terms.clients:,} clients; got "
            f"{delta:g}. A larger one would allow to publish a client."
        )
    by = cast("Accountant", accountant or terms.accountant)
    rows = [
        [f"ε by {WORDS[by]} ({by})", f"{ledger.spent(delta, by):.4f}"],
        ["δ", f"{shown:g}"],
        ["Rounds charged", str(len(ledger.rounds))],
        *([["and in the runs that it continues", str(before)]] if (before := ledger.before) else []),
        ["of these run again after a stop", str(ledger.repeated)],
        [
            "Clients in a round, on average",
            f"{terms.cohort:g} of {terms.clients:,} (rate {terms.release.rate:.4g})",
        ],
        ["Noise multiplier", f"{terms.release.noise:g}"],
    ]
    if terms.budget is not None:
        rows.append(["Budget", f"ε = {terms.budget:g} at δ = {terms.delta:g}, by {terms.accountant}"])
        rows.append(["Rounds that still fit", rounds_left(ledger)])
    show_table(f"{run}: what its rounds have spent", ["", ""], rows)
    for line in ledger.assumptions():
        say(f"· {line}")


WORDS: dict[Accountant, str] = {"pld": "privacy loss distributions", "rdp": "Rényi differential privacy"}
MOST = 1000
"""Rounds that are tried, at most, to say how many still fit."""


def rounds_left(ledger: Ledger) -> str:
    """Return how many more rounds fit, as text."""
    left = ledger.room(MOST)
    return str(left) if left < MOST else f"{MOST} or more"
