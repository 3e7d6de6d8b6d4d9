"""Commands that need a package which is not installed with fedkeep."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec

from fedkeep.core.errors import ConfigError

P = ParamSpec("P")


def needs_flower(command: Callable[P, None]) -> Callable[P, None]:
    """Return a command that says what to install where Flower is missing."""

    @functools.wraps(command)
    def checked(*args: P.args, **settings: P.kwargs) -> None:
        if importlib.util.find_spec("flwr") is None:
            raise ConfigError(
                "This command needs Flower, which is not installed: pip install 'fedkeep[flower]'."
            )
        command(*args, **settings)

    return checked
