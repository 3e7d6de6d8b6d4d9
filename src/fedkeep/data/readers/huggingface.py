"""Data sets of the Hugging Face ``datasets`` library, an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, Spot, needing, reading
from fedkeep.data.preparation import Plain, Raw, encoded_alone
from fedkeep.data.preparation.texts import AnyVocabulary
from fedkeep.data.readers.cells import ID, Cells, Only, RawTable
from fedkeep.data.readers.opened_files import check_names, naming_of
from fedkeep.data.readers.pictures import decoded, encoded_in
from fedkeep.data.readers.tables import columns_of, named_user, raw_from
from fedkeep.data.subsets import drawn
from fedkeep.tasks import of_numbers

PARTITION = "the partition"
"""The column of clients where partitions are."""


def raw_huggingface(
    source: Any,
    *,
    user: str | None = "user",
    text: str | None = None,
    image: str | None = None,
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
    size: int | Sequence[int] | None = None,
    clients: int | None = None,
) -> Raw:
    """Read a Hugging Face data set.

    Args:
        source: a name for ``datasets.load_dataset``, a ``Dataset``, or a ``DatasetDict`` whose keys are splits
            (train, validation, test). A single ``Dataset`` with a column ``split`` keeps that split. Or a
            ``FederatedDataset`` or a ``Partitioner`` of ``flwr_datasets``: each of its partitions is a client, named by its
            natural id, else by its number; the same number in several splits is one client.
        user: name of the column of client ids. None: rows are nobody's, and a partition deals them. Partitions need none.
        image: name of a column of images, in place of ``text`` and ``features``; they become ``image``, uint8 (channels,
            height, width), 1 channel where all are grey, else 3.
        text, features, label, label_separator, time, opted_in, task, label_names, tokens, vocabulary, max_length, standardise: as for ``read_table``.
            Labels of a ``ClassLabel`` are read as its names, numbered as there.
        size: of images, as of ``image_folder``.
        clients: read the rows of so many clients alone, drawn by their ids, and make no other partition. None: all.

    Raises:
        DataError: ``datasets`` isn't installed or cannot load the name, what is given is no data set that can be read
            from its beginning to its end, a column is missing, or a value is not what its column wants.
    """
    with needing("Reading Hugging Face data sets", "datasets", "datasets", DataError):
        import datasets
    name = source if isinstance(source, str) else "huggingface"
    with reading(
        "Cannot load the Hugging Face data set {source!r}: {why}. Check its name and the network.",
        source=source,
    ):
        found = datasets.load_dataset(source) if isinstance(source, str) else source
    parts = _parts(name, found, clients)
    partitioned = parts[0].client is not None
    if partitioned and user not in (None, "user"):
        raise DataError(
            "The partitions of {name} say whose each row is; got user={user!r} beside them. Leave it out.",
            name=name,
            user=user,
        )
    if image is not None and (text is not None or features is not None):
        raise DataError("Wanted an image, text or features; got image={image!r} and another.", image=image)
    named_user = None if partitioned else user
    inputs = features if image is None else [image]
    wanted, usual = columns_of(named_user, label, text, inputs, time=time, opted_in=opted_in)
    words = text or "text" if inputs is None else None
    others = {"features": features, "image": image, "time": time, "opted_in": opted_in}
    naming = naming_of({"user": named_user, "label": label, "text": words, **others})
    columns: dict[str, list[Any]] = {}
    places: list[tuple[_Part, int]] = []
    only = None
    if clients is not None and not partitioned:
        only = _drawn(name, parts, user, naming, clients)
    for one in parts:
        part, rows = one.split, _plain(name, one.rows)
        numbers = np.arange(len(rows))
        if only is not None:
            numbers = only.rows(Cells(list(rows[only.column])))
            rows = rows.select(numbers)
        if image in rows.column_names and type(rows.features.get(image)).__name__ == "Image":
            rows = rows.cast_column(image, datasets.Image(decode=False))  # files are smaller than pixels
        names = list(rows.column_names)
        check_names(name, names, wanted, naming)
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
        if partitioned:
            columns.setdefault(PARTITION, []).extend([one.client] * len(rows))
        places.extend((one, row) for row in numbers.tolist())
    short = [column for column, values in columns.items() if len(values) != len(places)]
    if short:
        raise DataError(
            "{name}: the column {column!r} is missing from some of the splits {splits}.",
            name=name,
            column=short[0],
            splits=sorted({str(one.split) for one in parts}),
        )
    if not places:
        raise DataError("{name} holds no example.", name=name)

    def where(row: int) -> Spot:
        one, number = places[row]
        about = [one.split, None if one.client is None else f"partition {one.client}"]
        return Spot(", ".join([name, *filter(None, about)]), number, "row")

    pictures = None if image is None else decoded(encoded_in(columns.pop(image), where), size)
    return raw_from(
        RawTable({column: Cells(values) for column, values in columns.items()}, where),
        user=PARTITION if partitioned else user,
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
        inputs=None if pictures is None else {"image": Plain(values=pictures)},
        meta={"name": name, "source": {"huggingface": name, "fingerprints": _fingerprints(parts)}},
    )


huggingface = encoded_alone(raw_huggingface)
"""Read a data set as :func:`raw_huggingface` does, and encode it."""


@dataclass(frozen=True)
class _Part:
    """Rows of a split and of a client, where these are known."""

    split: str | None
    client: str | None
    rows: Any


def _drawn(
    name: str, parts: Sequence[_Part], user: str | None, naming: Mapping[str, str], clients: int
) -> Only:
    """Return so many clients, of whose column alone every row is read."""
    user = named_user(user)
    ids = set[str]()
    for one in parts:
        rows = _plain(name, one.rows)
        check_names(name, list(rows.column_names), [user], naming)
        place = ", ".join(filter(None, [name, one.split]))
        table = RawTable({user: Cells(list(rows[user]))}, partial(Spot, place, unit="row"))
        ids.update(table.read(user, ID)[0])
    return Only(user, drawn(ids, clients))


def _plain(name: str, given: Any) -> Any:
    """Return a set of rows that gives plain numbers and texts; DataError where it is none."""
    if not isinstance(given, Sized) or not hasattr(given, "with_format"):
        raise DataError(
            "{name}: wanted a Dataset or a DatasetDict; got {got}. Load it without streaming.",
            name=name,
            got=type(given).__name__,
        )
    return given.with_format(None)


def _parts(name: str, found: Any, clients: int | None = None) -> list[_Part]:
    """Return the sets of rows that a source is made of, of partitions those of so many alone.

    Raises:
        DataError: a partition cannot be made.
    """
    partitioners = getattr(found, "partitioners", None)
    if isinstance(
        partitioners, dict
    ):  # a FederatedDataset; of one split alone examples are divided in each client
        single = len(partitioners) == 1
        given = [(None if single else split, one) for split, one in partitioners.items()]
    elif hasattr(found, "load_partition"):
        given = [(None, found)]
    else:
        return [
            _Part(part, None, rows)
            for part, rows in (found if isinstance(found, dict) else {None: found}).items()
        ]
    with reading("{name}: cannot make the partitions: {why}.", name=name):
        those = [
            (
                split,
                one,
                number,
                str((getattr(one, "partition_id_to_natural_id", None) or {}).get(number, number)),
            )
            for split, one in given
            for number in range(one.num_partitions)
        ]
        kept = None if clients is None else drawn({client for *_, client in those}, clients)
        return [
            _Part(split, client, one.load_partition(number))
            for split, one, number, client in those
            if kept is None or client in kept
        ]


def _named(value: Any, classes: Sequence[str]) -> Any:
    """Return the name of a class, or of each of a list, by its number."""
    if isinstance(value, list):
        return [_named(one, classes) for one in value]
    return classes[value] if value in range(len(classes)) else value


def _fingerprints(parts: Sequence[_Part]) -> dict[str, str]:
    """Return what tells sets of rows apart, by their splits and clients."""
    return {
        " ".join(filter(None, [str(one.split), one.client])): str(getattr(one.rows, "_fingerprint", ""))
        for one in parts
    }
