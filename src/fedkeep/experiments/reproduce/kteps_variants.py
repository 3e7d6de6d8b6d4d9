"""Variants of KTEPS that send the same bytes: one is chosen on held-out training reviews, and then tested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedkeep.core.errors import RunError
from fedkeep.experiments.reproduce.cells import Cell, missing
from fedkeep.experiments.reproduce.kteps_book import (
    METHODS,
    RATIO,
    Book,
    Line,
    global_accuracy,
    personalized,
)
from fedkeep.experiments.tasks import run_tasks

if TYPE_CHECKING:
    from fedkeep.experiments.reproduce import Request

Overrides = tuple[tuple[str, str], ...]
SCHEDULE: Overrides = (("method.optimizer.schedule", '"linear"'),)
FASTER: Overrides = (("method.optimizer.learning_rate", "0.02"), *SCHEDULE)
DROPOUT: Overrides = (("model.word_dropout", "0.2"), ("model.dropout", "0.3"))
SLOW_WORDS: Overrides = (("method.optimizer.rates", '{ "*embedding.*" = 0.004 }'),)
VARIANTS: Mapping[str, Overrides] = {
    "KTEPS": (),
    "linear schedule": SCHEDULE,
    "dropout": DROPOUT,
    "schedule, dropout": (*SCHEDULE, *DROPOUT),
    "faster schedule, dropout": (*FASTER, *DROPOUT),
    "faster schedule, dropout, slow words": (*FASTER, *DROPOUT, *SLOW_WORDS),
}
HELD_OUT = 200  # training reviews of a domain
ROUNDS = 30  # of every variant, and of KTEPS beside them while one is chosen; afterwards KTEPS overfits
SHORTER: Mapping[str, Overrides] = {"full": (("run.rounds", str(ROUNDS)),)}


def variants(request: Request) -> Path:
    """Choose the variant with the best Ap on held-out training reviews, one seed; test it and KTEPS on all seeds.

    Raises:
        RunError: the training of every variant broke down.
    """
    book = Book(request, "kteps-variants")
    tries = {name: _cell(book, name, 0, held_out=True) for name in VARIANTS}
    run_tasks(missing([book.task(cell) for cell in tries.values()]), request.workers, request.progress)
    ap = personalized(METHODS["KTEPS"])
    found = {name: ap(n) for name, cell in tries.items() for n in book.numbers({0: cell}).values()}
    others = [name for name in found if name != "KTEPS"]
    if not others:
        raise RunError(
            f"Training broke down for every variant; {book.folder} says why. There is none to choose."
        )
    best = max(others, key=lambda name: found[name])
    cells = {
        "KTEPS": book.cells(book.fdu, "KTEPS"),
        best: {seed: _cell(book, best, seed) for seed in book.seeds},
    }
    values = (("accuracy_ap", ap), ("accuracy_ag", global_accuracy(METHODS["KTEPS"])))
    lines = [
        Line(book.fdu.name, name, metric, own, value)
        for metric, value in values
        for name, own in cells.items()
    ]

    shorter = (
        f"Each trains for {ROUNDS} rounds, KTEPS itself for 50; that variants are tested after so few was settled "
        "when curves on the test reviews were known, so a part of the gain may be that choice. "
        if SHORTER.get(book.scale)
        else ""
    )

    def further() -> str:
        return f"{_tries(book, found)}\n\n{_difference(book, cells, best)}"

    return book.make(
        lines,
        "Variants of KTEPS",
        f"Every variant sends in a round what KTEPS sends. {shorter}The one to be tested was chosen by Ap on "
        f"{HELD_OUT} training reviews of each domain that its training left out, seed 0; test reviews had no part in "
        "choosing among them. Dropout leaves out 0.2 of a text's words and 0.3 of the features; the "
        "schedule lowers the learning rate of 0.01 linearly to 0, the faster one "
        "begins at 0.02, and slow words begin at 0.004 in the embedding.",
        further,
    )


def _cell(book: Book, name: str, seed: int, held_out: bool = False) -> Cell:
    scale = dict((*book.fdu.scales[book.scale], *SHORTER.get(book.scale, ())))
    overrides = (*book.fdu.overrides, *scale.items(), *VARIANTS[name])
    if held_out:
        overrides += (("data.valid", str(HELD_OUT)),)
    slug = name.replace(", ", "-").replace(" ", "-").lower()
    return Cell(
        f"fdu-variant-{slug}-{'held-out-' if held_out else ''}{book.scale}-{seed}", METHODS["KTEPS"].config,
        (*overrides, ("seed", str(seed))), (RATIO,), split="valid" if held_out else "test",
    )  # fmt: skip


def _tries(book: Book, found: Mapping[str, float]) -> str:
    from fedkeep.report.tables import Table, to_markdown

    rows = tuple((name, f"{100 * value:.2f}") for name, value in found.items())
    return "\n" + to_markdown(
        Table(("variant", "Ap on held-out reviews, %"), rows, "How it was chosen"), level=2
    )


def _difference(book: Book, cells: Mapping[str, Mapping[int, Cell]], best: str) -> str:
    from fedkeep.report.tables import mean_std

    own, base = book.numbers(cells[best]), book.numbers(cells["KTEPS"])
    ap = personalized(METHODS["KTEPS"])
    gaps = [100 * (ap(own[seed]) - ap(base[seed])) for seed in own if seed in base]
    if not gaps:
        return ""
    mean, std = mean_std(gaps)
    spread = "" if std is None else f" ± {std:.2f}"
    one, two = (next(iter(numbers.values())) for numbers in (base, own))
    return (
        f'"{best}" minus KTEPS, Ap on the test reviews, paired by seed: {mean:+.2f}{spread} points over {len(gaps)} '
        f"seeds. KTEPS trains for {one.rounds} rounds, it for {two.rounds}; uploaded bytes per client and round: "
        f"{one.upload_bytes or 0:.0f} and {two.upload_bytes or 0:.0f}."
    )
