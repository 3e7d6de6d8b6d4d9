"""What Flower costs: the memory of a node with one client; a round of W1 beside Flower's own FedAvg and plain actors.

``python -m benchmarks.flower [--part memory|rounds]`` writes ``results/flower.json``. Its claims: a node with one
client takes at most 400 MB above torch; in Flower's simulation a round of W1 is no slower than with Flower's own FedAvg
and NumPy clients, taken in turn on the same machine. Plain actors of Ray's would be an engine of their own if they were
1.3 times as fast as Flower's simulation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import commit
from benchmarks.measure import RESULTS, processor
from benchmarks.processes import sizes_of
from fedkeep.flower.local_federation import Local, federation, local_of, train
from fedkeep.flower.processes import marked

MOST_MB, TURNS, ROUNDS = 400, 3, 6
CONFIG = """name = "memory"

[data]
reader = "many_user_text"
users = 1
examples = 40

[model]
kind = "document"
user_dim = 16
embedding_dim = 16
hidden = 32
mlp = 64
pool = "max"

[method]
kind = "furl"
private = "user"
batch_size = 16

[run]
rounds = 2
cohort = 1
"""


def main(words: Sequence[str] | None = None) -> int:
    """Return 0 if the claims hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flower", description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=("memory", "rounds"))
    parser.add_argument("--turns", type=int, default=TURNS, help="trainings of each")
    given = parser.parse_args(words)
    path = RESULTS / "flower.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if given.part in (None, "memory"):
        content["memory"] = memory()
    if given.part in (None, "rounds"):
        content["rounds"] = rounds(given.turns)
    content |= {"commit": commit(), "machine": processor()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(content, indent=1))
    fine = content.get("memory", {}).get("above_torch_mb", 0) <= MOST_MB
    return int(not fine or content.get("rounds", {}).get("ratio", 1.0) > 1.0)


def memory() -> dict[str, Any]:
    """Return megabytes (10⁶ bytes, proportional set size) of a node's processes, and of torch alone."""
    with tempfile.TemporaryDirectory(prefix="fedkeep-memory-") as folder:
        place: Local = local_of(Path(folder) / "place", CONFIG, None, 1)
        with federation(place) as (link, nodes):
            port = str(nodes["node-1"].link.port)
            time.sleep(5)
            idle, seen, done = _node(link.processes.mark, port), list[dict[str, float]](), threading.Event()

            def watch() -> None:
                while not done.is_set():
                    seen.append(_node(link.processes.mark, port))
                    time.sleep(0.1)

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                train(place, link)
            finally:
                done.set()
                watcher.join()
    most = max(seen, key=lambda found: sum(found.values()))
    alone = _alone("import torch")
    return {
        "idle_mb": idle,
        "most_mb": most,
        "torch_mb": alone,
        "fedkeep_mb": _alone("import fedkeep"),
        "above_torch_mb": round(sum(most.values()) - alone, 1),
    }


def _node(mark: str, port: str) -> dict[str, float]:
    """Return the memory of a node's processes by what they are; all of them name its port or are started by it."""
    found: dict[str, float] = {}
    for process in marked(mark):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if port in words:
                kinds = ("watch.py", "flower-supernode", "guard")
                what = next((kind for kind in kinds if kind in words), "other")
                found[what] = round(found.get(what, 0.0) + _pss(process), 1)
        except OSError:
            continue
    return found


def _pss(process: int) -> float:
    return sizes_of(process, "smaps_rollup").get("Pss", 0) * 1024 / 1e6


def _alone(code: str) -> float:
    """Return the memory of a process that has imported something."""
    told = f"{code}\nprint(open('/proc/self/smaps_rollup').read())"
    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=True, env=os.environ
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("Pss:"))
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


def rounds(turns: int) -> dict[str, Any]:
    """Return seconds of a round of W1, ours, theirs and on plain actors in turn; first rounds are left out."""
    seconds: dict[str, list[float]] = {"ours": [], "theirs": [], "actors": []}
    for turn in range(turns):
        for which in seconds if turn % 2 else reversed(seconds):
            with tempfile.TemporaryDirectory(prefix="fedkeep-rounds-") as folder:
                words = [sys.executable, "-m", "benchmarks.flower_rounds", which, str(ROUNDS), folder]
                done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            seconds[which] += json.loads(done.stdout.splitlines()[-1])[1:]
    middle = {which: statistics.median(found) for which, found in seconds.items()}
    ratios = {"ratio": middle["ours"] / middle["theirs"], "to_actors": middle["ours"] / middle["actors"]}
    return {"seconds": seconds, "median": middle, **ratios}


if __name__ == "__main__":
    sys.exit(main())
