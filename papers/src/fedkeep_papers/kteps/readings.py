"""Readings of what the text of KTEPS leaves open, each beside FedAvg where it concerns that too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedkeep.experiments.reproductions import Request
from fedkeep_papers.kteps.book import METHODS, RATIO, Book, Line, global_accuracy, personalized
from fedkeep_papers.kteps.cells import Cell
from fedkeep_papers.kteps.variants import DROPOUT, HELD_OUT, Overrides


@dataclass(frozen=True)
class Reading:
    """Settings that say the reading.

    Attributes:
        kteps: for KTEPS; None: the reading changes nothing there.
        fedavg: for FedAvg; None: likewise.
    """

    kteps: Overrides | None
    fedavg: Overrides | None = None


UNIFORM: Overrides = (("method.weighting", '"uniform"'),)
PADDED: Overrides = (("model.mean_over", "200"),)
READINGS: Mapping[str, Reading] = {
    "as configured": Reading((), ()),
    "halved losses": Reading((("method.share", "0.5"),)),
    "mean over padding": Reading(PADDED, PADDED),
    "noise for all methods": Reading(None, (("method.upload_noise", "0.001"),)),
    "noise of 0.01 for all": Reading((("method.noise", "0.01"),), (("method.upload_noise", "0.01"),)),
    "simple averaging": Reading(UNIFORM, UNIFORM),
    "dropout": Reading(DROPOUT, DROPOUT),
    "HSIC by the median": Reading((("method.kernel", '"median"'),)),
    "normalised HSIC": Reading((("method.normalised", "true"),)),
}


def readings(request: Request) -> Path:
    """Train KTEPS and FedAvg by every reading without some training reviews, and judge on these; test numbers too."""
    book = Book(request, "kteps-readings")
    held, tested = f"{book.fdu.name}, held-out training reviews", f"{book.fdu.name}, test reviews"
    asked = {
        (name, method): {seed: _cell(book, name, method, overrides, seed) for seed in book.seeds[:1]}
        for name, reading in READINGS.items()
        for method, overrides in (("KTEPS", reading.kteps), ("FedAvg", reading.fedavg))
        if overrides is not None
    }
    lines = [
        Line(scene, f"{method}, {name}", metric, own, value)
        for scene, metric in ((held, "accuracy_ap"), (tested, "accuracy_ag"))
        for (name, method), own in asked.items()
        for value in [personalized(METHODS[method]) if scene == held else global_accuracy(METHODS[method])]
    ]
    return book.make(
        lines,
        "KTEPS: readings of what its text leaves open",
        f"Each trains for all rounds, one seed, without {HELD_OUT} training reviews of each domain, on which Ap is "
        "measured. A reading is to be chosen by these; the test numbers of all are below. KTEPS has noise of 0.001 "
        "anyway.",
    )


def _cell(book: Book, name: str, method: str, overrides: Overrides, seed: int) -> Cell:
    (usual,) = (cell for number, cell in book.cells(book.fdu, method).items() if number == seed)
    slug = f"{method}-{name}".replace(" ", "-").lower()
    further = (*overrides, ("data.valid", str(HELD_OUT)))
    return Cell(
        f"fdu-reading-{slug}-held-out-{book.scale}-{seed}", usual.config, (*usual.overrides, *further), (RATIO,),
        split="valid",
    )  # fmt: skip
