"""What the word vectors change: ours are not the paper's, so methods are trained from others, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedkeep.experiments.reproductions import Request
from fedkeep.report.text_tables import TextTable, to_markdown
from fedkeep_papers.kteps import published
from fedkeep_papers.kteps.book import METHODS, RATIO, Book, Line, global_accuracy, personalized
from fedkeep_papers.kteps.cells import Cell, Overrides
from fedkeep_papers.kteps.glove import GLOVE_150, OURS_150
from fedkeep_papers.kteps.variants import gap

GLOVE = "GloVe, 150 numbers"
"""The nearest to the paper's, whose numbers stand beside it."""
BY_ADAM = "GloVe, 150 numbers, tuned by Adam"
BRIEFLY = f"{BY_ADAM} for 100 steps"
TUNED = (BY_ADAM, BRIEFLY)
"""KTEPS alone, to see what the rate of fine-tuning does then."""
FROM_GLOVE: Overrides = (("model.word_vectors", f'"{GLOVE_150}"'), ("model.embedding_dim", "150"))
ADAM: Overrides = (*FROM_GLOVE, ("personalization.optimizer", '"adam"'))
WAYS: Mapping[str, Overrides] = {
    "as configured": (),
    "vectors twice as long": (("model.word_vectors_scale", "2.0"),),
    "no vectors": (("model.word_vectors", '""'),),
    "ours, 150 numbers": (("model.word_vectors", f'"{OURS_150}"'), ("model.embedding_dim", "150")),
    GLOVE: FROM_GLOVE,
    BY_ADAM: ADAM,
    BRIEFLY: (*ADAM, ("personalization.steps", "100"), ("personalization.every", "2")),
}
FILES = {"ours, 150 numbers": OURS_150, GLOVE: GLOVE_150} | dict.fromkeys(TUNED, GLOVE_150)
"""Of a way, which is left out where its file is not in the folder of data."""
ROWS = ("Indiv", "FedAvg", "KTEPS")
OF_GLOVE = ("LG-FedAvg", "FedFusion", "PFL-DA", "KTEPS⋆")
"""Trained as configured and from GloVe's alone."""
ABOUT = """
The paper starts from GloVe 6B; ours are skip-gram vectors of posts and of reviews. Their numbers have a standard
deviation of 0.22; twice as long they are nearer to GloVe's. Without vectors a word's numbers are drawn from U(−0.1,
0.1). Ratio 1 fine-tunes at the full learning rate, as in Table 5.

GloVe 6B's 200 numbers, which the paper takes, were found in no package. 150 were: its vectors of 50 numbers and of 100,
side by side. The latter lack "a", "i", "n't", "'s" and numerals, which have zeros there. Beside them stand ours on
their 150 principal components, and as long as GloVe's: only what the vectors were made of differs. `python -m
fedkeep_papers.kteps.glove` writes both files; without them these rows are left out. With 150 numbers KTEPS⋆ keeps
components 2 to 150 of 150, so that 100 directions are left after 50 rounds, as they are of 200.

"Tuned by Adam": the training is the same, and clients fine-tune by Adam at the rates of Table 5, not by SGD with
momentum. The paper says SGD, of training. For how many steps clients are tuned and how often they are tested is lost;
elsewhere it is 200 steps and every 20th. Ap is the mean over the curve, so that both matter where the first steps hurt:
"for 100 steps" tests after every second.
"""


def vectors(request: Request) -> Path:
    """Train methods from the word vectors, from the same ones made longer, from GloVe's, and without any."""
    book = Book(request, "kteps-vectors")
    asked = [(m, w) for m in ROWS for w in WAYS if m == "KTEPS" or w not in TUNED]
    asked += [(m, w) for m in OF_GLOVE for w in ("as configured", GLOVE)]
    lines = [line for method, way in asked for line in _lines(book, method, way)]
    return book.make(lines, "KTEPS: other word vectors", ABOUT, lambda: _ahead(book))


def _lines(book: Book, method: str, way: str) -> list[Line]:
    """Return the lines of a method from some vectors: Ag, Ap, and Ap where clients tune at other rates."""
    scene, entry, label = book.fdu.name, METHODS[method], f"{method}, {way}"
    cells = _cells(book, method, way)
    possible = way not in FILES or ((book.data / FILES[way]).is_file() and not book.request.finished)
    if not possible and not book.numbers(cells):
        return []
    ag, ap = (of.get(scene, {}).get(method) for of in (published.AG, published.AP))
    shown = [(label, "accuracy_ag", global_accuracy(entry), ag)] if entry.ag != "none" else []
    shown.append((label, "accuracy_ap", personalized(entry), ap))
    for ratio in (r for r in entry.ratios if r == 1 or (r != RATIO and way in (GLOVE, *TUNED))):
        rate = published.TUNING_RATES.get(scene, {}).get((method, ratio))
        shown.append((f"{label}, ratio {ratio:g}", "accuracy_ap", personalized(entry, ratio=ratio), rate))
    beside = not WAYS[way] or FILES.get(way) == GLOVE_150
    return [
        Line(scene, name, metric, cells, value, number if beside else None)
        for name, metric, value, number in shown
    ]


def _cells(book: Book, method: str, way: str) -> Mapping[int, Cell]:
    """Return a method's cells from some vectors, by seed."""
    usual = book.cells(book.fdu, method)
    return {s: _cell(book, cell, method, way, s) for s, cell in usual.items()} if WAYS[way] else usual


def _ahead(book: Book) -> str:
    """Write how far KTEPS is ahead of FedAvg from each kind of vectors, paired by seed."""
    of, rows = {m: (personalized(METHODS[m]), global_accuracy(METHODS[m])) for m in ("KTEPS", "FedAvg")}, []
    for way in WAYS:
        ours, theirs = (book.numbers(_cells(book, method, way)) for method in of)
        seeds = [seed for seed in ours if seed in theirs]
        if seeds:
            pairs = zip(of["KTEPS"], of["FedAvg"], strict=True)
            gaps = [gap([own(ours[s]) - base(theirs[s]) for s in seeds]) for own, base in pairs]
            rows.append((way, *gaps, str(len(seeds))))
    columns = ("vectors", "Ap, points", "Ag, points", "seeds")
    title = "KTEPS minus FedAvg, paired by seed"
    return "\n" + to_markdown(TextTable(columns, tuple(rows), title), level=2) if rows else ""


def _cell(book: Book, usual: Cell, method: str, way: str, seed: int) -> Cell:
    """Return a method's usual cell, but from other vectors."""
    return replace(
        usual,
        name=usual.name.replace(
            f"-{book.scale}-", f"-{way.replace(',', '').replace(' ', '-').lower()}-{book.scale}-"
        ),
        overrides=book.overrides(book.fdu, METHODS[method].config, WAYS[way], seed),
        inferences=(),
        words=(),
    )
