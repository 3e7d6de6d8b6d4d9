"""Summaries and encodings as JSON: every field is there and of its type, and there is no other."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from typing import Annotated, Any, ClassVar, Self, cast, get_type_hints

from fedkeep.core.errors import DataError

FORMAT = 1
LARGEST = 1 << 28  # bytes


@functools.cache
def _model(make: Any) -> Any:
    """Return what checks such records: pydantic takes longer to make it than to use it."""
    import pydantic  # not needed to import fedkeep

    column: Any = Annotated[functools.reduce(operator.or_, make.kinds), pydantic.Field(discriminator="kind")]
    strict = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    hints: dict[str, Any] = get_type_hints(make) | {"columns": dict[str, column], "format": int, "what": str}
    names = ("format", "what", *(field.name for field in dataclasses.fields(make)))
    wanted: dict[str, Any] = {name: (hints[name], ...) for name in names}
    return pydantic.create_model(make.__name__, __config__=strict, **wanted)


@dataclasses.dataclass(frozen=True)
class Readable:
    """A record with a record for each of its ``columns``, which are of ``kinds``; it can be written and read as JSON."""

    kinds: ClassVar[tuple[type, ...]]

    def to_json(self) -> str:
        """Return it as JSON; the same content is always the same text."""
        content = {"format": FORMAT, "what": type(self).__name__.lower(), **dataclasses.asdict(self)}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "") -> Self:
        """Read what :meth:`to_json` gave.

        Raises:
            DataError: it is no JSON, of another format, too large, or a field is missing, unknown, of another type or
                contradicts another; the message names ``where`` and the field.
        """
        import pydantic  # not needed to import fedkeep

        what = cls.__name__.lower()
        where = where or f"The {what}"
        if len(text) > LARGEST:
            raise DataError(
                "{where} is longer than {LARGEST} MiB. Is it the right file?",
                where=where,
                LARGEST=LARGEST >> 20,
            )
        try:
            found = _model(cast("Any", cls)).model_validate_json(text)
            if (found.format, found.what) != (FORMAT, what):
                raise DataError(
                    "wanted format {format}. Use the same version of fedkeep everywhere.", format=FORMAT
                )
            return cls(**{field.name: getattr(found, field.name) for field in dataclasses.fields(cls)})
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
            raise DataError(
                "{where} is no sound {what}: {error}", where=where, what=what, error=error
            ) from None
