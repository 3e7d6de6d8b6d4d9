"""What others add: installed packages by entry points, and one's own models and methods as ``package.module:name``.

Packages add readers, methods, configurations and reproductions.

An entry point's name is what configurations and commands say; its value is imported when it is asked for. The papers'
package declares, for instance::

    [project.entry-points."fedkeep.readers"]
    zulip_channels = "fedkeep_papers.readers:zulip_channels"

Of the group ``fedkeep.configurations`` it is a folder of TOML files, and a file's path in it is the configuration's
name, e.g. ``furl/personalized-fl``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from importlib.resources.abc import Traversable
from typing import Any, TypeVar, get_type_hints

from fedkeep.core.errors import ConfigError, did_you_mean, raising

T = TypeVar("T")

PAPERS = "fedkeep-papers"
INSTALL_PAPERS = (
    "What reproduces the papers is a package of its own: pip install 'fedkeep[papers]', or pip install ./papers in a "
    "clone of fedkeep."
)


def points(group: str, own: Mapping[str, Any]) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, e.g. of ``fedkeep.readers``.

    Args:
        group: the group.
        own: what fedkeep itself has of this kind, by name.

    Raises:
        ConfigError: two have the same name; both are named.
    """
    found: dict[str, EntryPoint] = {}
    for point in _installed(group, tuple(map(_state, sys.path))):
        if point.name in own or point.name in found:
            first = described(found[point.name]) if point.name in found else "fedkeep itself"
            raise ConfigError(
                "Two {group} are named {point!r}: one of {first} and one of "
                "{package}. Uninstall one of the packages, or rename its entry point.",
                group=group.removeprefix("fedkeep."),
                point=point.name,
                first=first,
                package=described(point),
            )
        found[point.name] = point
    return found


@lru_cache(maxsize=32)
def _installed(group: str, _places: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group as the folders stand that Python imports from; reading them takes a while."""
    return tuple(entry_points(group=group))


def _state(folder: str) -> tuple[str, int]:
    """Return a folder and when a package was last added to it or taken away."""
    try:
        return folder, os.stat(folder or ".").st_mtime_ns
    except OSError:
        return folder, 0


def described(point: EntryPoint) -> str:
    """Return the package that an entry point is of, and what it names there."""
    package = "an unknown package" if point.dist is None else f"the package {point.dist.name}"
    return f"{package} ({point.value})"


def papers_hint() -> str:
    """Return how to install the papers' package, to end a message with; empty where it is installed."""
    try:
        distribution(PAPERS)
    except PackageNotFoundError:
        return f" {INSTALL_PAPERS}"
    return ""


CONFIGURATIONS = "fedkeep.configurations"


def builtin_names() -> list[str]:
    """Return the names of the built-in configurations, e.g. ``furl/personalized-fl``.

    Raises:
        ConfigError: two packages have configurations of one name, or a package's folder cannot be found.
    """
    return sorted(_files())


def _files() -> dict[str, Traversable]:
    """Return the configurations' files by name."""
    folders = {"fedkeep itself": resources.files("fedkeep") / "configs"}
    for point in points(CONFIGURATIONS, {}).values():
        with raising(
            ConfigError,
            "The configurations {name!r} of {package} cannot be found: {why}.",
            ImportError,
            TypeError,
            name=point.name,
            package=described(point),
        ):
            folders[described(point)] = resources.files(point.value)
    found: dict[str, Traversable] = {}
    owner: dict[str, str] = {}
    for whose, folder in folders.items():
        for name, file in _named(folder, ""):
            if name in found:
                raise ConfigError(
                    "Two configurations are named {name!r}: one of {owner} and one of {whose}. Uninstall one "
                    "of the packages, or rename its file.",
                    name=name,
                    owner=owner[name],
                    whose=whose,
                )
            found[name], owner[name] = file, whose
    return found


def _named(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _named(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".toml"):
            yield prefix + entry.name.removesuffix(".toml"), entry


def builtin_text(name: str) -> str:
    """Return a built-in configuration's text.

    Raises:
        ConfigError: there is none of this name.
    """
    files = _files()
    wanted = name.replace("\\", "/").removesuffix(".toml")
    if wanted not in files:
        names = sorted(files)
        raise ConfigError(
            "There is no built-in configuration {name!r}; there are {names}.{near}",
            name=name,
            names=", ".join(names),
            near=near_names(wanted, names),
        )
    return files[wanted].read_text(encoding="utf-8")


def near_names(wanted: str, names: Sequence[str], otherwise: str = "") -> str:
    """Return the end of a message about a name that is not there: what may have been meant, or must be installed.

    Args:
        wanted: the name.
        names: those that there are.
        otherwise: what to say where none of them is near.
    """
    group = [n for n in names if n.startswith(f"{wanted.rstrip('/')}/")]
    hint = f" Did you mean one of {', '.join(group)}?" if group else did_you_mean(wanted[:80], names)
    return (hint or otherwise) + papers_hint()


class Offered(Mapping[str, T]):
    """What fedkeep has of a kind, and then what installed packages add; theirs is imported when it is looked up.

    Args:
        group: of entry points, e.g. ``fedkeep.readers``.
        kind: the class that an entry point's value must be of.
        own: fedkeep's own, by name.

    Raises:
        ConfigError: two have the same name.
    """

    def __init__(self, group: str, kind: type[T], own: Mapping[str, T]) -> None:
        self._kind, self._own, self._points = kind, own, points(group, own)

    def __getitem__(self, name: str) -> T:
        """Return one of them.

        Raises:
            KeyError: there is none of this name.
            ConfigError: what the entry point names cannot be imported, or is of another kind.
        """
        if name in self._own:
            return self._own[name]
        point = self._points[name]
        with raising(
            ConfigError,
            "{name!r} of {package} cannot be imported: {why}.",
            ImportError,
            AttributeError,
            name=name,
            package=described(point),
        ):
            found = point.load()
        if not isinstance(found, self._kind):
            wanted, got = self._kind.__name__, type(found).__name__
            raise ConfigError(
                "{name!r} of {package}: wanted {wanted}; got {got}.",
                name=name,
                package=described(point),
                wanted=wanted,
                got=got,
            )
        return found

    def __iter__(self) -> Iterator[str]:
        """Yield the names, fedkeep's own first."""
        yield from self._own
        yield from sorted(self._points)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._own) + len(self._points)


def is_own(kind: str) -> bool:
    """Tell whether a name is one of a module, not of what fedkeep or a package offers."""
    return ":" in kind


def imported(place: str, kind: str) -> Any:
    """Return what a name ``package.module:name`` stands for.

    Raises:
        ConfigError: it cannot be imported; ``place`` is the key that names it.
    """
    module, _, name = kind.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (
        ImportError,
        ValueError,
        AttributeError,
        TypeError,
    ) as error:  # the last: ".." is relative to nothing
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = " Name the folder of the file in PYTHONPATH."
            if not f"{module}.".startswith(f"{error.name}."):
                hint = f" {module} imports it. Install it, or name the folder of its file in PYTHONPATH."
        raise ConfigError(
            "{place}: {kind!r} cannot be imported: {why}.{hint}", place=place, kind=kind, why=error, hint=hint
        ) from error


def says_it_returns(found: Any, kind: type) -> bool:
    """Tell whether something is a function whose annotation says that it returns a kind."""
    if not inspect.isfunction(found):
        return False
    try:
        made = get_type_hints(found).get("return")
    except (NameError, TypeError):  # it names types that are not there when it runs
        return False
    return isinstance(made, type) and issubclass(made, kind)
