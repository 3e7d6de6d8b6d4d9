"""Every key of a configuration, from the classes that check it: for the reference, and for ``fedkeep explain``."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from fedkeep.core.arguments import accepted
from fedkeep.core.errors import MEANT, ConfigError
from fedkeep.data import PARTITIONS
from fedkeep.experiments.build import LOCAL, MODELS, REDUCTIONS, SERVER, offered_methods
from fedkeep.experiments.config import Config, DataConfig, MethodConfig, PartitionConfig
from fedkeep.experiments.config_tables import Table
from fedkeep.experiments.run_settings import RunSettings
from fedkeep.experiments.sources import offered_readers
from fedkeep.remote.node_config import OwnDevice
from fedkeep.remote.policy import RoundPolicy

APART = ("rounds", "device", "audit")
"""Tables that are for other commands than those which train."""
EVERY = "all commands that take a configuration"
READ_BY = {
    "run": "fedkeep run, compare, sweep, deploy, and others that train",
    "personalization": "fedkeep run, compare and sweep, after the last round",
    "ranking": "fedkeep run and compare, after the last round",
    "privacy": "fedkeep run, compare, sweep, deploy and budget",
    "rounds": "fedkeep deploy and fedkeep flower",
    "device": "fedkeep device, from a file of the device's own",
    "audit": "fedkeep audit",
}
"""Commands that read a table, by the first part of its name; others are read by all that take a configuration."""
OF_PHASES = {
    "epochs": "passes of local training over a client's own examples in a round.",
    "batch_size": "examples in a mini-batch of local training.",
    "merge_single": "whether a last mini-batch of one example joins the one before, as batch normalisation wants.",
    "clip_norm": "the bound of a gradient's L2 norm in local training; None: gradients stay as they are.",
    "clip_over": "whether the bound is for all gradients together, or for the private and the federated half each.",
    "weighting": "how clients count in the mean of uploads: by their training examples, or all alike.",
}
"""What the keys of a method's table mean that its phase and its server are made of."""
OF_DATA = {
    "clients": "keep so many clients, drawn by their ids; the draw is the same with every seed. Tables, LEAF's files, folders of "
    "images, tar files and Hugging Face's sets are read for these clients alone. None: all.",
    "examples": "keep at most so many examples of each client, of its splits in proportion, after they were read. None: all.",
}
"""What the keys of ``[data]`` mean that any reader takes."""
GIVEN = ("self", "images", "local", "server")
"""Arguments that no key gives: fedkeep does, or keys of other tables."""


@dataclass(frozen=True)
class Key:
    """A key of a table.

    Attributes:
        type, default: as one reads them; the default is empty where a value must be given.
        about: what its class says of it, with its unit.
    """

    type: str
    default: str
    about: str


@dataclass(frozen=True)
class KeyTable:
    """A table of a configuration, or the keys that a table takes further with a kind of method, model or reader.

    Attributes:
        about: what it is.
        keys: by name.
        read_by: commands.
    """

    about: str
    keys: Mapping[str, Key]
    read_by: str


def tables() -> dict[str, KeyTable]:
    """Return the tables of a configuration by dotted name; that of the file itself is the empty text."""
    owners: dict[str, tuple[Any, Table]] = {"": (Config, Table())}
    wanted = _hints(Config) | {"run": RunSettings, "rounds": RoundPolicy, "device": OwnDevice}
    wanted |= {"data.partition": PartitionConfig}
    while wanted:
        name = next(iter(wanted))
        if found := _table_in(wanted.pop(name), Table()):
            owners[name] = owner, mark = found
            wanted |= {f"{name}.{key}": hint for key, hint in mark.known(_hints(owner)).items()}
    made = {}
    for name, (owner, mark) in sorted(owners.items()):
        keys = mark.known(keys_of(owner, mark.usual))
        keys = {key: one for key, one in keys.items() if _joined(name, key) not in owners}
        if owner is MethodConfig:
            hints = {**LOCAL, **SERVER}
            keys |= {key: Key(_shown(hints[key]), "the method's", what) for key, what in OF_PHASES.items()}
        if owner is DataConfig:
            keys |= {key: Key("int | None", "None", what) for key, what in OF_DATA.items()}
        made[name] = KeyTable(_about(owner), keys, READ_BY.get(name.partition(".")[0], EVERY))
    return made


def kinds() -> dict[str, Callable[..., Any]]:
    """Return what takes further keys of a table, by the table's name and its own: ``method.fedrep``, ``data.leaf``."""
    offered: dict[str, Mapping[str, Callable[..., Any]]] = {
        "data": {name: reader.read for name, reader in offered_readers().items()},
        "data.partition": PARTITIONS,
        "model": MODELS,
        "method": offered_methods(),
        "method.reduce": REDUCTIONS,
    }
    return {f"{table}.{name}": made for table, those in offered.items() for name, made in those.items()}


def explained(asked: str) -> list[tuple[str, KeyTable | Key, str]]:
    """Return what a name stands for: full names, what each is, and the commands that read it.

    Args:
        asked: a key, a table or a kind, whole or its last parts: ``run.epochs``, ``optimizer``, ``method.fedrep``.

    Raises:
        ConfigError: there is none; near ones are named.
    """
    known = _everything()
    found = [name for name in known if name == asked] or _ending(asked, known) or _as_written(asked, known)
    if found:
        return [(name, *known[name]) for name in found]
    near = _near(asked, known)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        "There is no key, table or kind {asked!r}.{hint} All tables: fedkeep explain.", asked=asked, hint=hint
    )


def keys_meant(asked: str) -> list[str]:
    """Return the full names of a run's keys that a name means, as ``epochs`` or ``lr``; likely ones first."""
    known = {
        name: what
        for name, what in _everything().items()
        if isinstance(what[0], Key) and name.partition(".")[0] not in APART
    }
    found = _ending(MEANT.get(asked, asked), known)
    return sorted(found, key=lambda name: (name.count("."), not name.startswith("run.")))


def _everything() -> dict[str, tuple[KeyTable | Key, str]]:
    """Return every table, kind and key by its full name, and the commands that read it."""
    known: dict[str, tuple[KeyTable | Key, str]] = {}
    everything = tables()
    for name, made in kinds().items():
        read_by = everything[name.rpartition(".")[0]].read_by
        everything.setdefault(name, KeyTable(_about(made), keys_of(made), read_by))
    for name, table in everything.items():
        if name:
            known[name] = table, table.read_by
        known |= {_joined(name, key): (one, table.read_by) for key, one in table.keys.items()}
    return known


def _ending(asked: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if name.endswith(f".{asked}")]


def _as_written(asked: str, known: Collection[str]) -> list[str]:
    """Return the keys that kinds of a table take, by the name that they have in a file: ``data.path`` of ``data.leaf.path``."""
    table, _, key = asked.rpartition(".")
    return [
        name for kind in kinds() if kind.rpartition(".")[0] == table and (name := f"{kind}.{key}") in known
    ]


def _near(asked: str, known: Iterable[str]) -> list[str]:
    """Return at most three names that look like one, or are what its last part means."""
    above, _, last = asked.rpartition(".")
    beside = [name for name in known if name.rpartition(".")[0].endswith(above)]
    lasts = {name.rpartition(".")[2]: name for name in sorted(beside, key=len, reverse=True)}
    near = [name for one, name in lasts.items() if one == MEANT.get(last)]
    near += [lasts[one] for one in difflib.get_close_matches(last, lasts, 3, 0.6)]
    near += difflib.get_close_matches(asked, known, 3, 0.6)
    return list(dict.fromkeys(near[:3]))


def keys_of(owner: Any, usual: Mapping[str, Any] = {}) -> dict[str, Key]:
    """Return the keys that a class or a function makes of a table; ``usual`` are defaults that differ from its own."""
    said, hints, parameters = _meanings(owner), _hints(owner), inspect.signature(owner).parameters
    found: dict[str, Key] = {}
    for name, one in parameters.items():
        if name in GIVEN or one.kind is one.VAR_KEYWORD:
            continue
        default = usual.get(name, one.default)
        plain = default is None or isinstance(default, bool | int | float | str | tuple)
        text = "" if default is one.empty else repr(default) if plain else "…"
        found[name] = Key(_shown(hints.get(name, Any)), text, said.get(name, ""))
    if inspect.isfunction(owner):  # of a typed ``**others``
        further = {n: hint for n, hint in hints.items() if n not in {*found, *GIVEN}}
        found |= {name: Key(_shown(hint), "…", said.get(name, "")) for name, hint in further.items()}
    return found


def _hints(owner: Any) -> dict[str, Any]:
    if not inspect.isclass(owner) or issubclass(owner, nn.Module):
        return accepted(owner)
    return get_type_hints(owner, include_extras=True)


def _table_in(hint: Any, mark: Table) -> tuple[Any, Table] | None:
    """Return the class of fedkeep's among the types of a field, and how the field marks it."""
    if inspect.isclass(hint):
        return (hint, mark) if hint.__module__.startswith("fedkeep") else None
    inner = get_args(hint)
    if get_origin(hint) not in (Annotated, Union, UnionType):
        return None
    mark = next((one for one in inner if isinstance(one, Table)), mark)
    return next(filter(None, (_table_in(one, mark) for one in inner if not isinstance(one, Table))), None)


def _joined(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _about(owner: Any) -> str:
    """Return a docstring up to what it says of arguments."""
    text = inspect.getdoc(owner) or ""
    return re.split(r"\n\n(?:Args|Attributes|Raises|Returns):", text)[0]


def _meanings(owner: Any) -> dict[str, str]:
    """Return what the docstrings of a class and its bases, or of a function, say of each argument, in one line."""
    base = _meanings(owner.__base__) if getattr(owner, "__base__", object) not in (object, None) else {}
    text = inspect.cleandoc(owner.__doc__ or "")
    parts = re.findall(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    found: dict[str, str] = {}
    for names, what in re.findall(
        r"^    ([\w, ]+): (.*?)(?=^    \w|\Z)", "\n".join(parts), re.MULTILINE | re.DOTALL
    ):
        found |= dict.fromkeys(names.split(", "), " ".join(what.split()))
    return base | found


def _shown(hint: Any) -> str:
    """Return a type as one reads it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _shown(inner[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_shown, inner))
    if origin is Literal:
        return " | ".join(map(repr, inner))
    if inspect.isclass(origin) and inner:
        return f"{origin.__name__}[{', '.join(map(_shown, inner))}]"
    text = "..." if hint is ... else hint.__name__ if inspect.isclass(hint) else str(hint)
    return re.sub(r"\b(?:[a-z_]\w*\.)+", "", text).replace("NoneType", "None")
