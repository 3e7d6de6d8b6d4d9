"""Claim: a stranger's module trains as its author's own loop would, or is refused by name.

    python -m benchmarks.strangers [--out results/strangers.json] [--only MODULE] [--methods NAME ...] [--again]
                                   [--share PART] [--join FILE ...]

Every module of ``tests/strangers/modules.py`` by every method: FedAvg, FedProx and training alone are held against a
plain loop, the others' engines against each other. A cell says for each engine ``equal``, ``trained`` (the first engine,
where no plain loop is written here), or how it refused; ``wrong`` and ``crashed`` are faults. Modules that
compute with 16 bits are compared after one pass of every phase: later steps multiply what engines round differently.
``auto`` and workers are tried in one of eight cells, as they choose one of the others or take long to start.
``make strangers`` runs all of it with torchvision, transformers and Lightning, in an environment of its own; where a
package is missing, its rows say so. Cells that the file has are not run
again; one at which the process died is a crash. ``--share 0/2`` runs every second module only; ``--join FILE ...`` takes
in the cells of other files.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import RESULTS, processor
from fedkeep.experiments.environment import commit
from fedkeep.methods import METHODS
from tests.strangers.loops import ENGINES, PLAIN, ROUNDS, SEED, row
from tests.strangers.modules import CLIENTS, EXAMPLES, STRANGERS

DIED = {"sequential": "crashed: the process died"}


def engines(module: str, method: str) -> tuple[str, ...]:
    """Return the engines of a cell: all in one of eight."""
    chosen = zlib.crc32(f"{module}/{method}".encode()) % 8 == 0
    return ENGINES if chosen else ENGINES[:2]


def counted(rows: dict[str, Any]) -> dict[str, int]:
    """Return how many engines' cells ended how."""
    every = [
        result
        for cells in rows.values()
        if "skipped" not in cells
        for cell in cells.values()
        for result in cell.values()
    ]
    found = Counter(result.partition(":")[0] for result in every)
    return {"wrong": 0, "crashed": 0, **dict(sorted(found.items())), "in all": len(every)}


def save(file: Path, rows: dict[str, Any]) -> None:
    """Write the file anew."""
    about = {
        "commit": commit(),
        "torch": torch.__version__,
        "processor": processor(),
        "seed": SEED,
        "clients": CLIENTS,
        "examples": EXAMPLES,
        "rounds": ROUNDS,
    }
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"about": about, "summary": counted(rows), "modules": rows}, indent=1) + "\n")
    new.replace(file)


def main() -> None:
    """Fill the file; fail if a cell is wrong or crashed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "strangers.json")
    parser.add_argument("--only", default="", help="the modules whose name has this text")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), help="these methods alone")
    parser.add_argument("--share", default="0/1", help="part/parts of the modules")
    parser.add_argument("--join", type=Path, nargs="*", default=[], help="take in the cells of these files")
    parser.add_argument("--again", action="store_true", help="run cells again that the file has")
    given = parser.parse_args()
    torch.set_num_threads(1)
    part, parts = map(int, given.share.split("/"))
    rows: dict[str, Any] = json.loads(given.out.read_text())["modules"] if given.out.exists() else {}
    for file in given.join:
        rows |= json.loads(file.read_text())["modules"]
    there = {}
    for module in [name for name in list(STRANGERS)[part::parts] if given.only in name]:
        try:
            STRANGERS[module].make()
        except ImportError as error:
            rows[module] = {"skipped": str(error)}
            print(f"{module}: skipped ({error})", flush=True)
            continue
        there[module] = rows[module] = {} if "skipped" in rows.get(module, {}) else rows.get(module, {})
    for method in sorted(given.methods, key=lambda name: name not in PLAIN):
        began = time.perf_counter()
        for module, cells in there.items():
            if method in cells and not given.again:
                continue
            cells[method] = DIED
            save(given.out, rows)
            cells[method] = row(STRANGERS[module], method, engines(module, method))
            for engine, result in cells[method].items():
                if result.startswith(("wrong", "crashed", "trained alone", "trained, ")):
                    print(f"{module}, {method}, {engine}: {result}", flush=True)
        save(given.out, rows)
        print(f"{method}: {time.perf_counter() - began:.0f} s", flush=True)
    found = counted(rows)
    print(found)
    assert not found["wrong"]
    assert not found["crashed"]


if __name__ == "__main__":
    main()
