"""From a configuration to its data: the reader's source, in the encoding that follows from all clients' summaries.

The readers and generators that configurations name (``data.reader``), and where they look for their files.

An installed package adds its own as entry points of the group ``fedkeep.readers``, each a `Reader`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedkeep import data as room
from fedkeep.core.arguments import accepted
from fedkeep.core.errors import ConfigError, DataError, did_you_mean, raising
from fedkeep.core.files import expanded
from fedkeep.data import PARTITIONS, FederatedData, ImageSet, opt_out, readers
from fedkeep.data.preparation import Encoding, Plain, Raw, Ready, Rules, Source, Summary, Times, prepared
from fedkeep.data.subsets import subset
from fedkeep.experiments.config import Config, DataConfig
from fedkeep.experiments.config_tables import check_options
from fedkeep.experiments.plugins import Offered, imported, is_own, papers_hint, says_it_returns

T = TypeVar("T")


def data_folder(given: Path | None) -> Path | None:
    """Return the folder of real data: the one given, else ``FEDKEEP_DATA``, else None."""
    if given is not None:
        return given
    named = os.environ.get("FEDKEEP_DATA")
    return expanded(named) if named else None


@dataclass(frozen=True)
class ConfiguredSource:
    """The source that a table ``data`` names: its reader's, each client's examples divided as the table says.

    Attributes:
        read: what the reader gives.
        settings: the table.
        seed: of the division, where the table names none.
    """

    read: Source
    settings: DataConfig
    seed: int

    @property
    def ids(self) -> Sequence[str]:
        """The clients' ids."""
        return self.read.ids

    def summary(self, rules: Rules = Rules()) -> Summary:
        """Return what may leave the device; where examples are divided here, the rows that then train shape it."""
        return self.shaping.summary(rules)

    @property
    def shaping(self) -> Source:
        """The reader's source as a summary is made of it: its rows say whether they train, and whether they opted in."""
        read = self._opted
        if not (isinstance(read, Raw) and (read.split is None or isinstance(self.settings.split, dict))):
            return read
        rows = self._rows(read)
        split = np.full(len(read), "test", object)
        split[np.asarray(rows.columns["row"])[rows.split_rows("train")]] = "train"
        return replace(read, split=split.tolist())

    def encoded(self, encoding: Encoding) -> FederatedData:
        """Return the data in numbers, divided into train, valid and test."""
        return self._divided(self._opted.encoded(encoding))

    def prepared(self, rules: Rules = Rules(), since: Encoding | None = None) -> FederatedData:
        """Return the data in the encoding that follows from these clients alone; or in one from before, extended."""
        summary = self.summary(rules)
        if since is not None:
            return self.encoded(since.extended(summary))
        return self._divided(prepared(self._opted, rules, summary))

    @cached_property
    def _opted(self) -> Source:
        """The reader's source, with those examples marked that are drawn to opt out: they shape no encoding."""
        read = self.read
        if self.settings.opt_out is None or not isinstance(read, Raw):
            return read
        drawn = self._rows(read).columns
        inside = np.zeros(len(read), bool)
        inside[np.asarray(drawn["row"])] = np.asarray(drawn["opted_in"])
        return replace(read, opted_in=inside if read.opted_in is None else inside & read.opted_in)

    def _rows(self, read: Raw) -> FederatedData:
        """Return the numbers of a source's rows, as the column ``row``, divided as its examples will be."""
        columns: dict[str, Any] = {"row": np.arange(len(read))}
        time = read.columns.get("time")
        if isinstance(time, Plain | Times):
            columns["time"] = time.values
        return self._divided(FederatedData.from_columns(read.client, columns, read.split))

    def _divided(self, made: FederatedData) -> FederatedData:
        """Return data divided into train, valid and test, with those examples marked that opt out."""
        settings = self.settings
        splits = made.meta["divided_here"] = isinstance(settings.split, dict) or made.bounds is None
        if splits:
            split = {"seed": self.seed, **_division(settings)}
            made = made.split_per_user(**check_options("data.split", made.split_per_user, split))
        if settings.opt_out is not None:
            out = check_options(
                "data.opt_out", opt_out, {"seed": self.seed, **settings.opt_out}, ("data", "where")
            )
            made = opt_out(made, **out)
        drawn = _drawn(settings, splits)
        made.meta["follows_seed"] = any("seed" not in options for options in drawn.values())
        return made

    def settled(self, made: FederatedData) -> DataConfig:
        """Return the table that gives these data with every seed of a configuration: this one's stands in it.

        Args:
            made: what ``prepared`` gave.
        """
        drawn = _drawn(self.settings, bool(made.meta["divided_here"]))
        found = self.settings.model_dump(exclude_unset=True)
        for table, options in drawn.items():
            place = found if table == "data" else found.setdefault(table, {})
            place |= {"seed": self.seed, **options}
        return DataConfig.model_validate(found)


def _drawn(settings: DataConfig, splits: bool) -> dict[str, Mapping[str, Any]]:
    """Return the tables of what is drawn: how data are made, divided among clients, split, kept out.

    Where one names no seed it is the configuration's, and another seed makes other data; reports ask for it.
    """
    found: dict[str, Mapping[str, Any]] = {}
    if _takes_seed(reader_named(settings.reader)):
        found["data"] = settings.options
    if settings.partition is not None:
        found["partition"] = settings.partition.options
    if splits:
        found["split"] = _division(settings)
    if settings.opt_out is not None:
        found["opt_out"] = settings.opt_out
    return found


def _division(settings: DataConfig) -> dict[str, Any]:
    """Return how each user's examples are divided.

    Raises:
        DataError: a column of splits is named, and the reader gave no split.
    """
    if isinstance(settings.split, str):
        raise DataError(
            "data.split names {split!r}, but the reader {reader!r} gave no split. Leave it out.",
            split=settings.split,
            reader=settings.reader,
        )
    return settings.split or {}


def _takes_seed(reader: Reader) -> bool:
    return "seed" in inspect.signature(reader.read).parameters


def build_data(config: Config, folder: Path | None = None, since: Encoding | None = None) -> FederatedData:
    """Read or make the data that a configuration names, as one device that has all clients would.

    Sets of images are divided among clients by ``data.partition``; texts, labels and features become numbers by the
    encoding that follows from the clients' summaries; data that come without a split are split per user;
    ``data.opt_out`` says last which examples stay out.

    Args:
        config: the configuration.
        folder: the folder of real data (``--data`` or ``FEDKEEP_DATA``); relative paths in the configuration are
            looked up there.
        since: the encoding of the run that these data continue; labels and items that are new get the next numbers.

    Raises:
        ConfigError, DataError: an unknown reader or option, or a fault in the data.
    """
    return build_source(config.data, config.seed, folder).prepared(config.preparation, since)


def build_source(settings: DataConfig, seed: int, folder: Path | None = None) -> ConfiguredSource:
    """Return the source that a table ``data`` names; a device of a federation has one of its own.

    Args:
        settings: the table.
        seed: of what the table draws, where it names none.
        folder: as for `build_data`.

    Raises:
        ConfigError, DataError: an unknown reader or option, or a fault in the data.
    """
    made = _partitioned(settings, seed, read_source(settings, seed, folder))
    if fewer := _subset(settings):
        if not isinstance(made, FederatedData | Raw):
            raise ConfigError(
                "data.{name}: the reader {reader!r} gives no clients to choose from.",
                name=next(iter(fewer)),
                reader=settings.reader,
            )
        given = check_options("data", subset, fewer, ("data",))
        made = subset(made, **given)
    return ConfiguredSource(Ready(data=made) if isinstance(made, FederatedData) else made, settings, seed)


def read_source(
    settings: DataConfig, seed: int, folder: Path | None = None
) -> FederatedData | ImageSet | Source:
    """Read or make what a table's reader gives: data of clients, or images that belong to nobody yet.

    Raises:
        ConfigError, DataError: as for ``build_data``.
    """
    reader = reader_named(settings.reader)
    options = {name: value for name, value in settings.options.items() if name not in _subset(settings)}
    if reader.argument is not None:
        place = options.get(reader.argument, reader.place)
        if not isinstance(place, str):
            wanted = "missing" if place is None else f"wanted a path as text; got {place!r}"
            raise ConfigError(
                "data.{argument}: {wanted}. It says where in the folder of data to read.",
                argument=reader.argument,
                wanted=wanted,
            )
        path = located(f"The reader {settings.reader!r}", place, folder)
        # a reader of one's own may say that it takes a text
        options[reader.argument] = str(path) if accepted(reader.read).get(reader.argument) is str else path
    if isinstance(options.get("test_path"), str):
        options["test_path"] = located("test_path", options["test_path"], folder)
    if isinstance(settings.split, str):
        if "split" not in inspect.signature(reader.read).parameters:
            raise ConfigError(
                "data.split: the reader {reader!r} has no column of splits to name; got {split!r}. "
                "To divide its examples write a table, e.g. split = {{ fractions = [0.8, 0.1, 0.1] }}.",
                reader=settings.reader,
                split=settings.split,
            )
        options["split"] = settings.split
    if _takes_seed(reader):
        options.setdefault("seed", seed)
    if settings.partition is not None and settings.reader in DEALT:
        options.setdefault("user", None)  # rows are dealt, whoever's they are
    return reader.read(**check_options("data", reader.read, options))


def _subset(settings: DataConfig) -> dict[str, Any]:
    """Return how many clients and examples to keep, where the reader does not see to it itself, or a partition makes them."""
    own = (
        inspect.signature(reader_named(settings.reader).read).parameters if settings.partition is None else {}
    )
    return {n: v for n, v in settings.options.items() if n in ("clients", "examples") and n not in own}


def _partitioned(
    settings: DataConfig, seed: int, made: FederatedData | ImageSet | Source
) -> FederatedData | Source:
    given = settings.partition
    if given is None:
        if not isinstance(made, ImageSet):
            return made
        raise ConfigError(
            "data.partition: missing. The reader {reader!r} gives images that belong to no client; divide "
            "them by one of the kinds {partitions}.",
            reader=settings.reader,
            partitions=", ".join(PARTITIONS),
        )
    divide = named("data.partition.kind", "partition", given.kind, PARTITIONS)
    if not isinstance(made, ImageSet | Raw):
        raise ConfigError(
            "data.partition: the reader {reader!r} gives examples that belong to clients already. Leave "
            "the table out.",
            reader=settings.reader,
        )
    dealt: FederatedData | Raw = divide(
        made.pooled() if isinstance(made, Raw) else made,
        **check_options("data.partition", divide, {"seed": seed, **given.options}, ("images",)),
    )
    return dealt


def named(place: str, what: str, name: str, table: Mapping[str, T], hint: Callable[[], str] = str) -> T:
    """Return what a table of things has under a name.

    Raises:
        ConfigError: nothing; ``place`` is the key that names it.
    """
    if name not in table:
        instead = did_you_mean(name, table) or f" There are {', '.join(table)}.{hint()}"
        raise ConfigError(
            "{place}: there is no {what} {name!r}.{instead}",
            place=place,
            what=what,
            name=name,
            instead=instead,
        )
    return table[name]


def located(what: str, place: str, folder: Path | None) -> Path:
    """Return where in the folder of data a place is.

    Raises:
        DataError: there is no folder of data; ``what`` wants it.
    """
    path = expanded(place)
    # A name that is too long, a folder that may not be entered
    with raising(DataError, "{what}: cannot look up {place!r}: {why}.", OSError, what=what, place=place[:80]):
        if path.is_absolute():
            return path
        if folder is None:
            raise DataError(
                "{what} wants a folder of data. Name it with --data DIR or the variable FEDKEEP_DATA; "
                "'{path}' is looked up in it.",
                what=what,
                path=path,
            )
        if not folder.is_dir():
            fault = "is no folder" if folder.exists() else "does not exist"
            raise DataError(
                "The folder of data {folder} {fault}. Name another with --data DIR or FEDKEEP_DATA.",
                folder=folder,
                fault=fault,
            )
        # --data may name the data set's own folder
        return folder if not (folder / path).exists() and folder.name == path.name else folder / path


GROUP = "fedkeep.readers"
DEALT = ("table", "huggingface")
"""Readers that do without a column of clients where a partition deals the rows."""


@dataclass(frozen=True)
class Reader:
    """A reader of files, or a generator.

    Attributes:
        read: makes a source of data that are not numbered yet, encoded data, or images that belong to nobody yet; its
            arguments are the further keys of a configuration's table ``data``.
        argument: which of them holds the place in the folder of data; None: it reads no files from there.
        place: that place by default; None: a configuration must name it.
    """

    read: Callable[..., FederatedData | ImageSet | Source]
    argument: str | None = None
    place: str | None = None


READERS: Mapping[str, Reader] = {
    "reviews": Reader(readers.raw_review_files, "folder"),
    "table": Reader(readers.raw_table, "path"),
    "movielens": Reader(readers.raw_movielens, "path", "movielens"),
    "movielens_100k": Reader(readers.raw_movielens_100k),
    "movielens_100k_ranking": Reader(readers.movielens_100k_ranking),
    "insteval": Reader(readers.raw_insteval),
    "shakespeare": Reader(readers.shakespeare),
    "huggingface": Reader(readers.raw_huggingface),
    "fashion_mnist": Reader(readers.fashion_mnist, "folder", "fashion_mnist"),
    "cifar10": Reader(readers.cifar10, "folder", "cifar10"),
    "cifar100": Reader(readers.cifar100, "folder", "cifar100"),
    "npz_images": Reader(readers.npz_images, "path"),
    "image_folder": Reader(readers.raw_image_folder, "folder"),
    "leaf": Reader(readers.raw_leaf, "folder"),
    "tars": Reader(readers.raw_tars, "path"),
    "saved": Reader(FederatedData.load, "folder"),
    "many_user_text": Reader(room.many_user_text),
    "toy": Reader(room.toy),
}


def offered_readers() -> Offered[Reader]:
    """Return fedkeep's own readers and those of installed packages, by name.

    Raises:
        ConfigError: two have the same name.
    """
    return Offered(GROUP, Reader, READERS)


def reader_named(name: str) -> Reader:
    """Return a reader that is offered, or of one's own: ``package.module:function``, which says what it returns.

    An argument of such a function named ``path`` or ``folder`` is looked up as those of offered readers are.

    Raises:
        ConfigError: there is none, it cannot be imported, or it does not say that it returns data.
    """
    if not is_own(name):
        return named("data.reader", "reader", name, offered_readers(), papers_hint)
    found = imported("data.reader", name)
    if isinstance(found, Reader):
        return found
    if not any(says_it_returns(found, kind) for kind in (FederatedData, ImageSet, Raw, Ready)):
        raise ConfigError(
            "data.reader: {name!r} is no function that says `-> FederatedData`, `-> ImageSet` or `-> Raw`.",
            name=name,
        )
    places = [n for n in ("path", "folder") if n in inspect.signature(found).parameters]
    return Reader(found, places[0] if places else None)
