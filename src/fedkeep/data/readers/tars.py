"""Tar files of images as webdataset writes them: members that share a name up to its first dot are one example.

``0001.jpg``, ``0001.cls`` and ``0001.json`` are the image, the class and what else is known of the example ``0001``.
"""

from __future__ import annotations

import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from fedkeep.core.errors import DataError, raising
from fedkeep.core.files import expanded
from fedkeep.data.federated import FederatedData
from fedkeep.data.ids import as_id
from fedkeep.data.images import ImageSet
from fedkeep.data.preparation import Raw, prepared
from fedkeep.data.readers.cells import ALIASES, CLASS, ID, Cells, RawTable
from fedkeep.data.readers.image_folder import ENDINGS, NOBODYS, examples_of
from fedkeep.data.readers.many import check_once, files_of, is_of_many, named
from fedkeep.data.readers.opened_files import LONGEST_LINE, digest_of, existing, object_of
from fedkeep.data.readers.pictures import decoded
from fedkeep.data.subsets import drawn

TARS = (".tar", ".tar.gz", ".tgz")
OWN_TAR = "tar"
"""As the name of the client: each tar file is a client."""


@dataclass
class Sample:
    """An example's members by their endings, in small letters and without the first dot."""

    file: Path
    key: str
    members: dict[str, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.file}, {self.key}"


def raw_tars(
    path: str | Path,
    *,
    client: str | None = None,
    label: str = "cls",
    image: str | None = None,
    size: int | list[int] | None = None,
    clients: int | None = None,
) -> Raw | ImageSet:
    """Read images from tar files in the form of webdataset; the encoded images are held in memory once.

    Args:
        path: a ``.tar``, ``.tar.gz`` or ``.tgz`` file, a folder of such files, or a pattern such as ``shards/*.tar``.
            Where the files' names have a word for a split, as ``set-train-0001.tar``, it is that of their examples.
        client: where the client's id is: the ending of a member (``0001.user``), or a name in the example's ``.json``;
            "tar": each file is a client, ``ann.tar``, or ``ann.train.tar`` and ``ann.test.tar``. None: nobody's, and a
            partition deals the images.
        label: likewise where the class is.
        image: the ending of the image's member; None: the only one that is such an ending.
        size: as of ``image_folder``.
        clients: keep the examples of so many clients alone, drawn by their ids; of others no file, or no image, stays in
            memory. None: all.

    Returns:
        As ``image_folder``.

    Raises:
        DataError: a file is missing, cut off or no tar, a member stands there twice, an example lacks its image, class
            or client, or an image cannot be decoded or has another size; file and example are named.
    """
    place = expanded(path)
    files = files_of(place, "tar file", TARS) if is_of_many(place) else [existing(place, key="data.path")]
    if wrong := next((file for file in files if not file.name.endswith(TARS)), None):
        raise DataError(
            "Wanted a file that ends in one of {wanted}; got {got}.", wanted=", ".join(TARS), got=wrong.name
        )
    if client == OWN_TAR:
        check_once(files, TARS)
    if clients is None:
        samples = [sample for file in files for sample in _samples(file)]
    elif client is None:
        raise DataError(NOBODYS)
    elif client == OWN_TAR:
        kept = drawn({as_id(named(file, TARS)[0]) for file in files}, clients)
        files = [file for file in files if as_id(named(file, TARS)[0]) in kept]
        samples = [sample for file in files for sample in _samples(file)]
    else:
        kept = drawn({_whose(sample, client) for file in files for sample in _samples(file)}, clients)
        samples = [s for file in files for s in _samples(file) if _whose(s, client) in kept]
    pictures: list[tuple[object, Path | bytes]] = [(sample, _image(sample, image)) for sample in samples]
    columns = {"class": Cells([_said(sample, label, "label") for sample in samples])}
    if client == OWN_TAR:
        columns["client"] = Cells([named(sample.file, TARS)[0] for sample in samples])
    elif client is not None:
        columns["client"] = Cells([_said(sample, client, "client") for sample in samples])
    table = RawTable(columns, lambda row: samples[row])
    values: dict[str, list[Any]] = {
        name: table.each(name, kind) for name, kind in (("class", CLASS), ("client", ID)) if name in columns
    }
    parts = {file: _split(file, client == OWN_TAR) for file in files}
    if any(parts.values()):
        if unsaid := next((file for file, part in parts.items() if part is None), None):
            raise DataError(
                "{file} has no split in its name, as others have, such as train or test. Rename it, or read it alone.",
                file=unsaid,
            )
        values["split"] = [parts[sample.file] for sample in samples]
    home = place if place.is_dir() else files[0].parent
    source = {place.name: digest_of(home, files)}
    return examples_of(decoded(pictures, size), values, place.name.split(".")[0], source, table.where)


def tars(path: str | Path, **options: Any) -> FederatedData | ImageSet:
    """Read tar files as :func:`raw_tars` does, with its arguments, and encode them."""
    made = raw_tars(path, **options)
    return made if isinstance(made, ImageSet) else prepared(made)


def _samples(file: Path) -> list[Sample]:
    """Return the examples of a file in the order of their first members."""
    found: dict[str, Sample] = {}
    for name, content in _members(file):
        at = PurePosixPath(name)
        stem, dot, ending = at.name.partition(".")
        if not stem or not dot:  # hidden files, and others that belong to no example
            continue
        key = str(at.with_name(stem))
        members = found.setdefault(key, Sample(file, key)).members
        if ending.lower() in members:
            raise DataError(
                "{file} holds {member} twice. Write the examples of each file under names of their own.",
                file=file,
                member=name,
            )
        members[ending.lower()] = content
    if not found:
        raise DataError("{file} holds no example. Wanted members such as 0001.jpg and 0001.cls.", file=file)
    return list(found.values())


def _members(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each ordinary file in a tar."""
    with (
        raising(
            DataError,
            "{file} is cut off or no tar file ({why}). Fetch it again.",
            tarfile.TarError,
            EOFError,
            zlib.error,
            OSError,
            ValueError,
            file=file,
        ),
        tarfile.open(existing(file), "r:*") as tar,
    ):
        for member in tar:
            if not member.isreg() or member.issparse():
                continue
            if member.size > LONGEST_LINE:
                raise DataError(
                    "{file}: {member} has more than {most} MiB. Is it an image?",
                    file=file,
                    member=member.name,
                    most=LONGEST_LINE >> 20,
                )
            content = tar.extractfile(member)
            assert content is not None
            yield member.name, content.read()
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise EOFError("it has no end")  # which tarfile does not miss


def _image(sample: Sample, image: str | None) -> bytes:
    """Return the encoded image of an example."""
    own = [end for end in sample.members if f".{end.rpartition('.')[2]}" in ENDINGS]
    wanted = image or (own[0] if len(own) == 1 else None)
    if wanted not in sample.members:
        raise DataError(
            "{place}: wanted {what}; the example has {there}.{advice}",
            place=sample,
            what=f"a member .{image}" if image else "one image",
            there=sorted(sample.members),
            advice=" Say which is the image: image = 'ENDING'." if len(own) > 1 else "",
        )
    return sample.members[wanted]


def _said(sample: Sample, name: str, what: str) -> Any:
    """Return what an example says under a name: in a member of that ending, or in its JSON."""
    if name.lower() in sample.members:
        try:
            return sample.members[name.lower()].decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(
                "{place}: the member .{name} is no text ({why}). Name another as {what}.",
                place=sample,
                name=name,
                what=what,
                why=error.reason,
            ) from None
    about: Any = {}
    if "json" in sample.members:
        try:
            about = json.loads(sample.members["json"], object_pairs_hook=object_of)
        except (ValueError, RecursionError) as error:
            raise DataError("{place}: its .json is no JSON ({why}).", place=sample, why=error) from None
    if not isinstance(about, Mapping) or name not in about:
        raise DataError(
            "{place}: nothing says its {what}: there is no member .{name}, and no {name!r} in a .json. It has "
            "{there}. Say where it is: {what} = 'NAME'.",
            place=sample,
            what=what,
            name=name,
            there=sorted({*sample.members, *(about if isinstance(about, Mapping) else ())}),
        )
    return about[name]


def _whose(sample: Sample, client: str) -> str:
    """Return the id of an example's client."""
    return RawTable({"client": Cells([_said(sample, client, "client")])}, lambda row: sample).each(
        "client", ID
    )[0]


def _split(file: Path, is_client: bool) -> str | None:
    """Return the split that a file's name tells."""
    if is_client:
        return named(file, TARS)[1]
    told = {ALIASES[word] for word in re.split(r"[\W\d_]+", file.name.lower()) if word in ALIASES}
    return told.pop() if len(told) == 1 else None
