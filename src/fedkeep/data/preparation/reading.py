"""Reading summaries and encodings from JSON: every field is there and of its type, and there is no other."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fedkeep.core.errors import DataError

FORMAT = 1
LARGEST = 1 << 28  # bytes
R = TypeVar("R")


def to_json(record: Any) -> str:
    """Return a summary or an encoding as JSON, the same text for the same content."""
    content = {"format": FORMAT, "what": type(record).__name__.lower(), **dataclasses.asdict(record)}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


@functools.cache
def _model(what: str, fields: tuple[tuple[str, Any], ...], kinds: tuple[type, ...]) -> Any:
    """Return what checks such records: pydantic takes longer to make it than to use it."""
    import pydantic  # not needed to import fedkeep

    column: Any = Annotated[functools.reduce(operator.or_, kinds), pydantic.Field(discriminator="kind")]
    strict = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    wanted: dict[str, Any] = {name: (kind, ...) for name, kind in fields}
    wanted |= {"format": (int, ...), "what": (str, ...), "columns": (dict[str, column], ...)}
    return pydantic.create_model(what, __config__=strict, **wanted)


def from_json(
    make: type[R], text: str | bytes, fields: Mapping[str, Any], kinds: Sequence[type], where: str
) -> R:
    """Return a summary or an encoding: its fields by type, and its columns, each of one of ``kinds``.

    Raises:
        DataError: it is no JSON, of another format, too large, or a field is missing, unknown, of another type or
            contradicts another; the message names ``where`` and the field.
    """
    import pydantic  # not needed to import fedkeep

    if len(text) > LARGEST:
        raise DataError(
            "{where} is longer than {LARGEST} MiB. Is it the right file?",
            where=where,
            LARGEST=LARGEST >> 20,
        )
    what = make.__name__.lower()
    wanted = ("format", "what", "columns", *fields)
    try:
        model = _model(what, tuple(fields.items()), tuple(kinds))
        found = model.model_validate_json(text)
        content = {name: getattr(found, name) for name in wanted}
        if (content.pop("format"), content.pop("what")) != (FORMAT, what):
            raise DataError(
                "wanted format {format}. Use the same version of fedkeep everywhere.", format=FORMAT
            )
        return make(**content)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))[:200]
        raise DataError(
            "{where} is no {what}, or is damaged: {field}{why}. Make it again.",
            where=where,
            what=what,
            field=f"{place}: " if place else "",
            why=first["msg"],
        ) from None
    except DataError as error:
        raise DataError("{where} is no sound {what}: {error}", where=where, what=what, error=error) from None
