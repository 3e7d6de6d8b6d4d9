"""KTEPS, Table 1: what the clients hold."""

from __future__ import annotations

from pathlib import Path

from fedkeep.data import text_statistics
from fedkeep.experiments.build import build_data
from fedkeep.experiments.environment import commit
from fedkeep.experiments.reproductions import Request
from fedkeep.report.results import over_seeds, write_results
from fedkeep_papers.kteps import published
from fedkeep_papers.kteps.book import FEDAVG, Book
from fedkeep_papers.kteps.cells import Cell

UNCUT = "1000000"
METRICS = ("training_reviews", "test_reviews", "mean_words", "different_words")


def table1(request: Request) -> Path:
    """Write each client's numbers of reviews and words, as the scale's configurations read them; nothing is trained."""
    book = Book(request, "kteps-table1")
    seed, now, rows = book.seeds[0], commit() or "", []
    for scene in book.scenes:
        printed = published.of_scene(published.STATISTICS, scene.name)
        uncut = book.overrides(scene, FEDAVG, (("data.max_length", UNCUT),), seed)
        data = build_data(Cell("", FEDAVG, uncut).resolved(), book.data)
        for own in text_statistics(data):
            values = (own.train, own.test, own.mean_words, own.different_words)
            known = printed.get(own.client, (None,) * len(METRICS))
            rows += [
                over_seeds(
                    scene.name, own.client, m, {seed: float(v)}, published=k, scale=book.scale, commit=now
                )
                for m, v, k in zip(METRICS, values, known, strict=True)
            ]
    text = (
        "Of training reviews, before they are cut to the length that is trained on; different words are those of the "
        "clients' common vocabulary of 50,000. The paper prints them in thousands."
    )
    title = "KTEPS, Table 1: the data"
    return write_results(request.out, book.result, rows, title=title, preamble=text)[1]
