"""How many small faults the tests notice: a seeded sample of mutants, run against the tests of their room.

    python -m benchmarks.mutants CHECKOUT --map              # which tests run which lines; once, takes as long as the tests
    python -m benchmarks.mutants CHECKOUT --out FILE [--count 300] [--seed 0]

A mutant is a copy of CHECKOUT's library with one place changed: a comparison, an operator, a whole number, a truth value, a
condition turned round, a statement left out. None is in a string or a docstring. Each runs against tests of its room and the
conformance table of the methods, which stop at the first failure: of the tests that run the changed line, the ``SMALLEST``
that run the fewest lines, and ``OTHERS`` drawn from the rest; of a line that no test runs in its own process (module level, a
worker's), ``SMALLEST`` + ``OTHERS`` drawn from all. It is killed if a test fails that passes without the change, computes
longer than ``LIMIT`` or takes longer than ``WAIT``. FILE holds a line a mutant, as
those in ``results/mutants``, named by commit; a second call goes on where the first stopped. At the end the share of those
killed is printed, with its 95 % interval (Wilson), and who survived.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import coverage
import numpy as np
import pytest

ROOMS = ("core", "engines", "methods", "remote", "store", "split", "privacy", "links", "client", "server")
"""Rooms of either commit; a room that a checkout lacks has no mutants."""
BESIDE = {"remote": ["tests/flower"], "engines": ["tests/experiments/personalize"]}
"""Tests of a room that stand in another's folder, as what they set up is that room's."""
TABLE = ("tests/engines/test_conformance.py", "tests/methods/test_every_method.py", "tests/test_numerics.py")
LIMIT, WAIT = 120, 1200
"""Seconds that the tests of one mutant may compute, and may take with waiting: a busy machine kills no mutant."""
SMALLEST, OTHERS = 60, 40
MAP = ".coverage.mutants"
"""File in a checkout that says which test runs which line; made by ``--map``."""
LOADED = ("torch", "numpy", "scipy.stats", "flwr.app", "pydantic", "safetensors.torch")
"""What the process that tests are forked from has imported; nothing of the library."""

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


def tests_of(checkout: Path, room: str) -> list[str]:
    """Return the files and folders of tests that a room's mutants run against."""
    names = (f"tests/{room}", *BESIDE.get(room, ()), *TABLE)
    return [name for name in names if (checkout / name).exists()]


def draw_map(checkout: Path) -> None:
    """Run the tests of all rooms once, and keep which of them runs which line."""
    tests = sorted({name for room in ROOMS for name in tests_of(checkout, room)})
    settings = checkout / ".coveragerc.mutants"
    settings.write_text(f"[run]\nsource = fedkeep\ndata_file = {checkout / MAP}\n", encoding="utf-8")
    words = ["-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal", "--cov", "--cov-report="]
    words += [f"--cov-config={settings}", "--cov-context=test", *tests]
    subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=checkout, env=environment(checkout), check=False
    )
    settings.unlink()


def environment(checkout: Path) -> dict[str, str]:
    """Return the variables under which a checkout's own library is tested."""
    paths = [str(checkout / "src"), str(checkout / "papers" / "src"), str(checkout)]
    given = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {**given, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def named(context: str) -> str:
    """Return the test of a context, which also says in which part of the test."""
    return context.rsplit("|", 1)[0]


class Tests:
    """Which tests run which line, as ``--map`` found.

    Args:
        checkout: what was tested.
        seed: of the draws among those that run a line.
    """

    def __init__(self, checkout: Path, seed: int) -> None:
        self.checkout, self.seed = checkout, seed
        self.data = coverage.CoverageData(str(checkout / MAP))
        self.data.read()
        if not self.data.measured_contexts():
            raise SystemExit(f"{checkout / MAP} is missing or empty: run with --map first.")
        self.sizes: Counter[str] = Counter()
        self.lines: dict[str, dict[int, set[str]]] = {}
        for file in sorted(self.data.measured_files()):
            name = Path(file).relative_to(checkout).as_posix()
            by_line = self.data.contexts_by_lineno(file)
            self.lines[name] = {
                line: {context for context in found if context} for line, found in by_line.items()
            }
            self.sizes.update(named(c) for found in self.lines[name].values() for c in found)
        self.sound: set[str] = set()
        self.of_file: dict[str, list[str]] = {}
        for test in self.sizes:
            self.of_file.setdefault(test.split("::")[0], []).append(test)

    def of(self, file: str, line: int) -> list[str]:
        """Return the tests to run against a change of this line."""
        wanted = tests_of(self.checkout, Path(file).parts[2])
        contexts = self.lines.get(file, {}).get(line, set())
        found = {named(context) for context in contexts}
        for context in contexts:
            if context.endswith("|setup"):  # a fixture that later tests of the file may share
                found.update(self.of_file[named(context).split("::")[0]])
        here = [test for test in found if test.startswith(tuple(wanted))]
        ordered = sorted(here, key=lambda test: (self.sizes[test], test))
        if not ordered:
            rest = sorted(test for test in self.sizes if test.startswith(tuple(wanted)))
            order = np.random.default_rng([self.seed, line]).permutation(len(rest))[: SMALLEST + OTHERS]
            return [rest[i] for i in order]
        rest = ordered[SMALLEST:]
        order = np.random.default_rng([self.seed, line]).permutation(len(rest))[:OTHERS]
        return ordered[:SMALLEST] + [rest[i] for i in order]


def tested(copy: Path, output: Path, tests: Sequence[str]) -> NoReturn:
    """Run tests in a copy, and end this process with pytest's exit code."""
    os.setsid()
    variables = environment(copy)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(copy)
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.modules["__main__"] = ModuleType("__main__")
    others = [path for path in sys.path if path and not (Path(path) / "benchmarks").exists()]
    sys.path[:] = [*variables["PYTHONPATH"].split(os.pathsep), *others]
    sys.dont_write_bytecode = False
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-rfE", *tests])
    sys.stdout.flush()
    os._exit(code)


def computed(process: int) -> float:
    """Return the seconds that a process has computed, with its own processes that have ended (Linux)."""
    fields = (
        Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    )
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run(copy: Path, tests: Sequence[str]) -> tuple[str | None, str]:
    """Run tests in a copy until one fails; return which failed, None if all passed, and pytest's last line.

    The process is a fork of this one, which has imported what no mutant changes.
    """
    output, until = copy / "output.txt", time.monotonic() + WAIT
    if (child := os.fork()) == 0:
        tested(copy, output, tests)
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.05)
        if time.monotonic() > until or computed(child) > LIMIT:
            os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        return "", f"ended by signal {-code}"
    told = output.read_text(encoding="utf-8", errors="replace")
    last = told.strip().rsplit("\n", 1)[-1]
    if code == pytest.ExitCode.OK:
        return None, last
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(told[-4000:])
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", told, re.MULTILINE)
    return (found[1] if found else ""), last


def copied(checkout: Path, folder: Path) -> Path:
    """Return a copy of a checkout in a folder, for one mutant after the other: what Python compiled there stays."""
    left_out = shutil.ignore_patterns(".git", ".venv", "results", "docs", "site", MAP)
    return shutil.copytree(checkout, folder, ignore=left_out)


def tried(tests: Tests, copy: Path, file: str, number: int) -> dict[str, Any]:
    """Write one mutant into a copy, run its tests there, put the copy back, and return what happened."""
    text = (copy / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    node, kind = list(places(tree))[number]
    line = node.lineno  # type: ignore[attr-defined]
    changed(node, kind)
    chosen = tests.of(file, line)
    place = copy / file
    times = place.stat()
    while True:
        place.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n", encoding="utf-8")
        by, why = run(copy, chosen)
        place.write_text(text, encoding="utf-8")
        os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))
        if by not in chosen or by in tests.sound or run(copy, [by])[0] is None:
            break
        chosen = [test for test in chosen if test != by]  # fails in a copy whatever is changed
    if by is not None and by in chosen:
        tests.sound.add(by)
    return {
        "file": file,
        "place": number,
        "line": line,
        "kind": kind,
        "text": text.splitlines()[line - 1].strip(),
        "tests": len(chosen),
        "killed": by is not None,
        "by": by,
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
    parser.add_argument("--map", action="store_true", help="find which tests run which lines, and end")
    parser.add_argument("--out", type=Path, help="a line of JSON a mutant; is continued")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    checkout = given.checkout.resolve()
    if given.map:
        draw_map(checkout)
        return
    if given.out is None:
        parser.error("--out FILE is wanted.")
    for name in LOADED:
        importlib.import_module(name)
    tests = Tests(checkout, given.seed)
    lines = given.out.read_text(encoding="utf-8").splitlines() if given.out.exists() else []
    found = [json.loads(line) for line in lines]
    known = {(row["file"], row["place"]) for row in found}
    left = [one for one in sample(checkout, given.count, given.seed) if one not in known]
    with (
        given.out.open("a", encoding="utf-8") as file,
        tempfile.TemporaryDirectory(prefix="fedkeep-mutants-") as folder,
    ):
        copy = copied(checkout, Path(folder) / "copy")
        for place, number in left:
            found.append(tried(tests, copy, place, number))
            file.write(json.dumps(found[-1]) + "\n")
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
