"""KTEPS, Figures 4 and 5: curves by round and by step of fine-tuning, and neighbours of words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedkeep.experiments.reproductions import Request
from fedkeep.metrics import ap
from fedkeep.report.text_tables import TextTable, to_markdown
from fedkeep_papers.kit import plots
from fedkeep_papers.kteps import published
from fedkeep_papers.kteps.book import (
    METHODS,
    OWN_WORDS,
    RATIO,
    WORDS,
    Book,
    Line,
    Value,
    global_accuracy,
)
from fedkeep_papers.kteps.cells import Numbers
from fedkeep_papers.kteps.neighbours import KS
from fedkeep_papers.kteps.tables import components


def figure4(request: Request) -> Path:
    """Ag by round, and accuracy by step of personalisation, of every method."""
    book = Book(request, "kteps-figure4")
    cells = {m: book.cells(book.fdu, m) for m in (*published.AP_METHODS, OWN_WORDS)}
    lines = []
    for method, own in cells.items():
        entry = METHODS[method]
        if entry.ag == "shared":
            lines.append(
                Line(
                    book.fdu.name,
                    method,
                    "accuracy_ag",
                    own,
                    global_accuracy(entry),
                    published.AG.get(book.fdu.name, {}).get(method),
                )
            )
        for step in ("before", "after") if entry.tuned else ():
            place = 0 if step == "before" else -1
            lines.append(Line(book.fdu.name, f"{method}, {step} fine-tuning", "accuracy_ap", own, _at(place)))

    def draw(folder: Path) -> list[Path]:
        shared: dict[str, list[tuple[float, float]]] = {}
        tuned: dict[str, list[tuple[float, float]]] = {}
        for method, own in cells.items():
            found = list(book.numbers(own).values())
            if found and METHODS[method].ag == "shared":
                shared[method] = _mean_curve([n.shared_curve for n in found])
            if found and METHODS[method].tuned:
                curves = [ap(n.curves[str(RATIO)]["own"]).curve for n in found]
                tuned[method] = list(zip(found[0].steps, np.mean(curves, axis=0).tolist(), strict=True))
        if not (shared or tuned):
            return []
        panels = [("rounds", "Ag", shared), ("mini-batches of fine-tuning", "accuracy", tuned)]
        return [plots.write(plots.panels_of_curves(panels, "accuracy", ""), folder, "figure4")]

    return book.make(
        lines,
        "KTEPS, Figure 4: Ag by round, and accuracy while clients fine-tune",
        "Methods without a global model have no curve of Ag. No numbers of the printed figure survive; Ag is beside "
        "Table 2's.",
        figures=draw,
    )


def _at(place: int) -> Value:
    return lambda n: ap(n.curves[str(RATIO)]["own"]).curve[place]


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float]]:
    values = np.mean([[y for _, y in curve] for curve in curves], axis=0).tolist()
    return [(x, y) for (x, _), y in zip(curves[0], values, strict=True)]


def figure5(request: Request) -> Path:
    """Neighbours of a word in the client's embedding, as the server restores it, and aggregated."""
    book = Book(request, "kteps-figure5")
    settings = {
        f"components {start} to 150": components(book, book.fdu, start, 150, OWN_WORDS) for start in (1, 2)
    }
    lines = [
        Line(
            book.fdu.name,
            f"{word}: client and {place}, {label}",
            f"common_of_{k}",
            own,
            _common(word, place, k),
        )
        for label, own in settings.items()
        for word in WORDS
        for place in ("server", "aggregate")
        for k in KS
    ]

    def words() -> str:
        text = ""
        for label, own in settings.items():
            for seed, numbers in list(book.numbers(own).items())[:1]:
                found = numbers.neighbours
                rows = tuple(
                    (word, place, ", ".join(near["cosine"]))
                    for word, places in found["nearest"].items()
                    for place, near in places.items()
                )
                whose = f"client {found['client']} ({found['own_words']:,} own words), seed {seed}"
                title = f"Nearest words by cosine, {label}, {whose}"
                text += "\n" + to_markdown(
                    TextTable(("word", "embedding", "nearest"), rows, title, left=3), level=2
                )
        return text

    def draw(folder: Path) -> list[Path]:
        found = {
            label: [n for n in book.numbers(own).values() if n.neighbours["common"]]
            for label, own in settings.items()
        }
        panels = [
            (
                "k nearest words",
                f"common to client and {place}",
                {
                    f"{label}, by {by}": _shares(runs, place, how)
                    for how, by in (("cosine", "cosine"), ("inner", "inner product"))
                    for label, runs in found.items()
                    if runs
                },
            )
            for place in ("server", "aggregate")
        ]
        if not panels[0][2]:
            return []
        title = "Means over the words " + ", ".join(WORDS)
        if any(len(runs) > 1 for runs in found.values()):
            title += ", and over seeds"
        return [plots.write(plots.panels_of_curves(panels, "accuracy", title, KS), folder, "figure5")]

    return book.make(
        lines,
        "KTEPS, Figure 5: neighbours of words under compression",
        'One more round after the last. "client": the table of one client after local training, before it is '
        'compressed; "server": what the server restores of its upload; "aggregate": the table of the next round. '
        "Counted are words common to the k nearest by cosine, in the figure by inner product too, among the client's "
        'own words, whose rows alone are compressed. The paper shows Yelp 2013 and "man"; here it is the domain with '
        "the most words. Its counts are lost.",
        words,
        draw,
    )


def _shares(runs: Sequence[Numbers], place: str, how: str) -> list[tuple[float, float]]:
    """Return (k, share of the k nearest that are common), the mean over runs of that over the client's words."""

    def share(numbers: Numbers, k: int) -> float:
        words = numbers.neighbours["common"].values()
        return float(np.mean([found[place][how][str(k)] / k for found in words]))

    return [(k, float(np.mean([share(numbers, k) for numbers in runs]))) for k in KS]


def _common(word: str, place: str, k: int) -> Value:
    def value(numbers: Numbers) -> float:
        found = numbers.neighbours["common"].get(word)
        return math.nan if found is None else float(found[place]["cosine"][str(k)])

    return value
