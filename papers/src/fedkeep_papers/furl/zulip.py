"""The messages of six open-source communities' public Zulip chats: predict the channel of a message.

The folder holds ``messages.jsonl.gz``, one object a line with user, community, label, time, split and text, and
``channels.tsv`` with label, community, channel and messages. Each user's rows come divided 80/10/10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedkeep.core.errors import DataError
from fedkeep.core.seeds import numpy_generator
from fedkeep.data.federated import FederatedData
from fedkeep.data.hashing import HashedWords
from fedkeep.data.readers.files import json_lines, lines, sha256
from fedkeep.data.splits import SPLITS
from fedkeep.data.text import CharVocabulary

FIELDS: dict[str, type] = {
    "user": int,
    "community": str,
    "label": int,
    "time": int,
    "split": str,
    "text": str,
}
HEADER = ["label", "community", "channel", "messages"]


def zulip_channels(
    folder: str | Path,
    max_length: int = 160,
    vocabulary: CharVocabulary | HashedWords | int = 128,
    limit_users: int | None = None,
    seed: int = 0,
    tokens: Literal["characters", "words"] = "characters",
) -> FederatedData:
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
            f"Wanted max_length and limit_users of at least 1; got {max_length} and {limit_users}."
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
    if isinstance(vocabulary, int) and tokens == "words":
        vocabulary = HashedWords(vocabulary)
    elif isinstance(vocabulary, int):
        training = (text for text, split in zip(texts, column["split"], strict=True) if split == "train")
        vocabulary = CharVocabulary.from_texts(training, vocabulary)
    data = FederatedData.from_columns(
        column["user"],
        {"text": vocabulary.encode_all(texts, max_length), "label": column["label"], "time": column["time"]},
        column["split"],
        {
            "name": "zulip_channels",
            "task": "multiclass",
            "classes": len(names),
            "label_names": names,
            "vocabulary": vocabulary.to_dict(),
            "max_length": max_length,
            "source": {messages.name: sha256(messages), channels.name: sha256(channels)},
        },
    )
    _, first = np.unique(column["user"], return_index=True)
    data.meta["traits"] = {
        "community": column["community"][first].tolist(),
        "most_used_label": [names[label] for label in _most_used(data, len(names))],
    }
    return data


def _channel_names(path: Path) -> list[str]:
    """Return "community/channel" for labels 0, 1, …; the table must list each label once and in order."""
    names: list[str] = []
    for number, line in lines(path):
        cells = line.split("\t")
        if number == 1:
            if cells != HEADER:
                raise DataError(f"{path}, line 1: wanted the header {HEADER}; got {cells}.")
            continue
        if len(cells) != len(HEADER) or cells[0] != str(len(names)):
            raise DataError(
                f"{path}, line {number}: wanted label {len(names)} and {len(HEADER)} cells; got {cells}."
            )
        names.append(f"{cells[1]}/{cells[2]}")
    if not names:
        raise DataError(f"{path} lists no channel. Fetch it again.")
    return names


def _messages(path: Path, labels: int, channels: Path, keep: int | None) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for number, entry in json_lines(path):
        for name, kind in FIELDS.items():
            # type(...) and not isinstance: true is no integer here
            if type(entry.get(name)) is not kind:
                got = f"got {entry[name]!r}" if name in entry else f"it has only {sorted(entry)}"
                raise DataError(f"{path}, line {number}: wanted {name!r} to be {kind.__name__}; {got}.")
            if kind is int and not abs(entry[name]) < 1 << 63:
                raise DataError(f"{path}, line {number}: wanted {name!r} below 2^63; got {entry[name]}.")
        if not 0 <= entry["label"] < labels:
            raise DataError(
                f"{path}, line {number}: label {entry['label']} is not in {channels.name}, which lists 0 to "
                f"{labels - 1}."
            )
        if entry["split"] not in SPLITS:
            raise DataError(
                f"{path}, line {number}: wanted the split 'train', 'valid' or 'test'; got {entry['split']!r}."
            )
        entry["text"] = entry["text"][:keep]
        for name, values in rows.items():
            values.append(entry[name])
    return rows


def _keep_users(user: np.ndarray[Any, np.dtype[np.int64]], limit: int | None, seed: int) -> list[int]:
    users = np.unique(user)
    if limit is None or limit >= len(users):
        return list(range(len(user)))
    kept = numpy_generator(seed, "limit_users").choice(users, limit, replace=False)
    return [int(i) for i in np.flatnonzero(np.isin(user, kept))]


def _most_used(data: FederatedData, labels: int) -> list[int]:
    label = np.asarray(data.columns["label"])
    return [
        int(np.bincount(label[rows.start : rows.stop], minlength=labels).argmax()) for rows in _train(data)
    ]


def _train(data: FederatedData) -> list[range]:
    return [data.rows(client, "train") for client in range(len(data))]
