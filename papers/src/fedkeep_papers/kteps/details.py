"""Further tables in the Markdown of KTEPS's Tables 2 and 3: every client, repeated reviews, fairness, and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fedkeep.metrics import per_client
from fedkeep.report.text_tables import TextTable, to_markdown
from fedkeep.report.wording import duration, size
from fedkeep_papers.kteps import published
from fedkeep_papers.kteps.book import METHODS, Book
from fedkeep_papers.kteps.cells import Cell, Numbers

OfClient = Callable[[str, Numbers], Mapping[str, float]]
"""Each client's accuracy in a cell of a method."""
Cells = Mapping[tuple[str, str], Mapping[int, Cell]]
"""Cells by seed, by scene and method."""


def _mean_clients(
    book: Book, cells: Mapping[int, Cell], method: str, of_client: OfClient
) -> dict[str, float]:
    """Return each client's accuracy, the mean over seeds; empty where no cell is finished."""
    found = [of_client(method, n) for n in book.numbers(cells).values()]
    return {c: float(np.mean([own[c] for own in found])) for c in found[0]} if found else {}


def by_client(book: Book, cells: Cells, known: Mapping[str, Mapping[str, float]], of_client: OfClient) -> str:
    """Return a Markdown table of every client and method, ours and the published beside it."""
    text = ""
    for scene in book.scenes:
        printed = published.of_scene(known, scene.name)
        methods = [m for s, m in cells if s == scene.name]
        ours = {m: _mean_clients(book, cells[scene.name, m], m, of_client) for m in methods}
        found = list(dict.fromkeys(c for own in ours.values() for c in own))
        clients = [c for c in printed if c in found] + [c for c in found if c not in printed]
        if not clients:
            continue
        rows = tuple(
            (c, *(_beside(ours[m].get(c), printed.get(c, {}).get(m)) for m in methods)) for c in clients
        )
        title = f"{scene.name} by client, ours (published), %"
        text += "\n" + to_markdown(TextTable(("client", *methods), rows, title), level=2)
    return text


def _beside(ours: float | None, theirs: float | None) -> str:
    left = "–" if ours is None else f"{100 * ours:.1f}"
    return left if theirs is None else f"{left} ({100 * theirs:.1f})"


def fairness(book: Book, cells: Cells, of_client: OfClient) -> str:
    """Return a Markdown table of how each method's accuracy is spread over clients."""
    rows = []
    for (scene, method), own in cells.items():
        values = _mean_clients(book, own, method, of_client)
        if values:
            s = per_client(values)
            deciles = " ".join(f"{100 * d:.1f}" for d in s.deciles)
            rows.append(
                (
                    scene,
                    method,
                    f"{100 * s.min:.1f}",
                    str(s.worst),
                    f"{100 * s.std:.1f}",
                    f"{100 * s.max:.1f}",
                    deciles,
                )
            )
    if not rows:
        return ""
    columns = ("scene", "method", "worst", "who", "deviation", "best", "deciles 10 % … 90 %")
    return "\n" + to_markdown(
        TextTable(columns, tuple(rows), "Fairness over clients, Ap in %", left=2), level=2
    )


def costs(book: Book, cells: Cells) -> str:
    """Return a Markdown table of bytes and seconds."""
    rows = []
    for (scene, method), own in cells.items():
        found = list(book.numbers(own).values())
        if found:
            seconds = float(np.mean([n.seconds / max(n.rounds, 1) for n in found]))
            up, down = (_mean_of(found, name) for name in ("upload_bytes", "download_bytes"))
            private = found[0].private_bytes
            rows.append((scene, method, size(up), size(down), size(private), duration(seconds)))
    if not rows:
        return ""
    columns = ("scene", "method", "up", "down", "stays private", "a round takes")
    note = (
        "Bytes are means over clients and rounds as they are sent: tables cut to the words that a client uses. Times "
        "include evaluation, and were taken on machines that did other things too."
    )
    return "\n" + to_markdown(
        TextTable(columns, tuple(rows), "Costs a client and round", note, left=2), level=2
    )


def _mean_of(found: Iterable[Numbers], name: str) -> float | None:
    values = [v for n in found if (v := getattr(n, name)) is not None]
    return float(np.mean(values)) if values else None


def of_repeats(book: Book, cells: Cells) -> str:
    """Return a Markdown table of accuracy on test reviews that stand in training, and on all others."""
    rows = []
    for (scene, method), own in cells.items():
        model = "shared" if METHODS[method].ag == "shared" else "own"
        found = [n for n in book.numbers(own).values() if n.rest.get(model)]
        if found:
            every = [n.shared if model == "shared" else n.test for n in found]
            whole, rest = (_mean_over(values) for values in (every, [n.rest[model] for n in found]))
            right = [(n.again[model][client], count) for n in found for client, count in n.repeats.items()]
            again = sum(value * count for value, count in right) / max(sum(count for _, count in right), 1)
            numbers = (f"{100 * value:.1f}" for value in (whole, again, rest, whole - rest))
            rows.append((scene, method, str(len(found)), *numbers))
    if not rows:
        return ""
    columns = ("scene", "method", "seeds", "all", "the repeats", "the others", "all − the others")
    title = "Test reviews that stand in training, and the others, %"
    note = (
        "A repeat is a test review whose first 200 words are a training review's. Of cells that were computed since "
        "this is looked at. Means over clients; of the repeats, over reviews."
    )
    return "\n" + to_markdown(TextTable(columns, tuple(rows), title, note, left=2), level=2)


def _mean_over(found: Iterable[Mapping[str, float]]) -> float:
    return float(np.mean([np.mean(list(values.values())) for values in found]))
