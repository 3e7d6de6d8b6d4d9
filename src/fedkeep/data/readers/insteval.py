"""InstEval: students' ratings of lectures at ETH Zurich, from R's package ``lme4``.

73,421 ratings from 1 (poor) to 5 (very good) of 1,128 lecturers by 2,972 students, over several years; described in
lme4's help page ``InstEval`` (D. Bates, M. Maechler, B. Bolker, S. Walker, "Fitting Linear Mixed-Effects Models Using
lme4", Journal of Statistical Software 67(1), 2015). lme4 and its data are under the GNU GPL, version 2 or later; they
are read where R has them.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, needing, raising
from fedkeep.core.files import expanded
from fedkeep.data.preparation import About, KeyColumn, Plain, Raw, encoded_alone
from fedkeep.data.readers.opened_files import readable, sha256

FOLDER = "/usr/lib/R/site-library/lme4/data"
"""Where Debian's package ``r-cran-lme4`` has its data."""
NAME = "InstEval"
LARGEST = 1 << 28  # bytes of a data set of R; InstEval has 2 MB


def raw_insteval(folder: str | Path = FOLDER) -> Raw:
    """Read the ratings: a client is a student, column ``item`` the lecturer (int64), ``label`` the rating (float32).

    Lecturers are numbered 0, 1, … in the order of lme4's own numbers; ``meta["items"]`` counts them and
    ``meta["item_ids"]`` lists lme4's. The ratings have no time and no split: call ``split_per_user``.

    Args:
        folder: lme4's folder ``data``, with ``Rdata.rdx`` and ``Rdata.rdb``.

    Raises:
        DataError: lme4 or the Python package ``rdata`` is not installed, or a file is damaged.
    """
    index, base = expanded(folder) / "Rdata.rdx", expanded(folder) / "Rdata.rdb"
    if not (index.is_file() and base.is_file()):
        raise DataError(
            "InstEval is inside R's package lme4, and {folder} holds no Rdata.rdx and Rdata.rdb. Install "
            "it (Debian: apt-get install r-cran-lme4), or name the folder data of your lme4.",
            folder=folder,
        )
    with (
        raising(
            DataError,
            "{base} holds no readable {name} ({why}). Install lme4 again.",
            ValueError,
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
            struct.error,
            zlib.error,
            base=base,
            name=NAME,
        ),
        readable(base),
    ):
        table = _table(index.read_bytes(), base)
        student, lecturer, rating = (np.asarray(table[name]).astype(np.int64) for name in ("s", "d", "y"))
    if not len(rating) or rating.min() < 1 or rating.max() > 5:
        raise DataError(
            "{base}: wanted ratings of 1 to 5 in {name}; install lme4 again.", base=base, name=NAME
        )
    return Raw(
        client=student,
        split=None,
        columns={"item": KeyColumn(values=lecturer), "label": Plain(values=rating.astype(np.float32))},
        about=About(task="regression", classes=1),
        meta={"name": "insteval", "source": {file.name: sha256(file) for file in (index, base)}},
    )


insteval = encoded_alone(raw_insteval)
"""Read ratings as :func:`raw_insteval` does, and number the lecturers."""


def _table(index: bytes, base: Path) -> Any:
    """Return a data set of R's lazy-load data base: a big-endian uint32 of its size, and zlib, at a place in the file.

    The index, a list in R's serialisation, says where.
    """
    offset, length = (int(n) for n in _r_object(index)["variables"][NAME])
    with base.open("rb") as file:
        file.seek(offset)
        packed = file.read(length)
    (size,) = struct.unpack(">I", packed[:4])
    if size > LARGEST:
        raise ValueError(f"{size:,} bytes")
    content = zlib.decompressobj().decompress(packed[4:], size)
    return _r_object(content)


def _r_object(content: bytes) -> Any:
    with needing("Reading R's data", "rdata", "natural", DataError):
        import rdata
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it takes a serialised object for a file without a name
        return rdata.conversion.convert(rdata.parser.parse_data(content))
