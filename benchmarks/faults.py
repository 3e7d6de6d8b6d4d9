"""The campaign against wrong results without a word: damaged, mixed and nonsensical files, settings and ids.

``python -m benchmarks.faults [--part inputs|folders] [--tried N] [--seed S]`` writes ``results/faults.json``. Its
claim: no input is accepted wrongly, ends in an exception that is none of fedkeep's, or takes more than 10 s or 2 GB.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, processor

PARTS = {"inputs": 10_000, "folders": 3_000}
"""Each part ``benchmarks.fault_PART`` gives ``classes(tried, seed)``; with the number of inputs of a whole campaign."""
VERDICTS = ("silent", "crashed", "hung")


def main(words: Sequence[str] | None = None) -> int:
    """Return 0 if every input was refused by name, or accepted rightly."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=tuple(PARTS), help="one part alone")
    parser.add_argument("--tried", type=int, help="inputs of each part, instead of a whole campaign's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "faults.json")
    given = parser.parse_args(words)
    found = []
    for part in (given.part,) if given.part else present():
        for one in campaign(part, given.tried or PARTS[part], given.seed):
            found.append(one)
            print(
                f"{one['name']}: {one['tried']:,} tried, " + ", ".join(f"{one[v]} {v}" for v in VERDICTS),
                flush=True,
            )
    content = {"classes": found, "commit": commit(), "machine": processor(), "seed": given.seed}
    given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(any(one[verdict] for one in found for verdict in VERDICTS))


def present() -> list[str]:
    """Return the parts that there are."""
    return [part for part in PARTS if importlib.util.find_spec(f"benchmarks.fault_{part}") is not None]


def campaign(part: str, tried: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the classes of a part, with its name before theirs."""
    for one in importlib.import_module(f"benchmarks.fault_{part}").classes(tried, seed):
        yield {**one, "name": f"{part}: {one['name']}"}


def commit() -> str:
    """Return the commit that runs, with ``+`` behind it where files but results were changed since."""
    try:
        head, changed = (
            subprocess.run(
                ["git", *words], capture_output=True, text=True, check=True, cwd=RESULTS.parent
            ).stdout
            for words in (
                ("rev-parse", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if changed.strip() else "")


if __name__ == "__main__":
    sys.exit(main())
