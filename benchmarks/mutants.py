"""How many small faults the tests notice: a seeded sample of mutants, run against the tests of their room.

    python -m benchmarks.mutants CHECKOUT --out FILE [--count 300] [--seed 0] [--jobs 1]

A mutant is a copy of CHECKOUT's library with one place changed: a comparison, an operator, a whole number, a truth value, a
condition turned round, a statement left out. None is in a string or a docstring. Each runs against the tests of its room and the
conformance table of the methods, which stop at the first failure. It is killed if a test fails or they take too long. FILE holds
a line a mutant; a second call goes on where the first stopped. At the end the share of those killed is printed, with its
95 % interval (Wilson), and who survived.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOMS = ("core", "engines", "methods", "remote", "store", "split", "privacy", "links", "client", "server")
"""Rooms of either commit; a room that a checkout lacks has no mutants."""
TABLE = ("tests/engines/test_conformance.py", "tests/methods/test_every_method.py", "tests/test_numerics.py")
LIMIT = 600.0
"""Seconds that the tests of one mutant may take."""

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each node that can be changed, and what the change is called; annotations and type checks are left out."""
    rest: list[ast.AST] = [tree]
    while rest:
        node = rest.pop()
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            yield node, "comparison"
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
            yield node, "operator"
        elif isinstance(node, ast.BoolOp):
            yield node, "and/or"
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, "truth"
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, "number"
        elif isinstance(node, ast.If | ast.While | ast.IfExp) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield node, "condition"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "call left out"
        elif isinstance(node, ast.AugAssign):
            yield node, "update left out"
        left_out = {"annotation", "returns", "type_params", "decorator_list"}
        for name, value in ast.iter_fields(node):
            if name in left_out:
                continue
            rest.extend(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, ast.AST))


def changed(node: ast.AST, kind: str) -> None:
    """Change a node in its tree."""
    if isinstance(node, ast.Compare):
        node.ops[0] = COMPARED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp):
        node.op = COMPUTED[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if kind == "truth" else node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(value=None)
    elif isinstance(node, ast.AugAssign):
        node.op, node.value = ast.Add(), ast.Constant(value=0)


def sample(checkout: Path, count: int, seed: int) -> list[tuple[str, int]]:
    """Return a seeded sample of (file, number of the place in it), equally likely over all places."""
    source = checkout / "src" / "fedkeep"
    found = [
        (path.relative_to(checkout).as_posix(), number)
        for room in ROOMS
        for path in sorted((source / room).rglob("*.py"))
        for number, _ in enumerate(places(ast.parse(path.read_text(encoding="utf-8"))))
    ]
    drawn = np.random.default_rng(seed).permutation(len(found))[:count]
    return [found[i] for i in drawn]


def tried(checkout: Path, file: str, number: int) -> dict[str, Any]:
    """Write one mutant into a copy of the checkout, run its tests there, and return what happened."""
    text = (checkout / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    node, kind = list(places(tree))[number]
    line = node.lineno  # type: ignore[attr-defined]
    changed(node, kind)
    room = Path(file).parts[2]
    with tempfile.TemporaryDirectory(prefix="fedkeep-mutant-") as folder:
        copy = Path(folder) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv", "results", "__pycache__", "docs", "site")
        shutil.copytree(checkout, copy, ignore=left_out)
        (copy / file).write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n", encoding="utf-8")
        paths = [str(copy / "src"), str(copy / "papers" / "src"), str(copy)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        tests = [name for name in (f"tests/{room}", *TABLE) if (copy / name).exists()]
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                words, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT
            )
            killed, why = done.returncode != 0, done.stdout.strip().rsplit("\n", 1)[-1]
        except subprocess.TimeoutExpired:
            killed, why = True, "timeout"
    changed_line = text.splitlines()[line - 1].strip()
    return {
        "file": file,
        "place": number,
        "line": line,
        "kind": kind,
        "text": changed_line,
        "killed": killed,
        "why": why,
    }


def interval(killed: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, after Wilson."""
    z, share = 1.96, killed / count
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return centre - half, centre + half


def main(words: Sequence[str] | None = None) -> None:
    """Try the mutants that are left, and tell how many were killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON a mutant; is continued")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args(words)
    checkout = given.checkout.resolve()
    lines = given.out.read_text(encoding="utf-8").splitlines() if given.out.exists() else []
    found = [json.loads(line) for line in lines]
    known = {(row["file"], row["place"]) for row in found}
    left = [one for one in sample(checkout, given.count, given.seed) if one not in known]
    with given.out.open("a", encoding="utf-8") as file, ThreadPoolExecutor(given.jobs) as pool:
        for row in pool.map(lambda one: tried(checkout, *one), left):
            found.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    killed = sum(row["killed"] for row in found)
    low, high = interval(killed, len(found))
    for row in found:
        if not row["killed"]:
            print(f"survived: {row['file']}:{row['line']} ({row['kind']}) {row['text']}")
    print(
        f"{killed} of {len(found)} killed: {100 * killed / len(found):.1f} % ({100 * low:.1f} to {100 * high:.1f})"
    )


if __name__ == "__main__":
    main()
