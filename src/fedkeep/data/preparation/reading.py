"""Reading summaries and encodings from JSON: every field is there and of its type, and there is no other."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fedkeep.core.errors import DataError

FORMAT = 1
LARGEST = 1 << 28  # bytes


def to_json(what: str, record: Any) -> str:
    """Return a summary or an encoding as JSON, the same text for the same content."""
    content = {"format": FORMAT, "what": what, **dataclasses.asdict(record)}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(
    what: str, text: str | bytes, fields: Mapping[str, Any], kinds: Sequence[type], where: str
) -> dict[str, Any]:
    """Return the fields of a summary or an encoding, its columns as one of ``kinds`` each.

    Raises:
        DataError: it is no JSON, of another format, too large, or a field is missing, unknown or of another type;
            the message names the field.
    """
    import pydantic  # not needed to import fedkeep

    if len(text) > LARGEST:
        raise DataError(f"{where} is longer than {LARGEST >> 20} MiB. Is it the right file?")
    column: Any = Annotated[functools.reduce(operator.or_, kinds), pydantic.Field(discriminator="kind")]
    strict = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    wanted: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    wanted |= {"format": (int, ...), "what": (str, ...), "columns": (dict[str, column], ...)}
    model = pydantic.create_model(what, __config__=strict, **wanted)
    try:
        found = model.model_validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))[:200]
        raise DataError(
            f"{where} is no {what}, or is damaged: {f'{place}: ' if place else ''}{first['msg']}. Make it "
            f"again."
        ) from None
    except DataError as error:
        raise DataError(f"{where} is no sound {what}: {error}") from None
    content = {name: getattr(found, name) for name in wanted}
    if (content.pop("format"), content.pop("what")) != (FORMAT, what):
        raise DataError(f"{where} is no {what} of format {FORMAT}. Make it with the same fedkeep everywhere.")
    return content
