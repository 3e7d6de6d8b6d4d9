"""Variants of KTEPS that send the same bytes: one is chosen on held-out training reviews, and then tested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedkeep.core.errors import RunError
from fedkeep.experiments.reproduce.cells import Cell, Numbers, missing
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
WORDS_OUT: Overrides = (("model.word_dropout", "0.2"),)
DROPOUT: Overrides = (*WORDS_OUT, ("model.dropout", "0.3"))
VARIANTS: Mapping[str, Overrides] = {
    "KTEPS": (),
    "linear schedule": SCHEDULE,
    "word dropout": WORDS_OUT,
    "word dropout and dropout": DROPOUT,
    "schedule, word dropout": (*SCHEDULE, *WORDS_OUT),
    "schedule, word dropout and dropout": (*SCHEDULE, *DROPOUT),
    "schedule, word dropout and dropout, embedding rate 0.003": (
        *SCHEDULE, *DROPOUT, ("method.optimizer.rates", '{ "embedding.*" = 0.003 }'),
    ),
}  # fmt: skip
HELD_OUT = 200  # training reviews of a domain
CHOSEN_AT = {"quick": "quick", "medium": "medium", "full": "medium"}  # the scale of the runs that choose


def variants(request: Request) -> Path:
    """Choose the variant with the best Ap on held-out training reviews, one seed; test it and KTEPS on all seeds.

    Raises:
        RunError: the training of every variant broke down.
    """
    book = Book(request, "kteps-variants")
    tries = {name: _cell(book, name, CHOSEN_AT[book.scale], 0, held_out=True) for name in VARIANTS}
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
        best: {seed: _cell(book, best, book.scale, seed) for seed in book.seeds},
    }
    values = (("accuracy_ap", ap), ("accuracy_ag", global_accuracy(METHODS["KTEPS"])))
    lines = [
        Line(book.fdu.name, name, metric, own, value)
        for metric, value in values
        for name, own in cells.items()
    ]

    def further() -> str:
        return f"{_tries(book, found)}\n\n{_difference(book, cells, best)}"

    return book.make(
        lines,
        "Variants of KTEPS",
        f"Every variant sends what KTEPS sends. The one to be tested was chosen by Ap on {HELD_OUT} training reviews "
        f"of each domain that its training left out, at the scale `{CHOSEN_AT[book.scale]}`, seed 0; test reviews "
        f"had no part in it. Word dropout leaves out a share of 0.2 of a text's words, dropout 0.3 of the features.",
        further,
    )


def _cell(book: Book, name: str, scale: str, seed: int, held_out: bool = False) -> Cell:
    overrides = (*book.fdu.overrides, *book.fdu.scales[scale], *VARIANTS[name])
    slug = name.replace(", ", "-").replace(" ", "-").replace(".", "").lower()
    held = (("data.valid", str(HELD_OUT)),) if held_out else ()
    return Cell(
        f"fdu-variant-{slug}-{'held-out-' if held_out else ''}{scale}-{seed}", METHODS["KTEPS"].config,
        (*overrides, *held, ("seed", str(seed))), (RATIO,), split="valid" if held_out else "test",
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
    sent = _bytes(base), _bytes(own)
    return (
        f'"{best}" minus KTEPS, Ap on the test reviews, paired by seed: {mean:+.2f}{spread} points over {len(gaps)} '
        f"seeds. Uploaded bytes per client and round: {sent[0]:.0f} and {sent[1]:.0f}."
    )


def _bytes(numbers: Mapping[int, Numbers]) -> float:
    return next(iter(numbers.values())).upload_bytes or 0.0
