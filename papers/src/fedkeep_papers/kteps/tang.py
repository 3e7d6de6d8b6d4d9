"""The review files of Tang et al. (``.ss``): IMDB, Yelp 2013 and Yelp 2014 with ratings; a corpus is a client.

D. Tang, B. Qin, T. Liu, "Learning Semantic Representations of Users and Products for Document Level Sentiment
Classification", ACL 2015. Each line: user, product, rating and text, with two tabs between them; ``<sssss>`` stands
between sentences. KTEPS calls these three clients IYY, and takes the files of train and test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from fedkeep.core.errors import DataError
from fedkeep.data.preparation import Raw, encoded_alone
from fedkeep.data.readers.opened_files import lines, sha256
from fedkeep.data.reviews import Reviews, raw_reviews
from fedkeep.data.text import TokenVocabulary

LEVELS = {"imdb": 10, "yelp-2013": 5, "yelp-2014": 5}
CLASSES = 5
LABELS = tuple(str(label + 1) for label in range(CLASSES))
SEPARATOR = "<sssss>"
FIELDS = ("user", "product", "rating", "text")


def raw_tang(
    folder: str | Path,
    max_length: int = 400,
    vocabulary: TokenVocabulary | int = 50_000,
    levels: Mapping[str, int] | None = None,
    separators: Literal["keep", "drop"] = "keep",
    valid: int = 0,
    drop_duplicates: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> Raw:
    """Read Tang's reviews: a client per corpus, columns ``text`` (word ids) and ``label`` (0 worst to 4 best).

    Args:
        folder: holds a file for train and one for test of each corpus, e.g. ``imdb.train.txt.ss`` or
            ``yelp-2013-test.txt.ss``. The files of dev are not read.
        max_length: words of a review to keep.
        vocabulary: a vocabulary, or how many words to keep, the most frequent in training reviews.
        levels: how many ratings each corpus has, by the beginning of its files' names; by default imdb 10 and Yelp 5.
            More than 5 are merged into 5 by neighbours: of 10, 1 and 2 become 0, …, 9 and 10 become 4.
        separators: ``"keep"`` takes ``<sssss>`` for a word, as KTEPS must have done: its Table 1 counts 409 words in a
            review of IMDB, 199 and 207 in those of Yelp, which Tang's own counts reach with the separators only.
        valid: training reviews of each client to validate on instead, drawn at random.
        drop_duplicates: drop training reviews that stand word for word in a test set.
        limit: keep at most this many training and this many test reviews of each client, drawn at random.
        seed: of the draws.

    Raises:
        DataError: a file is missing, empty or malformed, or a rating is out of range; file and line are named.
    """
    corpora = dict(LEVELS if levels is None else levels)
    if not corpora or any(number < CLASSES or number % CLASSES for number in corpora.values()):
        raise DataError(
            "Wanted corpora with 5, 10, 15, … levels of rating each; got {corpora}.", corpora=corpora
        )
    files = {
        (name, split): _find(Path(folder), name, split) for name in corpora for split in ("train", "test")
    }
    reviews = Reviews()
    for (name, split), file in files.items():
        for rating, text in _reviews(file, corpora[name]):
            words = text if separators == "keep" else text.replace(SEPARATOR, " ")
            reviews.add(name, split, LABELS[(rating - 1) * CLASSES // corpora[name]], words)
    meta = {"name": "tang", "source": {file.name: sha256(file) for file in files.values()}}
    return raw_reviews(
        reviews,
        meta,
        label_names=LABELS,
        max_length=max_length,
        vocabulary=vocabulary,
        valid=valid,
        drop_duplicates=drop_duplicates,
        limit=limit,
        seed=seed,
    )


tang = encoded_alone(raw_tang)
"""Read Tang's reviews as :func:`raw_tang` does, and encode them."""


def _find(folder: Path, name: str, split: str) -> Path:
    """Return the file of a corpus's split; releases write ``imdb.train.txt.ss`` or ``yelp-2013-train.txt.ss``."""
    pattern = re.compile(rf"{re.escape(name)}[-._]{split}(\.txt)?\.ss(\.gz)?")
    inside = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    found = [n for n in inside if pattern.fullmatch(n)]
    if len(found) != 1:
        raise DataError(
            "Wanted one {split} file of {name!r} in {folder}, e.g. {name}-{split}.txt.ss; got {found}. "
            "Put it there, or name other corpora with levels.",
            split=split,
            name=name,
            folder=folder,
            found=found or inside,
        )
    return folder / found[0]


def _reviews(path: Path, levels: int) -> Iterator[tuple[int, str]]:
    for number, line in lines(path):
        cells = line.split("\t\t", len(FIELDS) - 1)
        if len(cells) != len(FIELDS):
            raise DataError(
                "{path}, line {number}: wanted {fields} with two tabs between them; got {line!r}.",
                path=path,
                number=number,
                fields=", ".join(FIELDS),
                line=line,
            )
        rating = cells[2].strip()
        if not (rating.isascii() and rating.isdigit() and len(rating) < 10 and 1 <= int(rating) <= levels):
            raise DataError(
                "{path}, line {number}: wanted a rating of 1 to {levels}; got {got!r}.",
                path=path,
                number=number,
                levels=levels,
                got=cells[2],
            )
        yield int(rating), cells[3]
