"""Options of a configuration against the signature of the function that they are meant for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedkeep.core.errors import ConfigError, did_you_mean, shown


def check_options(
    what: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    given: Collection[str] = (),
    also: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return ``options`` as arguments of ``function``: names known, none missing, types as annotated.

    A list stands for a tuple where the function wants one.

    Args:
        what: the table's name in messages, e.g. ``data``.
        function: a reader, a model class or a method's builder.
        options: the table's further keys.
        given: arguments that fedkeep fills in itself.
        also: types of further keys that are known, e.g. those of an argument that is put together of them.

    Raises:
        ConfigError: names the key, what was wanted and what was got.
    """
    parameters, hints = inspect.signature(function).parameters, accepted(function)
    known = [n for n in (*hints, *(also or {})) if n not in given]
    hints = {**hints, **(also or {})}
    checked = {}
    for key, value in options.items():
        if key not in known:
            others = f" Known here: {', '.join(known)}." if known else " It takes no options."
            raise ConfigError(f"{what}.{key[:80]}: unknown key.{did_you_mean(key[:40], known)}{others}")
        checked[key] = _fitted(f"{what}.{key}", hints.get(key, Any), value)
    empty = inspect.Parameter.empty
    needed = [n for n in known if n in parameters and parameters[n].default is empty and n not in options]
    if needed:
        raise ConfigError(f"{what}: missing {', '.join(needed)}.")
    return checked


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


def _fitted(place: str, wanted: Any, value: Any) -> Any:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(
            wanted, config=ConfigDict(strict=True, arbitrary_types_allowed=True)
        )
    except Exception:  # noqa: BLE001 - an annotation that pydantic doesn't know (a stranger's module)
        return value
    first: ValidationError | None = None
    for form in (value, tuple(value)) if isinstance(value, list) else (value,):
        try:
            return adapter.validate_python(form)
        except ValidationError as error:
            first = first or error
    got = type(value).__name__ if "\n" in repr(value) else shown(value, 200)
    with suppress(ValidationError):
        adapter.validate_python([value])
        got += f". Write a list: [{got}]"
    raise ConfigError(f"{place}: wanted {_shown(wanted)}; got {got}.") from first


def _shown(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return f"one of {', '.join(map(repr, get_args(wanted)))}"
    if isinstance(wanted, type) and get_origin(wanted) is None:
        return wanted.__name__
    return str(wanted).replace("typing.", "").replace("collections.abc.Sequence", "list")
