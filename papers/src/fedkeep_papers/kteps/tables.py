"""KTEPS, Tables 1 to 8: every table but the first, of the data, asks for cells, which the tables share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkeep.data import text_statistics
from fedkeep.experiments.build import build_data
from fedkeep.experiments.reproductions import Request
from fedkeep.metrics import ap
from fedkeep_papers.kit.results import over_seeds, write_results
from fedkeep_papers.kteps import published
from fedkeep_papers.kteps.book import (
    FEDAVG,
    METHODS,
    OWN_WORDS,
    RATIO,
    Book,
    Entry,
    Line,
    Scene,
    global_accuracy,
    personalized,
)
from fedkeep_papers.kteps.cells import Cell, Numbers
from fedkeep_papers.kteps.details import by_client, costs, fairness, of_repeats

STARS = ("KTEPS", "KTEPS⋆", OWN_WORDS)
AP_ROWS = (*published.AP_METHODS, OWN_WORDS)


def table2(request: Request) -> Path:
    """Ag of every method, by domain and over all."""
    book = Book(request, "kteps-table2")
    lines, cells = [], {}
    for scene in book.every:
        for method in (*published.AG_METHODS, OWN_WORDS):
            cells[scene.name, method] = book.cells(scene, method)
            value = global_accuracy(METHODS[method])
            known = published.AG.get(scene.name, {}).get(method)
            lines.append(
                Line(book.title(scene), method, "accuracy_ag", cells[scene.name, method], value, known)
            )

    def of_client(method: str, numbers: Numbers) -> Mapping[str, float]:
        return numbers.shared if METHODS[method].ag == "shared" else numbers.test

    return book.make(
        lines,
        "KTEPS, Table 2: accuracy of the global model (Ag)",
        "The model of the last round without any personalisation, judged on each client's test reviews. Indiv has no "
        "global model, and ASP-MTL none without task heads: their own models are judged.",
        lambda: by_client(book, cells, published.AG, of_client) + of_repeats(book, cells),
    )


def table3(request: Request) -> Path:
    """Ap of every method, by domain and over all; fairness and bytes."""
    book = Book(request, "kteps-table3")
    lines, cells = [], {}
    for scene in book.every:
        for method in AP_ROWS:
            cells[scene.name, method] = own = book.cells(scene, method)
            entry = METHODS[method]
            known = published.AP.get(scene.name, {}).get(method)
            lines.append(Line(book.title(scene), method, "accuracy_ap", own, personalized(entry), known))
        for what in ("last", "max"):
            for method in AP_ROWS:
                value = personalized(METHODS[method], what)
                lines.append(
                    Line(book.title(scene), method, f"accuracy_ap_{what}", cells[scene.name, method], value)
                )

    def of_client(method: str, numbers: Numbers) -> Mapping[str, float]:
        return ap(numbers.curves[str(RATIO)]["own"]).clients if METHODS[method].tuned else numbers.test

    return book.make(
        lines,
        "KTEPS, Table 3: accuracy of personalised models (Ap)",
        "After the last round every client fine-tunes everything with its method's own loss, at 0.01 of the "
        "learning rate, and is tested before, on the way and after. Indiv shares nothing and is judged as it is.",
        lambda: (
            by_client(book, cells, published.AP, of_client)
            + fairness(book, cells, of_client)
            + costs(book, cells)
        ),
    )


def _both(
    book: Book,
    scene: Scene,
    label: str,
    cells: Mapping[int, Cell],
    entry: Entry,
    known: Mapping[tuple[str, str], Any],
    key: Any,
) -> list[Line]:
    """Return the lines of Ag and Ap of one setting."""
    values = {"ag": global_accuracy(entry), "ap": personalized(entry)}
    return [
        Line(book.title(scene), label, f"accuracy_{m}", cells, value, known.get((scene.name, m), {}).get(key))
        for m, value in values.items()
    ]


def table4(request: Request) -> Path:
    """KTEPS over λ1 (diversity) and λ2 (transfer)."""
    book = Book(request, "kteps-table4")
    lines = []
    for scene in book.every:
        for one in published.WEIGHTS:
            for two in published.WEIGHTS:
                usual = one == two == 0.01
                cells = book.cells(scene, "KTEPS", None if usual else {"diversity": one, "transfer": two})
                label = f"λ1 = {one:g}, λ2 = {two:g}"
                lines += _both(
                    book, scene, label, cells, METHODS["KTEPS"], published.LOSS_WEIGHTS, (one, two)
                )
    return book.make(
        lines,
        "KTEPS, Table 4: weights of the losses",
        "λ1 weighs the diversity of the branches (HSIC), λ2 the transfer from the shared to the private one. Which "
        "axis of the printed table is λ1 is lost; its rows are read as λ1.",
    )


def table5(request: Request) -> Path:
    """Ap over the learning rate of personalisation."""
    book = Book(request, "kteps-table5")
    lines = [
        Line(
            book.title(scene),
            f"{method}, ratio {ratio:g}",
            "accuracy_ap",
            book.cells(scene, method),
            personalized(METHODS[method], ratio=ratio),
            published.TUNING_RATES.get(scene.name, {}).get((method, ratio)),
        )
        for scene in book.every
        for method in STARS
        for ratio in published.RATIOS
    ]
    return book.make(
        lines,
        "KTEPS, Table 5: the learning rate of personalisation",
        "Ap by the learning rate of fine-tuning, as a multiple of the rate in federation.",
    )


def table6(request: Request) -> Path:
    """Ap by the branch that predicts."""
    book = Book(request, "kteps-table6")
    lines = [
        Line(
            book.title(scene),
            f"{method}, {how}",
            "accuracy_ap",
            book.cells(scene, method),
            personalized(METHODS[method], predict=how),
            published.INFERENCE.get(scene.name, {}).get((method, how)),
        )
        for scene in book.every
        for method in STARS
        for how in published.INFERENCES
    ]
    return book.make(
        lines,
        "KTEPS, Table 6: which branch predicts",
        "The shared branch (s), the private one (p), or the mean of their logits (sp), on the same fine-tuned models.",
    )


def components(book: Book, scene: Scene, start: int, end: int, method: str = "KTEPS⋆") -> dict[int, Cell]:
    """Return the cells of a KTEPS⋆ with components start .. end; all of them is KTEPS, 2 .. 150 the usual one."""
    if (start, end) == (1, 200):
        return book.cells(scene, "KTEPS")
    if (start, end) == (2, 150):
        return book.cells(scene, method)
    words = METHODS[method].words if (start, end) == (1, 150) else ()  # Figure 5 sets it beside the usual one
    return book.cells(scene, method, {"start": start, "end": end}, words)


def table7(request: Request) -> Path:
    """KTEPS⋆ over the components that are kept."""
    book = Book(request, "kteps-table7")
    lines = []
    for scene in book.every:
        for end in published.ENDS:
            for start in published.STARTS:
                label = f"components {start} to {end}"
                cells = components(book, scene, start, end)
                lines += _both(
                    book, scene, label, cells, METHODS["KTEPS⋆"], published.COMPONENTS, (end, start)
                )
                if (start, end) != (1, 200):
                    cells = components(book, scene, start, end, OWN_WORDS)
                    lines += _both(book, scene, f"{label}, own words", cells, METHODS[OWN_WORDS], {}, ())
    return book.make(
        lines,
        "KTEPS, Table 7: components kept of the embedding",
        "KTEPS⋆ uploads the principal components d_s to d_e of each client's embedding. Components 1 to 200 are all of "
        "them: that row is KTEPS's own run. Of a whole table, every round of aggregation removes the first d_s − 1 "
        "directions that are left, so that after R rounds max(0, d_e − R (d_s − 1)) remain. Where only the rows of a "
        "client's own words are projected, which is ours, the others keep every direction.",
    )


def private_part(
    book: Book, architecture: str, transfer: float, inferences: tuple[str, ...] = ()
) -> dict[int, Cell]:
    """Return the cells of KTEPS without projections and diversity, which has an ``architecture`` and a λ2."""
    changes = {"architecture": architecture, "diversity": 0.0, "projections": False, "transfer": transfer}
    return book.cells(book.fdu, "KTEPS", changes, inferences=inferences)


def table8(request: Request) -> Path:
    """What is private, without projections and diversity."""
    book = Book(request, "kteps-table8")
    lines = []
    for architecture in published.ARCHITECTURES:
        for two in published.TRANSFERS:
            cells = private_part(book, architecture, two)
            label = f"{architecture}, λ2 = {two:g}"
            lines += _both(
                book, book.fdu, label, cells, METHODS["KTEPS"], published.PRIVATE_PARTS, (two, architecture)
            )
    return book.make(
        lines,
        "KTEPS, Table 8: what is private",
        "Private are the classifier (A), the encoder and the classifier (B), or the whole model (C), without "
        "projections and diversity (λ1 = 0).",
    )


UNCUT = "1000000"
METRICS = ("training_reviews", "test_reviews", "mean_words", "different_words")


def table1(request: Request) -> Path:
    """Write each client's numbers of reviews and words, as the scale's configurations read them; nothing is trained."""
    book = Book(request, "kteps-table1")
    seed, rows = book.seeds[0], []
    for scene in book.scenes:
        printed = published.of_scene(published.STATISTICS, scene.name)
        uncut = book.overrides(scene, FEDAVG, (("data.max_length", UNCUT),), seed)
        data = build_data(Cell("", FEDAVG, uncut).resolved(), book.data)
        for own in text_statistics(data):
            values = (own.train, own.test, own.mean_words, own.different_words)
            known = printed.get(own.client, (None,) * len(METRICS))
            rows += [
                over_seeds(scene.name, own.client, m, {seed: float(v)}, published=k, scale=book.scale)
                for m, v, k in zip(METRICS, values, known, strict=True)
            ]
    text = (
        "Of training reviews, before they are cut to the length that is trained on; different words are those of the "
        "clients' common vocabulary of 50,000. The paper prints them in thousands."
    )
    title = "KTEPS, Table 1: the data"
    return write_results(request.out, book.result, rows, title=title, preamble=text)[1]
