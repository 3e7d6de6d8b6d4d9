"""Folders of images, one file an image: the class is a folder, the client a folder or in a table."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, warn
from fedkeep.core.files import expanded
from fedkeep.data.columns import Rows
from fedkeep.data.federated import FederatedData
from fedkeep.data.images import ImageSet, Pixels
from fedkeep.data.preparation import Labels, Plain, Raw, prepared
from fedkeep.data.preparation.contract import Where
from fedkeep.data.readers.cells import ALIASES, CLASS, ID, SPLIT, TEXT, Cells, RawTable
from fedkeep.data.readers.load_table import load_table
from fedkeep.data.readers.opened_files import digest_of
from fedkeep.data.readers.pictures import read_files
from fedkeep.data.subsets import drawn

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
LEVELS = ("split", "client", "class")
SKIPPED = "*"
NOBODYS = "clients wants clients to choose from; nothing says whose each image is."


def raw_image_folder(
    folder: str | Path,
    *,
    levels: str | None = None,
    table: str | Path | None = None,
    image: str = "image",
    client: str | None = None,
    label: str | None = None,
    split: str | None = None,
    size: int | Sequence[int] | None = None,
    clients: int | None = None,
) -> Raw | ImageSet:
    """Read a folder of images: BMP, GIF, JPEG, PNG, PPM, TIFF or WebP; hidden files and others are left out.

    Args:
        folder: of the images, in folders whose names say what they are.
        levels: what the folders say, from ``folder`` down to the images: "split", "client", "class", or "*" for
            nothing, with "/" between: "client/class". None: "class", or "split/class" where the folders right in
            ``folder`` are called train, valid and test, or alike.
        table: a CSV or other table in ``folder`` with a row for each image to read, in place of what folders say.
        image: its column of files, as paths inside ``folder``.
        client, label, split: its further columns. None: the column "client", "label" or "split", where there is one.
        size: height and width to bring every image to, or one number for both. None: all have one size.
        clients: read the images of so many clients alone, drawn by their ids. None: all.

    Returns:
        Examples of clients, with the column ``image``, uint8 (channels, height, width), 1 channel where all images are
        grey, else 3. Where nothing says whose an image is, a set of images for a partition, in which those of a split
        valid are training images.

    Raises:
        DataError: there is no such folder, an image does not lie as deep as ``levels`` says, cannot be decoded or has
            another size; or a row of the table is wrong; the file and the line are named.
    """
    home = expanded(folder)
    if not os.path.isdir(home):
        why = "is a file" if os.path.exists(home) else "does not exist"
        raise DataError("Wanted a folder of images; {folder} {why}. Check the path.", folder=home, why=why)
    if table is None:
        read = _found(home)
    else:
        given = {"client": client, "label": label, "split": split}
        read = _listed(home, expanded(table), image, given)
    names = [str(name) for name in read.columns["image"].tolist()]
    kinds = {"split": SPLIT, "client": ID, "class": CLASS}
    told = read.columns.keys()
    if "class" not in told or levels is not None:
        wanted = levels.split("/") if levels is not None else _usual(home, names[0], read)
        _check_levels(wanted, levels, "class" in told)
        split_up = _folders(names, wanted, read)
        read = RawTable({**split_up, **read.columns}, read.where)
    values: dict[str, list[Any]] = {
        name: read.each(name, kind) for name, kind in kinds.items() if name in read.columns
    }
    if clients is not None:
        rows = rows_drawn(values, clients)
        names, read = [names[row] for row in rows.tolist()], read.only(rows)
        values = {name: [own[row] for row in rows.tolist()] for name, own in values.items()}
    files = [home / name for name in names]
    pixels = read_files(files, size)
    source = {home.name: digest_of(home, set(files))}
    return examples_of(pixels, values, home.name, source, read.where)


def rows_drawn(said: Mapping[str, list[Any]], clients: int) -> Rows:
    """Return the rows of so many clients.

    Raises:
        DataError: nothing says whose an image is, or there are not so many clients.
    """
    if "client" not in said:
        raise DataError(NOBODYS)
    kept = drawn(set(said["client"]), clients)
    return np.flatnonzero([client in kept for client in said["client"]])


def examples_of(
    pixels: Pixels, said: Mapping[str, list[Any]], name: str, source: Mapping[str, str], where: Where
) -> Raw | ImageSet:
    """Return images as examples of clients; as a set for a partition where nothing says whose they are.

    Args:
        pixels: the images.
        said: of each image its ``class``, and where they are known its ``client`` and ``split``.
        name, source: of the data.
        where: names an image in messages.
    """
    if "client" in said:
        return Raw(
            client=said["client"],
            split=said.get("split"),
            columns={"image": Plain(values=pixels), "label": Labels(values=said["class"])},
            meta={"name": name, "source": dict(source)},
            where=where,
        )
    words = sorted(set(said["class"]), key=lambda word: (int(word) if word.isdecimal() else -1, word))
    number = {word: n for n, word in enumerate(words)}
    tests = np.asarray([part == "test" for part in said.get("split", [""] * len(pixels))])
    order = np.argsort(tests, kind="stable")
    labels = np.asarray([number[word] for word in said["class"]], np.int64)
    return ImageSet(pixels[order], labels[order], int((~tests).sum()), tuple(words), name, source)


def image_folder(folder: str | Path, **options: Any) -> FederatedData | ImageSet:
    """Read a folder as :func:`raw_image_folder` does, with its arguments, and encode it."""
    made = raw_image_folder(folder, **options)
    return made if isinstance(made, ImageSet) else prepared(made)


def _found(home: Path) -> RawTable:
    """Return the images in a folder and in the folders in it."""
    names = sorted(
        path.relative_to(home).as_posix()
        for path in home.rglob("*")
        if path.suffix.lower() in ENDINGS and path.is_file()
    )
    names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not names:
        raise DataError(
            "{folder} holds no image. Wanted files that end in one of {endings}, in a folder for each class.",
            folder=home,
            endings=", ".join(ENDINGS),
        )
    return RawTable({"image": Cells(names)}, lambda row: home / names[row])


def _listed(home: Path, place: Path, image: str, given: Mapping[str, str | None]) -> RawTable:
    """Return the images in the rows of a table, with what it says of each."""
    file = home / place
    wanted = [image, *(column for column in given.values() if column is not None)]
    read = load_table(file, wanted, [name for name, column in given.items() if column is None], {})
    names = read.each(image, TEXT)
    for row, name in enumerate(names):
        if not os.path.isfile(home / name):
            raise DataError(
                "{place}: there is no image {file} in {folder}. Write paths as they are inside this folder.",
                place=read.where(row),
                file=name,
                folder=home,
            )
    there = _found(home).columns["image"].tolist()
    if left := set(there) - {Path(name).as_posix() for name in names}:
        warn(
            f"{len(left):,} of {len(there):,} images in {home} are in no row of {file.name}, so they are left out, e.g. "
            f"{min(left)}."
        )
    columns = {"class" if name == "label" else name: column or name for name, column in given.items()}
    said = {name: read.columns[column] for name, column in columns.items() if column in read.columns}
    return RawTable({"image": Cells(names), **said}, read.where)


def _usual(home: Path, name: str, read: RawTable) -> list[str]:
    """Return what the folders above an image usually say."""
    folders = name.split("/")[:-1]
    if len(folders) == 1:
        return ["class"]
    if len(folders) == 2 and all(
        path.name in ALIASES for path in home.iterdir() if path.is_dir() and not path.name.startswith(".")
    ):
        return ["split", "class"]
    if not folders:
        raise DataError(
            "{place}: the image lies in no folder that says its class. Put the images of each class into a folder, or "
            "name a table with the columns image and label: table = 'FILE.csv'.",
            place=read.where(0),
        )
    raise DataError(
        "{place}: the image lies {deep} folders deep. Say what each says, from above: levels = {example!r}, of "
        "{known} and '*'.",
        place=read.where(0),
        deep=len(folders),
        example="/".join(["client", "class"] if len(folders) == 2 else ["split", "client", "class"]),
        known=", ".join(map(repr, LEVELS)),
    )


def _check_levels(wanted: Sequence[str], levels: str | None, has_class: bool) -> None:
    known = [name for name in wanted if name != SKIPPED]
    fits = set(known) <= set(LEVELS) and len(set(known)) == len(known)
    if not fits or not (has_class or "class" in known):
        raise DataError(
            "Wanted levels of folders as split, client, class and *, each once but for *, with / between, and a class; "
            "got {got!r}.",
            got=levels,
        )


def _folders(names: Sequence[str], wanted: Sequence[str], read: RawTable) -> dict[str, Cells]:
    """Return what the folders of each image say."""
    said: dict[str, list[str]] = {name: [] for name in wanted if name != SKIPPED}
    for row, name in enumerate(names):
        folders = Path(name).parts[:-1]
        if len(folders) != len(wanted):
            raise DataError(
                "{place}: wanted the image in {wanted}; it lies in {got}. Move it, or remove it.",
                place=read.where(row),
                wanted="/".join(wanted).upper(),
                got="/".join(folders) or "no folder",
            )
        for level, folder in zip(wanted, folders, strict=True):
            if level != SKIPPED:
                said[level].append(folder)
    return {level: Cells(own) for level, own in said.items()}
