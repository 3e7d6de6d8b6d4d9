"""Claims: five million rows of CSV become a federated data set in at most 3 times the processor time of
``polars.read_csv`` and twice its memory; of Parquet in at most twice.

    python -m benchmarks.tables [--turns N] [--rows N] [--quick]

``polars`` reads the file into a frame; ``columns`` is what fedkeep reads of it, by kinds and with its faults named;
``data`` is all of it: labels and categories numbered, numbers standardised by exact sums, rows sorted by client. Each has a
process of its own, which is measured from the end of its imports; memory is the highest resident set, imports included.
Writes ``results/tables.json``; ``--quick`` makes few rows, writes into ``runs/benchmarks`` and asserts nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import csv, parquet

from benchmarks.measure import write
from benchmarks.processes import ROOT

CLAIMED = {"csv": {"cpu": 3.0, "memory": 2.0}, "parquet": {"cpu": 2.0, "memory": 2.0}}
CONTENDERS = ("polars", "columns", "data")
CODE = """
import json, re, sys, time
who, path = sys.argv[1:]
if who == "polars":
    import polars
    read = polars.read_csv if path.endswith("csv") else polars.read_parquet
else:
    from fedkeep.data import read_table
    from fedkeep.data.readers.tables import raw_table
    from pyarrow import compute, csv, parquet
    columns = {"user": "customer", "features": ["opened", "branch", "income", "age", "score"]}
    read = lambda path: (raw_table if who == "columns" else read_table)(path, **columns)
before = time.process_time()
kept = read(path)
cpu = time.process_time() - before
highest = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]  # getrusage counts the parent's
print(json.dumps({"cpu": cpu, "memory": 1024 * int(highest)}))
"""


def make(folder: Path, rows: int) -> dict[str, Path]:
    """Write a bank's table as CSV and as Parquet: ids, dates, a category, numbers and holes."""
    draw = np.random.default_rng(0)
    days = np.datetime64("2020-01-01") + draw.integers(0, 1500, rows)
    table = pyarrow.table(
        {
            "customer": pyarrow.array(np.char.add("c", draw.integers(0, rows // 250, rows).astype(str))),
            "opened": pyarrow.array(days.astype(str)),
            "branch": pyarrow.array(np.array(["north", "south", "east", "west"])[draw.integers(0, 4, rows)]),
            "income": pyarrow.array(np.round(draw.lognormal(10, 1, rows), 2)),
            "age": pyarrow.array(draw.integers(18, 90, rows)),
            "score": pyarrow.array(np.round(draw.normal(size=rows), 4), mask=draw.random(rows) < 0.05),
            "label": pyarrow.array(draw.integers(0, 2, rows)),
        }
    )
    files = {kind: folder / f"bank.{kind}" for kind in CLAIMED}
    csv.write_csv(table, files["csv"])
    parquet.write_table(table, files["parquet"])
    return files


def measured(who: str, file: Path) -> dict[str, float]:
    """Return processor seconds and the highest resident set, in bytes, of a contender's process."""
    ran = subprocess.run(
        [sys.executable, "-c", CODE, who, str(file)], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, and write ``tables.json``; fail if a claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--quick", action="store_true", help="few rows, to see that it runs")
    options = parser.parse_args(arguments)
    contenders = [who for who in CONTENDERS if who != "polars" or importlib.util.find_spec("polars")]
    rows = 2_000 if options.quick else options.rows
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = make(Path(folder), rows)
        for kind, file in files.items():
            turns = [{who: measured(who, file) for who in contenders} for _ in range(options.turns)]
            found[kind] = {
                who: {
                    what: statistics.median(turn[who][what] for turn in turns) for what in ("cpu", "memory")
                }
                for who in contenders
            }
    over = {
        kind: {
            who: {what: each[who][what] / each["polars"][what] for what in ("cpu", "memory")}
            for who in contenders
            if who != "polars" and "polars" in each
        }
        for kind, each in found.items()
    }
    content = {"rows": rows, "turns": options.turns, "measured": found, "over_polars": over}
    write("tables", content, folder=ROOT / "runs" / "benchmarks" if options.quick else None)
    failed = [
        f"claim failed: {kind}, {what}: {over[kind]['data'][what]:.1f} times polars'; claimed {claimed}"
        for kind, claims in CLAIMED.items()
        for what, claimed in claims.items()
        if not options.quick and over[kind] and over[kind]["data"][what] > claimed
    ]
    print("\n".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
