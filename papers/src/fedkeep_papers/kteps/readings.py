"""Readings of what the text of KTEPS leaves open, each beside FedAvg where it concerns that too.

One is chosen on training reviews that are held out, and then trained on all of them and tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedkeep.experiments.reproductions import Request
from fedkeep.report.text_tables import TextTable, to_markdown
from fedkeep_papers.kteps.book import METHODS, RATIO, Book, Line, global_accuracy, personalized
from fedkeep_papers.kteps.cells import Cell, Overrides, missing
from fedkeep_papers.kteps.details import Cells
from fedkeep_papers.kteps.variants import DROPOUT, HELD_OUT, gap


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
BOTH = ("KTEPS", "FedAvg")
USUAL = "as configured"
READINGS: Mapping[str, Reading] = {
    USUAL: Reading((), ()),
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
    """Choose KTEPS's reading with the best Ap on held-out training reviews, one seed; test it on all seeds.

    FedAvg by the same reading and both methods as configured are tested beside it. It waits for all readings of KTEPS.
    """
    book = Book(request, "kteps-readings")
    tried = {
        (method, name): {seed: _cell(book, method, name, seed, held_out=True) for seed in book.seeds[:1]}
        for name, reading in READINGS.items()
        for method in BOTH
        if _overrides(method, reading) is not None
    }
    tested = {
        (method, name): (
            book.cells(book.fdu, method)
            if name == USUAL
            else {seed: _cell(book, method, name, seed, held_out=False) for seed in book.seeds}
        )
        for method, name in tried
    }
    held, left = f"{book.fdu.name}, held-out training reviews", f"{book.fdu.name}, test reviews"
    lines = _lines(tried, held, "accuracy_ap") + _lines(tried, left, "accuracy_ag")
    title, possible = "KTEPS: readings of what its text leaves open", [*tested.values()]
    about = (
        f"Each trains for all rounds, one seed, without {HELD_OUT} training reviews of each domain, on which Ap is "
        "measured. A reading is chosen by these; the test numbers of all are below. KTEPS has noise of 0.001 anyway. "
    )
    waits = "Once all of KTEPS's are finished the best is trained on all training reviews and tested."
    path = book.make(lines, title, about + waits, possible=possible)
    best = _best(book, {name: cells for (method, name), cells in tried.items() if method == "KTEPS"})
    if best is None:
        return path
    chosen = {key: cells for key, cells in tested.items() if key[1] in (USUAL, best)}
    scene = f"{book.fdu.name}, trained on all training reviews"
    lines += _lines(chosen, scene, "accuracy_ap") + _lines(chosen, scene, "accuracy_ag")
    about += (
        f"The best of KTEPS's is {best!r}. Last come it, FedAvg by the same reading and both methods as configured, "
        "trained on all training reviews, on test reviews."
    )
    return book.make(lines, title, about, lambda: _differences(book, chosen, best), possible=possible)


def _overrides(method: str, reading: Reading) -> Overrides | None:
    return reading.kteps if method == "KTEPS" else reading.fedavg


def _cell(book: Book, method: str, name: str, seed: int, *, held_out: bool) -> Cell:
    config = METHODS[method].config
    slug = f"{method}-{name}{'-held-out' if held_out else ''}".replace(" ", "-").lower()
    further = _overrides(method, READINGS[name]) or ()
    if held_out:
        further += (("data.valid", str(HELD_OUT)),)
    return Cell(
        f"{book.fdu.name.lower()}-reading-{slug}-{book.scale}-{seed}",
        config,
        book.overrides(book.fdu, config, further, seed),
        (RATIO,),
        split="valid" if held_out else "test",
    )


def _lines(asked: Cells, scene: str, metric: str) -> list[Line]:
    values = {"accuracy_ap": personalized, "accuracy_ag": global_accuracy}
    return [
        Line(scene, f"{method}, {name}", metric, cells, values[metric](METHODS[method]))
        for (method, name), cells in asked.items()
    ]


def _best(book: Book, tried: Mapping[str, Mapping[int, Cell]]) -> str | None:
    """Return the reading with the best Ap; None while one is not finished, or where all broke down."""
    if missing([book.task(cell) for cells in tried.values() for cell in cells.values()]):
        return None
    ap = personalized(METHODS["KTEPS"])
    found = {name: ap(n) for name, cells in tried.items() for n in book.numbers(cells).values()}
    return max(found, key=lambda name: found[name]) if found else None


def _differences(book: Book, tested: Cells, best: str) -> str:
    """Write how far KTEPS by the chosen reading is ahead of each that it was tested beside, paired by seed."""
    own, rows = book.numbers(tested["KTEPS", best]), []
    for (method, name), cells in tested.items():
        base = book.numbers(cells)
        seeds = [seed for seed in own if seed in base]
        if seeds and (method, name) != ("KTEPS", best):
            measures = [(of(METHODS["KTEPS"]), of(METHODS[method])) for of in (personalized, global_accuracy)]
            gaps = [gap([ours(own[s]) - theirs(base[s]) for s in seeds]) for ours, theirs in measures]
            rows.append((f"{method}, {name}", *gaps, str(len(seeds))))
    if not rows:
        return ""
    columns = ("minus", "Ap, points", "Ag, points", "seeds")
    title = f"KTEPS, {best}, on the test reviews, paired by seed"
    return "\n" + to_markdown(TextTable(columns, tuple(rows), title), level=2)
