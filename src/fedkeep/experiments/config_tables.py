"""Tables of a configuration against what they make: a class, or the signature of a function.

A table knows all its keys, ``"3"`` is no number and ``true`` is no 1; a list stands for a tuple, a table for pairs. A
fault names its place in the file, what was wanted there and what was got.
"""

from __future__ import annotations

import datetime
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache, partial, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from fedkeep.core.arguments import accepted
from fedkeep.core.errors import MEANT, ConfigError, FedkeepError, near_name, shown

T = TypeVar("T")
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
"""Texts; a list stands for them."""
STRICT = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


class Strict(BaseModel):
    """A table that knows all its keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Open(BaseModel):
    """A table whose further keys are the options of the thing that it names; they are checked when it is built."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.__pydantic_extra__ or {})


@dataclass(frozen=True, eq=False)
class Table:
    """Marks a dataclass that is a field of a table: a table makes it, and its own checks speak.

    Attributes:
        usual: defaults that differ from the class's own.
        keys: the fields that a table may name, the others keep their defaults; none: all of them.
    """

    usual: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    def known(self, found: Mapping[str, T]) -> dict[str, T]:
        """Return what is found by field of those fields that a table may name."""
        return {name: found[name] for name in self.keys or found if name in found}

    def __get_pydantic_core_schema__(self, kind: type[Any], handler: object) -> core_schema.CoreSchema:
        """Return how pydantic checks and writes out the field."""
        return core_schema.no_info_plain_validator_function(
            partial(_made, kind, self),
            serialization=core_schema.plain_serializer_function_ser_schema(self._written, info_arg=True),
        )

    def _written(self, made: Any, info: core_schema.SerializationInfo) -> dict[str, Any]:
        """Return the table that makes an object; what has its default is left out where what is unset is.

        Where what is unset is left out a rate that was named stays, though it is the usual one.
        """
        how = "unset" if info.exclude_unset else "equal" if info.exclude_defaults else "none"
        return self.known(_table(made, how, self.usual))


def _made(kind: Any, mark: Table, content: Any) -> Any:
    if isinstance(content, kind):
        return content
    if not isinstance(content, Mapping):
        raise PydanticCustomError("dict_type", "wanted a table")
    table = {**mark.usual, **content}
    for name, hint in get_type_hints(kind).items():
        if name in table and (_is_pairs(hint) or (_may_be_pairs(hint) and isinstance(table[name], Mapping))):
            table[name] = _pairs(name, table[name])
    try:
        # TOML's values are JSON's but for dates, which stand nowhere; in JSON lists are tuples, and tables dataclasses.
        given = _adapter(kind, mark.keys).validate_json(json.dumps(table, default=repr), strict=True)
        return kind(**vars(given))
    except FedkeepError as error:  # the class's own check
        said = {"said": str(error), "names": [f.name for f in fields(kind)]}
        raise PydanticCustomError("own_check", "{said}", said) from error


def _pairs(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    wrong = InitErrorDetails(
        type=PydanticCustomError("dict_type", "wanted a table"), loc=(name,), input=value
    )
    raise ValidationError.from_exception_data(name, [wrong])


@cache
def _adapter(kind: Any, keys: tuple[str, ...]) -> TypeAdapter[Any]:
    """Return what checks the arguments of a dataclass; one among them is made of its table, and checks itself."""
    hints = get_type_hints(kind, include_extras=True)
    arguments = [
        (one.name, _tabled(hints[one.name]), field(default=one.default, default_factory=one.default_factory))
        for one in fields(kind)
        if one.init and one.name in (keys or hints)
    ]
    given: Any = make_dataclass(kind.__name__, arguments, kw_only=True)
    return TypeAdapter(given | None, config=STRICT)  # pydantic refuses a config for a dataclass alone


def _tabled(hint: Any) -> Any:
    """Return a type in which every dataclass is made of a table."""
    if get_origin(hint) in (Union, UnionType):
        return reduce(or_, map(_tabled, get_args(hint)))
    return Annotated[hint, Table()] if is_dataclass(hint) else hint


def _may_be_pairs(hint: Any) -> bool:
    """Tell whether a type is one of several, of which one is pairs."""
    return any(map(_is_pairs, get_args(hint)))


def _is_pairs(hint: Any) -> bool:
    """Tell whether a type is ``tuple[tuple[name, value], ...]``."""
    inner, *rest = get_args(hint) or (None,)
    return get_origin(hint) is tuple and rest == [...] and get_origin(inner) is tuple


def _table(made: Any, left_out: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(type(made))
    found = {}
    for one in fields(made):
        value = getattr(made, one.name)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        default = usual.get(one.name, default)
        if left_out != "none" and value == default and (left_out == "equal" or type(value) is type(default)):
            continue
        if is_dataclass(value):
            value = _table(value, left_out, {})
        pairs = _is_pairs(hints[one.name]) or (_may_be_pairs(hints[one.name]) and isinstance(value, tuple))
        found[one.name] = dict(value) if pairs else value
    return found


def made_of(kind: Any, content: Any, where: str, place: str = "", usual: Mapping[str, Any] = {}) -> Any:
    """Return what a table makes: a model of pydantic's, or a dataclass.

    Args:
        kind: the class.
        content: the table.
        where: the file's name in messages.
        place: the table's within the file.
        usual: defaults that differ from the class's own.

    Raises:
        ConfigError: a key is unknown, or a value doesn't fit; all faults are named.
    """
    table: Any = Annotated[kind, Table(usual)] if is_dataclass(kind) else kind
    try:
        return TypeAdapter(table).validate_python(content)
    except ValidationError as error:
        lines = [f"  {line}" for line in fault_lines(error, kind, content, place)]
        raise ConfigError("{file}:\n{faults}", file=where, faults="\n".join(lines)) from None


def check_options(
    what: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    given: Collection[str] = (),
    also: Mapping[str, Any] | None = None,
    table: Any = None,
) -> dict[str, Any]:
    """Return ``options`` as arguments of ``function``: names known, none missing, types as annotated.

    Args:
        what: the table's name in messages, e.g. ``data``.
        function: a reader, a model class or a method's builder.
        options: the table's further keys.
        given: arguments that fedkeep fills in itself.
        also: types of further keys that are known, e.g. those of an argument that is put together of them.
        table: the class of the keys that the table has whatever the function is.

    Raises:
        ConfigError: names the key, what was wanted and what was got.
    """
    parameters, hints = inspect.signature(function).parameters, accepted(function)
    known = [n for n in (*hints, *(also or {})) if n not in given]
    hints = {**hints, **(also or {})}
    checked = {}
    for key, value in options.items():
        if key not in known:
            elsewhere = _deeper(key, table, what)
            whose = function.__name__.removeprefix("raw_")
            raise ConfigError(
                "{what}.{key}: {why}",
                what=what,
                key=key[:80],
                why=_unknown(key, [*known, *_fields(table)], elsewhere, what, whose),
            )
        checked[key] = _checked(f"{what}.{key}", hints.get(key, Any), value)
    empty = inspect.Parameter.empty
    needed = [n for n in known if n in parameters and parameters[n].default is empty and n not in options]
    if needed:
        raise ConfigError("{what}: missing {needed}.", what=what, needed=", ".join(needed))
    return checked


def _checked(place: str, wanted: Any, value: Any) -> Any:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(wanted, config=STRICT)
    except Exception:  # noqa: BLE001 - an annotation that pydantic doesn't know (a stranger's module)
        return value
    try:
        return _validated(adapter, value)
    except ValidationError as error:
        (first, *_) = fault_lines(error, wanted, value, place)
        if not isinstance(value, list | Mapping) and _fits(adapter, [value]):
            raise ConfigError("{fault} Write a list: [{got!r}].", fault=first, got=value) from error
        raise ConfigError(first) from error


def _validated(adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError:
        if not isinstance(value, list | dict):
            raise
    return adapter.validate_json(json.dumps(value, default=repr))


def _fits(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        _validated(adapter, value)
    except ValidationError:
        return False
    return True


WANTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "a text",
    "path": "a path as text",
    "tuple": "a list",
    "list": "a list",
    "sequence": "a list",
    "dict": "a table",
    "mapping": "a table",
    "model": "a table",
    "is_instance_of": "a {class}",
    "dataclass": "a table",
    "literal": "{expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "string_pattern_mismatch": "your own 'package.module:name'",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}
"""What was wanted, by the kind of a fault in pydantic's words, or its first part."""
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


@dataclass(frozen=True)
class _Fault:
    """One fault of a table.

    Attributes:
        place: keys and places in lists, from the outermost.
        said: what is wrong.
        wanted: what was wanted instead of the value there; empty where that is not it.
        tried: whether it is one of several types that a value might have been of.
    """

    place: tuple[str, ...]
    said: str = ""
    wanted: str = ""
    got: Any = None
    tried: bool = False


def fault_lines(error: ValidationError, kind: Any, content: Any, place: str = "") -> list[str]:
    """Return a line for each fault: its place, what was wanted, and what was got or a suggestion.

    Args:
        error: what pydantic found.
        kind: what the content was to make: a class, or another type.
        content: what was checked.
        place: the content's own, e.g. of a table within a file.
    """
    found = [_fault(one, kind, content, place) for one in error.errors(include_url=False)]
    lines: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for one in found:
        deeper = (f for f in found if f.tried and len(f.place) > len(one.place))
        if one.tried and any(f.place[: len(one.place)] == one.place for f in deeper):
            continue  # another of the types fits better
        got = "" if not one.wanted else f"; got {_value(one.got)}."
        wanted = lines.setdefault((one.place, one.said or got), [])
        if one.wanted and one.wanted not in wanted:
            wanted.append(one.wanted)
    return [
        _line(
            ".".join(filter(None, (place, *where))), f"wanted {' or '.join(wanted)}{text}" if wanted else text
        )
        for (where, text), wanted in lines.items()
    ]


def _line(place: str, text: str) -> str:
    place = place if len(place) <= 80 else f"{place[:80]} …"
    if text.startswith("."):  # of a field, which the text names
        return f"{place}{text}" if place else text[1:]
    if place and text.startswith(f"{place}."):
        return text
    return f"{place or 'configuration'}: {text}"


def _fault(error: Any, kind: Any, content: Any, outer: str) -> _Fault:
    what = error["type"]
    place, got, tried = _place(error["loc"], content, what in (*UNKNOWN, "missing"))
    if what in UNKNOWN:
        known, deeper = _known(place[:-1], kind), _deeper(place[-1], kind)
        table = ".".join(filter(None, (outer, *place[:-1])))
        return _Fault(place, _unknown(place[-1], known, deeper, table))
    if what == "missing":
        return _Fault(place, "missing.")
    if what == "own_check":
        names, text = error["ctx"]["names"], error["msg"]
        first = re.split(r"\W", text, maxsplit=1)[0]
        return _Fault(place, f".{text}" if first in names else text)
    if what == "value_error":
        return _Fault(place, f"{error['msg'].removeprefix('Value error, ')}.")
    words = WANTED.get(what) or WANTED.get(what.partition("_")[0])
    if words is None:
        wanted = re.sub("^Input should be ", "", error["msg"])
    else:
        numbers = {
            n: int(v) if isinstance(v, float) and v == int(v) else v for n, v in error.get("ctx", {}).items()
        }
        wanted = words.format(**numbers)
    return _Fault(place, wanted=wanted, got=got, tried=tried)


def _place(location: Sequence[Any], content: Any, named: bool) -> tuple[tuple[str, ...], Any, bool]:
    """Return keys and places in lists of a fault, what stands there, and whether it is of one of several types.

    Pydantic names these types on the way, and counts pairs where a table stands for them.

    Args:
        location: pydantic's.
        content: what was checked.
        named: whether the last part is a key, though nothing may stand there.
    """
    place: list[str] = []
    tried, here = False, content
    parts: Iterator[tuple[int, Any]] = enumerate(location, 1)
    for number, part in parts:
        if isinstance(here, Mapping) and part in here:
            here = here[part]
        elif isinstance(here, Mapping) and isinstance(part, int) and part < len(here):
            part, here = list(here.items())[part]
            next(parts, None)  # of the pair's two
        elif isinstance(here, list | tuple) and isinstance(part, int) and part < len(here):
            here = here[part]
        elif not (named and number == len(location)):
            tried = True
            continue
        place.append(str(part))
    return tuple(place), here, tried


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return type(value).__name__ if "\n" in repr(value) else shown(value)


def _unknown(key: str, known: Sequence[str], elsewhere: Sequence[str], table: str, whose: str = "") -> str:
    """Return what to say of an unknown key: the one that is meant, here or by its full name in a table elsewhere, or all."""
    if elsewhere:
        first, *more = elsewhere
        also = f" (Of that name are also {', '.join(more)}.)" if more else ""
        return f"unknown key. Did you mean {first}?{also}"
    if meant := near_name(key[:40], known):
        return f"unknown key. Did you mean {table and f'{table}.'}{meant}?"
    if not known:
        return "unknown key. It takes no options."
    file = " For a table of yours: fedkeep start FILE." * ((table, key) == ("data", "path"))
    return f"unknown key. {f'The {table} {whose!r} takes' if whose else 'Known here are'} {', '.join(known)}.{file}"


def _deeper(key: str, kind: Any, place: str = "") -> list[str]:
    """Return the full names of keys of this name, or of its meaning, in the tables of a class, and in theirs."""
    key = MEANT.get(key, key)
    found = [key] * (not place and key in _fields(kind))
    for name, inner in _fields(kind).items():
        here = f"{place}.{name}" if place else name
        found += [f"{here}.{key}"] * (key in _fields(inner)) + _deeper(key, inner, here)
    return sorted(found, key=lambda name: name.count("."))


def _known(place: Sequence[str], kind: Any) -> list[str]:
    """Return the keys of the table at a place of a class."""
    for part in place:
        kind = _fields(kind).get(part)
    return list(_fields(kind))


def _fields(kind: Any) -> dict[str, Any]:
    """Return the keys of the table that makes a value of a type, each with its type; none where no table does."""
    if get_origin(kind) is Annotated:
        inner, *marks = get_args(kind)
        return next((mark for mark in marks if isinstance(mark, Table)), Table()).known(_fields(inner))
    if get_origin(kind) in (Union, UnionType):
        return next(filter(None, map(_fields, get_args(kind))), {})
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: one.rebuild_annotation() for name, one in kind.model_fields.items()}
    return {f.name: get_type_hints(kind)[f.name] for f in fields(kind)} if is_dataclass(kind) else {}
