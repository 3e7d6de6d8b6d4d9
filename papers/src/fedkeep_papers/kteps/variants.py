"""Variants of KTEPS that send the same bytes: one is chosen on held-out training reviews, and then tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedkeep.core.errors import RunError
from fedkeep.experiments.reproductions import Request
from fedkeep.report.text_tables import TextTable, mean_std, to_markdown
from fedkeep_papers.kteps.book import (
    METHODS,
    RATIO,
    Book,
    Line,
    global_accuracy,
    personalized,
)
from fedkeep_papers.kteps.cells import Cell, Numbers, Overrides

SCHEDULE: Overrides = (("method.optimizer.schedule", '"linear"'),)
FASTER: Overrides = (("method.optimizer.learning_rate", "0.02"), *SCHEDULE)
DROPOUT: Overrides = (("model.word_dropout", "0.2"), ("model.dropout", "0.3"))
SLOW_WORDS: Overrides = (("method.optimizer.rates", '{ "*embedding.*" = 0.004 }'),)


@dataclass(frozen=True)
class Variant:
    """What differs from KTEPS: settings, and whether it stops after `ROUNDS` rounds (`early`) or trains for all."""

    overrides: Overrides = ()
    early: bool = True


VARIANTS: Mapping[str, Variant] = {
    "KTEPS": Variant(),
    "linear schedule": Variant(SCHEDULE),
    "linear schedule, all rounds": Variant(SCHEDULE, early=False),
    "dropout": Variant(DROPOUT),
    "schedule, dropout": Variant((*SCHEDULE, *DROPOUT)),
    "faster schedule, dropout": Variant((*FASTER, *DROPOUT)),
    "faster schedule, dropout, slow words": Variant((*FASTER, *DROPOUT, *SLOW_WORDS)),
}
FEDAVG = "FedAvg"
"""It is tested by the rule that is chosen, too: stopping early and a falling rate might help any method."""
HELD_OUT = 200  # training reviews of a domain
ROUNDS = 30  # of every variant, and of KTEPS beside them while one is chosen; afterwards KTEPS overfits
SHORTER: Mapping[str, Overrides] = {"full": (("run.rounds", str(ROUNDS)),)}


def variants(request: Request) -> Path:
    """Choose the variant with the best Ap on held-out training reviews, one seed; test it and KTEPS on all seeds, and
    FedAvg with and without its rule.

    It waits for all variants: where one is not finished, none is chosen.

    Raises:
        RunError: the training of every variant broke down.
    """
    book = Book(request, "kteps-variants")
    names = [name for name, variant in VARIANTS.items() if variant.early or SHORTER.get(book.scale)]
    tries = {name: _cell(book, name, 0, held_out=True) for name in names}
    book.run([book.task(cell) for cell in tries.values()])
    waits = [name for name, cell in tries.items() if book.task(cell).slot.find() is None]
    ap = personalized(METHODS["KTEPS"])
    tried = {name: n for name, cell in tries.items() for n in book.numbers({0: cell}).values()}
    found = {name: ap(n) for name, n in tried.items()}
    rounds = {name: n.rounds for name, n in tried.items()}
    others = [name for name in found if VARIANTS[name].overrides]
    if not waits and not others:
        raise RunError(
            "Training broke down for every variant; {folder} says why. There is none to choose.",
            folder=book.folder,
        )
    best = None if waits else max(others, key=lambda name: found[name])
    cells = {"KTEPS": book.cells(book.fdu, "KTEPS"), FEDAVG: book.cells(book.fdu, FEDAVG)}
    if best is not None:
        for name, method in ((best, "KTEPS"), (f"{FEDAVG}, {best}", FEDAVG)):
            cells[name] = {seed: _cell(book, best, seed, method=method) for seed in book.seeds}
    values = (("accuracy_ap", ap), ("accuracy_ag", global_accuracy(METHODS["KTEPS"])))
    lines = [
        Line(book.fdu.name, name, metric, own, value)
        for metric, value in values
        for name, own in cells.items()
    ]

    shorter = (
        f"KTEPS is tested after its 50 rounds, a variant after {ROUNDS}; the linear schedule was tried with 50 too. "
        f"That {ROUNDS} is among the choices goes back to curves on the test reviews of seed 0. "
        if SHORTER.get(book.scale)
        else ""
    )

    chosen = "The one to be tested was"
    if waits:
        missing = ", ".join(f'"{name}"' for name in waits)
        chosen = f"Not run yet: {missing}. Once all are tried, the one to be tested is"

    def further() -> str:
        return f"{_tries(found, rounds)}\n\n{_difference(book, cells, best) if best is not None else ''}"

    return book.make(
        lines,
        "Variants of KTEPS",
        f"Every variant sends in a round what KTEPS sends. {shorter}{chosen} chosen by Ap on "
        f"{HELD_OUT} training reviews of each domain that its training left out, seed 0; test reviews had no part in "
        "choosing among them. Dropout leaves out 0.2 of a text's words and 0.3 of the features; the "
        "schedule lowers the learning rate of 0.01 linearly to 0, the faster one "
        "begins at 0.02, and slow words begin at 0.004 in the embedding.",
        further,
        possible=[{0: cell} for cell in tries.values()],
    )


def _cell(book: Book, name: str, seed: int, held_out: bool = False, method: str = "KTEPS") -> Cell:
    variant = VARIANTS[name]
    config, own = METHODS[method].config, variant.overrides
    if variant.early:
        own += SHORTER.get(book.scale, ())
    if held_out:
        own += (("data.valid", str(HELD_OUT)),)
    slug = (name if method == "KTEPS" else f"{method} {name}").replace(", ", "-").replace(" ", "-").lower()
    return Cell(
        f"{book.fdu.name.lower()}-variant-{slug}-{'held-out-' if held_out else ''}{book.scale}-{seed}",
        config,
        book.overrides(book.fdu, config, own, seed),
        (RATIO,),
        split="valid" if held_out else "test",
    )


def _tries(found: Mapping[str, float], rounds: Mapping[str, int]) -> str:
    if not found:
        return ""
    rows = tuple((name, str(rounds[name]), f"{100 * value:.2f}") for name, value in found.items())
    return "\n" + to_markdown(
        TextTable(("variant", "rounds", "Ap on held-out reviews, %"), rows, "How it was chosen"), level=2
    )


def _difference(book: Book, cells: Mapping[str, Mapping[int, Cell]], best: str) -> str:
    own, base = book.numbers(cells[best]), book.numbers(cells["KTEPS"])
    seeds = [seed for seed in own if seed in base]
    if not seeds:
        return ""
    ap = personalized(METHODS["KTEPS"])
    ahead = gap([ap(own[seed]) - ap(base[seed]) for seed in seeds])
    one, two = base[seeds[0]], own[seeds[0]]
    text = (
        f'"{best}" minus KTEPS, Ap on the test reviews, paired by seed: {ahead} points over {len(seeds)} '
        f"seeds. KTEPS trains for {one.rounds} rounds, it for {two.rounds}; uploaded bytes per client and round: "
        f"{one.upload_bytes or 0:.0f} and {two.upload_bytes or 0:.0f}."
    )
    if two.rounds < one.rounds:
        stop = two.rounds
        early = gap([_at(base[s], stop) - _at(base[s], base[s].rounds) for s in seeds])
        same = gap([_at(own[s], stop) - _at(base[s], stop) for s in seeds])
        text += (
            f" What stopping alone is worth: before fine-tuning, the clients' models of KTEPS were {early} points "
            f'better after round {stop} than after its last one; those of "{best}" were then {same} points better '
            f"than KTEPS's after the same round {stop}."
        )
    return text + _beside_fedavg(book, cells, best)


def _beside_fedavg(book: Book, cells: Mapping[str, Mapping[int, Cell]], best: str) -> str:
    """Write what the rule is worth to FedAvg, and how far KTEPS is ahead of it there."""
    names = (best, f"{FEDAVG}, {best}", FEDAVG)
    own, ruled, usual = (book.numbers(cells[name]) for name in names)
    seeds = [seed for seed in own if seed in ruled and seed in usual]
    if not seeds:
        return ""
    gains, gaps = (
        [
            gap([of(a[s]) - of(b[s]) for s in seeds])
            for of in (personalized(METHODS[FEDAVG]), global_accuracy(METHODS[FEDAVG]))
        ]
        for a, b in ((ruled, usual), (own, ruled))
    )
    return (
        f"\n\nBy the same rule FedAvg has {gains[0]} points of Ap and {gains[1]} of Ag more than as configured, paired "
        f'by seed over {len(seeds)} seeds. "{best}" minus FedAvg by that rule: {gaps[0]} and {gaps[1]} points.'
    )


def _at(numbers: Numbers, number: int) -> float:
    """Return the clients' mean accuracy with their own models after a round, before fine-tuning."""
    return next(value for at, value in numbers.test_curve if at == number)


def gap(differences: Sequence[float]) -> str:
    """Write the mean of differences of accuracies in points, with their standard deviation."""
    mean, std = mean_std([100 * d for d in differences])
    return f"{mean:+.2f}" if std is None else f"{mean:+.2f} ± {std:.2f}"
