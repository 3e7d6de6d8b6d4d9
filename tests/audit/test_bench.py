"""The audit's store: it has all that a device asks of a store, and no file."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import fedkeep
from fedkeep.audit.bench import States
from fedkeep.remote import serving

AFTER_A_FILE = {"begin_older", "adapted_values"}
"""Asked of what a file gave before: a version that is missing there, and what somebody adapted to."""


def asked(path: Path) -> set[str]:
    """Return what code asks of anything that is called ``store``."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "store"
    }


def reads_a_file(name: str, above: tuple[str, ...] = ()) -> bool:
    """Tell whether an attribute of the audit's store uses a file, by itself or by another one."""
    found = inspect.getattr_static(States, name, None)
    code = getattr(getattr(found, "fget", found), "__code__", None)
    if code is None or name in above:
        return False
    return "_file" in code.co_names or any(reads_a_file(each, (*above, name)) for each in code.co_names)


def test_what_a_device_asks_of_a_store_the_audits_answers_without_a_file() -> None:
    engines = Path(inspect.getfile(fedkeep)).parent / "engines"
    wanted = asked(Path(inspect.getfile(serving))).union(*map(asked, engines.rglob("*.py")))
    assert {"stage_adapted", "name", "read", "flush", *AFTER_A_FILE} <= wanted
    values = {"default", "ids"}  # attributes of every store, given when it is made
    assert not {name for name in wanted - values if not hasattr(States, name)}
    assert {name for name in wanted if reads_a_file(name)} == AFTER_A_FILE
    assert reads_a_file("file")
