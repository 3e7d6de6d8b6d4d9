"""PFL-DA, FedFusion, FedProx, Tables 7 and 8, read in other ways: the paper does not say how it built them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedkeep.experiments.reproductions import Request
from fedkeep_papers.kteps import published
from fedkeep_papers.kteps.book import FEDAVG, METHODS, RATIO, Book, Line, Value, global_accuracy, personalized
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
        components: d_e and d_s of Table 7, whose published numbers stand beside it instead.
        more: rounds that follow the usual ones; Ag after the usual ones has a row of its own.
    """

    method: str
    config: str = ""
    overrides: Overrides = ()
    components: tuple[int, int] | None = None
    more: int = 0

    def known(self, scene: str, metric: str) -> float | None:
        """Return the published "ag" or "ap"."""
        if self.components is not None:
            return published.COMPONENTS.get((scene, metric), {}).get(self.components)
        return {"ag": published.AG, "ap": published.AP}[metric].get(scene, {}).get(self.method)


GATED: Overrides = (("method.kind", '"fedkeep_papers.kteps.methods:pfl_da"'),)
KEPT: Overrides = (("method.reset_local", "false"),)
BOTH: Overrides = (*KEPT, ("method.train_received", "true"), ("method.gamma", "0.5"))
WHOLE: Overrides = (("method.server_optimizer.learning_rate", "1.0"),)
CONV, SINGLE = (("method.operator", f'"{operator}"') for operator in ("conv", "single"))
READINGS: Mapping[str, Reading] = {
    f"PFL-DA, {USUAL}": Reading("PFL-DA"),
    "PFL-DA, gated": Reading("PFL-DA", FEDAVG, GATED),
    "PFL-DA, gated, with a loss of its own": Reading("PFL-DA", FEDAVG, (*GATED, ("method.general", "1.0"))),
    f"FedFusion, {USUAL}": Reading("FedFusion"),
    "FedFusion, conv": Reading("FedFusion", "kteps/fedfusion", (CONV,)),
    "FedFusion, single": Reading("FedFusion", "kteps/fedfusion", (SINGLE,)),
    "FedFusion, never set back": Reading("FedFusion", "kteps/fedfusion", KEPT),
    "FedFusion, never set back, conv": Reading("FedFusion", "kteps/fedfusion", (*KEPT, CONV)),
    "FedFusion, never set back, single": Reading("FedFusion", "kteps/fedfusion", (*KEPT, SINGLE)),
    "FedFusion, both trained": Reading("FedFusion", "kteps/fedfusion", BOTH),
    "FedFusion, gamma averaged whole": Reading("FedFusion", "kteps/fedfusion", WHOLE),
    "FedProx, mu 0.1": Reading("FedProx", "kteps/fedprox", (("method.mu", "0.1"),)),
    "Table 7, 3 to 150, 3 a round": Reading(
        "KTEPS⋆", "kteps/kteps-star", (("method.start", "4"), ("method.end", "150")), (150, 3), more=1
    ),
    "KTEPS⋆, uncentred": Reading("KTEPS⋆", "kteps/kteps-star", (("method.center", "false"),)),
}
ABOUT = """
PFL-DA as configured is two whole branches, each with a loss of its own, which predict by the mean of their logits
(Table 8, column C). Gated, it is the method of Peterson et al.: a gate mixes the predictions of a private and a general
model, and the loss is the mixture's, or the mixture's and the general model's own.

FedFusion as configured sets a client's extractor back to the received one in every round, as Yao et al. do, and keeps
the last one for predictions. Never set back, it goes on from where it was, and a copy is uploaded: a private word
embedding, of which the paper says that it overfits. Features are fused by a weight for each ("multi"), by one weight
for all ("single"), or by a linear layer ("conv"). Both trained, the private extractor is never set back and never
leaves; the received one is trained beside it and uploaded, and a feature's weight starts at a half. As configured the
server moves these weights by a tenth of the clients' mean change, as the published code does; averaged whole, they are
means like all else.

FedProx as configured has μ = 0.01, one of the four values of its own paper, which KTEPS's does not repeat.

Table 7's d_s is the first component that is kept, so that d_s − 1 of them go in every round. Counted from 0, as code
counts, d_s of them go. Of 3 to 150 none is left then after 50 rounds. That row has one round more.

KTEPS⋆'s components are those of the words' covariance, so that their mean is no direction of its own. Uncentred they
are those of the table itself, whose first is near the mean.

Table 8 predicts by the mean of both branches' logits (sp). Its columns B and C at λ2 = 0.01 stand here with the shared
branch (s) and the private one (p) alone, too, on the same fine-tuned models. With λ2 = 0 nothing trains C's private
branch but the client's own loss: alone, it is Indiv.
"""
ALONE = (("B", 0.01), ("C", 0.01))
"""Cells of Table 8, by what is private and λ2, whose branches predict alone, too."""
BRANCHES = ("s", "p")


def baselines(request: Request) -> Path:
    """Train PFL-DA, FedFusion and FedProx by each reading, and let the branches of Table 8 predict alone."""
    book = Book(request, "kteps-baselines")
    lines = []
    for name, reading in READINGS.items():
        entry, cells = METHODS[reading.method], _cells(book, name, reading)
        ag, ap = (reading.known(book.fdu.name, metric) for metric in ("ag", "ap"))
        if reading.more:
            lines.append(Line(book.fdu.name, name, "accuracy_ag", cells, _before(reading.more), ag))
            name += f", {reading.more} more"
        lines += [
            Line(book.fdu.name, name, "accuracy_ag", cells, global_accuracy(entry), ag),
            Line(book.fdu.name, name, "accuracy_ap", cells, personalized(entry), ap),
        ]
    for architecture, two in ALONE:
        cells = private_part(book, architecture, two, BRANCHES)
        known = published.PRIVATE_PARTS.get((book.fdu.name, "ap"), {}).get((two, architecture))
        ways = {"sp": "own"} | {how: how for how in BRANCHES}
        lines += [
            Line(
                book.fdu.name,
                f"Table 8, {architecture}, λ2 = {two:g}, {how}",
                "accuracy_ap",
                cells,
                personalized(METHODS["KTEPS"], predict=kept),
                known,
            )
            for how, kept in ways.items()
        ]
    return book.make(lines, "KTEPS: how PFL-DA, FedFusion, FedProx, Tables 7 and 8 are read", ABOUT)


def _before(rounds: int) -> Value:
    """Return what takes a cell's Ag of so many rounds before its end."""
    return lambda n: n.shared_curve[-1 - rounds][1]


def _cells(book: Book, name: str, reading: Reading) -> Mapping[int, Cell]:
    """Return a reading's cells, by seed."""
    if not reading.config:
        return book.cells(book.fdu, reading.method)
    slug = name.replace(",", "").replace("⋆", "-star").replace(" ", "-").lower()
    found = {}
    for seed in book.seeds:
        overrides = book.overrides(book.fdu, reading.config, reading.overrides, seed)
        usual = Cell("", reading.config, overrides).resolved().run.rounds
        if reading.more and usual is not None:
            overrides = (*overrides, ("run.rounds", str(usual + reading.more)))
        name = f"{book.fdu.name.lower()}-{slug}-{book.scale}-{seed}"
        found[seed] = Cell(name, reading.config, overrides, (RATIO,))
    return found
