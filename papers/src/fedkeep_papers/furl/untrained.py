"""Rows of FURL's Table 3 that need no training and no federation: counting, decayed counting, and local memory.

Every device computes them from its own user's training examples, and judges them on the table's test examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData
from fedkeep.data.columns import Ragged
from fedkeep.data.text import CharVocabulary, HashedWords
from fedkeep.metrics.scores import auc
from fedkeep.metrics.worth.intervals import users_like_these
from fedkeep.report.text_tables import TextTable, to_markdown
from fedkeep_papers.furl.channels import Found
from fedkeep_papers.furl.memory import Array
from fedkeep_papers.furl.own_counts import WORDS, own_shares
from fedkeep_papers.furl.scoring import Scored, judged_ids, memories, mixed, own_of, scored

COUNTING = "(each user's most frequent label)"
CLICKS = "(each user's share of positive labels)"
DECAYED = "(own counts, decayed)"
MEMORY = "(local memory alone)"
ABOUT = """\
Rows in brackets are not trained. "Local memory alone" is naive Bayes over the user's own words, the most similar own
examples, and own counts, as in `furl-channels`, whose cell it is for the messages; its two weights are one for all
users, and those best on valid. Decayed counts weigh recent messages more; the generated clicks have no time."""

Users = Mapping[str, float]
"""Each user's test accuracy, by id."""
BySeed = Mapping[int | None, Users]


@dataclass(frozen=True)
class Known:
    """A row.

    Attributes:
        values: by seed, the table's metric on all test examples.
        users: by seed, each user's accuracy; None: whatever the seed.
    """

    values: Mapping[int, float]
    users: BySeed


def of_messages(data: FederatedData, found: Found | None, seed: int) -> dict[str, Known]:
    """Return the rows of messages: what ``furl-channels`` found of the same examples; None: it has not been run.

    Args:
        data: the table's own data.
        found: the cell of the random split that needs no training.
        seed: under which the table has their values.
    """
    rows = {COUNTING: Known({seed: most_frequent_label(data)}, {None: users_most_frequent(data)})}
    if found is not None:
        for name, key in ((DECAYED, "decayed"), (MEMORY, "local")):
            rows[name] = Known({seed: found.rows[key].test}, {None: by_id(data, found.rows[key], found.ids)})
    return rows


def of_clicks(generated: Mapping[int, FederatedData]) -> dict[str, Known]:
    """Return the rows of generated clicks, by seed: AUC, with the weights whose AUC is best on valid."""
    found = {seed: _clicks(data) for seed, data in generated.items()}
    return {
        name: Known(
            {seed: rows[name].test for seed, rows in found.items()},
            {seed: by_id(generated[seed], rows[name]) for seed, rows in found.items()},
        )
        for name in (CLICKS, MEMORY)
    }


def _clicks(data: FederatedData) -> dict[str, Scored]:
    text = data.columns["text"]
    assert isinstance(text, Ragged)
    letters = CharVocabulary.from_dict(data.meta["vocabulary"])
    words = HashedWords(WORDS).encode_all([letters.decode(row.tolist()) for row in text])
    columns = {**data.columns, "text": words, "own": own_shares(data, by_time=False)}
    own = FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta)
    counts = {split: own_of(own, split) for split in ("valid", "test")}
    return {CLICKS: scored(own, counts, {}, area), MEMORY: mixed(own, memories(own), None, area)}


def area(data: FederatedData, scores: Array, split: str) -> float:
    """Return the AUC of a split's examples, given scores of both labels."""
    labels = np.asarray(data.columns["label"])[data.split_rows(split)]
    return auc(scores[:, 1] - scores[:, 0], labels)


def by_id(data: FederatedData, row: Scored, ids: Sequence[str] = ()) -> Users:
    """Return each user's accuracy by id, those with test examples; ``ids`` are whose the row has, where that is kept.

    Raises:
        DataError: the row is of other users.
    """
    own = judged_ids(data)
    if len(row.users) != len(own) or (ids and tuple(ids) != own):
        raise DataError(
            "Wanted accuracies of these {count} users: {own}, …; got those of {users}: "
            "{ids}, …. Delete the cell of furl-channels to compute it again.",
            count=len(own),
            own=", ".join(own[:3]),
            users=len(row.users),
            ids=", ".join(ids[:3]) or "ids are not kept",
        )
    return dict(zip(own, row.users, strict=True))


def side_by_side(rows: Mapping[str, BySeed], references: Sequence[str], title: str) -> str:
    """Return a table of mean accuracies over users, and their gains over reference rows, paired over users.

    Args:
        rows: by name and seed, each user's accuracy; a row without seeds is compared with every seed of another.
        references: names of rows to compare with; one that is not there is left out.
        title: above it.
    """
    against = [name for name in references if rows.get(name)]
    lines = []
    for name, own in rows.items():
        if own:
            mean = np.mean([np.mean(list(users.values())) for users in own.values()])
            gains = ["–" if other == name else _gain(own, rows[other]) for other in against]
            lines.append((name, f"{100 * mean:.2f} %", *gains, "–" if None in own else str(len(own))))
    columns = ("row", "accuracy, mean over users", *(f"points over {name}" for name in against), "seeds")
    note = "Gains with 95 % intervals, paired over users and seeds on test; each user counts once."
    return to_markdown(TextTable(columns, tuple(lines), title, note), level=3) if lines else ""


def _gain(own: BySeed, other: BySeed) -> str:
    pairs = [(a, b) for s, a in own.items() for t, b in other.items() if s == t or None in (s, t)]
    ids = [user for user in pairs[0][0] if all(user in a and user in b for a, b in pairs)] if pairs else []
    if len(ids) < 2:
        return "–"
    mean, low, high = 100 * users_like_these(np.array([[a[u] - b[u] for u in ids] for a, b in pairs]))
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")


def users_most_frequent(data: FederatedData) -> dict[str, float]:
    """Return ``most_frequent_label`` of each user by id, of those with examples to count and to judge."""
    each = {str(data.ids[c]): most_frequent_label(data, clients=[c]) for c in range(len(data))}
    return {user: value for user, value in each.items() if value == value}


def most_frequent_label(
    data: FederatedData, split: str = "test", clients: Sequence[int] | None = None
) -> float:
    """Return the accuracy of predicting, for each user, the label most frequent in the user's training examples.

    ``clients`` are indices, by default all. NaN where no example is judged.
    """
    labels = np.asarray(data.columns["label"])
    right = total = 0
    for client in range(len(data)) if clients is None else clients:
        train, judged = (
            labels[r.start : r.stop] for r in (data.rows(client, "train"), data.rows(client, split))
        )
        if len(train):
            right += int((judged == np.bincount(train).argmax()).sum())
            total += len(judged)
    return right / total if total else float("nan")
