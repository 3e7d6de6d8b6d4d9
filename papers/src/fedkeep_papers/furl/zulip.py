"""The messages of six open-source communities' public Zulip chats: predict the channel of a message.

The folder holds ``messages.jsonl.gz``, one object a line with user, community, label, time, split and text, and
``channels.tsv`` with label, community, channel and messages. Each user's rows come divided 80/10/10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.preparation import Labels, Plain, Raw, Texts, encoded_alone
from fedkeep.data.readers.opened_files import json_lines, lines, sha256
from fedkeep.data.splits import SPLITS
from fedkeep.data.text import CharVocabulary, HashedWords
from fedkeep_papers.kit.data import check_fields

FIELDS: dict[str, type] = {
    "user": int,
    "community": str,
    "label": int,
    "time": int,
    "split": str,
    "text": str,
}
Numbers = NDArray[np.int64]
HEADER = ["label", "community", "channel", "messages"]


def raw_zulip_channels(
    folder: str | Path,
    max_length: int = 160,
    vocabulary: CharVocabulary | HashedWords | int = 128,
    limit_users: int | None = None,
    seed: int = 0,
    tokens: Literal["characters", "words"] = "characters",
) -> Raw:
    """Read the Zulip messages: columns ``text`` (token ids), ``label`` (163 channels) and ``time`` (seconds).

    Args:
        folder: holds ``messages.jsonl.gz`` and ``channels.tsv``.
        max_length: tokens of a message to keep.
        vocabulary: a vocabulary, or the size of one: of characters, to build from the training messages of the users
            kept; of words, to hash into.
        limit_users: keep this many users, drawn at random; the labels stay the same.
        seed: of that draw.
        tokens: what a message is cut into.

    Returns:
        Data with the given split. ``meta["traits"]`` holds each user's ``community`` and ``most_used_label``,
        counted on training messages.

    Raises:
        DataError: a file is missing, empty, truncated or malformed, or a label isn't in ``channels.tsv``; the
            message names file and line.
    """
    messages, channels = Path(folder) / "messages.jsonl.gz", Path(folder) / "channels.tsv"
    if max_length < 1 or (limit_users is not None and limit_users < 1):
        raise DataError(
            "Wanted max_length and limit_users of at least 1; got {max_length} and {limit_users}.",
            max_length=max_length,
            limit_users=limit_users,
        )
    names = _channel_names(channels)
    keep_characters = max_length if tokens == "characters" else None
    rows = _messages(messages, len(names), channels, keep_characters)
    keep = _keep_users(np.asarray(rows["user"], dtype=np.int64), limit_users, seed)
    texts = [rows["text"][i] for i in keep]
    column = {
        name: np.asarray([rows[name][i] for i in keep])
        for name in ("user", "label", "time", "split", "community")
    }
    if isinstance(vocabulary, int):
        given, size, kind = None, vocabulary, HashedWords.kind if tokens == "words" else CharVocabulary.kind
    else:
        given, size, kind = vocabulary, len(vocabulary), vocabulary.kind
    _, first = np.unique(column["user"], return_index=True)
    used = _most_used(column["user"], column["label"], column["split"] == "train", len(names))
    return Raw(
        client=column["user"],
        split=column["split"].tolist(),
        columns={
            "text": Texts(values=texts, tokens=kind, size=size, max_length=max_length, given=given),
            "label": Labels(
                values=[names[label] for label in column["label"]], names=tuple(names), task="multiclass"
            ),
            "time": Plain(values=column["time"]),
        },
        meta={
            "name": "zulip_channels",
            "source": {messages.name: sha256(messages), channels.name: sha256(channels)},
            "traits": {
                "community": column["community"][first].tolist(),
                "most_used_label": [names[label] for label in used],
            },
        },
    )


zulip_channels = encoded_alone(raw_zulip_channels)
"""Read the messages as :func:`raw_zulip_channels` does, and encode them."""


def _channel_names(path: Path) -> list[str]:
    """Return "community/channel" for labels 0, 1, …; the table must list each label once and in order."""
    names: list[str] = []
    for number, line in lines(path):
        cells = line.split("\t")
        if number == 1:
            if cells != HEADER:
                raise DataError(
                    "{path}, line 1: wanted the header {header}; got {cells}.",
                    path=path,
                    header=HEADER,
                    cells=cells,
                )
            continue
        if len(cells) != len(HEADER) or cells[0] != str(len(names)):
            raise DataError(
                "{path}, line {number}: wanted label {count} and {wanted} cells; got {cells}.",
                path=path,
                number=number,
                count=len(names),
                wanted=len(HEADER),
                cells=cells,
            )
        names.append(f"{cells[1]}/{cells[2]}")
    if not names:
        raise DataError("{path} lists no channel. Fetch it again.", path=path)
    return names


def _messages(path: Path, labels: int, channels: Path, keep: int | None) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for number, entry in json_lines(path):
        check_fields(path, number, entry, FIELDS)
        for name, kind in FIELDS.items():
            if kind is int and not abs(entry[name]) < 1 << 63:
                raise DataError(
                    "{path}, line {number}: wanted {name!r} below 2^63; got {got}.",
                    path=path,
                    number=number,
                    name=name,
                    got=entry[name],
                )
        if not 0 <= entry["label"] < labels:
            raise DataError(
                "{path}, line {number}: label {label} is not in {channels}, which lists 0 to {last}.",
                path=path,
                number=number,
                label=entry["label"],
                channels=channels.name,
                last=labels - 1,
            )
        if entry["split"] not in SPLITS:
            raise DataError(
                "{path}, line {number}: wanted the split 'train', 'valid' or 'test'; got {split!r}.",
                path=path,
                number=number,
                split=entry["split"],
            )
        entry["text"] = entry["text"][:keep]
        for name, values in rows.items():
            values.append(entry[name])
    return rows


def _keep_users(user: Numbers, limit: int | None, seed: int) -> list[int]:
    users = np.unique(user)
    if limit is None or limit >= len(users):
        return list(range(len(user)))
    kept = numpy_generator(seed, "limit_users").choice(users, limit, replace=False)
    return [int(i) for i in np.flatnonzero(np.isin(user, kept))]


def _most_used(user: Numbers, label: Numbers, train: NDArray[np.bool_], labels: int) -> list[int]:
    """Return each user's most frequent label among the training messages, users in rising order."""
    users, number = np.unique(user, return_inverse=True)
    counts = np.zeros((len(users), labels), np.int64)
    np.add.at(counts, (number[train], label[train]), 1)
    return [int(most) for most in counts.argmax(axis=1)]
