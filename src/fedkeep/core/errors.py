"""Every error that fedkeep raises on purpose.

    FedkeepError
    ├── ConfigError          a setting, a configuration file or a call is wrong
    │   └── RuleError        a rule of preparation is for none of the columns
    ├── DataError            a data file or a data set is missing, malformed or out of range
    │   └── LabelError       a label is no number of a class
    ├── SplitError           a split into federated and private parameters is unsound
    ├── MethodError          a method and a model don't fit each other
    ├── RunError             a run directory is missing, damaged, in use or from another configuration
    │   ├── EndedError       a server app of Flower ended without a word
    │   └── GoneError        a job ended without a word
    │       └── OutOfTimeError  its time was over
    ├── StoreError           private state cannot be read or written
    │   ├── BusyError        another process is at work on it; it will be free again
    │   └── MissingError     it lacks the version that the server names
    ├── UploadError          an upload was refused: names, shapes or values are wrong
    │   └── FailedError      a function of the method, or the model, failed on a device
    ├── NonFiniteError       a loss, gradient or parameter became NaN or infinite
    ├── LostError            a client did not answer
    │   ├── LateError        a client is there, and its round was closed before it answered
    │   └── DroppedError     a client was dropped by the run's owner
    ├── RoundError           too few clients took part in a round
    ├── BudgetError          a round would cost more privacy than is left
    ├── SecureSumError       a secure sum cannot be made, or would reveal more than the sum
    │   └── WrongShareError  shares of a secret are not what should have been dealt
    ├── RefusalError         a node does not serve a message
    └── WorkerError          a process that trains clients could not start, or died

A message says what was wanted, what was got, and what to do. The names and numbers that an error is about are ``facts``:
they fill the sentence, and whoever catches the error reads them there.

    raise DataError("{place}: wanted a number in column {column!r}; got {got!r}.", place=place, column="age", got="x")

A sentence with facts is a plain text, never an f-string: each fact is named once, and braces in a value stay as they are.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import shlex
import string
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

MOST_FILES = 10_000
"""How many files of a folder are looked through for a name like the one that was wanted."""
INSIDE = ("fedkeep", "torch", "contextlib")
"""Packages whose functions stand between a warning and whoever asked for what it is about."""


def warn(text: str) -> None:
    """Warn of something, at the line outside fedkeep that led to it."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


class FedkeepError(Exception):
    """The root of all errors that fedkeep raises on purpose; the command line turns it into exit code 2.

    Args:
        text: what to say. Where facts are given, a sentence with their names in braces; ``{got!r}`` shows a value as
            `shown` does.
        facts: what the error is about, by name: place, column, client, wanted, got, …

    Attributes:
        facts: the same.
    """

    def __init__(self, text: str, /, **facts: Any) -> None:
        super().__init__(_Sentence().format(text, **facts) if facts else text)
        self.facts = facts


class _Sentence(string.Formatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        return shown(value) if conversion == "r" else super().convert_field(value, conversion)


@dataclass(frozen=True)
class Spot:
    """Where something stands: a file, or what it was read from, and a line or a row.

    Attributes:
        file: its path, or the name of a data set.
        number: of the line, from 1; or of the row, from 0.
        unit: what is counted.
    """

    file: object
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


@dataclass(frozen=True)
class Inspection:
    """What ``fedkeep doctor`` and ``fedkeep device check`` looked at.

    Attributes:
        what: was looked at.
        found: what was found, in words.
        good: whether it is good; None: a choice.
        do: what to do about it.
    """

    what: str
    found: str
    good: bool | None = True
    do: str = ""


class ConfigError(FedkeepError):
    """A setting, a configuration file or a call is wrong."""


class DataError(FedkeepError):
    """A data file or a data set is missing, malformed or out of range."""


class SplitError(FedkeepError):
    """A split into federated and private parameters is unsound."""


class MethodError(FedkeepError):
    """A method and a model don't fit each other."""


class RunError(FedkeepError):
    """A run directory is missing, damaged, in use or from another configuration."""


class StoreError(FedkeepError):
    """Private state cannot be read or written."""


class BusyError(StoreError):
    """Another process is at work on private state; it will be free again."""


class UploadError(FedkeepError):
    """An upload was refused: its names, shapes or values are wrong."""


def refused_upload(client: str, fault: str, /, **facts: Any) -> UploadError:
    """Return the error that refuses a client's upload; ``fault`` is a sentence with the facts' names in braces."""
    return UploadError("The upload of client {client!r} was refused: " + fault, client=client, **facts)


class FailedError(UploadError):
    """A function of the method, or the model, failed on a device; asked again it fails again."""


class NonFiniteError(FedkeepError):
    """A loss, gradient or parameter became NaN or infinite."""


class LostError(FedkeepError):
    """A client did not answer."""


class LateError(LostError):
    """A client is there, and had not answered when its round was closed."""


class DroppedError(LostError):
    """A client was dropped by the run's owner."""


class RoundError(FedkeepError):
    """Too few clients took part in a round, so that it does not count.

    Attributes:
        failed: whether that is as functions of the method or the model failed, and nothing else is to blame.
    """

    def __init__(self, text: str, /, *, failed: bool = False, **facts: Any) -> None:
        super().__init__(text, **facts)
        self.failed = failed


class BudgetError(FedkeepError):
    """A round would cost more privacy than is left."""


class SecureSumError(FedkeepError):
    """A secure sum cannot be made, or would reveal more than the sum."""


class WorkerError(FedkeepError):
    """A process that trains clients could not start, or died."""


def check_choice(
    text: str, got: object, known: Collection[object], error: type[FedkeepError] = ConfigError
) -> None:
    """Raise ``error`` unless ``got`` is one of ``known``: "``text`` 'a', 'b' or 'c'; got 'd'. Did you mean ...?"."""
    if got not in known:
        *names, last = map(repr, known)
        raise error(
            "{what} {choices}; got {got!r}.{near}",
            what=text,
            choices=f"{', '.join(names)} or {last}",
            got=got,
            near=did_you_mean(str(got), map(str, known)),
        )


def check_whole(given: Mapping[str, object], error: type[FedkeepError] = ConfigError) -> None:
    """Raise ``error`` unless every value is a whole number; keys are the values' names."""
    for name, value in given.items():
        if not isinstance(value, Integral):
            raise error("{name} must be a whole number; got {got!r}.", name=name, got=value)


def check_range(interval: str, error: type[FedkeepError] = ConfigError, /, **given: Any) -> None:
    """Raise ``error`` unless every number lies in an interval, written "[0, 1)" or "(0, inf)"; None stands for no number."""
    low, high = map(float, interval[1:-1].split(","))
    for name, value in given.items():
        above = value is None or value > low or (interval[0] == "[" and value == low)
        if not above or not (value is None or value < high or (interval[-1] == "]" and value == high)):
            wanted = f"in {interval}"
            if high == math.inf:
                least = f"at least {low:g}" if interval[0] == "[" else "positive"
                wanted = "finite" if value == high else least
            raise error("{name} must be {wanted}; got {got!r}.", name=name, wanted=wanted, got=value)


def shown(value: object, most: int = 80) -> str:
    """Return a value as a message shows it: at most so many characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no integer of more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]} …"


@contextmanager
def raising(
    error: type[FedkeepError], text: str, /, *kinds: type[BaseException], **facts: Any
) -> Iterator[None]:
    """Raise ``error`` in place of one of ``kinds`` that comes up inside.

    Args:
        error: the kind of error to raise.
        text: as of `FedkeepError`, with ``{why}`` for what the other one says.
        kinds: of errors, of Python, the system or a package.
        facts: as of `FedkeepError`.
    """
    try:
        yield
    except kinds as other:
        raise error(text, why=why_of(other), **facts) from other


def why_of(error: BaseException) -> str:
    """Return what an error says, for the middle of a sentence: fedkeep's own whole, of others the first line."""
    if isinstance(error, FedkeepError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, UnicodeDecodeError):
        return f"{error.reason} at byte {error.start}"
    return first_line(error).rstrip(". ")


@contextmanager
def reading(text: str, /, *passed: type[Exception], **facts: Any) -> Iterator[None]:
    """Raise DataError where anything else goes wrong inside: readers of files raise whatever their parsers raise.

    Args:
        text: as of `FedkeepError`, with ``{why}`` for what went wrong.
        passed: errors that go on as they are, beside fedkeep's own.
        facts: as of `FedkeepError`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (FedkeepError, *passed)):
            raise
        raise DataError(text, why=why_of(error), **facts) from error


def first_line(error: BaseException, most: int = 200) -> str:
    """Return an error's first line, cut at ``most`` characters, or its kind where it has no text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:most]


MEANT = {
    "client": "user",
    "clients": "users",
    "target": "label",
    "y": "label",
    "file": "path",
    "columns": "features",
    "lr": "learning_rate",
}
"""Words of others, and ours."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the choice of ``word``'s meaning, else the nearest, or an empty string."""
    meant = near_name(word, choices)
    return "" if meant is None else f" Did you mean {meant!r}?"


def near_name(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice of ``word``'s meaning, else the nearest; None where there is none."""
    known = list(choices)
    near = [m for m in known if m == MEANT.get(word)] or difflib.get_close_matches(word, known, 1, 0.6)
    return near[0] if near else None


def instead_of(word: str, known: Collection[str]) -> str:
    """Return what to write in place of a word that is not known: the one that was meant, or all that there are."""
    return did_you_mean(word, known) or f" There are {', '.join(known)}."


def some_of(names: Iterable[str], most: int = 3) -> str:
    """Return the first of some names, as a message shows them: ``'a', 'b', 'c'``."""
    return ", ".join(shown(name) for name in islice(names, most))


def near_path(path: Path) -> str:
    """Return what to say of a path that is not there: what its folder holds of nearly that name, or that there is no such
    folder; or an empty string.
    """
    try:
        names = [one.name for one in islice(path.parent.iterdir(), MOST_FILES)]
    except FileNotFoundError:
        return f" There is no folder {str(path.parent)[:300]} either."
    except OSError:
        return ""
    near = [
        name
        for name in difflib.get_close_matches(path.name, names, cutoff=0.6)
        if difflib.get_close_matches(
            path.stem, [Path(name).stem], cutoff=0.6
        )  # an ending alone makes nothing alike
    ]
    return f" Did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def visible(text: str) -> str:
    r"""Return a text with what doesn't print written out (``\x1b``, ``\u202e``), so that no file drives a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\u00a0" else ascii(c)[1:-1] for c in text)


@functools.cache
def installing(extra: str) -> str:
    """Return the command that installs an extra beside this fedkeep, for a shell."""
    try:
        origin = json.loads(distribution("fedkeep").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # it is on the path alone
        origin = {}
    if "dir_info" not in origin:
        return f"pip install 'fedkeep[{extra}]'"
    folder = url2pathname(urlsplit(origin["url"]).path)
    editable = "-e " if origin["dir_info"].get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{folder}[{extra}]')}"


@contextmanager
def needing(
    who: str, package: str, extra: str, kind: type[FedkeepError] = ConfigError, otherwise: str = ""
) -> Iterator[None]:
    """Say what to install where an import inside finds no package.

    Args:
        who: needs it.
        package: its name, for people.
        extra: of fedkeep, that brings it.
        kind: of the error.
        otherwise: what to do instead; empty, or a sentence with a space before it.
    """
    try:
        yield
    except ImportError as error:
        raise kind(
            "{who} needs {package}, which is not installed: {install}.{otherwise}",
            who=who,
            package=package,
            install=installing(extra),
            otherwise=otherwise,
        ) from error
