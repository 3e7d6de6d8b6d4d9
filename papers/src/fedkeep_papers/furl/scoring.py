"""How what a user's own messages tell is scored: counts, decayed counts, and memory, with weights best on valid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from fedkeep.data import FederatedData
from fedkeep.data.columns import Ragged
from fedkeep_papers.furl.memory import Array, decayed, memory_scores

HALF_LIVES = (2.0, 4.0, 8.0, 16.0, 32.0, 128.0, 1024.0)
GRID = {
    "text": (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.25),
    "bayes": (0.0, 0.1, 0.2, 0.4, 0.8),
    "votes": (0.0, 0.2, 0.5, 1.0, 2.0),
}
"""Weights of the text's logits, of naive Bayes and of the votes, of which those best on valid are taken."""
Measure = Callable[[FederatedData, Array, str], float]
"""A metric of scores, (n, C), of a split's examples."""


@dataclass(frozen=True)
class Scored:
    """A row: its metric (accuracy, but where another is named) on valid and test, each user's accuracy on test.

    All are fractions; ``chosen`` holds what was best on valid.
    """

    valid: float
    test: float
    users: tuple[float, ...]
    chosen: dict[str, float]


def own_of(data: FederatedData, split: str) -> Array:
    """Return the column ``own`` of a split, (n, C)."""
    return np.asarray(data.columns["own"])[data.split_rows(split)]


def counted(data: FederatedData) -> dict[str, Scored]:
    """Return counting, and decayed counting with the half-life (days) that is best on valid."""
    label, time = (np.asarray(data.columns[n]) for n in ("label", "time"))
    classes = int(data.meta["classes"])

    def scores(half_life: float) -> dict[str, Array]:
        table = np.stack(
            [
                decayed(
                    label[r.start : r.stop], time[r.start : r.stop].astype(float), classes, half_life
                ).sum(0)
                for r in (data.rows(client, "train") for client in range(len(data)))
            ]
        )
        return {s: table[data.clients_of(data.split_rows(s))] for s in ("valid", "test")}

    every = {days: scores(days) for days in HALF_LIVES}
    best = max(every, key=lambda days: accuracy(data, every[days]["valid"], "valid"))
    own = np.stack(
        [np.bincount(label[r], minlength=classes) for r in (data.rows(c, "train") for c in range(len(data)))]
    )
    plain = {s: own[data.clients_of(data.split_rows(s))] for s in ("valid", "test")}
    return {"counting": scored(data, plain, {}), "decayed": scored(data, every[best], {"half_life": best})}


def memories(data: FederatedData) -> dict[str, tuple[Array, Array]]:
    """Return naive Bayes' scores and the votes of every user's own training messages, by split."""
    text, label = data.columns["text"], np.asarray(data.columns["label"])
    assert isinstance(text, Ragged)
    found: dict[str, list[tuple[Array, Array]]] = {"valid": [], "test": []}
    for client in range(len(data)):
        train = np.asarray(data.rows(client, "train"))
        for split, parts in found.items():
            new = np.asarray(data.rows(client, split), np.int64)
            scores = memory_scores(text.take(train), label[train], text.take(new), int(data.meta["classes"]))
            parts.append((scores[0].astype(np.float32), scores[1].astype(np.float32)))
    return {s: tuple(map(np.concatenate, zip(*parts, strict=True))) for s, parts in found.items()}  # type: ignore[misc]


def mixed(
    data: FederatedData,
    memory: Mapping[str, tuple[Array, Array]] | None,
    text: Mapping[str, Array] | None,
    measure: Measure | None = None,
) -> Scored:
    """Return own counts + w · text + a · naive Bayes + b · log(0.05 + votes), with the weights best on valid.

    Devices would send how many of their validation examples are right under each triple, and nothing else.

    Args:
        data: with the column ``own``.
        memory: by split, what ``memories`` returns; None: without a and b.
        text: by split, (n, C); None: without w.
        measure: what is best on valid, given data, scores and a split; None: ``accuracy``.
    """
    measure = measure or accuracy
    given = {"text": text is not None, "bayes": memory is not None, "votes": memory is not None}
    names = [name for name, there in given.items() if there]
    weights = [dict(zip(names, each, strict=True)) for each in product(*(GRID[name] for name in names))]
    own = {s: own_of(data, s) for s in ("valid", "test")}

    def scores(split: str, w: Mapping[str, float]) -> Array:
        found = own[split]
        if memory is not None:
            bayes, votes = memory[split]
            found = found + w["bayes"] * bayes + w["votes"] * np.log(0.05 + votes)
        return found if text is None else found + w["text"] * text[split]

    best = max(weights, key=lambda w: measure(data, scores("valid", w), "valid"))
    return scored(data, {s: scores(s, best) for s in own}, best, measure)


def judged_ids(data: FederatedData) -> tuple[str, ...]:
    """Return the ids of the users with test examples."""
    return tuple(str(data.ids[client]) for client in np.flatnonzero(data.counts("test")).tolist())


def accuracy(data: FederatedData, scores: Array, split: str) -> float:
    """Return the share of a split's examples whose largest score is the label's."""
    return float((scores.argmax(1) == np.asarray(data.columns["label"])[data.split_rows(split)]).mean())


def scored(
    data: FederatedData, scores: Mapping[str, Array], chosen: dict[str, float], measure: Measure = accuracy
) -> Scored:
    """Return a row, given its scores of both splits; ``measure`` gives its ``valid`` and ``test``."""
    rows = data.split_rows("test")
    owner = data.clients_of(rows)
    right = scores["test"].argmax(1) == np.asarray(data.columns["label"])[rows]
    many = np.bincount(owner, minlength=len(data))
    users = np.bincount(owner, right, len(data))[many > 0] / many[many > 0]
    valid, test = (measure(data, scores[split], split) for split in ("valid", "test"))
    return Scored(valid, test, tuple(users.tolist()), chosen)
