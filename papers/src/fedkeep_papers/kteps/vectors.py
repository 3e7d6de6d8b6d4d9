"""What the word vectors change: ours are not the paper's, so methods are trained from others, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedkeep.experiments.reproductions import Request
from fedkeep_papers.kteps import published
from fedkeep_papers.kteps.book import METHODS, Book, Line, global_accuracy, personalized
from fedkeep_papers.kteps.cells import Cell, Overrides

WAYS: Mapping[str, Overrides] = {
    "as configured": (),
    "vectors twice as long": (("model.word_vectors_scale", "2.0"),),
    "no vectors": (("model.word_vectors", '""'),),
}
ROWS = ("Indiv", "FedAvg", "KTEPS")


def vectors(request: Request) -> Path:
    """Train methods from the word vectors, from the same ones made longer, and without any."""
    book = Book(request, "kteps-vectors")
    return book.make(
        [line for method in ROWS for way in WAYS for line in _lines(book, method, way)],
        "KTEPS: other word vectors",
        "The paper starts from GloVe 6B; ours are skip-gram vectors of posts and of reviews. Their numbers have a "
        "standard deviation of 0.22; twice as long they are nearer to GloVe's. Without vectors a word's numbers are "
        "drawn from U(−0.1, 0.1). Ratio 1 fine-tunes at the full learning rate, as in Table 5.",
    )


def _lines(book: Book, method: str, way: str) -> list[Line]:
    """Return the lines of a method from some vectors: Ag, Ap, and Ap where clients tune at the full rate."""
    scene, entry, label = book.fdu.name, METHODS[method], f"{method}, {way}"
    usual = book.cells(book.fdu, method)
    cells = {s: _cell(book, cell, method, way, s) for s, cell in usual.items()} if WAYS[way] else usual
    known = [of.get(scene, {}).get(method) for of in (published.AG, published.AP)]
    known.append(published.TUNING_RATES.get(scene, {}).get((method, 1.0)))
    values = [global_accuracy(entry), personalized(entry), personalized(entry, ratio=1.0)]
    shown = [(label, "accuracy_ag"), (label, "accuracy_ap"), (f"{label}, ratio 1", "accuracy_ap")]
    return [
        Line(scene, name, metric, cells, value, None if WAYS[way] else number)
        for (name, metric), value, number in zip(shown, values, known, strict=True)
        if "ratio" not in name or 1.0 in entry.ratios
    ]


def _cell(book: Book, usual: Cell, method: str, way: str, seed: int) -> Cell:
    """Return a method's usual cell, but from other vectors."""
    return replace(
        usual,
        name=usual.name.replace(f"-{book.scale}-", f"-{way.replace(' ', '-')}-{book.scale}-"),
        overrides=book.overrides(book.fdu, METHODS[method].config, WAYS[way], seed),
        inferences=(),
        words=(),
    )
