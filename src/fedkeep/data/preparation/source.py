"""Where clients' data come from: a source sums its data up, and gives them in the encoding that all share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ParamSpec, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkeep.core.errors import DataError
from fedkeep.data.columns import AS_READ, Column, Ragged, Repeated, Rows
from fedkeep.data.federated import FederatedData
from fedkeep.data.ids import group_rows
from fedkeep.data.images import noisy
from fedkeep.data.preparation.contract import Code, Counted, RawColumn, Rules, Where
from fedkeep.data.preparation.encoding import Encoding
from fedkeep.data.preparation.feature_columns import FeatureCode, Features
from fedkeep.data.preparation.label_columns import LabelError, Labels
from fedkeep.data.preparation.numbers import Plain, plain_summary
from fedkeep.data.preparation.summary import About, Summary
from fedkeep.data.splits import SPLITS

P = ParamSpec("P")


class Source(Protocol):
    """The data of some clients, on the device where they are."""

    @property
    def ids(self) -> Sequence[str]:
        """The clients' ids."""

    def summary(self, rules: Rules = Rules()) -> Summary:
        """Return what may leave the device.

        Raises:
            DataError: a fault in the data; file and line are named.
        """

    def encoded(self, encoding: Encoding) -> FederatedData:
        """Return the data in numbers.

        Raises:
            DataError: they do not fit the encoding: a column is missing or of another kind, a label is unknown.
        """


@dataclass(frozen=True, kw_only=True)
class Raw:
    """A source of examples as a reader read them: nothing is numbered or cut yet.

    Attributes:
        client: one id a row, texts or integers.
        split: "train", "valid" or "test" of each row; None: not split.
        columns: by the name that they have in a model's ``forward``.
        opted_in: False for each row that stays out, bool (rows,); it becomes a column of the data. None: all are in.
        about: what the reader knows without looking at the examples.
        meta: what else ``FederatedData.meta`` is to hold.
        where: names a row, for messages.
    """

    client: ArrayLike
    split: Sequence[str] | None
    columns: Mapping[str, RawColumn]
    opted_in: NDArray[np.bool_] | None = None
    about: About = About()
    meta: Mapping[str, Any] = field(default_factory=dict)
    where: Where = "Row {}".format

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._grouped[1])

    @property
    def ids(self) -> Sequence[str]:
        """The clients' ids, in the order of the encoded data."""
        return self._grouped[0]

    def taken(self, rows: Rows, **changes: Any) -> Raw:
        """Return these rows alone; ``changes`` are fields to have other values for them, such as ``client``."""
        every: Mapping[str, Any] = self.columns  # each kind of column has values
        columns = {name: replace(c, values=_taken(c.values, rows)) for name, c in every.items()}
        kept = {
            "client": _taken(self.client, rows),
            "split": _taken(self.split, rows),
            "opted_in": _taken(self.opted_in, rows),
        }
        return replace(self, columns=columns, where=lambda row: self.where(int(rows[row])), **kept | changes)

    def pooled(self) -> Pooled:
        """Return the examples as such that belong to nobody; DataError where each has no class."""
        label = self.columns.get("label")
        if not isinstance(label, Labels):
            raise DataError("A partition deals by classes; these data have no class for each example.")
        words = sorted(set(label.values)) if label.names is None else list(label.names)
        number = {word: n for n, word in enumerate(words)}
        if unknown := next((word for word in label.values if word not in number), None):
            raise DataError(
                "{place}: the label {got!r} is none of label_names.",
                place=self.place_of(unknown),
                got=unknown,
            )
        labels = np.asarray([number[word] for word in label.values], np.int64)
        tests = np.asarray([part == "test" for part in self.split or [""] * len(labels)])
        order = np.argsort(tests, kind="stable")
        return Pooled(self, order, labels[order], int((~tests).sum()), tuple(words))

    @cached_property
    def _grouped(self) -> tuple[list[str], NDArray[np.int64]]:
        return group_rows(self.client)

    def summary(self, rules: Rules = Rules()) -> Summary:
        """Return what may leave the device.

        Rows to train on shape it, or all where the data are not split; of these only such as opted in.

        Raises:
            ConfigError: a rule is for none of the columns.
        """
        rules.check_used({name: column.kind for name, column in self.columns.items()})
        ids, client = self._grouped
        shaping = np.ones(len(client), bool) if self.split is None else np.asarray(self.split) == "train"
        rows = np.flatnonzero(shaping if self.opted_in is None else shaping & self.opted_in)
        counted = Counted(rows=rows, client=client[rows], inside=self.opted_in)
        columns = {name: column.summary(rules, counted) for name, column in self.columns.items()}
        return Summary(
            clients=len(ids), clients_a_word=rules.clients_a_word, columns=columns, about=self.about
        )

    def encoded(self, encoding: Encoding) -> FederatedData:
        """Return the data in numbers."""
        encoding.check_kinds(self.columns, self.about)
        columns: dict[str, Column | Callable[[Rows], Column]] = {
            name: self._encoded(encoding.columns[name], raw) for name, raw in self.columns.items()
        }
        for name, raw in self.columns.items():
            if (found := encoding.columns[name].as_read(raw)) is not None:
                columns[AS_READ + name] = found
        if self.opted_in is not None:
            columns["opted_in"] = self.opted_in
        meta = {**self.meta, **encoding.meta, "encoding": encoding.digest, "encoded_by": encoding.to_json()}
        return FederatedData.from_groups(*self._grouped, columns, self.split, meta)

    def _encoded(self, code: Code, raw: RawColumn) -> Column | Callable[[Rows], Column]:
        """Return a column in numbers; features, which take most memory, once the order of rows is known."""
        if type(code) is FeatureCode and isinstance(raw, Features):
            return functools.partial(code.encoded, raw, self._place)
        return code.encoded(raw, self._place)

    def _place(self, row: int) -> object:
        """Name a row, and where it opted out what follows from that: its labels and items are in no summary."""
        if self.opted_in is None or self.opted_in[row]:
            return self.where(row)
        return (
            f"{self.where(row)} (opted out, so nobody was told what it holds; name all labels in label_names, or drop "
            f"it)"
        )

    def place_of(self, label: str) -> object:
        """Return where a label stands first, for messages."""
        for raw in self.columns.values():
            if isinstance(raw, Labels) and label in raw.values:
                return self.where(raw.values.index(label))
        return "Labels"


@dataclass(frozen=True)
class Pooled:
    """The examples of a source as such that belong to nobody yet, as partitions want them.

    Attributes:
        raw: the source.
        order: its rows, those to train on first.
        labels, train, label_names: as of ``ImageSet``.
    """

    raw: Raw
    order: Rows
    labels: NDArray[np.int64]
    train: int
    label_names: Sequence[str]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.label_names)

    @property
    def name(self) -> str:
        """Of the source."""
        return str(self.raw.meta.get("name", "The data"))

    def __len__(self) -> int:
        return len(self.labels)

    def dealt(
        self, parts: Sequence[tuple[Rows, ...]], about: Mapping[str, Any], sigma: Sequence[float] = ()
    ) -> Raw:
        """Return the source with these examples as (train, valid, test) of clients, with noise of ``sigma``."""
        each = [
            (f"client-{n}", split, np.sort(rows))
            for n, part in enumerate(parts)
            for split, rows in zip(SPLITS, part, strict=True)
        ]
        made = self.raw.taken(
            self.order[np.concatenate([rows for _, _, rows in each])],
            client=[client for client, _, rows in each for _ in rows],
            split=[split for _, split, rows in each for _ in rows],
            meta={**self.raw.meta, "partition": dict(about)},
        )
        return (
            _with_noise(made, [sum(map(len, part)) for part in parts], sigma, about) if len(sigma) else made
        )


def _with_noise(raw: Raw, clients: Sequence[int], sigma: Sequence[float], about: Mapping[str, Any]) -> Raw:
    """Return a source with noise on its features that are numbers, and on arrays; ``clients`` says how many rows each has."""
    columns = dict(raw.columns)
    for name, column in raw.columns.items():
        if isinstance(column, Features):
            values = np.array(column.values)
            chosen = [n for n, feature in enumerate(column.names) if feature not in column.kinds]
            values[:, chosen] = noisy(values[:, chosen], clients, sigma, about["seed"], name)
            columns[name] = replace(column, values=values)
        elif isinstance(column, Plain) and isinstance(column.values, np.ndarray) and name != "label":
            columns[name] = replace(column, values=noisy(column.values, clients, sigma, about["seed"], name))
    if all(columns[name] is raw.columns[name] for name in columns):
        raise DataError(
            "The partition {kind!r} adds noise to numbers and images; these data have the columns {columns} and none.",
            kind=about["kind"],
            columns=sorted(columns),
        )
    return replace(raw, columns=columns)


def _taken(values: Any, rows: Rows) -> Any:
    """Return these rows of an array, a ragged column or a list; None of None."""
    if isinstance(values, Ragged):
        return values.take(rows)
    if isinstance(values, Repeated):
        return values.taken(values.number[rows])
    if values is None or isinstance(values, np.ndarray):
        return None if values is None else values[rows]
    return [values[row] for row in rows.tolist()]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A source of data that are encoded already: arrays, saved or generated data, images.

    Attributes:
        data: the data.
    """

    data: FederatedData

    @property
    def ids(self) -> Sequence[str]:
        """The clients' ids."""
        return self.data.ids

    def summary(self, rules: Rules = Rules()) -> Summary:
        """Tell the columns' types, and what ``meta`` says of the task; nothing else of the examples.

        Raises:
            ConfigError: a rule is for none of the columns; none is for columns that are encoded.
        """
        told = {name: column for name, column in self.data.columns.items() if not name.startswith("_")}
        rules.check_used(dict.fromkeys(told, Plain.kind))
        columns = {name: plain_summary(column) for name, column in told.items()}
        return Summary(
            clients=len(self.data), clients_a_word=rules.clients_a_word, columns=columns, about=self._about
        )

    @property
    def _about(self) -> About:
        known: dict[str, Any] = {name: self.data.meta.get(name) for name in [f.name for f in fields(About)]}
        whole = {name: int(value) for name, value in known.items() if isinstance(value, np.integer)}
        names = known["label_names"]
        return About(**{**known, **whole, "label_names": None if names is None else tuple(map(str, names))})

    def encoded(self, encoding: Encoding) -> FederatedData:
        """Return the data as they are, with the classes that all devices have together."""
        encoding.check(self.summary())
        made = copy.copy(self.data)
        about = encoding.about
        shared = {"task": about.task, "classes": about.classes} if about.classes is not None else {}
        made.meta = {**self.data.meta, **shared, "encoding": encoding.digest}
        return made


def prepared(source: Source, rules: Rules = Rules(), summary: Summary | None = None) -> FederatedData:
    """Return the data of a source in the encoding that follows from its own clients alone: a simulation's data.

    Args:
        source: the source.
        rules: of its summary.
        summary: what shapes the encoding; None: the source's own.

    Raises:
        DataError: a fault in the data; file and line are named.
    """
    try:
        encoding = Encoding.of(source.summary(rules) if summary is None else summary)
    except LabelError as error:
        place = source.place_of(error.label) if isinstance(source, Raw) else "Labels"
        raise DataError("{place}: {why}", place=place, label=error.label, why=error.why) from None
    return source.encoded(encoding)


def encoded_alone(read: Callable[P, Source]) -> Callable[P, FederatedData]:
    """Return a reader that gives encoded data: those of its own clients alone, see :func:`prepared`."""

    @functools.wraps(read)
    def read_and_encode(*args: P.args, **settings: P.kwargs) -> FederatedData:
        return prepared(read(*args, **settings))

    return read_and_encode
