"""Reviews of several clients, as they were read, and the steps from there to federated data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, check_range
from fedkeep.core.records import by_key
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.preparation import Labels, Plain, Raw, Texts
from fedkeep.data.text import SPECIAL, TokenVocabulary


@dataclass
class Reviews:
    """Texts with labels, one entry a review in each list.

    Attributes:
        client: ids of the clients.
        split: "train", "valid" or "test"; empty where the reviews are not split yet.
        label: classes, as words.
        text: tokenised texts, words between spaces.
        row: the number of each in the files, for messages.
    """

    client: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    label: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    row: list[int] = field(default_factory=list)

    def add(self, client: str, split: str, label: str, text: str) -> None:
        """Append a review."""
        for column, value in zip(self._columns(), (client, split, label, text, len(self.row)), strict=True):
            column.append(value)

    def keep(self, rows: list[int]) -> Reviews:
        """Return these reviews, in this order."""
        return Reviews(*([column[row] for row in rows] if column else [] for column in self._columns()))

    def rows(self, split: str) -> dict[str, list[int]]:
        """Return the row numbers of a split by client, clients in order of their ids."""
        found: dict[str, list[int]] = {client: [] for client in sorted(set(self.client))}
        for row, (client, part) in enumerate(zip(self.client, self.split, strict=True)):
            if part == split:
                found[client].append(row)
        return found

    def _columns(self) -> tuple[list[Any], ...]:
        return self.client, self.split, self.label, self.text, self.row


def raw_reviews(
    reviews: Reviews,
    meta: dict[str, Any],
    *,
    label_names: Sequence[str] | None,
    max_length: int,
    vocabulary: TokenVocabulary | int,
    valid: int = 0,
    drop_duplicates: bool = False,
    limit: int | None = None,
    seed: int = 0,
    where: Callable[[int], object] = "Review {}".format,
) -> Raw:
    """Return reviews as a source of the columns ``text`` (word ids) and ``label``.

    In this order: training reviews that occur in a test set are dropped, clients are cut down to ``limit``, training
    reviews become validation reviews, and the vocabulary is counted on what is left to train on.

    Args:
        reviews: what was read.
        meta: of the result.
        label_names: the labels in the order of their numbers; None: integers as they are, others in sorted order.
        max_length: words of a review to keep.
        vocabulary: a vocabulary, or how many words to keep: the most frequent of all clients' training reviews, as
            the sum of the clients' own counts (KTEPS §5.1); padding (0) and unknown (1) come on top.
        valid: training reviews of each client to validate on instead, drawn at random.
        drop_duplicates: drop training reviews that stand word for word in a test set, of any client that is read.
        limit: keep at most this many training and this many test reviews of each client, drawn at random.
        seed: of the draws.
        where: names a review by its number in the files.

    Raises:
        DataError: ``valid`` leaves a client nothing to train on, or numbers below what makes sense.
    """
    given, words = (None, vocabulary) if isinstance(vocabulary, int) else (vocabulary, None)
    check_range("[1, inf]", DataError, max_length=max_length, limit=limit, vocabulary=words)
    check_range("[0, inf]", DataError, valid=valid)
    asked = {"valid": valid, "limit": limit, "drop_duplicates": drop_duplicates}
    if not reviews.split and (wanted := [name for name, value in asked.items() if value]):
        raise DataError(
            "{wanted} wants reviews that are split into train and test; these are not split. Call "
            "data.split_per_user() without it.",
            wanted=wanted[0],
        )
    labels = set(zip(reviews.client, reviews.label, strict=True))
    if drop_duplicates:
        reviews, meta = _without_duplicates(reviews, meta)
    if limit is not None:
        reviews = _limited(reviews, limit, seed)
    if valid:
        reviews = _with_valid(reviews, valid, seed)
    size = vocabulary + SPECIAL if isinstance(vocabulary, int) else len(vocabulary)
    left_out = by_key(labels - set(zip(reviews.client, reviews.label, strict=True)))
    names, row = None if label_names is None else tuple(map(str, label_names)), reviews.row
    lengths = [len(TokenVocabulary.words(text)) for text in reviews.text]
    return Raw(
        client=reviews.client,
        split=reviews.split or None,
        columns={
            "text": Texts(values=reviews.text, tokens="token", size=size, max_length=max_length, given=given),
            "label": Labels(
                values=reviews.label,
                names=names,
                task="multiclass",
                elsewhere={client: set(own) for client, own in left_out.items()},
            ),
            # The whole length, which the cut text no longer tells; the underscore keeps it out of batches.
            "_words": Plain(values=np.asarray(lengths, dtype=np.int64)),
        },
        meta=meta,
        where=lambda kept: where(row[kept]),
    )


def _without_duplicates(reviews: Reviews, meta: dict[str, Any]) -> tuple[Reviews, dict[str, Any]]:
    tested = {text for text, part in zip(reviews.text, reviews.split, strict=True) if part == "test"}
    keep = [
        row
        for row, (text, part) in enumerate(zip(reviews.text, reviews.split, strict=True))
        if part != "train" or text not in tested
    ]
    dropped = len(reviews.text) - len(keep)
    return reviews.keep(keep), {**meta, "dropped_duplicates": dropped}


def _limited(reviews: Reviews, limit: int, seed: int) -> Reviews:
    kept: list[int] = []
    for split in sorted(set(reviews.split)):
        for client, rows in reviews.rows(split).items():
            order = numpy_generator(seed, f"limit/{split}", client).permutation(rows)
            kept += order[:limit].tolist()
    return reviews.keep(sorted(kept))


def _with_valid(reviews: Reviews, valid: int, seed: int) -> Reviews:
    split = list(reviews.split)
    for client, rows in reviews.rows("train").items():
        if len(rows) <= valid:
            raise DataError(
                "Wanted {wanted} of the training reviews of client {client!r} to validate on; it has only "
                "{rows}, which would leave none to train on. Lower valid.",
                wanted=valid,
                client=client,
                rows=len(rows),
            )
        for row in numpy_generator(seed, "valid", client).permutation(rows)[:valid]:
            split[row] = "valid"
    return replace(reviews, split=split)
