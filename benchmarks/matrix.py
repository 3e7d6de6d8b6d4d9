"""Claim: the fast tests pass with every Python and torch that fedkeep names, at the lowest and newest dependencies.

    python -m benchmarks.matrix FOLDER [--only 3.12] [--build +cpu] [--tests tests/core]

For each cell it makes a virtual environment in FOLDER with ``uv`` (which is to be on the path), in it a clone of the
commit that is checked out, resolves what fedkeep's extras and the papers' package ask for, installs it, runs the fast
tests, writes what it saw into ``results/matrix.json``, and removes the environment. ``lowest`` takes the lowest
allowed version of what fedkeep names itself, ``newest`` the newest of everything. A cell without Flower takes what
Flower's own pins would keep back. A cell that the file has for this commit and these tests is not run again;
``--tests`` names some of them, and the file says which.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import RESULTS, processor
from benchmarks.processes import ROOT

NAMED = ("torch", "numpy", "pydantic", "typer", "click", "rich", "flwr", "pyarrow", "matplotlib", "pytest")


class Cell(NamedTuple):
    """An environment: a Python, a torch, and which versions of all else."""

    python: str
    torch: str
    resolution: str  # "lowest" or "newest"
    flower: bool = True

    @property
    def name(self) -> str:
        return f"{self.python}, torch {self.torch}, {self.resolution}{'' if self.flower else ', no Flower'}"


CELLS = (
    Cell("3.11", "2.13.0", "lowest"),
    Cell("3.13", "2.15.0", "newest"),
    Cell("3.12", "2.14.1", "newest"),
    Cell("3.13", "2.15.0", "newest", flower=False),
    Cell("3.12", "2.13.0", "lowest"),
    Cell("3.13", "2.14.1", "lowest"),
)
EXTRAS = "maps,onnx,dev"


def call(*words: str | Path, cwd: Path | None = None) -> str:
    """Return what a command prints; end with what it said if it fails."""
    done = subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout.strip()


def install(cell: Cell, folder: Path, tree: Path, build: str) -> tuple[Path, dict[str, str]]:
    """Make the cell's environment; return its interpreter and the versions of what it holds."""
    python = folder / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    call("uv", "venv", "--clear", "--python", cell.python, folder / "env")
    if not cell.flower:  # in the clone alone
        project = tree / "pyproject.toml"
        lines = project.read_text(encoding="utf-8").splitlines()
        project.write_text(
            "\n".join(line for line in lines if "flwr>=" not in line or "=" in line.split("flwr")[0])
        )
    wanted, found = folder / "wanted.txt", folder / "found.txt"
    lines = [f"-e {tree}[{EXTRAS}]", f"-e {tree / 'papers'}", f"torch=={cell.torch}{build}"]
    wanted.write_text("\n".join(lines), encoding="utf-8")
    resolution = "lowest-direct" if cell.resolution == "lowest" else "highest"
    call("uv", "pip", "compile", "-q", "--python", python, "--resolution", resolution, wanted, "-o", found)
    call("uv", "pip", "install", "-q", "--python", python, "-r", found)
    held = json.loads(call("uv", "pip", "list", "--python", python, "--format", "json"))
    return python, {one["name"]: one["version"] for one in held}


def tested(python: Path, tree: Path, jobs: int, tests: list[str]) -> dict[str, Any]:
    """Run the tests; return how many passed, were skipped and failed, and which failed and why."""
    here = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "600"}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | here
    environment["PATH"] = os.pathsep.join([str(python.parent), environment["PATH"]])
    words = ["-m", "pytest", "-q", "-rfE", "-n", str(jobs), "--dist", "worksteal", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [python, *words, *tests],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    print(done.stdout, flush=True)
    failed = dict(re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", done.stdout, re.MULTILINE))
    last = done.stdout.splitlines()[-1]
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (\w+)", last)}
    return {
        "passed": counts.get("passed", 0),
        "skipped": counts.get("skipped", 0),
        "failed": failed,
        "said": last,
    }


def main() -> None:
    """Run the cells, write ``results/matrix.json`` after each, and fail if a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="a part of the cells' names")
    parser.add_argument("--build", default="", help="of torch, where the index has several, e.g. +cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tests", nargs="*", default=[])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    commit = call("git", "rev-parse", "HEAD", cwd=ROOT)[:12]
    path, ran = RESULTS / "matrix.json", " ".join(options.tests) or "all fast ones"
    failed = []
    for cell in CELLS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else {}
        before = cells.get(cell.name, {})
        if options.only not in cell.name or (before.get("commit"), before.get("tests")) == (commit, ran):
            continue
        print(cell.name, flush=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as made:
            folder, tree = Path(made), Path(made) / "tree"
            call("git", "clone", "-q", "--shared", ROOT, tree)
            call("git", "checkout", "-q", commit, cwd=tree)
            python, held = install(cell, folder, tree, options.build)
            seen = tested(python, tree, options.jobs, options.tests)
            shutil.rmtree(folder / "env")
        print(json.dumps(seen, indent=1), flush=True)
        failed += [f"{cell.name}: {name}" for name in seen["failed"]]
        seen |= {"tests": ran, "commit": commit, "date": datetime.date.today().isoformat()}
        seen |= {"processor": processor(), "versions": {name: held[name] for name in NAMED if name in held}}
        cells[cell.name] = seen
        path.write_text(json.dumps({"cells": cells}, indent=1) + "\n", encoding="utf-8")
    sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
