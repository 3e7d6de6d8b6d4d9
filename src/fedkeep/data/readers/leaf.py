"""Data sets in LEAF's JSON files: FEMNIST, Shakespeare, Sent140, CelebA, Reddit, Synthetic, and one's own in the same form.

Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv:1812.01097. A file holds an object of ``users``,
``num_samples`` and ``user_data``, which has for each user the lists ``x`` and ``y`` of equal length.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import DataError, raising
from fedkeep.core.files import expanded
from fedkeep.data.ids import as_id
from fedkeep.data.preparation import About, Labels, Plain, Raw, RawColumn, encoded_alone
from fedkeep.data.readers.cells import ALIASES, CLASS, ID, TEXT, CellKind, Cells, RawTable
from fedkeep.data.readers.leaf_reddit import columns_of_words, has_targets, sequences
from fedkeep.data.readers.opened_files import digest_of, existing, object_of, readable
from fedkeep.data.readers.pictures import read_files
from fedkeep.data.readers.shakespeare import ALPHABET
from fedkeep.data.readers.tables import texts_of
from fedkeep.data.subsets import drawn
from fedkeep.data.text import CharVocabulary

PARTS = ("train", "val", "test")
PICTURES = "raw/img_align_celeba"
ENDINGS = (".jpg", ".jpeg", ".png")
TWEET = 4
"""Where the text stands in an example of Sent140, which is a row of its file."""
SQUARE = 28
ROUNDED = 1e-3  # a pixel that is so near to n is n


@dataclass(frozen=True)
class User:
    """A user's examples in one file: as many ``x`` as ``y``; numbers are one array."""

    file: Path
    part: str | None
    name: str
    x: Any
    y: list[Any]

    def place(self, number: int) -> str:
        """Name an example."""
        return f"{self.file}, user {self.name!r}, example {number}"


def raw_leaf(
    folder: str | Path,
    *,
    images: str | Path = PICTURES,
    size: int | Sequence[int] | None = None,
    shape: Sequence[int] | None = None,
    label_names: Sequence[str] | None = None,
    tokens: str | None = None,
    vocabulary: int | None = None,
    max_length: int = 256,
    clients: int | None = None,
) -> Raw:
    r"""Read a data set as LEAF's ``preprocess.sh`` leaves it; what an example is follows from the first one.

    - 784 numbers (FEMNIST) become ``image`` (1, 28, 28): uint8 where all are n / 255, else float32.
    - Other numbers (Synthetic) become ``x``, float32.
    - A text whose label is one character (Shakespeare) becomes ``text``, a number for each character; other characters
      than those of ``shakespeare`` are read as a space in labels, and as unknown in texts.
    - Another text, or the row of a tweet (Sent140), becomes ``text``, cut into ``tokens``.
    - The name of an image's file (CelebA) becomes ``image`` (channels, height, width), uint8.
    - A comment cut into sequences of words (Reddit) becomes an example for each of them: ``input_ids`` (words,), and as
      ``label`` the words that follow, for the task "next_token"; what follows the last word of a comment does not count.

    Args:
        folder: holds ``train/*.json`` and ``test/*.json``, and perhaps ``val/*.json``, itself or in its folder ``data``;
            or ``*.json``, which are not split.
        images: where the files are that ``x`` names, looked up in ``folder``.
        size: of such images, as of ``image_folder``.
        shape: channels, height and width of images given as numbers; None: 784 are (1, 28, 28), others are no image.
        label_names: the labels in the order of their numbers; None: integers as they are, others in sorted order.
        tokens, vocabulary, max_length: as of ``read_table``; of Reddit ``vocabulary`` counts ids, by default 10,000.
        clients: keep so many users alone, drawn by their names; one file is in memory at a time, and no image of others is
            read. None: all.

    Raises:
        DataError: there is no file, or one is cut off, no JSON or not of LEAF's form; a user has not as many examples
            as its file says, or an example is not like the first; file, user and example are named.
    """
    place = expanded(folder)
    files = _files(place)
    kept = None
    if clients is not None:
        kept = drawn({name for file, part in files for name in _names(file, part)}, clients)
    users = [user for file, part in files for user in _users(file, part, kept)]
    if not users:
        raise DataError("The users in {folder} have no example. Sample them again.", folder=place)
    ends = list(accumulate(len(user.y) for user in users))

    def where(row: int) -> str:
        number = bisect_right(ends, row)
        return users[number].place(row - (ends[number - 1] if number else 0))

    def table(name: str, values: Sequence[Any]) -> RawTable:
        return RawTable({name: Cells(list(values))}, where)

    first, answer = users[0].x[0], users[0].y[0]
    labels = table("y", [label for user in users for label in user.y])
    columns: dict[str, RawColumn] = {}
    about = About()
    if isinstance(answer, tuple):
        rows = [(x, y, user.part) for user in users for x, y in zip(user.x, user.y, strict=True)]
        xs, ys, parts_of = zip(*rows, strict=True)
        columns, about = columns_of_words(xs, ys, [part in (None, "train") for part in parts_of], vocabulary)
    elif isinstance(users[0].x, np.ndarray):
        columns |= _numbers(users, shape)
    else:
        texts = table("x", [one for user in users for one in user.x]).each("x", WORDS)
        if isinstance(answer, str) and len(answer) == 1:
            columns["text"] = texts_of(texts, None, CharVocabulary(ALPHABET), max_length)
            known = [y if y in ALPHABET else " " for y in labels.each("y", CHARACTER)]
            columns["label"] = Labels(values=known, names=tuple(ALPHABET))
        elif isinstance(first, str) and first.lower().endswith(ENDINGS):
            home = expanded(images)
            columns["image"] = Plain(values=read_files([place / home / name for name in texts], size))
        else:
            columns["text"] = texts_of(texts, tokens, vocabulary, max_length)
    if "label" not in columns:
        names = None if label_names is None else tuple(map(str, label_names))
        columns["label"] = Labels(values=labels.each("y", CLASS), names=names)
    owners = table("user", [user.name for user in users for _ in user.y]).each("user", ID)
    parts = [user.part for user in users if user.part is not None for _ in user.y]
    return Raw(
        client=owners,
        split=parts or None,
        columns=columns,
        about=about,
        meta={"name": place.name, "source": {place.name: digest_of(place, [file for file, _ in files])}},
        where=where,
    )


leaf = encoded_alone(raw_leaf)
"""Read LEAF's files as :func:`raw_leaf` does, and encode them."""


def _words(x: Any) -> str:
    """Return the text of an example, which is one, or the row of a tweet."""
    if isinstance(x, list) and len(x) > TWEET:
        x = x[TWEET]
    return TEXT.read(x)


def _character(y: Any) -> str:
    if len(TEXT.read(y)) != 1:
        raise ValueError
    return str(y)


WORDS = CellKind("a text, a tweet's row or numbers, as in the first example,", _words)
CHARACTER = CellKind("one character, as in the first example,", _character)


def _files(folder: Path) -> list[tuple[Path, str | None]]:
    """Return the files, each with its split."""
    homes = [home for home in (folder, folder / "data") if any(os.path.isdir(home / part) for part in PARTS)]
    places: list[tuple[Path, str | None]] = (
        [(homes[0] / part, ALIASES[part]) for part in PARTS] if homes else [(folder, None)]
    )
    found = [
        (file, part) for home, part in places if os.path.isdir(home) for file in sorted(home.glob("*.json"))
    ]
    if not found:
        why = "does not exist" if not os.path.exists(folder) else "has none"
        raise DataError(
            "Wanted a folder with LEAF's files train/*.json and test/*.json; {folder} {why}. Name the folder that LEAF's "
            "preprocess.sh wrote to, such as leaf/data/femnist.",
            folder=folder,
            why=why,
        )
    return found


def _names(file: Path, part: str | None) -> list[str]:
    """Return the users in a file who have examples, without their examples where the file says its users first."""
    lists = []
    try:
        text = existing(file).read_text(encoding="utf-8")
        for key in ("users", "num_samples"):
            if (at := re.search(rf'"{key}"\s*:\s*(?=\[)', text)) is None:
                raise ValueError(key)
            lists.append(json.JSONDecoder().raw_decode(text, at.end())[0])
        names, numbers = lists
        return [as_id(name) for name, number in zip(names, numbers, strict=True) if number]
    except (OSError, ValueError, RecursionError, DataError):  # whoever reads all of it says what is wrong
        return [as_id(user.name) for user in _users(file, part)]


def _users(file: Path, part: str | None, kept: Collection[str] | None = None) -> list[User]:
    """Return the users in a file who have examples; of those ``kept`` alone, where they are given."""
    # Of UTF-8 and of JSON
    with (
        raising(
            DataError,
            "{file} is cut off or no JSON ({why}). Fetch it again.",
            ValueError,
            RecursionError,
            file=file,
        ),
        readable(file),
    ):
        content = json.loads(existing(file).read_text(encoding="utf-8"), object_pairs_hook=object_of)
    wanted = {"users": list, "user_data": dict}
    for key, kind in wanted.items():
        got = content.get(key) if isinstance(content, dict) else None
        if not isinstance(got, kind):
            raise DataError(
                "{file}: wanted LEAF's object with users, num_samples and user_data; {key!r} is {got}.",
                file=file,
                key=key,
                got="missing" if got is None else f"a {type(got).__name__}",
            )
    names, data = content["users"], content["user_data"]
    numbers = content.get("num_samples", [None] * len(names))
    if len(numbers) != len(names):
        raise DataError(
            "{file}: wanted as many num_samples as users; got {got} and {users}.",
            file=file,
            got=len(numbers),
            users=len(names),
        )
    found = []
    of_comments = any(
        has_targets(y) for own in data.values() if isinstance(own, dict) for y in (own.get("y") or [])[:1]
    )
    for name, number in zip(names, numbers, strict=True):
        if kept is not None and as_id(name) not in kept:
            continue
        own = data.get(str(name))
        x, y = (own.get(key) if isinstance(own, dict) else None for key in ("x", "y"))
        if (
            not isinstance(x, list)
            or not isinstance(y, list)
            or not len(x) == len(y) == (len(y) if number is None or of_comments else number)
        ):
            raise DataError(
                "{file}, user {user!r}: wanted {wanted} examples in x and as many in y; got {x} and {y}. Fetch it "
                "again.",
                file=file,
                user=name,
                wanted="equally many" if number is None else number,
                x=len(x) if isinstance(x, list) else "none",
                y=len(y) if isinstance(y, list) else "none",
            )
        if y and of_comments:  # whose num_samples count all splits together
            x, y = sequences(x, y, f"{file}, user {name!r}")
        if y:
            found.append(User(file, part, name, _packed(x, f"{file}, user {name!r}"), y))
    return found


def _packed(x: list[Any], place: str) -> Any:
    """Return numbers as one array at once, as Python's take eight times the memory; other values stay a list."""
    if not _is_number(x[0]):
        return x
    try:
        array = np.asarray(x, dtype=np.float32)
    except (ValueError, TypeError, OverflowError):
        row = next((n for n, one in enumerate(x) if _form(one) != _form(x[0])), 0)
        raise DataError(
            "{place}, example {row}: wanted {wanted} numbers, as in the first one; got {got}.",
            place=place,
            row=row,
            wanted=_form(x[0]),
            got=_form(x[row]),
        ) from None
    array = array.reshape(len(array), -1)
    steps = array * 255
    whole = np.rint(steps)
    if (
        array.shape[1] == SQUARE**2
        and (np.abs(steps - whole) < ROUNDED).all()
        and ((whole >= 0) & (whole <= 255)).all()
    ):
        return whole.astype(np.uint8)
    return array


def _is_number(x: Any) -> bool:
    while isinstance(x, list) and x:
        x = x[0]
    return isinstance(x, int | float) and not isinstance(x, bool)


def _form(x: Any) -> str:
    if not isinstance(x, list):
        return "a number" if _is_number(x) else f"a {type(x).__name__}"
    flat = list(chain.from_iterable(one if isinstance(one, list) else [one] for one in x))
    other = next((one for one in flat if not _is_number(one)), None)
    return str(len(flat)) if other is None else f"{len(flat)} with {other!r} among them"


def _numbers(users: Sequence[User], shape: Sequence[int] | None) -> dict[str, RawColumn]:
    """Return examples of numbers, as images where they are such."""
    width = users[0].x.shape[1]
    if shape is not None and math.prod(shape) != width:
        raise DataError(
            "{place} has {width} numbers, and shape = {shape} wants {wanted}.",
            place=users[0].place(0),
            width=width,
            shape=list(shape),
            wanted=math.prod(shape),
        )
    for user in users:
        if not isinstance(user.x, np.ndarray) or user.x.shape[1] != width:
            got = user.x.shape[1] if isinstance(user.x, np.ndarray) else "none"
            raise DataError(
                "{place}: wanted {width} numbers, as in {first}; got {got}.",
                place=user.place(0),
                width=width,
                first=users[0].place(0),
                got=got,
            )
    arrays: list[NDArray[Any]] = [user.x for user in users]
    if any(array.dtype != np.uint8 for array in arrays):
        arrays = [a / np.float32(255) if a.dtype == np.uint8 else a for a in arrays]
    if shape is None and width == SQUARE**2:
        shape = (1, SQUARE, SQUARE)
    if shape is None:
        return {"x": Plain(values=np.concatenate(arrays))}
    return {"image": Plain(values=np.concatenate(arrays).reshape(-1, *shape))}
