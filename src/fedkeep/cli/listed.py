"""What there is to choose from, read from the text of modules: a list needs no torch, and takes a second less."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from fedkeep.experiments.plugins import Offered, points

Place = tuple[str, ast.AST]
"""A module's name, and what stands there."""


def about_own(module: str, table: str, *, of_module: bool = False) -> dict[str, str]:
    """Return what the entries of a module's table are for, by name: the first paragraph of their docstrings.

    Args:
        module, table: where the table is, e.g. ``fedkeep.methods`` and ``METHODS``.
        of_module: what the module is for, in which each entry is defined.
    """
    where, node = _defined(module, table)
    if isinstance(node, ast.DictComp) and isinstance(node.generators[0].iter, ast.Tuple):
        each = {ast.unparse(entry): entry for entry in node.generators[0].iter.elts}
    else:
        assert isinstance(node, ast.Dict)
        each = {
            ast.literal_eval(key): entry for key, entry in zip(node.keys, node.values, strict=True) if key
        }
    return {name: _about((where, entry), of_module) for name, entry in each.items()}


def about_added(group: str, own: Mapping[str, object], *, of_module: bool = False) -> dict[str, str]:
    """Return the same of what installed packages add to a group; one whose text does not say it is imported.

    Raises:
        ConfigError: two have the same name, or one cannot be imported.
    """
    found = {}
    for name, point in sorted(points(group, own).items()):
        try:
            found[name] = _about(_defined(point.module, point.attr), of_module)
        except LookupError:
            found[name] = _of_object(Offered(group, object, {})[name], of_module)
    return found


def first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring as one line without marks."""
    first = inspect.cleandoc(text or "").split("\n\n")[0].replace("``", "").replace("\n", " ")
    return re.sub(r":\w+:`([^`]*)`", r"\1", first)


def _of_object(thing: object, of_module: bool) -> str:
    if isinstance(text := getattr(thing, "about", None), str):
        return text
    thing = getattr(thing, "read", thing)
    return first_paragraph(inspect.getdoc(inspect.getmodule(thing) if of_module else thing))


def _about(place: Place, of_module: bool) -> str:
    """Return what an expression's value is for.

    A call (``Reproduction(about="...")``, ``Reader(read)``) says it itself, or is for what its first argument is.

    Raises:
        LookupError: the text does not say.
    """
    module, node = _value(*place)
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "about":
                return str(ast.literal_eval(keyword.value))
        if not node.args:
            raise LookupError(ast.unparse(node))
        return _about((module, node.args[0]), of_module)
    if of_module:
        node = _tree(module)
    if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
        raise LookupError(ast.unparse(node))
    return first_paragraph(ast.get_docstring(node))


def _value(module: str, node: ast.AST) -> Place:
    """Return what a name, or a name's attribute, stands for."""
    if isinstance(node, ast.Name):
        return _value(*_defined(module, node.id))
    if isinstance(node, ast.Attribute):
        owner, inside = _value(module, node.value)
        if isinstance(inside, ast.Module):
            return _value(*_defined(owner, node.attr))
        return owner, next(
            each for each in ast.walk(inside) if isinstance(each, ast.FunctionDef) and each.name == node.attr
        )
    return module, node


def _defined(module: str, name: str) -> Place:
    """Return where a module's name is defined: there, where the module imports it from, or as a module below it."""
    for node in _tree(module).body:
        match node:
            case ast.FunctionDef() | ast.ClassDef() if node.name == name:
                return module, node
            case ast.Assign(targets=[ast.Name(id=named)], value=value) if named == name:
                return module, value
            case ast.AnnAssign(target=ast.Name(id=named), value=ast.AST() as value) if named == name:
                return module, value
            case ast.ImportFrom(module=str(source), level=0):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return _defined(source, alias.name)
    return f"{module}.{name}", _tree(f"{module}.{name}")


@cache
def _tree(module: str) -> ast.Module:
    spec = _spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise LookupError(module)
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


@cache
def _spec(module: str) -> ModuleSpec | None:
    """Return where a module is; no package above it is imported."""
    package, _, name = module.rpartition(".")
    if not package:
        return importlib.util.find_spec(name)
    above = _spec(package)
    return None if above is None else PathFinder.find_spec(module, above.submodule_search_locations)
