"""Private parameters in any Flower app, by one line: a mod of its ClientApp. Strategy and server stay as they are.

    app = ClientApp(mods=[keep("head.*", folder="kept")])

1. The node's own values take the place of what the server has sent of them.
2. The app trains or evaluates as it always did.
3. After training the node's new values are stored, beside those that they were trained from.
4. In the reply stands in their place what the server had sent, so its mean leaves them as they were.

A round that comes again, as after a kill, begins with the values that it began with before. Only array records are
looked at: what an app writes into metrics or configurations is its own matter, but for copies of a private array.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import Timeout
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from fedkeep.core.describe import digest
from fedkeep.core.errors import BusyError, ConfigError, StoreError, UploadError, did_you_mean, raising, shown
from fedkeep.core.files import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    expanded,
    layout,
    state_name,
    wipe_leftovers,
    write_whole,
)
from fedkeep.core.locks import take_lock
from fedkeep.core.params import Params, nonfinite
from fedkeep.core.records import by_key
from fedkeep.core.sealed import check_format, is_sealed, seal

FORMAT = 1
BEFORE = "before:"
"""Begins the names of the values that the last training began with; a round that comes again begins with them."""
PATIENCE = 60.0
TELLING = 32
"""Bytes that a private array must have to be looked for in a reply; shorter ones are found by chance."""
Place = tuple[str, str]
"""Where an array stands in a message: the key of its record, and its name there."""

log = logging.getLogger("flwr.fedkeep")  # Flower shows what its own logger is told


def keep(*patterns: str | type[nn.Module], folder: str | Path, model: nn.Module | None = None) -> Mod:
    """Make a mod of a ClientApp by which a node keeps arrays of its own.

    It goes last in the list of mods, so that those which encrypt or clip a reply get it without private values.

    Args:
        patterns: globs of names in the app's array records, as in ``model.state_dict()``: parameters and buffers. With
            ``model`` also classes of layers, e.g. ``nn.BatchNorm2d``: all that such layers hold, statistics too.
        folder: keeps a file for each partition (``partition-id`` in the node's configuration), else one for the node.
            Two nodes without partitions need two folders.
        model: the app's, to check the patterns at once.

    Raises:
        ConfigError: there is no pattern, a class without ``model``, or one that nothing in ``model`` matches.
    """
    globs = tuple(_globs(patterns, model))
    if model is not None:
        _check_matched(globs, list(model.state_dict()))
    return partial(_answered, globs, expanded(folder))


def own_values(folder: str | Path, client: str | int = "node", record: str = "arrays") -> Params:
    """Return what a node keeps, by the names of ``model.state_dict()``.

    Args:
        folder: as for ``keep``.
        client: its partition; of a node without partitions ``"node"``.
        record: the key of the array record.

    Raises:
        StoreError: there is nothing, or it is damaged.
    """
    path = _path(expanded(folder), client)
    own = Own.read(path)
    if own is None:
        raise StoreError("{path} is not there: nothing has been trained yet.", path=path)
    return {name: value for (key, name), value in own.values.items() if key == record}


def _globs(patterns: Iterable[str | type[nn.Module]], model: nn.Module | None) -> Iterator[str]:
    """Yield globs; a class becomes one for each tensor of its layers."""
    if not patterns:
        raise ConfigError(
            "keep() needs a pattern of what stays on the node, e.g. keep('head.*', folder='kept')."
        )
    for pattern in patterns:
        if isinstance(pattern, str):
            yield pattern
            continue
        if model is None:
            raise ConfigError(
                "Which layers are {pattern} is known of a model alone: say model=.", pattern=pattern.__name__
            )
        layers = {name for name, layer in model.named_modules() if isinstance(layer, pattern)}
        names = [name for name in model.state_dict() if name.rpartition(".")[0] in layers]
        if not names:
            raise ConfigError(
                "{model} has no {pattern} that holds anything.",
                model=type(model).__name__,
                pattern=pattern.__name__,
            )
        yield from (name.replace("[", "[[]") for name in names)


def _check_matched(globs: Iterable[str], names: list[str]) -> None:
    for glob in globs:
        if any(fnmatchcase(name, glob) for name in names):
            continue
        layers = sorted({f"{name.rpartition('.')[0]}.*" for name in names if "." in name})
        near = did_you_mean(glob, [*layers, *names]) or f" Its arrays are {shown(names)}."
        if names and all(name.isdecimal() for name in names):
            near = " Its arrays are numbered, as in Flower's older API; keep() needs the names of message records."
        raise ConfigError(
            "keep: the pattern {glob!r} matches no array of the app.{near}", glob=glob, near=near
        )


@dataclass(frozen=True)
class Own:
    """What a node keeps, and what that was trained from.

    Attributes:
        values: its own.
        before: those that the last training began with; empty: with what the server had sent.
        order: the run, the kind of message and the round that the last training answered.
        node: Flower's number of the node that trained.
        version: how many trainings count.
    """

    values: Mapping[Place, torch.Tensor]
    before: Mapping[Place, torch.Tensor] = field(default_factory=dict)
    order: str = ""
    node: int = 0
    version: int = 0

    def write(self, path: Path) -> None:
        """Write it whole or not at all, for its owner alone."""
        tensors = {"/".join(place): value for place, value in self.values.items()}
        tensors |= {f"{BEFORE}{'/'.join(place)}": value for place, value in self.before.items()}
        about = {"format": FORMAT, "order": self.order, "node": self.node, "version": self.version}
        about |= {"places": [list(place) for place in self.values], "digest": digest(tensors)}
        content = save(
            {name: value.contiguous() for name, value in tensors.items()},
            {"fedkeep": json.dumps(seal(about))},
        )
        write_whole(path, content, PRIVATE_FILE)

    @classmethod
    def read(cls, path: Path) -> Own | None:
        """Return what a file holds; None: there is none.

        Raises:
            StoreError: it is damaged or not ours.
        """
        if not path.exists():
            return None
        with raising(
            StoreError,
            "{name} in the folder of keep() is damaged: {why}. Restore it from a copy, or remove it to "
            "begin anew with the server's values.",
            OSError,
            SafetensorError,
            ValueError,
            KeyError,
            name=path.name,
        ):
            with safe_open(path, "pt") as file:
                about: dict[str, Any] = json.loads((file.metadata() or {})["fedkeep"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            check_format(
                f"{path.name} in the folder of keep()",
                about.get("format"),
                FORMAT,
                StoreError,
                anew="remove it to begin anew with the server's values",
            )
            if not is_sealed(about) or about["digest"] != digest(tensors):
                raise ValueError("its checksum is not that of its content")
        places: list[Place] = [(key, name) for key, name in about["places"]]
        found = {p: tensors["/".join(p)] for p in places}
        before = {p: tensors[at] for p in places if (at := f"{BEFORE}{'/'.join(p)}") in tensors}
        return cls(found, before, about["order"], about["node"], about["version"])

    def check_fits(self, received: Mapping[Place, Array], path: Path) -> None:
        """Raise StoreError if it was kept for another model or other patterns."""
        wanted = layout({"/".join(place): _tensor(array) for place, array in received.items()})
        found = layout({"/".join(place): value for place, value in self.values.items()})
        if wanted != found:
            odd = min(wanted.items() ^ found.items())[0]
            raise StoreError(
                "{path} in the folder of keep() was kept for another model or other patterns: {name!r} is "
                "{got}, and the app has {wanted}. Name another "
                "folder.",
                path=path.name,
                name=odd,
                got=found.get(odd, "not there"),
                wanted=wanted.get(odd, "no such array"),
            )


def _answered(
    globs: tuple[str, ...], folder: Path, message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    received = _private(message.content, globs)
    names = [name for record in message.content.array_records.values() for name in record]
    if names:
        _check_matched(globs, names)
    trains = message.metadata.message_type.partition(".")[0] == "train" and bool(received)
    path = _path(folder, context.node_config.get("partition-id", "node"))
    if not trains:
        own = Own.read(path) if received else None
        values = {} if own is None else own.values
        _give(message, received, own, values, path)
        reply = call_next(message, context)
        _restore(reply, received, globs, values)
        return reply
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    with (
        raising(
            BusyError, "Another process trains with {name} of the folder of keep().", Timeout, name=path.name
        ),
        take_lock(path.with_suffix(".lock"), PATIENCE, PRIVATE_FILE),
    ):
        return _trained(globs, path, message, context, call_next, received)


def _trained(
    globs: tuple[str, ...],
    path: Path,
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    received: Mapping[Place, Array],
) -> Message:
    """Answer an order to train: begin with the version that it names, store the next, send back what had come."""
    wipe_leftovers(path.parent, path.name)
    order, own = _order(message), Own.read(path)
    again = own is not None and own.order == order
    if own is not None and again and own.node != context.node_id:
        raise StoreError(
            "Another node has trained this round with {path} of the folder of keep(). Give each node a folder of "
            "its own, or a partition-id in its configuration.",
            path=path.name,
        )
    values = {} if own is None else own.before if again else own.values
    _give(message, received, own, values, path)
    if own is not None and own.order.partition(" ")[0] != str(message.metadata.run_id):
        log.info("keep: %s goes on with the values of %s earlier trainings.", path.name, own.version)
    reply = call_next(message, context)
    trained = _restore(reply, received, globs, values)
    if missing := sorted(received.keys() - trained.keys()):
        raise UploadError(
            "keep: the app's reply lacks {client!r}, so what was trained of it is not known. Let the app reply "
            "with all of model.state_dict().",
            client=missing[0][1],
        )
    if name := nonfinite({place[1]: value for place, value in trained.items()}):
        raise UploadError(
            "keep: training made {name!r} NaN or infinite. What was kept before stays.", name=name
        )
    version = 1 if own is None else own.version + (not again)
    made = Own(trained, values, order, context.node_id, version)
    made.check_fits(received, path)
    made.write(path)
    return reply


def _private(content: RecordDict, globs: tuple[str, ...]) -> dict[Place, Array]:
    """Return the arrays of a message's records that stay on a node."""
    return {
        (key, name): array
        for key, record in content.array_records.items()
        for name, array in record.items()
        if any(fnmatchcase(name, glob) for glob in globs)
    }


def _give(
    message: Message,
    received: Mapping[Place, Array],
    own: Own | None,
    values: Mapping[Place, torch.Tensor],
    path: Path,
) -> None:
    """Put a node's own values into a message, in the place of what the server has sent."""
    if own is not None:
        own.check_fits(received, path)
    if values:
        arrays = {place: Array(value.numpy()) for place, value in values.items()}
        message.content = _replaced(message.content, arrays, frozenset())


def _restore(
    reply: Message,
    received: Mapping[Place, Array],
    globs: tuple[str, ...],
    values: Mapping[Place, torch.Tensor],
) -> dict[Place, torch.Tensor]:
    """Put what the server has sent back into a reply, remove what it never had; return what was there.

    Raises:
        UploadError: a private array stands in it elsewhere too.
    """
    if not reply.has_content():
        return {}
    homes = by_key((place[1], place) for place in received)
    back: dict[Place, Array] = {}
    trained: dict[Place, torch.Tensor] = {}
    found = _private(reply.content, globs)
    for (key, name), array in found.items():
        at = [(key, name)] if (key, name) in received else homes.get(name, [])
        if len(at) == 1:  # else the server has never had it
            back[key, name] = received[at[0]]
            trained[at[0]] = _tensor(array)
    reply.content = _replaced(reply.content, back, found.keys() - back.keys())
    sent = {_bytes(array.numpy()) for array in received.values()}
    for place, value in (*values.items(), *trained.items()):
        content = _bytes(value.numpy())
        telling = len(content) >= TELLING and bool((value != value.flatten()[0]).any())
        if telling and content not in sent and (where := _place_of(content, reply.content)):
            raise UploadError(
                "keep: the app's reply holds the private {place!r} in {where!r} too. It was not sent. Name that "
                "array as well, or take it out of the reply.",
                place=place[1],
                where=where,
            )
    return trained


def _replaced(content: RecordDict, arrays: Mapping[Place, Array], without: Iterable[Place]) -> RecordDict:
    """Return records with other arrays in some places; what was given stays as it was, as nodes may share it."""
    without, made = set(without), RecordDict()
    for key, record in content.items():
        made[key] = record
        if isinstance(record, ArrayRecord):
            made[key] = new = ArrayRecord()
            for name, array in record.items():
                if (key, name) not in without:
                    new[name] = arrays.get((key, name), array)
    return made


def _place_of(value: bytes, content: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of an array, or of an entry of a configuration, that holds some bytes, or an empty text."""
    for record in content.values():
        for name, entry in record.items():
            held = entry
            if isinstance(entry, Array):  # in C's order, whatever the app's
                held = _bytes(entry.numpy()) if entry.stype == "numpy.ndarray" else entry.data
            if isinstance(held, bytes) and value in held:
                return name
    return ""


def _order(message: Message) -> str:
    """Return what names an order to train: one that comes again has the same name."""
    about = message.metadata
    rounds = [
        str(record["server-round"])
        for record in message.content.config_records.values()
        if "server-round" in record
    ]
    name = rounds[0] if rounds else about.group_id or about.message_id
    return f"{about.run_id} {about.message_type} {name}"


def _path(folder: Path, client: object) -> Path:
    """Return the file of a partition, or of the node."""
    name = str(client)
    return folder / (f"{name}.safetensors" if re.fullmatch(r"[\w-]{1,64}", name) else state_name(name))


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.numpy())


def _bytes(values: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(values).tobytes()
