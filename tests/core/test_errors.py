"""The tree of errors is the one that the code has."""

from __future__ import annotations

import ast
import copy
import functools
import math
import re
import string
from pathlib import Path
from typing import NamedTuple

import fedkeep
from fedkeep.core import errors
from fedkeep.core.errors import (
    ConfigError,
    DataError,
    Spot,
    check_choice,
    check_range,
    check_whole,
    first_line,
    near_path,
    some_of,
)
from tests.refusals import raises


class Code(NamedTuple):
    """What fedkeep's files define and call: each class's first base, classes with an ``__init__``, calls with keywords, and
    constants that are texts.
    """

    bases: dict[str, str]
    own: set[str]
    calls: list[tuple[Path, str, ast.Call]]
    texts: dict[str, str]


@functools.cache
def code() -> Code:
    found = Code({}, set(), [], {})
    for path in Path(fedkeep.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef():
                    if node.bases:
                        found.bases[node.name] = ast.unparse(node.bases[0]).rpartition(".")[2]
                    if any(getattr(inner, "name", "") == "__init__" for inner in node.body):
                        found.own.add(node.name)
                case ast.Call(func=ast.Name(id=name), keywords=[_, *_]) if re.search(
                    "[Ee]rror$|^(reading|kind|refused_upload|malformed|_refused_result|_undescribed)$", name
                ):
                    found.calls.append((path, name, node))
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                    found.texts[name] = text
    return found


def in_the_code() -> dict[str, str]:
    """Return the parent of every error whose root is ``FedkeepError``."""
    found, level, every = {}, {"FedkeepError"}, code().bases
    while level:
        children = {name: base for name, base in every.items() if base in level}
        found |= children
        level = set(children)
    return found


def in_the_docstring() -> dict[str, str]:
    """Return each error's parent as the tree at the top of ``errors`` has it."""
    found, path = {}, list[str]()
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+Error)\b", line):
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            if depth:
                found[match[2]] = path[depth - 1]
    return found


def test_the_tree_names_every_error() -> None:
    assert in_the_docstring() == in_the_code()


def test_an_error_says_its_facts_and_carries_them() -> None:
    place = Spot("t.csv", 4)
    error = DataError("{place}: got {got!r}, {n:,} times.", place=place, got="{x}" * 40, n=1000)
    assert str(error) == f"t.csv, line 4: got '{'{x}' * 26}{{ …, 1,000 times."
    again = copy.copy(error)  # as pickle does on the way from a worker
    assert (type(again), str(again), again.facts) == (DataError, str(error), error.facts)
    assert (error.facts["place"], error.facts["n"]) == (place, 1000)
    assert str(DataError("{as it is}")) == "{as it is}"


def test_checks_of_choices_and_whole_numbers_name_what_was_got() -> None:
    with raises(DataError, got="tain", choices="'a', 'b' or 'train'", said="Did you mean 'train'?"):
        check_choice("Wanted", "tain", ("a", "b", "train"), DataError)
    with raises(ConfigError, name="k", got=2.5):
        check_whole({"n": 1, "k": 2.5})


def test_a_number_out_of_an_interval_is_told_what_it_lacks() -> None:
    for interval, got, wanted in (
        ("[0, 1)", 1.0, "in [0, 1)"),
        ("[0, inf)", -1.0, "at least 0"),
        ("(0, inf)", 0.0, "positive"),
        ("[0, inf)", math.inf, "finite"),
    ):
        with raises(ConfigError, name="share", got=got, wanted=wanted):
            check_range(interval, share=got)
    check_range("[0, inf]", share=math.inf)


def test_the_first_line_of_an_error_or_its_kind() -> None:
    assert [first_line(error, 3) for error in (OSError("full\nmore"), KeyError())] == ["ful", "Key"]


def test_a_path_that_is_not_there_is_told_a_near_one(tmp_path: Path) -> None:
    (tmp_path / "trips.csv").touch()
    assert f"Did you mean {str(tmp_path / 'trips.csv')!r}?" in near_path(tmp_path / "trip.csv")
    assert near_path(tmp_path / "other") == ""
    assert f"no folder {tmp_path / 'none'}" in near_path(tmp_path / "none" / "trips.csv")
    assert near_path(tmp_path / "trips.csv" / "inside") == ""  # a file is no folder
    assert some_of(iter("abcd"), 2) == "'a', 'b'"


def _said(node: ast.AST) -> str:
    """Return what a constant says, or the name of one."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return code().texts.get(name, "")
        case _:
            return ""


def test_a_sentence_with_facts_names_each_once() -> None:
    """It is a plain text with all its names: else an error would fail on its way, or format a user's braces."""
    of_others = {"refused_upload", "malformed", "_refused_result", "_undescribed"}
    errors_with_facts = in_the_code().keys() - code().own | {"error", "reading", "kind"} | of_others
    found = 0
    for path, name, call in code().calls:
        if name in errors_with_facts:
            text = "".join(map(_said, (n for arg in call.args for n in ast.walk(arg))))
            named = {
                re.split(r"[.\[]", field)[0] for _, field, _, _ in string.Formatter().parse(text) if field
            }
            given = {keyword.arg for keyword in call.keywords} | ({"why"} if name == "reading" else set())
            assert named <= given or None in given, (path, call.lineno, named - given)
            found += 1
    assert found > 1
