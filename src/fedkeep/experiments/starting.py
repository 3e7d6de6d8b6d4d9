"""A configuration for a table that nobody has described yet: what ``fedkeep start`` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, did_you_mean
from fedkeep.data.alike import ID
from fedkeep.data.readers.cells import Table
from fedkeep.data.readers.kinds import Field, field_of
from fedkeep.data.readers.load import load_table

CLIENTS = re.compile(
    r"(user|client|customer|person|patient|subject|site|store|shop|hospital|device|account|member|author|speaker|"
    r"station|branch|group|owner|kunde|nutzer)(s|_?id|_?no|_?nr|_?name|_?number)?",
    re.IGNORECASE,
)
LABELS = re.compile(
    r"(label|target|class|outcome|y|response|rating|score|churn(ed)?|default|species|quality|diagnosis|result|"
    r"income|price|ziel)s?",
    re.IGNORECASE,
)
MOST_CLASSES = 20
"""More different numbers than this are a number to predict."""
EXAMPLES = 4_000_000
"""About so many examples are trained on in all: more rows train for fewer epochs."""


@dataclass
class Start:
    """What was found in a table.

    Attributes:
        path: the table's.
        client, label: columns.
        task: "multiclass", "binary" or "regression".
        names: labels in order, where they are whole numbers with gaps.
        fields: the features, by name.
        text: a column of texts, in place of features.
        left: columns that are left out, and why.
        faults: what must be mended before a run.
        rows, clients: how many there are.
        decimal: the mark before decimals.
    """

    path: Path
    client: str
    label: str
    task: str
    rows: int
    clients: int
    decimal: str
    names: list[str] | None = None
    fields: dict[str, Field] = field(default_factory=dict)
    text: str | None = None
    left: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def start_of(path: Path, client: str | None = None, label: str | None = None) -> Start:
    """Look at a table, and propose what its columns are.

    Args:
        path: the table.
        client, label: the columns of client ids and of labels; None: by their names and values.

    Raises:
        DataError: the table cannot be read; no column can be that of clients; or a column that was named is missing.
    """
    table = load_table(path, None)
    names = list(table.columns)
    for named in (client, label):
        if named is not None and named not in names:
            raise DataError(
                "{file} has no column {column!r}; it has {there}.{near}",
                file=path,
                column=named,
                there=names,
                near=did_you_mean(named, names),
            )
    different = {name: _different(table, name) for name in names}
    rows = len(next(iter(table.columns.values())))
    client = client or _client(path, names, different, rows, label)
    others = [name for name in names if name != client]
    if not others:
        raise DataError("{file} has one column only; a label is wanted beside the clients.", file=path)
    label = label or next((n for n in others if LABELS.fullmatch(n)), others[-1])
    decimal = table.decimal
    found = Start(path, client, label, "multiclass", rows, different[client], decimal)
    _label(found, table)
    for name in (n for n in others if n != label):
        if different[name] < 2:
            found.left[name] = "the same in every row"
            continue
        try:
            one = field_of(table, name)
        except DataError as error:
            if _holds_texts(table, name):
                found.left[name] = "texts"
            else:
                found.left[name] = str(error)
            continue
        if different[name] == rows > 20 and ID.fullmatch(name):
            found.left[name] = "another number in every row"
        else:
            found.fields[name] = one
    texts = [name for name, why in found.left.items() if why == "texts"]
    if not found.fields and texts:
        found.text = texts[0]
        del found.left[texts[0]]
    if not found.fields and found.text is None:
        found.faults.append("No column is left that a model could read.")
    return found


def _different(table: Table, name: str) -> int:
    values = table.columns[name].values
    if isinstance(values, list):
        return len(set(map(str, values)))
    from pyarrow import ArrowNotImplementedError, compute

    try:
        return int(compute.count_distinct(values).as_py())
    except ArrowNotImplementedError:
        return len(values)


def _client(path: Path, names: Sequence[str], different: dict[str, int], rows: int, label: str | None) -> str:
    fitting = [n for n in names if n != label and 2 <= different[n] <= rows / 2]
    if named := [n for n in fitting if CLIENTS.fullmatch(n.strip())]:
        return max(named, key=lambda n: different[n])
    if named := [n for n in fitting if re.search(r"(^|_)(id|nr)$", n, re.IGNORECASE)]:
        return max(named, key=lambda n: different[n])
    raise DataError(
        "{file}: no column looks like one that says whose each row is, such as user or customer_id, with several rows "
        "for each. Name it: --client COLUMN. The columns are {there}.",
        file=path,
        there=list(names),
    )


def _label(found: Start, table: Table) -> None:
    values = table.columns[found.label]
    cells, number = values.different()
    empty = [n for n, cell in enumerate(cells) if cell is None or str(cell).strip() == ""]
    if empty:
        count = int(np.isin(number, empty).sum())
        first = int(np.argmax(np.isin(number, empty)))
        found.faults.append(
            f"{count:,} rows have no label in {found.label!r}, the first {table.where(first)}. Remove them, or name another "
            f"label: --label COLUMN."
        )
    known = [cell for n, cell in enumerate(cells) if n not in empty]
    try:
        numbers = field_of(table, found.label, "number").values
    except DataError:
        found.task = "binary" if len(known) == 2 else "multiclass"
        if len(known) > max(1000, found.rows / 5):
            found.faults.append(
                f"The label {found.label!r} has {len(known):,} different texts. Name another: --label COLUMN."
            )
        return
    numbers = np.unique(numbers[~np.isnan(numbers)])
    if len(numbers) > MOST_CLASSES or (numbers % 1).any():
        found.task = "regression"
        return
    found.task = "binary" if len(numbers) == 2 else "multiclass"
    if len(numbers) != numbers[-1] + 1 or numbers[0] != 0:
        found.names = sorted(
            (str(int(float(cell))) if isinstance(cell, float) else str(cell) for cell in known), key=float
        )


def _holds_texts(table: Table, name: str) -> bool:
    values = table.columns[name].values
    if isinstance(values, list):
        return all(value is None or isinstance(value, str) for value in values)
    from pyarrow import compute, types

    if not types.is_string(values.type):
        return False
    few = values.slice(0, 1000)
    spaces = compute.mean(compute.match_substring_regex(few, r"\S\s+\S").cast("int8")).as_py()
    return bool(spaces is not None and spaces > 0.5)


def toml_of(found: Start) -> str:
    """Return the configuration, with comments in plain words."""
    q = json.dumps
    lines = [
        f"# Written by fedkeep start for {found.path.name}: {found.rows:,} rows of {found.clients:,} clients.",
        "# Read it once, change what is wrong, then: fedkeep check, and fedkeep run.",
        f"name = {q(found.path.name.split('.')[0])}",
        "",
        "[data]",
        'reader = "table"',
        f"path = {q(found.path.name)}          # looked up beside this file",
        f"user = {q(found.client)}          # whose each row is",
        f"label = {q(found.label)}          # what is predicted",
    ]
    if found.task == "regression":
        lines.append('task = "regression"          # a number; for classes say "multiclass"')
    if found.names:
        lines.append(f"label_names = {q(found.names)}")
    if found.decimal == ",":
        lines.append('decimal = ","')
    if found.text is not None:
        lines.append(f"text = {q(found.text)}")
    else:
        lines.append("features = [")
        lines += [f"    {q(name)}," for name in found.fields]
        lines.append("]")
    lines += [f"# left out: {name}: {_line(why)}" for name, why in found.left.items()]
    lines += [f"# to mend: {_line(fault)}" for fault in found.faults]
    if found.fields:
        lines += ["", "[data.kinds]          # number, truth, date or category"]
        lines += [
            f"{q(name)} = {q(one.declared)}          # {_about(one)}" for name, one in found.fields.items()
        ]
    epochs = max(1, min(20, EXAMPLES // found.rows))
    lines += ["", "[model]"]
    if found.text is None:
        lines.append('kind = "linear"          # W x + b, plus a private offset for each client')
    else:
        lines += ['kind = "bag_of_words"', "user_dim = 8          # numbers in each client's private vector"]
    width = sum(len(one.levels) or 1 for one in found.fields.values())
    optimizer = "{ learning_rate = 0.2 }"
    if found.text is not None:
        optimizer = '{ kind = "adam", learning_rate = 0.02 }'
    elif found.task == "regression":  # steps stay stable whatever the label's scale
        optimizer = f"{{ learning_rate = {min(0.1, 0.5 / (width + 1)):.2g} }}"
    lines += [
        "",
        "[method]",
        'kind = "furl"          # federated averaging with a private part; others: fedkeep list --for THIS FILE',
        'private = "user"          # the name of what stays with each client',
        "batch_size = 16",
        f"optimizer = {optimizer}",
    ]
    lines += [
        "",
        "[run]",
        f"epochs = {epochs}",
        f"cohort = {min(10, found.clients)}          # clients who train in one round",
        "evaluate_shared = true          # judge the shared part alone, too",
        "",
    ]
    return "\n".join(lines)


def _line(text: str) -> str:
    return " ".join(text.split())


def _about(one: Field) -> str:
    known: Any = one.values[~np.isnan(one.values)]
    holes = len(one.values) - len(known)
    if one.kind == "category":
        few = ", ".join(one.levels[:5]) + (", ..." if len(one.levels) > 5 else "")
        what = f"{len(one.levels)} different: {_line(few)}"
    elif one.kind == "date":
        day = np.datetime64("1970-01-01")
        first, last = (str(day + np.timedelta64(int(np.floor(v)), "D")) for v in (known.min(), known.max()))
        what = f"{first} to {last}"
    else:
        what = f"{known.min():g} to {known.max():g}"
    return what + (f"; missing in {holes:,} rows" if holes else "")
