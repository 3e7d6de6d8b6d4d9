"""The limits of a fleet: a real link and server app of Flower's, and scripted nodes that speak its wire, on one machine.

    python -m benchmarks.fleet_load [--rows 100x1 1000x1 5000x1 100x20 1000x20] [--again] [--look 3] [--minutes 8] [--out FOLDER]

A row is so many nodes, each with one client, times a model of so many MB: three rounds of FedAvg (one, of more than 100 nodes), all nodes
in each, over HTTP without TLS. See ``benchmarks.fleet_nodes`` for the nodes: all they do is answer. ``results/fleet-load.json`` has of each row rounds a minute,
peaks of memory of link, server app and nodes, their processor time, the link's database, bytes on the wire, faults, and how it ended: at its end, or where time,
memory or disk did. A row that is there is kept, unless ``--again`` is said. With a longer ``--look`` the link has more time for messages. Link, server and nodes share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.faults import commit
from benchmarks.fleet_nodes import FIRST
from benchmarks.measure import RESULTS, write
from fedkeep import FederatedData
from fedkeep.core.errors import RunError
from fedkeep.core.records import read_records
from fedkeep.data.preparation import Ready
from fedkeep.flower.link import READY, Control, environment, free_port
from fedkeep.flower.local_federation import read_status, rounds_done
from fedkeep.flower.processes import Processes, marked, program
from fedkeep.flower.project import new_project
from fedkeep.remote import Packet
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.node_config import experiment

ROWS = ("100x1", "1000x1", "5000x1", "100x20", "1000x20")
CONFIG = """name = "load"
[data]
reader = "toy"
users = {nodes}
[model]
kind = "mlp"
hidden = {hidden}
[method]
kind = "fedavg"
batch_size = 8
optimizer = {{ learning_rate = 0.1 }}
[run]
rounds = {rounds}
cohort = {nodes}
evaluate_every = 0
"""
IDLE = 20.0
"""Seconds in which all nodes have joined and no run has begun, so that all calls of the link are their looks."""
MANY = 100
"""Nodes beyond which one round is asked for, not three."""
NUMBERS = 10
"""Of an mlp for each hidden unit: 4 features and 3 classes, a bias, and a norm's two."""
LEAST = 3 << 30, 6 << 30
"""Bytes of memory and of disk that are left free; a row that wants more is ended."""


def serve(read: BinaryIO, send: BinaryIO, folder: Path) -> None:
    """Answer for all nodes by one real device."""
    draw = np.random.default_rng(0)
    columns = {"x": draw.normal(size=(8, 4)).astype(np.float32), "label": np.arange(8) % 3}
    data = FederatedData.from_columns([FIRST] * 8, columns, ["train"] * 8)
    node = Node(Ready(data=data), folder, OwnerTerms(owner="load"), experiment, tell=print)
    while count := read.read(4):
        files = [
            read.read(int.from_bytes(read.read(8), "little")) for _ in range(int.from_bytes(count, "little"))
        ]
        answer = node.serve(Packet.from_bytes(files[0], files[1:])).to_bytes()
        send.write(len(answer).to_bytes(8, "little") + answer)
        send.flush()


def peaks(mark: str, known: dict[str, float]) -> None:
    """Take note of the most memory that link and server app have had, and of their processor time."""
    for process in marked(mark):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            status, stat = (
                Path(f"/proc/{process}/{name}").read_text(encoding="utf-8") for name in ("status", "stat")
            )
        except OSError:
            continue
        if "watch.py" in words or "VmHWM" not in status:
            continue
        what = "server_app" if "--at-link" in words else "link" if "superlink" in words else "other"
        ticks = sum(map(int, stat.rpartition(")")[2].split()[11:13]))
        for name, value in (
            (f"{what}_peak_bytes", int(status.split("VmHWM:")[1].split()[0]) * 1024),
            (f"{what}_cpu_seconds", ticks / os.sysconf("SC_CLK_TCK")),
        ):
            known[name] = max(known.get(name, 0), value)


def short_of(folder: Path) -> str:
    """Return what this machine has too little of, or an empty text."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    if free < LEAST[0]:
        return "this machine's memory"
    return "this machine's disk" if shutil.disk_usage(folder).free < LEAST[1] else ""


def measured(nodes: int, megabytes: int, look: float, seconds: float, home: Path) -> dict[str, Any]:
    """Return a row."""
    hidden, rounds = megabytes * 1_000_000 // (4 * NUMBERS), 3 if nodes <= MANY else 1
    new_project(
        home / "project",
        CONFIG.format(nodes=nodes, hidden=hidden, rounds=rounds),
        "load",
        out=home / "run",
    )
    address, status, told = f"127.0.0.1:{free_port()}", home / "status.json", home / "nodes.json"
    control = Control(home / "flower", address, Path("none"))
    settings = (
        f'[superlink]\ndefault = "local"\n\n[superlink.local]\naddress = "{address}"\ninsecure = true\n'
    )
    (home / "flower" / "config.toml").write_text(settings, encoding="utf-8")
    given = {**environment(home / "bin"), **control.environment, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    known, began = dict[str, float](), time.monotonic()
    database, largest, ended, at_first = home / "link.db", 0, "", 0.0
    with Processes(home / "logs", given) as processes:
        command = [program("flower-superlink"), "--insecure", "--host", "127.0.0.1"]
        command += ["--port", address.partition(":")[2], "--database", database]
        processes.start("link", [*command, "--disable-runtime-dependency-installation"])
        processes.await_text("link", READY, 180)
        log = (home / "logs" / "nodes.log").open("wb")
        fleet = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fleet_nodes", address, str(nodes), str(look), str(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert fleet.stdin is not None
        assert fleet.stdout is not None
        threading.Thread(target=serve, args=(fleet.stdout, fleet.stdin, home / "device"), daemon=True).start()
        joined, at, idle = 0.0, "joining", list[tuple[float, int]]()
        try:
            while not ended:
                time.sleep(0.5)
                peaks(processes.mark, known)
                largest = max(largest, sum(p.stat().st_size for p in home.glob("link.db*")))
                fares = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {"joined": 0}
                if not joined and fares["joined"] == nodes:
                    joined = time.monotonic() - began
                    idle = [(known["link_cpu_seconds"], sum(fares["calls"].values()))]
                if idle and not known.get("run") and time.monotonic() > began + joined + IDLE:
                    idle.append((known["link_cpu_seconds"], sum(fares["calls"].values())))
                    known["run"], at_first = 1, known["link_cpu_seconds"]
                    control.submit(
                        home / "project", {"status": str(status), "clients": nodes, "patience": seconds}
                    )
                if known.get("run"):
                    at = f"round {rounds_done(home / 'run') + 1}" if (home / "run").exists() else "greeting"
                found = read_status(status)
                if found.state in ("finished", "failed"):
                    ended = "at its end" if found.state == "finished" else f"{at}: {found.text[:300]}"
                elif fleet.poll() is not None:
                    ended = f"{at}: the nodes' process ended: {fleet.returncode}"
                elif processes.running["link"].poll() is not None:
                    ended = f"{at}: the link ended"
                elif short := short_of(home):
                    ended = f"{at}: stopped, as {short} ran out"
                elif time.monotonic() > began + seconds:
                    ended = f"{at}: stopped after {seconds:.0f} s"
        except RunError as error:
            ended = f"{at}: {str(error)[:300]}"
        fleet.terminate()
        fleet.wait(30)
    fares = json.loads(told.read_text(encoding="utf-8"))
    timings = home / "run" / "timings.jsonl"
    took = [r.value for r in read_records(timings) if r.metric == "seconds"] if timings.exists() else []
    waiting = [text for text in events(home / "run") if "again" in text or "did not answer" in text]
    return {
        "nodes": nodes,
        "model_bytes": 4 * (NUMBERS * hidden + 3),
        "look_seconds": look,
        "ended": ended,
        "joined": fares["joined"],
        "joined_seconds": round(joined, 1) or None,
        "rounds_asked": rounds,
        "rounds": len(took),
        "round_seconds": [round(value, 2) for value in took],
        "rounds_a_minute": round(60 / statistics.median(took), 2) if took else None,
        **{name: value for name, value in sorted(known.items()) if name != "run"},
        "link_cpu_ms_a_look": spent(idle),
        "link_cpu_ms_a_message": round(1000 * (known["link_cpu_seconds"] - at_first) / fares["answers"], 1)
        if fares["answers"]
        else None,
        "nodes_peak_bytes": fares["peak_bytes"],
        "link_database_bytes": largest,
        "answers": fares["answers"],
        "calls": fares["calls"],
        "asked_in_vain": fares["asked_in_vain"],
        "nodes_sent_bytes": fares["sent_bytes"],
        "nodes_received_bytes": fares["received_bytes"],
        "faults": fares["faults"],
        "nodes_that_ended": fares["ended"],
        "events": {"sent again, or late": len(waiting), "first": waiting[:1]},
        "load_before": os.getloadavg()[0],
    }


def spent(idle: Sequence[tuple[float, int]]) -> float | None:
    """Return the link's milliseconds of processor time for a call while nodes did nothing but look for messages."""
    if len(idle) < 2:
        return None
    (before, first), (after, last) = idle
    return round(1000 * (after - before) / max(1, last - first), 2)


def events(run: Path) -> list[str]:
    """Return what the run's events say."""
    path = run / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [str(json.loads(line)["text"]) for line in lines]


def main() -> None:
    """Measure the rows that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", default=ROWS)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--look", type=float, default=3.0, help="seconds between two looks of a node")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    file = args.out / "fleet-load.json"
    rows: dict[str, Mapping[str, Any]] = (
        json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else {}
    )
    for name in args.rows:
        if name in rows and not args.again:
            continue
        nodes, megabytes = map(int, name.split("x"))
        with tempfile.TemporaryDirectory(prefix="fleet-", ignore_cleanup_errors=True) as home:
            row = measured(nodes, megabytes, args.look, 60 * args.minutes, Path(home))
        rows[name] = {**row, "commit": commit()}
        write("fleet-load", {"rows": rows}, folder=args.out)


if __name__ == "__main__":
    main()
