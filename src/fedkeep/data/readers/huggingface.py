"""Data sets of the Hugging Face ``datasets`` library, an extra."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from fedkeep.core.errors import DataError, Spot, first_line
from fedkeep.data.preparation import Raw, encoded_alone
from fedkeep.data.preparation.texts import AnyVocabulary
from fedkeep.data.readers.cells import Cells, Table
from fedkeep.data.readers.files import check_names
from fedkeep.data.readers.tables import columns_of, raw_from
from fedkeep.tasks import of_numbers


def raw_huggingface(
    source: Any,
    *,
    user: str | None,
    text: str | None = None,
    features: Sequence[str] | None = None,
    label: str | Sequence[str] = "label",
    label_separator: str = "|",
    time: str | None = None,
    opted_in: str | None = None,
    task: str | None = None,
    label_names: Sequence[str] | None = None,
    tokens: str | None = None,
    vocabulary: AnyVocabulary | int | None = None,
    max_length: int = 256,
    standardise: bool = True,
) -> Raw:
    """Read a Hugging Face data set.

    Args:
        source: a name for ``datasets.load_dataset``, a ``Dataset``, or a ``DatasetDict`` whose keys are splits
            (train, validation, test). A single ``Dataset`` with a column ``split`` keeps that split.
        user: name of the column of client ids. None: rows are nobody's, and a partition deals them.
        text, features, label, label_separator, time, opted_in, task, label_names, tokens, vocabulary, max_length, standardise: as for ``read_table``.
            Labels of a ``ClassLabel`` are read as its names, numbered as there.

    Raises:
        DataError: ``datasets`` isn't installed or cannot load the name, what is given is no data set that can be read
            from its beginning to its end, a column is missing, or a value is not what its column wants.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "Reading Hugging Face data sets needs the package datasets. Install it: pip install 'fedkeep[datasets]'."
        ) from error
    name = source if isinstance(source, str) else "huggingface"
    try:
        found = datasets.load_dataset(source) if isinstance(source, str) else source
    except Exception as error:  # of the network, of its own, and whatever its readers of files raise
        raise DataError(
            "Cannot load the Hugging Face data set {source!r}: {why}. Check its name and the network.",
            source=source,
            why=first_line(error).rstrip("."),
        ) from error
    parts = dict(found) if isinstance(found, dict) else {None: found}
    wanted, usual = columns_of(user, label, text, features, time=time, opted_in=opted_in)
    columns: dict[str, list[Any]] = {}
    places: list[tuple[str | None, int]] = []
    for part, given in parts.items():
        if not isinstance(given, Sized) or not hasattr(given, "with_format"):
            raise DataError(
                "{name}: wanted a Dataset or a DatasetDict; got {got}. Load it without streaming.",
                name=name,
                got=type(given).__name__,
            )
        rows = given.with_format(None)  # plain numbers and texts
        names = list(rows.column_names)
        check_names(name, names, wanted)
        classes = None
        if isinstance(label, str) and not of_numbers(task):
            feature = rows.features[label]  # of several labels in a cell it is a list's
            classes = getattr(getattr(feature, "feature", feature), "names", None)
        label_names = classes if label_names is None else label_names
        optional = [*usual, *(["split"] if part is None else [])]
        for column in dict.fromkeys((*wanted, *(column for column in optional if column in names))):
            values = rows[column]
            if column == label and classes is not None:
                values = [_named(value, classes) for value in values]
            columns.setdefault(column, []).extend(values)
        if part is not None:
            columns.setdefault("split", []).extend([part] * len(rows))
        places.extend((part, row) for row in range(len(rows)))
    short = [column for column, values in columns.items() if len(values) != len(places)]
    if short:
        raise DataError(
            "{name}: the column {column!r} is missing from some of the splits {splits}.",
            name=name,
            column=short[0],
            splits=sorted(map(str, parts)),
        )
    if not places:
        raise DataError("{name} holds no example.", name=name)

    def where(row: int) -> Spot:
        part, number = places[row]
        return Spot(name if part is None else f"{name}, {part}", number, "row")

    return raw_from(
        Table({column: Cells(values) for column, values in columns.items()}, where),
        user=user,
        text=text,
        features=features,
        label=label,
        label_separator=label_separator,
        split=None,
        time=time,
        opted_in=opted_in,
        task=task,
        label_names=label_names,
        tokens=tokens,
        vocabulary=vocabulary,
        max_length=max_length,
        standardise=standardise,
        meta={"name": name, "source": {"huggingface": name, "fingerprints": _fingerprints(parts)}},
    )


huggingface = encoded_alone(raw_huggingface)
"""Read a data set as :func:`raw_huggingface` does, and encode it."""


def _named(value: Any, classes: Sequence[str]) -> Any:
    """Return the name of a class, or of each of a list, by its number."""
    if isinstance(value, list):
        return [_named(one, classes) for one in value]
    return classes[value] if value in range(len(classes)) else value


def _fingerprints(parts: dict[str | None, Any]) -> dict[str, str]:
    return {str(part): str(getattr(rows, "_fingerprint", "")) for part, rows in parts.items()}
