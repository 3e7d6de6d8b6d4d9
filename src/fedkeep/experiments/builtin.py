"""The configurations that come with fedkeep, by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable

from fedkeep.core.errors import ConfigError, did_you_mean
from fedkeep.experiments.config import Config, parse_config

FOLDER = resources.files("fedkeep") / "configs"


def builtin_names() -> list[str]:
    """Return the names of the built-in configurations, e.g. ``furl/personalized-fl``."""
    return sorted(_names(FOLDER, ""))


def _names(folder: Traversable, prefix: str) -> list[str]:
    names = []
    for entry in folder.iterdir():
        if entry.is_dir():
            names += _names(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".toml"):
            names.append(prefix + entry.name.removesuffix(".toml"))
    return names


def builtin_text(name: str) -> str:
    """Return a built-in configuration's text.

    Raises:
        ConfigError: there is none of this name.
    """
    names = builtin_names()
    wanted = name.replace("\\", "/").removesuffix(".toml")
    if wanted not in names:
        group = [n for n in names if n.startswith(f"{wanted}/")]
        hint = f" Did you mean one of {', '.join(group)}?" if group else did_you_mean(wanted, names)
        raise ConfigError(f"There is no built-in configuration {name!r}; there are {', '.join(names)}.{hint}")
    return (FOLDER / f"{wanted}.toml").read_text(encoding="utf-8")


def builtin_config(name: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Return a built-in configuration, checked; ``overrides`` as for ``parse_config``."""
    return parse_config(builtin_text(name), name, overrides)
