"""Reproductions of the papers' tables and figures: one function each, in the form ``results/NAME.json`` and ``.md``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Protocol

from fedkeep.core.errors import ConfigError, did_you_mean
from fedkeep.experiments.reproduce import (
    furl,
    furl_sweep,
    kteps_figures,
    kteps_tables,
    kteps_variants,
    moe,
    moe_methods,
)

Scale = Literal["quick", "medium", "full"]


@dataclass(frozen=True)
class Request:
    """What to reproduce with.

    Attributes:
        data: the folder of real data; None where the reproduction needs none.
        out: the folder of results.
        scale: ``quick`` (minutes), ``medium`` (about an hour) or ``full`` (as long as in the paper).
        seeds: the seeds to run; None for the reproduction's own.
        workers: how many runs at a time, each in a process of its own.
        progress: True or False to force or forbid progress; None: on a terminal.
        only: patterns (as of file names: ``*``, ``?``, ``[]``) of runs; those that match none are left for another
            call. Empty: all runs.
    """

    data: Path | None
    out: Path
    scale: Scale = "quick"
    seeds: Sequence[int] | None = None
    workers: int = 1
    progress: bool | None = None
    only: Sequence[str] = ()

    def wants(self, run: str) -> bool:
        """Tell whether a run of this name is to be computed."""
        return not self.only or any(fnmatchcase(run, pattern) for pattern in self.only)

    def check(self, runs: Sequence[str]) -> None:
        """Check the patterns against the names of all runs.

        Raises:
            ConfigError: a pattern matches none of them.
        """
        for pattern in self.only:
            if not any(fnmatchcase(run, pattern) for run in runs):
                raise ConfigError(f"No run matches {pattern!r}. The runs are: {', '.join(runs)}.")


class Reproduction(Protocol):
    """Runs what is not yet run, and writes the results; returns the Markdown's path."""

    def __call__(self, request: Request) -> Path:
        """Run it."""
        ...


REPRODUCTIONS: dict[str, str] = {
    "furl-table3": "FURL Table 3 and Figures 2-5: four configurations, server and federated, with and without users",
    "furl-sweep": "the learning rates of furl-table3 swept, on the validation examples",
    "kteps-table2": "KTEPS Table 2: Ag of ten methods on FDU-MTL (and IYY, where its files are)",
    "kteps-table3": "KTEPS Table 3: Ap of twelve methods, fairness, bytes; the same runs as kteps-table2",
    "kteps-table4": "KTEPS Table 4: weights of diversity and knowledge transfer",
    "kteps-table5": "KTEPS Table 5: learning rates of personalisation; the runs of KTEPS in kteps-table3",
    "kteps-table6": "KTEPS Table 6: which branch predicts; the runs of KTEPS in kteps-table3",
    "kteps-table7": "KTEPS Table 7: components kept of the embedding",
    "kteps-table8": "KTEPS Table 8: what is private, without projections and diversity",
    "kteps-figure4": "KTEPS Figure 4: Ag by round, accuracy while clients fine-tune; the runs of kteps-table3",
    "kteps-figure5": "KTEPS Figure 5: neighbours of words under compression; two runs of kteps-table7",
    "kteps-variants": "variants of KTEPS that send the same bytes: one is chosen on held-out reviews, then tested",
    "moe-table2": "mixture of experts, Table 2: CIFAR-10, 5 clients, p = 0.8 to 1.0",
    "moe-variants": "mixture of experts: variants of the mixture on Table 2's scenes, paired differences",
    "moe-methods": "mixture of experts' scenes, p = 0.8 to 1.0: all personalised methods beside the paper's four",
    "moe-figure2": "mixture of experts, Figure 2: CIFAR-100, 50 clients, accuracy against p, two client fractions",
    "moe-figure3": "mixture of experts, Figure 3: CIFAR-10, accuracy against p, opt-out factors 0, 0.5, 0.9",
    "moe-figure4": "mixture of experts, Figure 4: Fashion-MNIST, accuracy against p, opt-out factors 0, 0.9",
    "moe-figure5": "mixture of experts, Figure 5: mixture minus fine-tuned over p and training size",
}
# What can be run in pieces (Request.only): its results may have gaps.
IN_PIECES = ("furl-table3", "furl-sweep", *(f"kteps-table{n}" for n in range(2, 9)))
_FUNCTIONS: dict[str, Reproduction] = {
    "furl-table3": furl.table3,
    "furl-sweep": furl_sweep.sweep,
    "kteps-table2": kteps_tables.table2,
    "kteps-table3": kteps_tables.table3,
    "kteps-table4": kteps_tables.table4,
    "kteps-table5": kteps_tables.table5,
    "kteps-table6": kteps_tables.table6,
    "kteps-table7": kteps_tables.table7,
    "kteps-table8": kteps_tables.table8,
    "kteps-figure4": kteps_figures.figure4,
    "kteps-figure5": kteps_figures.figure5,
    "kteps-variants": kteps_variants.variants,
    "moe-table2": moe.table2,
    "moe-variants": moe.variants,
    "moe-methods": moe_methods.table,
    "moe-figure2": moe.figure2,
    "moe-figure3": moe.figure3,
    "moe-figure4": moe.figure4,
    "moe-figure5": moe.figure5,
}


def reproduce(name: str, request: Request) -> Path:
    """Run a reproduction; interrupted, it goes on where it stopped when called again.

    Args:
        name: one of ``REPRODUCTIONS``.
        request: data, output folder, scale and seeds.

    Returns:
        The path of the Markdown file with the results.

    Raises:
        ConfigError: an unknown name, or runs were chosen of one that cannot be run in pieces.
    """
    function = _FUNCTIONS.get(name)
    if function is None:
        hint = did_you_mean(name, REPRODUCTIONS)
        raise ConfigError(f"There is no reproduction {name!r}; there are {sorted(REPRODUCTIONS)}.{hint}")
    if request.only and name not in IN_PIECES:
        raise ConfigError(f"{name} cannot be run in pieces; these can: {', '.join(IN_PIECES)}.")
    return function(request)
