"""PFL-DA, FedFusion and Table 8, read in other ways: the paper does not say how it built them, and what predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedkeep.experiments.reproductions import Request
from fedkeep_papers.kteps import published
from fedkeep_papers.kteps.book import FEDAVG, METHODS, RATIO, Book, Line, global_accuracy, personalized
from fedkeep_papers.kteps.cells import Cell, Overrides
from fedkeep_papers.kteps.tables import private_part

USUAL = "as configured"


@dataclass(frozen=True)
class Reading:
    """Settings that say the reading.

    Attributes:
        method: one of ``METHODS``, whose published numbers stand beside it.
        config: the built-in configuration; "" the method's own, in which nothing is changed.
        overrides: what is changed in it.
    """

    method: str
    config: str = ""
    overrides: Overrides = ()


GATED: Overrides = (("method.kind", '"pfl_da"'),)
KEPT: Overrides = (("method.reset_local", "false"),)
READINGS: Mapping[str, Reading] = {
    f"PFL-DA, {USUAL}": Reading("PFL-DA"),
    "PFL-DA, gated": Reading("PFL-DA", FEDAVG, GATED),
    "PFL-DA, gated, with a loss of its own": Reading("PFL-DA", FEDAVG, (*GATED, ("method.general", "1.0"))),
    f"FedFusion, {USUAL}": Reading("FedFusion"),
    "FedFusion, never set back": Reading("FedFusion", "kteps/fedfusion", KEPT),
    "FedFusion, never set back, conv": Reading(
        "FedFusion", "kteps/fedfusion", (*KEPT, ("method.operator", '"conv"'))
    ),
}
ABOUT = """
PFL-DA as configured is two whole branches, each with a loss of its own, which predict by the mean of their logits
(Table 8, column C). Gated, it is the method of Peterson et al.: a gate mixes the predictions of a private and a general
model, and the loss is the mixture's, or the mixture's and the general model's own.

FedFusion as configured sets a client's extractor back to the received one in every round, as Yao et al. do, and keeps
the last one for predictions. Never set back, it goes on from where it was, and a copy is uploaded: a private word
embedding, of which the paper says that it overfits. Features are fused by a weight for each ("multi"), or by a linear
layer ("conv").

Table 8 predicts by the mean of both branches' logits (sp). Its columns B and C at λ2 = 0.01 stand here with the shared
branch (s) and the private one (p) alone, too, on the same fine-tuned models. With λ2 = 0 nothing trains C's private
branch but the client's own loss: alone, it is Indiv.
"""
ALONE = (("B", 0.01), ("C", 0.01))
"""Cells of Table 8, by what is private and λ2, whose branches predict alone, too."""
BRANCHES = ("s", "p")


def baselines(request: Request) -> Path:
    """Train PFL-DA and FedFusion by each reading, and let the branches of Table 8 predict alone."""
    book = Book(request, "kteps-baselines")
    ap, ag = (of.get(book.fdu.name, {}) for of in (published.AP, published.AG))
    lines = []
    for name, reading in READINGS.items():
        entry, cells = METHODS[reading.method], _cells(book, name, reading)
        lines += [
            Line(book.fdu.name, name, "accuracy_ag", cells, global_accuracy(entry), ag.get(reading.method)),
            Line(book.fdu.name, name, "accuracy_ap", cells, personalized(entry), ap.get(reading.method)),
        ]
    for architecture, two in ALONE:
        cells = private_part(book, architecture, two, BRANCHES)
        known = published.PRIVATE_PARTS.get((book.fdu.name, "ap"), {}).get((two, architecture))
        ways = {"sp": "own"} | {how: how for how in BRANCHES}
        lines += [
            Line(
                book.fdu.name, f"Table 8, {architecture}, λ2 = {two:g}, {how}", "accuracy_ap", cells,
                personalized(METHODS["KTEPS"], predict=kept), known,
            )
            for how, kept in ways.items()
        ]  # fmt: skip
    return book.make(lines, "KTEPS: how PFL-DA, FedFusion and Table 8 are read", ABOUT)


def _cells(book: Book, name: str, reading: Reading) -> Mapping[int, Cell]:
    """Return a reading's cells, by seed."""
    if not reading.config:
        return book.cells(book.fdu, reading.method)
    slug = name.replace(",", "").replace(" ", "-").lower()
    return {
        seed: Cell(
            f"{book.fdu.name.lower()}-{slug}-{book.scale}-{seed}",
            reading.config,
            book.overrides(book.fdu, reading.config, reading.overrides, seed),
            (RATIO,),
        )
        for seed in book.seeds
    }
