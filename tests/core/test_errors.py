"""The tree of errors is the one that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fedkeep
from fedkeep.core import errors


def classes() -> dict[str, str]:
    """Return the first base of every class in fedkeep's files that has one, by the class's name."""
    found = {}
    for path in Path(fedkeep.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.bases:
                found[node.name] = ast.unparse(node.bases[0]).rpartition(".")[2]
    return found


def in_the_code() -> dict[str, str]:
    """Return the parent of every error whose root is ``FedkeepError``."""
    found, level, every = {}, {"FedkeepError"}, classes()
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
