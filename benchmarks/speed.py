"""Claims: how fast a round is, against a plain PyTorch loop, pfl and Flower's simulation, with the same result.

    python -m benchmarks.speed [--install-peers] [--only W1,W2] [--turns N] [--device cuda] [--quick]

Runs every contender on W1 (cohorts of 10, 40 and 160, and ragged), W2, W3 and W4, each in a process of its own, one
computing at a time, on the same cohorts and mini-batches and from the same initial values; writes ``speed.json``
and, made from it, ``speed.md`` into ``results/``; then fails if a claim of ``claims.py`` fails. ``--quick`` runs
tiny sizes and writes into ``runs/benchmarks``.

- ``plain``: the code a researcher writes, with the better of one thread and one per core, and the default
  allocator; where a trial leaves the other one close behind, it races too (``plain_other_threads``) and ratios are
  taken over the faster; ``plain_padded`` (W1 ragged): padding instead of packing; ``plain_two_processes``: half of
  the clients in each of two. It, ``pfl`` and ``flower`` pad ragged texts too, which is several times faster than
  packing.
- ``fedkeep_ENGINE``: with ``torch.nn``'s parameters and this package's layers.
- ``pfl``, ``flower``: in environments of their own under ``--peers`` (see ``peers.py``).

A ratio says how many times faster than the plain loop a contender is: the median over turns of the plain loop's
seconds by the contender's own of the same turn; low and high are the least and the greatest. A first round of few
clients is compared with the plain loop's and not timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import claims
from benchmarks.measure import RESULTS, processor
from benchmarks.processes import ROOT
from benchmarks.race import Race, Setting, peak_of_all_cores
from benchmarks.speed_table import page
from fedkeep.experiments.environment import commit
from fedkeep.kernels import native

CASES = {  # (workload, cohort): turns
    ("W1", 10): 9,
    ("W1", 40): 5,
    ("W1", 160): 3,
    ("W1 ragged", 6): 3,
    ("W2", 16): 3,
    ("W3", 5): 3,
    ("W4", 5): 9,
}
QUICK = (("W1", 3), ("W1 ragged", 3), ("W2", 3), ("W3", 2), ("W4", 2))


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the results, and return 1 if a claim fails."""
    options = parse(arguments)
    folder = options.out or (ROOT / "runs" / "benchmarks" if options.quick else RESULTS)
    setting = Setting(
        options.quick,
        options.device,
        options.peers,
        options.install_peers,
        options.patience,
        tuple(options.contenders.split(",")) if options.contenders else None,
    )
    cases = dict.fromkeys(QUICK, 2) if options.quick else CASES
    cases = {c: n for c, n in cases.items() if not options.only or c[0] in options.only.split(",")}
    path = folder / ("speed.json" if options.device == "cpu" else f"speed-{options.device}.json")
    began, compared, where = time.monotonic(), set(), machine(options.device)
    for (name, cohort), turns in cases.items():
        print(f"{name}, cohort {cohort} ...", flush=True)
        race = Race(setting, name, cohort)
        race.run(options.turns or turns, name not in compared and options.device == "cpu")
        compared.add(name)
        rows = keep(path, race.rows(commit(), where))
    print(f"{time.monotonic() - began:.0f} s; {path}")
    failed = [] if options.quick else claims.missed(rows, cases)
    failed += [f"{r['contender']} differs from the plain loop" for r in rows if differs(r)] * options.quick
    print("\n".join(f"claim failed: {line}" for line in failed) or "every claim holds")
    return bool(failed)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="workloads, e.g. W1,W3; the rows of others are kept as they are")
    parser.add_argument("--contenders", help="names beside plain, e.g. fedkeep_workers,pfl")
    parser.add_argument("--turns", type=int, help="measured rounds of each case; by default 3 to 9")
    parser.add_argument("--device", default="cpu", help="cuda: plain loop and fedkeep alone, speed-cuda.json")
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".venv-peers", help="where peers' environments are"
    )
    parser.add_argument("--install-peers", action="store_true", help="make the environments that are missing")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for one round")
    parser.add_argument("--out", type=Path, help="where to write")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    return parser.parse_args(arguments)


def keep(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write rows in the place of those of the same case, and the page made from them; return all rows."""
    cases = {(r["workload"], r["cohort"]) for r in rows}
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = [r for r in old if (r["workload"], r["cohort"]) not in cases] + rows
    order = [*CASES, *QUICK]
    rows.sort(key=lambda r: order.index((r["workload"], r["cohort"])))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(rows, path.name), encoding="utf-8")
    return rows


def machine(device: str) -> str:
    """Describe the machine in a line."""
    if device != "cpu":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    peak = max(peak_of_all_cores() for _ in range(5)) / 1e9
    threads = torch.get_num_threads()
    parts = (
        processor(),
        f"{threads} cores",
        f"{peak:.0f} GFLOP/s of multiply-adds",
        f"torch {torch.__version__}",
    )
    return ", ".join((*parts, str(native.status())))


def differs(row: dict[str, Any]) -> bool:
    """Tell whether a contender's first round ended elsewhere than the plain loop's."""
    return bool(row.get("state_error", 0.0) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
