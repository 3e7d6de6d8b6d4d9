"""What hostile inputs are made of: ids, cells, tables, arrays as bytes, configurations, damage."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

ODD_TEXTS = (
    "",
    " ",
    "nan",
    "inf",
    "-1",
    "1e400",
    "9" * 19,
    "9" * 5000,
    "x" * 300,
    "\0",
    "\x1b[2J",
    "\u202e",
    "e\u0301",
    "é",
    '"',
    ",",
    "\t",
    "\r",
    "\u2028",
    "٣",
    "20231231",
    "2147483648",
    "\ud800",
)
ODD_NUMBERS = (0, -1, 10**18, 2**63, 10**30, 10**400, 0.5, 1e300, float("nan"), float("inf"))
NAMES = ("user", "text", "label", "split", "time", "height")

ids: st.SearchStrategy[Any] = st.one_of(
    st.text(max_size=8),
    st.sampled_from(ODD_TEXTS),
    st.integers(),
    st.integers(-5, 5).map(np.int64),
    st.sampled_from([None, True, 1.0, b"ann", (), np.str_("é")]),
)
"""Anything that somebody may give as a client's id."""

cells: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["0", "1", "2", "ann", "bo", "train", "test"]),
    st.sampled_from(ODD_TEXTS),
    st.sampled_from(ODD_NUMBERS),
    st.text(max_size=5),
    st.sampled_from([None, True, [], {}, [1]]),
)
"""A cell of a table."""


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows of a table whose columns are mostly what a reader wants."""
    usual = {"user": "ann", "text": "hello", "label": "1", "split": "train", "time": 3, "height": 1.5}
    rows = draw(st.integers(1, 6))
    odd = draw(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(NAMES), cells), max_size=4))
    found: list[dict[str, Any]] = [
        {**usual, "user": f"u{row % 2}", "label": str(row % 3)} for row in range(rows)
    ]
    for row, name, cell in odd:
        found[row % rows][name] = cell
    return found


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with a few places flipped, cut out, doubled or filled with others."""
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted((draw(st.integers(0, len(content))), draw(st.integers(0, len(content)))))
        before, piece, after = content[:at], content[at:end], content[end:]
        other = draw(st.one_of(st.binary(max_size=6), st.just(b"9" * 5000), st.just(b"[" * 5000)))
        content = draw(
            st.sampled_from(
                [
                    before,
                    after,
                    before + after,
                    before + piece * 2 + after,
                    before + other + after,
                    before + bytes(len(piece)) + after,
                ]
            )
        )
    return content


def npy(array: Any) -> bytes:
    """An array as the bytes of an npy file."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


@st.composite
def npy_files(draw: st.DrawFn) -> bytes:
    """An npy file of any simple type and shape, with a header that may lie, and damage."""
    shape = draw(st.sampled_from([(), (0,), (3,), (8,), (9,), (2, 4), (8, 2)]))
    kind = draw(
        st.sampled_from(["int64", "float64", "uint8", "uint64", "bool", "complex64", "U3", ">i8", "M8[s]"])
    )
    whole = npy(np.full(shape, draw(st.sampled_from([0, 1, 7, 200])), "int64").astype(kind))
    lies = draw(st.sampled_from([b"", b"(1000000000000, 8)", b"(-1,)", b"(" * 300, b"(2,"]))
    if lies:
        header = b"{'descr': '<f8', 'fortran_order': False, 'shape': " + lies + b", }"
        whole = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
    return draw(st.one_of(st.just(whole), damaged(whole)))


json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.sampled_from(ODD_NUMBERS), st.sampled_from(ODD_TEXTS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)
"""What JSON may hold."""


def json_bytes(value: Any) -> bytes:
    """A value as JSON; Python writes NaN and infinity too."""
    return json.dumps(value).encode()


keys = st.one_of(
    st.sampled_from(
        [
            "seed",
            "name",
            "data.users",
            "data.reader",
            "data.split.fractions",
            "model.kind",
            "method.kind",
            "method.private",
            "method.optimizer.rates",
            "run.rounds",
            "run.epochs",
            "run.cohort",
            "#",
            "",
            "a.b",
            '"a b".c',
            "data",
        ]
    ),
    st.text(max_size=5),
)
values = st.one_of(
    st.sampled_from(
        [
            "inf",
            "nan",
            "[",
            "[" * 3000,
            "9" * 5000,
            "x" * 20_000,
            "{a = 1}",
            '"\\u0000"',
            "1\n2",
            "true",
            '"toy"',
            "1e308",
        ]
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
)
overrides = st.lists(st.tuples(keys, values).map(lambda pair: f"{pair[0]}={pair[1]}"), max_size=3)
"""Words of ``--set``."""
