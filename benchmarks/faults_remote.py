"""The campaign of faults on federations across machines, part 1: in one process, with real device stores.

``python -m benchmarks.faults_remote [--tried N] [--seed S] [--fresh]`` writes ``results/faults-remote.json``; stopped
and started again it goes on. Its claim: no private state is lost or mixed, no run resumes wrongly, every run finishes,
and the end is that of an undisturbed run in which the same clients took part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_remote import trial
from benchmarks.faults import commit
from benchmarks.measure import RESULTS, processor


def main(words: Sequence[str] | None = None) -> int:
    """Return 0 if every trial ended as it should."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults_remote", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--tried", type=int, default=264)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one trial alone, nothing is written")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("--out", type=Path, default=RESULTS / "faults-remote.json")
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    if given.only is not None:
        print(json.dumps(_one(given.only, given.seed), indent=1))
        return 0
    about = {"seed": given.seed, "commit": commit()}
    found = [] if given.fresh else _before(given.out, about)
    for number in range(len(found), given.tried):
        found.append(_one(number, given.seed))
        last = found[-1]
        print(f"{number} {last['fault']}: {last['verdict']} {last.get('why', '')}", flush=True)
        given.out.write_text(json.dumps(_page(found, about), indent=1) + "\n", encoding="utf-8")
    return int(any(one["verdict"] != "equal" for one in found))


def _one(number: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return trial(number, seed, Path(folder))


def _before(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    return content["trials"] if {k: content.get(k) for k in about} == about else []


def _page(found: list[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    kinds = {one["fault"]: Counter[str]() for one in found}
    for one in found:
        kinds[one["fault"]][one["verdict"]] += 1
    return {
        **about,
        "machine": processor(),
        "tried": len(found),
        "happened": sum(one.get("hits", 0) > 0 for one in found),
        "verdicts": dict(Counter(one["verdict"] for one in found)),
        "faults": {name: dict(count) for name, count in kinds.items()},
        "trials": found,
    }


if __name__ == "__main__":
    raise SystemExit(main())
