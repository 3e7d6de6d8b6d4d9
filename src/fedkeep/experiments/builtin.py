"""The configurations that come with fedkeep, by name."""

from __future__ import annotations

from pathlib import Path

from fedkeep.core.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).resolve().parent.parent / "configs"


def builtin_names() -> list[str]:
    """Return the names of the built-in configurations, e.g. ``furl/personalized-fl``."""
    return sorted(p.relative_to(FOLDER).with_suffix("").as_posix() for p in FOLDER.rglob("*.toml"))


def builtin_text(name: str) -> str:
    """Return a built-in configuration's text.

    Raises:
        ConfigError: there is none of this name.
    """
    names = builtin_names()
    if name not in names:
        raise ConfigError(f"There is no built-in configuration {name!r}; there are {names}.{did_you_mean(name, names)}")
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
