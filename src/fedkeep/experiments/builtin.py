"""The configurations that come with fedkeep and with installed packages, by name.

A package adds a folder of TOML files as an entry point of the group ``fedkeep.configurations``: the module that it
names is the folder, and a file's path in it the configuration's name, e.g. ``furl/personalized-fl``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable

from fedkeep.core.errors import ConfigError, did_you_mean
from fedkeep.experiments.config import Config, parse_config
from fedkeep.experiments.plugins import described, papers_hint, points

GROUP = "fedkeep.configurations"


def builtin_names() -> list[str]:
    """Return the names of the built-in configurations, e.g. ``furl/personalized-fl``.

    Raises:
        ConfigError: two packages have configurations of one name, or a package's folder cannot be found.
    """
    return sorted(_files())


def _files() -> dict[str, Traversable]:
    """Return the configurations' files by name."""
    folders = {"fedkeep itself": resources.files("fedkeep") / "configs"}
    for point in points(GROUP, {}).values():
        try:
            folders[described(point)] = resources.files(point.value)
        except (ImportError, TypeError) as error:
            raise ConfigError(
                f"The configurations {point.name!r} of {described(point)} cannot be found: {error}."
            ) from error
    found: dict[str, Traversable] = {}
    owner: dict[str, str] = {}
    for whose, folder in folders.items():
        for name, file in _named(folder, ""):
            if name in found:
                raise ConfigError(
                    f"Two configurations are named {name!r}: one of {owner[name]} and one of {whose}. Uninstall one "
                    f"of the packages, or rename its file."
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
            f"There is no built-in configuration {name!r}; there are {', '.join(names)}.{near_names(wanted, names)}"
        )
    return files[wanted].read_text(encoding="utf-8")


def near_names(wanted: str, names: Sequence[str]) -> str:
    """Return the end of a message about a name that is not there: what may have been meant, or must be installed."""
    group = [n for n in names if n.startswith(f"{wanted.rstrip('/')}/")]
    hint = f" Did you mean one of {', '.join(group)}?" if group else did_you_mean(wanted[:80], names)
    return hint + papers_hint()


def builtin_config(name: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Return a built-in configuration, checked; ``overrides`` as for ``parse_config``."""
    return parse_config(builtin_text(name), name, overrides)
