"""Arguments by name: which ones a function takes, and of one that it does not, which was meant or where it is written."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack, get_args, get_origin, get_type_hints

from fedkeep.core.errors import ConfigError, did_you_mean, shown

F = TypeVar("F", bound=Callable[..., Any])


def telling_arguments(written: Mapping[str, str] = {}, name: str | None = None) -> Callable[[F], F]:
    """Return a decorator of a function, or of a class, that says of an unknown argument what to write instead.

    Signature, types and documentation stay as they are.

    Args:
        written: by names that it does not take, how they are written; ``{got}`` stands for the given value.
        name: what users call it; None: its own name.

    Raises:
        ConfigError: when the function is called with an argument that it does not take.
    """

    def decorate(function: F) -> F:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        parameters = inspect.signature(function).parameters
        called = name or function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def telling(*args: object, **given: object) -> object:
            for key, value in given.items():
                if key not in parameters and key not in (takes := accepted(function)):
                    known = [one for one in takes if one != "self"]
                    form = written.get(key, "").format(got=shown(value))
                    raise ConfigError(
                        "{function}() takes no argument {name!r}.{instead} It takes {known}.",
                        function=called,
                        name=key,
                        instead=f" Write {form}." if form else did_you_mean(key, known),
                        known=", ".join(known),
                    )
            return function(*args, **given)

        return telling  # type: ignore[return-value]

    return decorate


def accepted(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that a function takes by name, with their types; those of a typed ``**others`` too."""
    hints = _hints(function)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in kinds:
            found[name] = hints.get(name, Any)
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD and get_origin(hints.get(name)) is Unpack:
            found |= get_type_hints(get_args(hints[name])[0])
    return found


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    called = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    try:
        return get_type_hints(called)
    except NameError:  # a module's own annotation that can't be resolved: its options go unchecked
        return {}
