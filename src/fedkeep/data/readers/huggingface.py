"""Data sets of the Hugging Face ``datasets`` library, an extra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedkeep.core.errors import DataError
from fedkeep.data.preparation import Raw, encoded_alone
from fedkeep.data.readers.tables import Table, check_names, columns_of, raw_from
from fedkeep.data.text import CharVocabulary, WordVocabulary


def raw_huggingface(
    source: Any,
    *,
    user: str,
    text: str | None = None,
    features: Sequence[str] | None = None,
    label: str = "label",
    time: str | None = None,
    opted_in: str | None = None,
    task: str | None = None,
    label_names: Sequence[str] | None = None,
    tokens: str = "char",
    vocabulary: CharVocabulary | WordVocabulary | int | None = None,
    max_length: int = 256,
) -> Raw:
    """Read a Hugging Face data set.

    Args:
        source: a name for ``datasets.load_dataset``, a ``Dataset``, or a ``DatasetDict`` whose keys are splits
            (train, validation, test). A single ``Dataset`` with a column ``split`` keeps that split.
        user: name of the column of client ids.
        text, features, label, time, opted_in, task, label_names, tokens, vocabulary, max_length: as for ``read_table``.

    Raises:
        DataError: ``datasets`` isn't installed, a column is missing, or a value is not what its column wants.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "Reading Hugging Face data sets needs the package datasets. Install it: pip install 'fedkeep[datasets]'."
        ) from error
    name = source if isinstance(source, str) else "huggingface"
    found = datasets.load_dataset(source) if isinstance(source, str) else source
    parts = dict(found) if isinstance(found, dict) else {None: found}
    wanted, usual = columns_of(user, label, text, features, time=time, opted_in=opted_in)
    columns: dict[str, list[Any]] = {}
    places: list[tuple[str | None, int]] = []
    for part, rows in parts.items():
        names = list(rows.column_names)
        check_names(name, names, wanted)
        optional = [*usual, *(["split"] if part is None else [])]
        for column in dict.fromkeys((*wanted, *(column for column in optional if column in names))):
            columns.setdefault(column, []).extend(rows[column])
        if part is not None:
            columns.setdefault("split", []).extend([part] * len(rows))
        places.extend((part, row) for row in range(len(rows)))
    short = [column for column, values in columns.items() if len(values) != len(places)]
    if short:
        raise DataError(
            f"{name}: the column {short[0]!r} is missing from some of the splits {sorted(map(str, parts))}."
        )
    if not places:
        raise DataError(f"{name} holds no example.")

    def where(row: int) -> str:
        part, number = places[row]
        return f"{name}{'' if part is None else f', {part}'}, row {number}"

    return raw_from(
        Table(columns, where),
        user=user,
        text=text,
        features=features,
        label=label,
        split=None,
        time=time,
        opted_in=opted_in,
        task=task,
        label_names=label_names,
        tokens=tokens,
        vocabulary=vocabulary,
        max_length=max_length,
        meta={"name": name, "source": {"huggingface": name, "fingerprints": _fingerprints(parts)}},
    )


huggingface = encoded_alone(raw_huggingface)
"""Read a data set as :func:`raw_huggingface` does, and encode it."""


def _fingerprints(parts: dict[str | None, Any]) -> dict[str, str]:
    return {str(part): str(getattr(rows, "_fingerprint", "")) for part, rows in parts.items()}
