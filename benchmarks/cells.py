"""Claim: finished cells of the papers' tables, trained again by the present code, give the numbers in ``results/``.

    python -m benchmarks.cells --data DIR [--only PATTERN] [--runs DIR] [--finished DIR]

Short cells of each system and of ``moe-methods``: some 90 minutes on one core. Each is trained in an empty folder
(``--runs DIR`` keeps it, so that a stopped call goes on), and every number of it is laid beside the finished one; times
and commits are left out. Differences are reported as the largest one, absolute. A cell that was made on another
processor or with older kernels may differ by rounding, which thousands of steps amplify: ``--finished DIR`` compares
with a folder of cells that another version made on this machine. The claim is about cells of today's ``NUMERICS``;
those of older ones are trained and compared too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, write
from fedkeep.experiments.environment import commit
from fedkeep.experiments.reproductions import Request, reproduce
from fedkeep.version import NUMERICS
from fedkeep_papers.kit.cells import OLDEST
from fedkeep_papers.moe.cells import Work
from fedkeep_papers.moe.methods import MethodCell, MethodJob
from fedkeep_papers.moe.results import Cell
from fedkeep_papers.moe.scene import Adapting, Federation, Scene
from fedkeep_papers.moe.variants import AUGMENTED, AUTHORS, OTHERS, PAPER, Variant

LEFT_OUT = {"seconds", "commit", "environment", "curve_seconds", "numerics"}
REPRODUCED = {  # file: the reproduction that asks for it
    "furl/subreddit-words-global-server-0-": "furl-table3",
    "furl/subreddit-words-personalized-fl-0-": "furl-table3",
    "furl/subreddit-words-personalized-server-0-": "furl-table3",
    "furl/subreddit-words-global-fl-paper-0-": "furl-table3",
    "furl/sticker-global-server-0-": "furl-table3",
    "kteps/fdu-fedper-full-0-": "kteps-table3",
    "kteps/fdu-lg-fedavg-full-0-": "kteps-table3",
}
MIXTURES = (
    "moe/cifar10-n5-N10-p0.2-q0-s0-r1500.json",
    "moe/cifar10-n5-N10-p1-s0-local.json",
    "moe/cifar10-n5-N10-p0.2-s0-local.json",
    "moe/cifar10-n5-N50-p0.6-s0-local.json",
    "moe/fashion_mnist-n5-N10-p1-s0-local.json",
)
METHODS = (
    "moe/cifar10-n5-N500-p0.8-q0-s0-fedper-r150.json",
    "moe/cifar10-n5-N500-p0.8-q0-s0-lg-fedavg-r150.json",
)


def reproduced(reproduction: str, finished: Path, data: Path, folder: Path) -> Path:
    """Train a cell of FURL or KTEPS again; return its file."""
    only = (f"{finished.stem.rpartition('-')[0]}*",)
    reproduce(reproduction, Request(data, folder, "full", None, 1, only=only, progress=False))
    return folder / finished.relative_to(RESULTS)


def mixture(finished: Path, data: Path, folder: Path) -> Path:
    """Train the variants of a cell of the mixture of experts again; return their file."""
    results = folder / "moe"
    for entry in json.loads(finished.read_text(encoding="utf-8")):
        settings = entry["settings"]
        cell = Cell(
            Scene(**{"q": 0.0, **settings["scene"]}),
            Federation(**(settings["federation"] or {})),
            Adapting(**(settings["adapting"] or {})),
        )
        variant = next(v for v in variants() if plain(cell.settings(v)) == settings)
        Work(cell, data, results, folder / "runs", 1, False).run([variant])
    return results / finished.name


def variants() -> Iterator[Variant]:
    """Yield every variant that a table asks for."""
    yield from (*PAPER, *OTHERS, AUTHORS, *AUGMENTED)


def method(finished: Path, data: Path, folder: Path) -> Path:
    """Train a cell of ``moe-methods`` again; return its file."""
    entry = json.loads(finished.read_text(encoding="utf-8"))
    settings = {k: v for k, v in entry["settings"].items() if k != "about"}
    cell = MethodCell(**{**settings, "scene": Scene(**settings["scene"])})
    if plain(cell.settings()) != entry["settings"]:
        raise SystemExit(f"{finished.name} was made with other settings than the present code's.")
    MethodJob(cell, data, folder / "moe", folder / "runs")(progress=False)
    return cell.file(folder / "moe")


def plain(settings: Any) -> Any:
    """Return settings as they come back from a file."""
    return json.loads(json.dumps(settings))


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a file with its place; of entries that only one file has, see ``compared``."""
    if isinstance(value, dict):
        for key, one in value.items():
            if key not in LEFT_OUT:
                yield from numbers(one, f"{place}/{key}")
    elif isinstance(value, list):
        for position, one in enumerate(value):
            yield from numbers(one, f"{place}/{position}")
    else:
        yield place, value


def compared(finished: Path, again: Path) -> dict[str, Any]:
    """Return how many numbers there are, how many differ, and by how much at most."""
    old, new = (dict(numbers(json.loads(p.read_text(encoding="utf-8")))) for p in (finished, again))
    if old.keys() != new.keys():
        odd = sorted(old.keys() ^ new.keys())[:3]
        raise SystemExit(f"{finished.name}: one of the two files lacks {odd}.")
    counted = [n for n, v in old.items() if isinstance(v, int | float) and not isinstance(v, bool)]
    apart = [abs(old[n] - new[n]) for n in counted if isinstance(new[n], int | float) and old[n] != new[n]]
    texts = [n for n in old if n not in counted and old[n] != new[n]]
    return {"numbers": len(counted), "differ": len(apart) + len(texts), "largest": max(apart, default=0.0)}


def numerics(file: Path) -> int:
    """Return the numerics of a file's cells."""
    content = json.loads(file.read_text(encoding="utf-8"))
    (found,) = {
        entry.get("numerics", OLDEST) for entry in (content if isinstance(content, list) else [content])
    }
    return int(found)


def cells() -> dict[Path, Callable[[Path, Path, Path], Path]]:
    """Return the finished cells, and what trains each again."""
    found: dict[Path, Callable[[Path, Path, Path], Path]] = {}
    for start, name in REPRODUCED.items():
        (file,) = RESULTS.glob(f"{start}*.json")
        found[file] = partial(reproduced, name)
    return found | {RESULTS / n: mixture for n in MIXTURES} | {RESULTS / n: method for n in METHODS}


def main() -> None:
    """Train, compare, write ``results/cells-again.json``, and fail if a number differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default="*")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--finished", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for finished, train in cells().items():
            if not fnmatchcase(finished.name, options.only):
                continue
            began = time.perf_counter()
            again = train(finished, options.data, (options.runs or Path(temporary)) / finished.stem)
            name = finished.relative_to(RESULTS)
            old = options.finished / name
            row = {"cell": name.as_posix(), "numerics": numerics(old), **compared(old, again)}
            rows.append({**row, "minutes": round((time.perf_counter() - began) / 60, 1)})
            print(json.dumps(rows[-1]), flush=True)
    if options.only == "*":
        write("cells-again", {"commit": commit(), "cells": rows})
    today = [row for row in rows if row["numerics"] == NUMERICS]
    assert not any(row["differ"] for row in today), "a number differs"


if __name__ == "__main__":
    main()
