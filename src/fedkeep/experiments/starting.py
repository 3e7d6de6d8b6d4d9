"""A configuration for a table or a folder that nobody has described yet: what ``fedkeep start`` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, did_you_mean
from fedkeep.data.alike import ID
from fedkeep.data.readers.cells import ALIASES, RawTable
from fedkeep.data.readers.image_folder import ENDINGS
from fedkeep.data.readers.kinds import SERIES, Field, field_of, lacking
from fedkeep.data.readers.load_table import load_table
from fedkeep.data.readers.many import files_of, load_many
from fedkeep.data.readers.pictures import opened_picture
from fedkeep.data.readers.series import is_series, seems_series, series_of
from fedkeep.experiments.run_settings import EPOCHS
from fedkeep.tasks import of_numbers, usual_kind

CLIENTS = re.compile(
    r"(user|client|customer|person|patient|subject|site|store|shop|hospital|device|account|member|author|speaker|"
    r"station|branch|group|owner|kunde|nutzer)(s|_?id|_?no|_?nr|_?name|_?number)?",
    re.IGNORECASE,
)
LABELS = tuple(
    re.compile(rf"({words})s?", re.IGNORECASE)
    for words in (
        r"label|target|y",
        r"class|outcome|response|rating|star|score|churn(ed)?|default|species|quality|diagnosis|result|ziel",
        r"income|price",
    )
)
"""Names of what is predicted, those first that are hardly ever anything else."""
ITEMS = re.compile(
    r"(item|film|movie|book|song|track|artist|product|article|game|recipe|title)s?([_ ]?(id|no|nr|number))?",
    re.IGNORECASE,
)
"""Names of what people rate, where a whole number stands for each."""
MOST_CLASSES = 20
"""More different numbers than this are a number to predict."""
MOST_NAMES = 100
"""More different texts than this are hardly classes."""
MOST_ROWS, MOST_IMAGES = 4_000_000, 600_000
"""About so many rows, or images, a proposed run trains on in all: where the usual epochs are more, it has fewer."""


UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]{6}"
"""Six characters of scripts that put no space between words."""
PHRASE, MESSAGE = rf"\S\s+\S|{UNSPACED}", rf"(\S+\s+){{3}}\S|{UNSPACED}"
"""What is in a cell of two words or more, and of four: a text."""
FEW = 20
"""So many different texts may be categories, however long."""


@dataclass
class TableFound:
    """What was found in a table.

    Attributes:
        path: the table's.
        client, label: columns.
        task: the name of its kind of task.
        names: labels in order, where they are whole numbers with gaps.
        fields: the features, by name.
        series: columns of series, in place of features, and what is said of each.
        text: a column of texts, in place of features.
        left: columns that are left out, and why.
        faults: what must be mended before a run.
        item: a column of numbers of what is rated, in place of features.
        unlabelled, repeated: how many rows have no label, and how many are as one above.
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
    series: dict[str, str] = field(default_factory=dict)
    text: str | None = None
    item: str | None = None
    left: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unlabelled: int = 0
    repeated: int = 0


def start_of(path: Path, client: str | None = None, label: str | None = None) -> TableFound:
    """Look at a table, and propose what its columns are.

    Args:
        path: the table.
        client, label: the columns of client ids and of labels; None: by their names and values.

    Raises:
        DataError: the table cannot be read; no column can be that of clients; a column that was named is missing; or a
            model could read none.
    """
    import pyarrow

    table = load_table(path, None) if not path.is_dir() else _one_a_client(path)
    if path.is_dir():
        client = client or "user"
    names = [name for name in table.columns if name != "split" or not path.is_dir()]
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
    series = [name for name in others if name != label and _holds_series(table, name)]
    plain = [name for name in others if name not in series] or others
    label = label or _proposed(table, path, plain, different)
    decimal = table.decimal
    found = TableFound(path, client, label, usual_kind(whole=True).name, rows, different[client], decimal)
    _label(found, table)
    codes = pyarrow.table({name: cells.different()[1] for name, cells in table.columns.items()})
    found.repeated = rows - codes.group_by(codes.column_names).aggregate([]).num_rows
    if of_numbers(found.task) or found.names:
        found.item = next(
            (
                n
                for n in others
                if n != label and ITEMS.fullmatch(n) and table.columns[n].as_type("int64") is not None
            ),
            None,
        )
    if found.item is not None:
        found.task, found.names = usual_kind(whole=False).name, None
        found.left = {
            n: "a model for ratings reads user and item alone" for n in others if n not in (label, found.item)
        }
        return found
    for name in (n for n in series if n != label):
        try:
            cells = series_of(table, [name], {name: SERIES}, max_length=1).values
        except DataError as error:
            found.left[name] = str(error)
            continue
        steps, width = np.diff(cells.offsets), cells.values.shape[1]
        found.series[name] = f"{steps.min():,} to {steps.max():,} steps" + (
            f" of {width}" if width > 1 else ""
        )
    for name in (n for n in others if n != label and n not in series):
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
        if one.kind == "category" and different[name] > FEW and _holds_texts(table, name, MESSAGE):
            found.left[name] = "texts"  # as a category each of them would be told to the server as it stands
        elif different[name] == rows > 20 and ID.fullmatch(name):
            found.left[name] = "another number in every row"
        else:
            found.fields[name] = one
    if found.series:
        found.left |= dict.fromkeys(
            found.fields, "a single value in each row; a model for series reads series alone"
        )
        found.fields.clear()
    texts = [name for name, why in found.left.items() if why == "texts"]
    if not found.fields and not found.series and texts:
        found.text = texts.pop(0)
        del found.left[found.text]
    for name in filter(ITEMS.fullmatch, texts):
        found.left[name] += "; if they name what is rated, number them in a column item"
    if not found.fields and not found.series and found.text is None:
        raise DataError(
            "{file} has no column that a model could read, beside {client!r} and {label!r}. {why}",
            file=path,
            client=client,
            label=label,
            why=" ".join(f"{name!r}: {each.rstrip('.')}." for name, each in found.left.items())
            or "Add one that describes the examples.",
        )
    return found


def _one_a_client(folder: Path) -> RawTable:
    """Return the tables of a folder as one, in which a file's name is the client where no column says it."""
    files = files_of(folder)
    names = [name for name in load_table(files[0], None).columns if name not in ("user", "split")]
    return load_many(files, names, ["split"], "user", "split")


def folder_toml(folder: Path) -> tuple[str, list[str]] | None:
    """Return a configuration for a folder of images or of LEAF's files, and what to say of it; None of others.

    Raises:
        DataError: images lie in no folder that says their class, or too deep.
    """
    if any(folder.glob("*.json")) or any(
        any(folder.glob(f"{within}train/*.json")) for within in ("", "data/")
    ):
        lines = [
            'reader = "leaf"',
            f"folder = {json.dumps(folder.name, ensure_ascii=False)}          # looked up beside this file",
        ]
        return _short_toml(folder, lines), ["The folder is LEAF's: its users are the clients."]
    images = [path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS]
    images = [
        path for path in images if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not images:
        return None
    levels = _levels(folder, {path.relative_to(folder).parts[:-1] for path in images})
    lines = [
        'reader = "image_folder"',
        f"folder = {json.dumps(folder.name, ensure_ascii=False)}          # looked up beside this file",
        f'levels = "{"/".join(levels)}"          # what the folders say, from above',
    ]
    guess = (
        " (a guess; if it is the other way round, correct levels)" if {"client", "class"} <= {*levels} else ""
    )
    said = [f"{len(images):,} images; their folders say {' and then '.join(levels)}{guess}."]
    sides = {_side(path) for path in sorted(images)[:: max(1, len(images) // 500)]}
    if len(sides) > 1:
        side = min(64, *(min(one) for one in sides))
        lines.append(
            f"size = {side}          # images have different sizes; each is brought to this height and width"
        )
        said.append(f"They have different sizes, so each is brought to {side} × {side}.")
    if "client" not in levels:
        lines += [
            "",
            "[data.partition]          # nobody owns an image, so they are dealt; say client in levels if folders tell",
            'kind = "dirichlet"',
            "clients = 10",
            "alpha = 0.5          # small: each client has few classes",
            "least = 1",
        ]
        said.append("No folder says whose an image is, so images are dealt to 10 clients.")
    return _short_toml(folder, lines, _fewer(len(images), MOST_IMAGES)), said


def _levels(folder: Path, found: set[tuple[str, ...]]) -> list[str]:
    """Return what the folders above images say, from the outermost."""
    if len({len(parts) for parts in found}) > 1 or not 1 <= len(next(iter(found))) <= 3:
        raise DataError(
            "{folder}: wanted all images in folders CLASS, CLIENT/CLASS, SPLIT/CLASS or SPLIT/CLIENT/CLASS; they lie "
            "{deep} folders deep.",
            folder=folder,
            deep=" or ".join(sorted({str(len(parts)) for parts in found})),
        )
    names = [set(own) for own in zip(*found, strict=True)]
    split = ["split"] if len(names) > 1 and names[0] <= ALIASES.keys() else []
    inner = names[len(split) :]
    if len(inner) < 2:
        return [*split, "class"]
    if len(inner) > 2:
        raise DataError("{folder}: three folders above an image, of which none is a split.", folder=folder)
    # more clients than classes, unless names tell
    outer_is_class = len(inner[0]) < len(inner[1]) or any(CLIENTS.match(name) for name in inner[1])
    if any(CLIENTS.match(name) for name in inner[0]):
        outer_is_class = False
    return [*split, *(["class", "client"] if outer_is_class else ["client", "class"])]


def _side(path: Path) -> tuple[int, int]:
    with opened_picture(path, path) as image:
        return image.size


def _short_toml(folder: Path, data: Sequence[str], epochs: Sequence[str] = ()) -> str:
    lines = [
        f"# Written by fedkeep start for {folder.name}. Model, optimiser, batches and epochs are the usual ones for such data.",
        "# Read it once, change what is wrong, then: fedkeep check, and fedkeep run.",
        f"name = {json.dumps(folder.name, ensure_ascii=False)}",
        "",
        "[data]",
        *data,
        *_usual_lines(epochs),
    ]
    return "\n".join(lines)


def _fewer(examples: int, most: int) -> list[str]:
    """Return the line that says how many epochs, where examples are too many for the usual ones (``RunSettings``)."""
    epochs = max(1, most // examples)
    return (
        [f"epochs = {epochs}          # as there are many examples; usual are {EPOCHS}"]
        if epochs < EPOCHS
        else []
    )


def _usual_lines(epochs: Sequence[str], method: str = "fedper", clients: int = 0) -> list[str]:
    """Return the tables of a configuration that leaves model, optimiser, batches and epochs to what is usual."""
    private = {"fedper": "a private head", "furl": "a private vector for each"}[method]
    more = [*epochs, *(["cohort = 10          # clients who train in one round"] if clients > 10 else [])]
    if method == "furl":  # without its vectors the model is whole
        more.append("evaluate_shared = true          # judge the shared part alone, too")
    return [
        "",
        "[method]",
        f'kind = "{method}"          # {private}; others: fedkeep list --for THIS FILE',
        *(["", "[run]", *more] if more else []),
        "",
    ]


def _different(table: RawTable, name: str) -> int:
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


def _proposed(table: RawTable, path: Path, others: Sequence[str], different: Mapping[str, int]) -> str:
    """Return the column whose name is a label's, or the last one, where it can be one.

    Raises:
        DataError: the last one holds dates, or more different texts than anybody has classes.
    """
    if named := next((n for names in LABELS for n in others if names.fullmatch(n)), None):
        return named
    last = others[-1]
    try:
        one = field_of(table, last)
    except DataError:
        fits = different[last] <= MOST_NAMES
    else:
        fits = one.kind != "date"
    if fits:
        return last
    raise DataError(
        "{file}: no column looks like one to predict, such as label or target, and the last one, {last!r}, holds "
        "{what}. Name it: --label COLUMN. The columns are {there}.",
        file=path,
        last=last,
        what=f"{different[last]:,} different {'texts' if different[last] > MOST_NAMES else 'dates'}",
        there=list(others),
    )


def _label(found: TableFound, table: RawTable) -> None:
    values = table.columns[found.label]
    cells, number = values.different()
    numbers: Any = None
    with suppress(DataError):
        numbers = field_of(table, found.label, "number").values
    without = lacking(table, found.label)
    if without.all():
        found.faults.append(f"No row has a label in {found.label!r}. Name another: --label COLUMN.")
        return
    found.unlabelled = int(without.sum())
    known = [cells[n] for n in dict.fromkeys(number[~without].tolist())]
    if numbers is None:
        found.task = _of_classes(len(known))
        if len(known) > max(1000, found.rows / 5):
            found.faults.append(
                f"The label {found.label!r} has {len(known):,} different texts. Name another: --label COLUMN."
            )
        return
    numbers = np.unique(numbers[~without])
    if len(numbers) > MOST_CLASSES or (numbers % 1).any():
        found.task = usual_kind(whole=False).name
        return
    found.task = _of_classes(len(numbers))
    if len(numbers) != numbers[-1] + 1 or numbers[0] != 0:
        found.names = sorted(
            (str(int(float(cell))) if isinstance(cell, float) else str(cell) for cell in known), key=float
        )


def _of_classes(different: int) -> str:
    """Return the kind of task of so many different labels: a single one may have others elsewhere."""
    return usual_kind(whole=True, classes=different if different > 1 else None).name


def _holds_series(table: RawTable, name: str) -> bool:
    few = table.columns[name].values[:1000]
    return is_series(table, name) or seems_series(few if isinstance(few, list) else few.to_pylist())


def _holds_texts(table: RawTable, name: str, pattern: str = PHRASE) -> bool:
    values = table.columns[name].values
    if isinstance(values, list):
        return pattern == PHRASE and all(value is None or isinstance(value, str) for value in values)
    from pyarrow import compute, types

    if not types.is_string(values.type):
        return False
    few = values.slice(0, 1000)
    share = compute.mean(compute.match_substring_regex(few, pattern).cast("int8")).as_py()
    return bool(share is not None and share > 0.5)


def toml_of(found: TableFound) -> str:
    """Return the configuration, with comments in plain words."""
    q = partial(json.dumps, ensure_ascii=False)
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
    if of_numbers(found.task):
        lines.append(
            f"task = {q(found.task)}          # a number; for classes say {q(usual_kind(whole=True).name)}"
        )
    if found.unlabelled:
        lines.append(f"skip_unlabelled = true          # {found.unlabelled:,} rows have no label")
    if found.names:
        lines.append(f"label_names = {q(found.names)}")
    if found.decimal == ",":
        lines.append('decimal = ","')
    if found.item is not None:
        lines.append(f"item = {q(found.item)}          # what is rated, by its number")
    elif found.text is not None:
        lines.append(f"text = {q(found.text)}")
    else:
        lines.append("features = [")
        lines += [f"    {q(name)}," for name in [*found.series, *found.fields]]
        lines.append("]")
    lines += [f"# left out: {name}: {_line(why)}" for name, why in found.left.items()]
    lines += [f"# to mend: {_line(fault)}" for fault in found.faults]
    if found.fields:
        lines += ["", "[data.kinds]          # number, truth, date or category"]
        lines += [
            f"{q(name)} = {q(one.declared)}          # {_about(one)}" for name, one in found.fields.items()
        ]
    if found.series:
        lines += ["", "[data.kinds]"]
        lines += [f'{q(name)} = "{SERIES}"          # {about}' for name, about in found.series.items()]
    epochs = _fewer(found.rows, MOST_ROWS)
    if found.series:
        return "\n".join([*lines, *_usual_lines(epochs)])
    return "\n".join([*lines, *_usual_lines(epochs, "furl", found.clients)])


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
