"""Claim: a node that is killed in the middle of a round takes part again at most 15 seconds after it is started.

    python -m benchmarks.restarts [--kills 6]

Three nodes train over TLS on loopback, and every round needs all of them. One node after the other is killed with all that
it has started, while it serves a message, and started again at once. Two times are taken from that start: until the link
has it, and until the round is finished that only its upload was wanting in; a round that ends before the link has it had
its upload before the kill, and the next one counts. ``results/restarts.json`` has both, and how busy the machine was.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fault_processes import part_of, words_of
from benchmarks.faults import commit
from benchmarks.measure import write
from fedkeep.flower.link import FlowerLink
from fedkeep.flower.local_federation import START, Local, federation, local_of, rounds_done, start_node
from fedkeep.flower.processes import marked
from fedkeep.flower.supernode import SuperNode
from fedkeep.flower.watch import JOINED

MOST, NODES, LONGEST = 15.0, 3, 300.0
CONFIG = f"""name = "restarts"

[data]
reader = "many_user_text"
users = {2 * NODES}
examples = 40

[model]
kind = "bag_of_words"
user_dim = 8

[method]
kind = "furl"
batch_size = 8

[run]
rounds = 1000
cohort = {2 * NODES}

[rounds]
minimum = {2 * NODES}
"""


def until(there: Callable[[], bool], what: str) -> float:
    """Wait for something; return the seconds that it took."""
    began = time.monotonic()
    while not there():
        if time.monotonic() > began + LONGEST:
            raise SystemExit(f"{what}: not in {LONGEST:g} s")
        time.sleep(0.02)
    return time.monotonic() - began


def serves(link: FlowerLink, node: SuperNode) -> bool:
    """Tell whether a node serves a message now."""
    folder = f"FLWR_HOME={node.home}"
    served = [p for p in marked(link.processes.mark) if part_of(p) == "message"]
    return any(folder in words_of(p, "environ") for p in served)


def killed(place: Local, link: FlowerLink, name: str, node: SuperNode) -> dict[str, Any]:
    """Kill a node and start it again; return how long it was away."""
    until(lambda: serves(link, node), f"{name} serves a message")
    link.processes.kill(name)
    load, began = os.getloadavg()[0], time.monotonic()
    start_node(link, name, node)
    until(lambda: JOINED in link.processes.text(name), f"{name} joins")
    joined, done = time.monotonic() - began, rounds_done(place.run)
    until(lambda: rounds_done(place.run) > done, f"{name} takes part")
    return {
        "node": name,
        "joined_seconds": round(joined, 1),
        "took_part_seconds": round(time.monotonic() - began, 1),
        "load": round(load, 1),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Kill, measure and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restarts", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=6)
    given = parser.parse_args(words)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        place = local_of(Path(folder), CONFIG, None, NODES)
        with federation(place, print) as (link, nodes):
            settings = {"status": str(place.status), "clients": 2 * NODES, "patience": START}
            run = link.submit(place.folder / "project", settings)
            until(lambda: rounds_done(place.run) > 1, "the first rounds")
            began, before = time.monotonic(), rounds_done(place.run)
            until(lambda: rounds_done(place.run) > before + 4, "four rounds")
            usual = (time.monotonic() - began) / (rounds_done(place.run) - before)
            for number in range(given.kills):
                name = sorted(nodes)[number % NODES]
                rows.append(killed(place, link, name, nodes[name]))
                print(rows[-1], flush=True)
            link.stop_run(run)
    slowest = max(row["took_part_seconds"] for row in rows)
    content = {
        "commit": commit(),
        "claim_seconds": MOST,
        "nodes": NODES,
        "usual_round_seconds": round(usual, 2),
    }
    write("restarts", {**content, "slowest_seconds": slowest, "kills": rows})
    print(f"slowest: {slowest} s; claimed: {MOST:g} s")


if __name__ == "__main__":
    main()
