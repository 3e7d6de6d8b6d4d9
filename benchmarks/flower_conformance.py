"""The conformance table on Flower: its simulation (on a cluster too), or real nodes here, each row to the bit.

``python -m benchmarks.flower_conformance ray|cluster|nodes [--rows few|all] [--nodes N]`` writes
``results/flower-conformance.json``. Its claim: every row equals ``engine="sequential"`` to the bit, private values too;
its records within 1e-6.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import commit
from benchmarks.flower_cases import FOLDER, ROWS
from benchmarks.measure import RESULTS, processor
from fedkeep.experiments.toml import to_toml
from fedkeep.flower.keys import make_keys
from fedkeep.flower.link import PATIENCE, FlowerLink, free_port
from fedkeep.flower.processes import program
from fedkeep.flower.watch import JOINED
from tests.engines.test_conformance import CASES
from tests.remote.test_conformance import FEW


def main(words: Sequence[str] | None = None) -> int:
    """Return 0 if every row is equal."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flower_conformance", description=__doc__.split("\n")[0]
    )
    parser.add_argument("where", choices=("ray", "cluster", "nodes"))
    parser.add_argument("--rows", choices=("few", "all"), default="few")
    parser.add_argument("--case", action="append", help="these alone; may be repeated")
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args(words)
    kinds = ("float32", "float64") if given.rows == "all" else ("float32",)
    cases = given.case or (FEW if given.rows == "few" else CASES)
    rows = [(case, kind) for case in cases for kind in kinds]
    found = trained(given.where, rows, given.nodes)
    equal = [
        row for row in found if row.get("server") and row.get("private") and row["records_apart"] <= 1e-6
    ]
    print(f"{given.where}: {len(equal)} of {len(rows)} rows equal to the bit")
    for row in found:
        if row not in equal:
            print(row)
    path = RESULTS / "flower-conformance.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    others = [
        row for row in before.get(given.where, {}).get("rows", []) if (row["case"], row["kind"]) not in rows
    ]
    told = {"nodes": given.nodes, "rows": others + found, "commit": commit(), "machine": processor()}
    path.write_text(json.dumps({**before, given.where: told}, indent=1) + "\n", encoding="utf-8")
    return int(len(equal) < len(rows))


def trained(where: str, rows: Sequence[tuple[str, str]], nodes: int) -> list[dict[str, Any]]:
    """Train rows on nodes somewhere; return a line about each."""
    with tempfile.TemporaryDirectory(prefix="fedkeep-conformance-") as folder:
        os.environ |= {FOLDER: folder, ROWS: json.dumps(rows), "FEDKEEP_NODES": str(nodes)}
        os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}
        {"ray": on_ray, "cluster": on_cluster, "nodes": on_nodes}[where](Path(folder), nodes)
        return [json.loads(line) for line in (Path(folder) / "rows.jsonl").read_text().splitlines()]


def on_ray(folder: Path, nodes: int, **where: Any) -> None:
    """Run all rows in one of Flower's simulations; its nodes have several clients each."""
    from flwr.simulation import run_simulation

    from benchmarks.flower_cases import client, server

    init = where or {"num_cpus": 2}
    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": init}
    run_simulation(server, client, num_supernodes=nodes, backend_config=resources)


def on_cluster(folder: Path, nodes: int) -> None:
    """Run all rows in Flower's simulation on a cluster of two Ray nodes, each with one core."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        on_ray(folder, nodes, address=cluster.address)
    finally:
        cluster.shutdown()


def on_nodes(folder: Path, nodes: int) -> None:
    """Run all rows on a link and nodes with TLS and authentication."""
    names = [f"node-{number}" for number in range(nodes)]
    make_keys(folder / "keys", hosts=["127.0.0.1"], nodes=names)
    link = FlowerLink(folder, folder / "keys")
    settings = {
        "project": {"name": "cases", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedkeep",
                    "components": {
                        "serverapp": "benchmarks.flower_cases:server",
                        "clientapp": "benchmarks.flower_cases:client",
                    },
                    "config": {},
                }
            }
        },
    }
    (folder / "project").mkdir()
    (folder / "project" / "pyproject.toml").write_text(to_toml(settings))
    with link.processes as processes:
        link.start()
        for number, name in enumerate(names):
            link.register(link.keys / f"{name}.pub")
            processes.start(
                name,
                [
                    program("flower-supernode"),
                    "--superlink",
                    link.address,
                    "--root-certificates",
                    folder / "keys/ca.pem",
                    "--auth-supernode-private-key",
                    folder / f"keys/{name}.key",
                    "--port",
                    str(free_port()),
                    "--node-config",
                    f"partition-id={number} num-partitions={nodes}",
                ],
            )
        for name in names:
            processes.await_text(name, JOINED, PATIENCE)
        run = link.submit(folder / "project", {})
        while not link.state_of(run).startswith("finished"):
            processes.check()
            time.sleep(15)


if __name__ == "__main__":
    sys.exit(main())
