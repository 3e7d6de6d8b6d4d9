"""The Zulip messages with what a device counts of its own user, and the model that adds it to the shared text's logits.

In the random split half of the test messages lie within ten minutes of a training message of the same user, nearly
always in the same channel. In the split by time every user's first messages train, and the last ones test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedkeep.core.errors import DataError, check_choice
from fedkeep.data import FederatedData
from fedkeep.data.columns import Ragged, offsets_of
from fedkeep.models import BagOfWords
from fedkeep.models.text_models import thinned
from fedkeep_papers.furl.memory import own_prior
from fedkeep_papers.furl.zulip import zulip_channels

Order = Literal["time", "random"]
WORDS, PAIRS = 32_768, 98_304
"""Ids that words, and pairs of neighbouring words, are hashed into."""
REVISION = 1
"""Of cells trained beside ``own`` by time: in 0 a message's recent shares were even where all earlier ones were old."""


def messages(folder: str | Path, order: Order = "time", limit_users: int | None = None) -> FederatedData:
    """Read the messages: ``text`` (ids of words, then of pairs), ``own`` (log shares, (labels,)), ``label``, ``time``.

    ``own`` is what ``own_prior`` makes of the user's training messages; every device can compute it by itself.

    Args:
        folder: holds ``messages.jsonl.gz`` and ``channels.tsv``.
        order: ``time`` (each user's first 80 % train, the next 10 % validate) or ``random`` (the given split).
        limit_users: as for ``raw_zulip_channels``.

    Raises:
        DataError: as for ``raw_zulip_channels``; an unknown order.
    """
    check_choice("Wanted the order", order, ("time", "random"), DataError)
    data = zulip_channels(folder, max_length=96, vocabulary=WORDS, tokens="words", limit_users=limit_users)
    return with_own(data.split_per_user(order="chronological") if order == "time" else data, order == "time")


def with_own(data: FederatedData, by_time: bool) -> FederatedData:
    """Return data of messages with the ids of pairs in ``text``, and the column ``own``; see ``messages``."""
    text = data.columns["text"]
    assert isinstance(text, Ragged)
    columns = {**data.columns, "text": with_pairs(text), "own": own_shares(data, by_time)}
    return FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta)


def own_shares(data: FederatedData, by_time: bool) -> NDArray[np.float32]:
    """Return what every device counts beside each message: log shares of labels, (n, C); see ``own_prior``.

    Args:
        data: with ``label`` and, by time, ``time``; each user's training messages stand by rising time then.
        by_time: whether the split is by time.
    """
    classes = int(data.meta["classes"])
    label = np.asarray(data.columns["label"])
    time = np.asarray(data.columns["time"]) if by_time else label
    own = np.empty((data.examples, classes), np.float32)
    for client in range(len(data)):
        train, new = data.rows(client, "train"), data.rows(client, "all")
        after, beside = own_prior(label[train], time[train], classes, by_time=by_time)
        own[new.start : new.stop] = after
        own[train.start : train.stop] = beside
    return own


def with_pairs(text: Ragged) -> Ragged:
    """Return each row's word ids, then an id from ``WORDS`` on for every pair of neighbours."""
    length = np.diff(text.offsets)
    ids = text.values.astype(np.int64)
    begins = np.ones(len(ids), bool)
    begins[text.offsets[1:][length > 0] - 1] = False  # the last word of a row begins no pair
    first = np.flatnonzero(begins)
    pair = WORDS + (ids[first] * 1_000_003 + ids[first + 1]) * 0x9E3779B1 % (1 << 31) % PAIRS
    row = np.repeat(np.arange(len(length)), length)
    rows = np.concatenate([row, row[first]])
    values = np.concatenate([ids, pair])[np.argsort(rows, kind="stable")]
    return Ragged(values.astype(np.int32), offsets_of(np.bincount(rows, minlength=len(length))))


class TextAndCounts(BagOfWords):
    """Bag of words and pairs → dropout → linear, + own counts → logits. What is private stands in the column ``own``.

    Args:
        classes: labels.
        counts: add the own counts; without them the text alone decides.
        embedding_dim: length of an id's vector, and of the text's.
        dropout, word_dropout: share of the text vector's entries, and of ids, that are dropped in training.
    """

    def __init__(
        self,
        classes: int,
        *,
        counts: bool = True,
        embedding_dim: int = 64,
        dropout: float = 0.3,
        word_dropout: float = 0.0,
    ) -> None:
        super().__init__(WORDS + PAIRS, classes, 0, embedding_dim=embedding_dim, mlp=1)
        self.mlp = nn.Sequential(nn.Dropout(dropout), nn.Linear(embedding_dim, classes))
        nn.init.zeros_(self.embedding.weight)
        self.counts, self.word_dropout = counts, word_dropout

    def forward(self, text: Tensor, text_length: Tensor, own: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits, (B, classes), for ids (B, L), lengths (B,) and log shares (B, classes)."""
        if self.training and self.word_dropout:
            text, text_length = thinned(text, text_length, self.word_dropout)
        logits = self.head(self.features(text, text_length))
        return logits + own if self.counts else logits
