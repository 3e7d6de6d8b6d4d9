"""The Zulip messages by time, with what each device counts, and what MiniLM's frozen layers make of the texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkeep.data import FederatedData
from fedkeep.data.columns import Column
from fedkeep.data.preparation import Labels, Plain, Texts
from fedkeep_papers.adapters.backbone import Encoded, kept_encoding
from fedkeep_papers.furl.own_counts import own_shares
from fedkeep_papers.furl.zulip import raw_zulip_channels

WHOLE = 1000  # characters; no message is longer


def by_time(folder: Path, users: int | None) -> tuple[FederatedData, list[str]]:
    """Return the messages, split by time within each user (80 %, 10 %, 10 %), and their texts in that order.

    The columns are ``label``, ``time`` and ``own``, log shares of the labels (163,); see ``own_counts.own_shares``.

    Args:
        folder: holds ``messages.jsonl.gz`` and ``channels.tsv``.
        users: how many to keep, drawn at random; None: all.

    Raises:
        DataError: as for ``raw_zulip_channels``.
    """
    raw = raw_zulip_channels(folder, max_length=WHOLE, limit_users=users)
    text, label, time = (raw.columns[name] for name in ("text", "label", "time"))
    assert isinstance(text, Texts)
    assert isinstance(label, Labels)
    assert isinstance(time, Plain)
    number = {name: n for n, name in enumerate(label.names or ())}
    columns = {
        "label": np.array([number[name] for name in label.values]),
        "time": np.asarray(time.values),
        "_row": np.arange(len(text.values)),
    }
    meta = {**raw.meta, "task": "multiclass", "classes": len(number), "label_names": list(number)}
    data = FederatedData.from_columns(raw.client, columns, raw.split, meta).split_per_user(
        order="chronological"
    )
    texts = [text.values[row] for row in np.asarray(data.columns["_row"])]
    kept: dict[str, Column] = {name: data.columns[name] for name in ("label", "time")}
    return FederatedData(
        {**kept, "own": own_shares(data, True)}, data.offsets, data.ids, data.bounds, data.meta
    ), texts


def with_sentences(data: FederatedData, encoded: Encoded, tokens: bool) -> FederatedData:
    """Return data with the columns ``hidden`` and ``length``, or without ``tokens`` with the column ``sentence``."""
    columns = {name: data.columns[name] for name in ("label", "own")}
    if tokens:
        columns |= {"hidden": encoded.hidden, "length": encoded.length}
    else:
        columns["sentence"] = encoded.sentence
    return FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta, check=False)


def encoded_messages(
    folder: Path, users: int | None, cache: Path, layers: int, tokens: bool, device: str = "cpu"
) -> FederatedData:
    """Return the messages with what MiniLM makes of them.

    Args:
        folder, users: as for ``by_time``.
        cache: the folder of what MiniLM makes of these messages, of this file of the package and these layers alone.
        layers: how many last layers an arm computes by itself.
        tokens: for an arm that does; else sentence vectors.
        device: where MiniLM computes.
    """
    data, texts = by_time(folder, users)
    return with_sentences(data, kept_encoding(cache, texts, layers, device), tokens)
