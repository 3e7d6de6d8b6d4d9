"""Claim: runs by Slurm's jobs and by Ray's tasks give the numbers of ``--jobs 2``, though jobs are killed at random.

    python -m benchmarks.cluster [--place slurm ray spread unhurt paced] [--seeds 3] [--kills 20] [--out FOLDER]

Eight methods with each seed on generated data, 30 rounds each: once in two processes here, then by a Slurm of this one machine
(``slurmctld``, ``slurmd`` and ``munged`` of its own, in a folder; Debian's slurm-wlm and munge, as root), and by a Ray head with two
nodes on this machine. Meanwhile processes of jobs are killed, and fewer kills than asked for are an error. ``unhurt`` is the time of a run, two at
a time, where none is killed. Digests are of all records but times, and of the server's and
every client's values. ``spread`` is each run by itself, its clients in Ray's tasks, of which some are killed. ``paced`` is a
run of clients of about 50 ms, whose rounds are timed: one after the other, in two processes here, and in two of Ray's, in turn; and, see
``benchmarks.cluster_rounds``, by a plain loop and in Flower's simulation. ``results/cluster.json`` says how many runs are equal,
how many jobs were lost, and how long it took; a place that is not measured anew keeps its row.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults import commit
from benchmarks.measure import RESULTS, write
from benchmarks.same_bits import told
from fedkeep.core.records import read_records
from fedkeep.engines import Engine, Sequential, Workers
from fedkeep.experiments.build import run_config
from fedkeep.experiments.comparing import Plan, plan, run
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.load import load_run
from fedkeep.experiments.places import Place, executors, place
from fedkeep.remote.cluster import ClusterWorkers

PAUSE, PAUSE_OF_ROUNDS = 8.0, 1.5
"""Seconds between two kills, at the mean, of runs and of what trains clients: 24 runs, two at a time, of which each kill takes
back some, last longer than 20 of them. Where one runs alone, the pause is twice as long: a job that is killed four times
before it comes further is given up, and it takes some seconds to begin.
"""
METHODS = ("fedavg", "fedprox", "furl", "fedper", "fedrep", "ditto", "apfl", "mixture")
SCENE = """
name = "cluster"
[data]
reader = "toy"
users = 40
examples = 20
[method]
kind = "fedavg"
[run]
rounds = 30
cohort = 20
"""
PACED = """
name = "paced"
[data]
reader = "toy"
users = 24
examples = 6000
[model]
kind = "mlp"
hidden = 300
[method]
kind = "fedper"
batch_size = 32
optimizer = { learning_rate = 0.1 }
[run]
rounds = 8
cohort = 24
evaluate_every = 1
"""
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16917
SlurmdPort=16918
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock
SlurmUser=root
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm(home: Path) -> Iterator[str]:
    """Run a Slurm of this machine alone."""
    host = os.uname().nodename.partition(".")[0]
    for name in ("state", "spool"):
        (home / name).mkdir()
    key = home / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    home.chmod(0o755)
    (home / "slurm.conf").write_text(CONF.format(host=host, home=home))
    files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = [
        "munged",
        "--force",
        f"--key-file={key}",
        *(f"--{n}={home}/munge.{e}" for n, e in files.items()),
    ]
    os.environ["SLURM_CONF"] = str(home / "slurm.conf")
    for command in (munged, ["slurmctld"], ["slurmd"]):
        subprocess.run(command, check=True, capture_output=True)
    try:
        while "idle" not in subprocess.run(["sinfo"], capture_output=True, text=True).stdout:
            time.sleep(0.5)
        yield "slurm"
    finally:
        for name in ("slurmd", "slurmctld", "munge"):
            process = int((home / f"{name}.pid").read_text())
            os.kill(process, signal.SIGTERM)
            while Path(f"/proc/{process}").exists():  # it still writes into the folder
                time.sleep(0.1)


@contextmanager
def ray(home: Path) -> Iterator[str]:
    """Run a Ray head and a second node, each of one core, on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield "ray"
    finally:
        cluster.shutdown()
        del os.environ["RAY_ADDRESS"]  # else Flower's simulation waits for it


def planned(out: Path, seeds: int) -> Plan:
    """Return the comparison."""
    return plan([parse_config(SCENE)], METHODS, range(seeds), out, references=False)


def digests(made: Plan) -> dict[str, dict[str, str]]:
    """Return of each run the digests of its records, the server's values and the clients'."""
    return {cell.name: told(load_run(cell.folder, data=made.data)) for cell in made.cells}


def compared(made: Plan, here: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return how many runs equal those here, are lost, i.e. not finished, or have a round twice in their records."""
    lost = sorted(cell.name for cell in made.cells if not cell.finished)
    there = {cell.name: told(load_run(cell.folder, data=made.data)) for cell in made.cells if cell.finished}
    other = sorted(cell for cell, found in there.items() if found != here[cell])
    doubled = [cell.name for cell in made.cells if cell.name in there and _twice(cell.folder)]
    return {
        "runs": len(made.cells),
        "equal": len(there) - len(other),
        "not equal": other,
        "lost": lost,
        "doubled": doubled,
    }


def _twice(folder: Path) -> bool:
    """Whether a run has recorded something twice, as two jobs that go on with one run would."""
    keys = [(r.round, r.split, r.metric, r.client) for r in read_records(folder / "records.jsonl")]
    return len(set(keys)) < len(keys)


def jobs_of(home: Path) -> list[int]:
    """Return the processes that compute a job whose folder is there: Slurm's, or workers of Ray that are at one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().replace(b"\0", b" ")
            if b"experiments.places " + str(home).encode() in words or words.startswith(
                (b"ray::_compute", b"ray::train")
            ):
                found.append(int(path.parent.name))
    return found


@contextmanager
def killing(home: Path, kills: int, draw: np.random.Generator, pause: float) -> Iterator[list[int]]:
    """Kill processes of jobs, one now and then, until so many are killed or the work is done."""
    killed, over = list[int](), threading.Event()

    def work() -> None:
        while len(killed) < kills and not over.wait(draw.uniform(0, 2 * pause)):
            if (there := jobs_of(home)) and (len(there) > 1 or draw.random() < 0.5):
                killed.append(int(draw.choice(there)))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def compute(made: Plan, on: Place | None) -> tuple[float, str]:
    """Return how long the comparison takes, and what it says meanwhile."""
    began, said = time.perf_counter(), io.StringIO()
    with contextlib.redirect_stderr(said):
        run(made, 2, False, on)
    return time.perf_counter() - began, said.getvalue()


def measured(
    name: str, home: Path, seeds: int, kills: int, here: dict[str, dict[str, str]]
) -> dict[str, Any]:
    """Return what a place made of the comparison."""
    made = planned(home / "runs", seeds)
    (home / "place").mkdir()
    with (
        {"slurm": slurm, "ray": ray}[name](home / "place") as named,
        killing(made.out, kills, np.random.default_rng(0), PAUSE) as killed,
        contextlib.closing(place(named, made.out, most=2)) as on,  # else Ray's cluster cannot be shut down
    ):
        seconds, said = compute(made, on)
    return {
        "place": name,
        **compared(made, here),
        "killed": len(killed),
        "sent again": said.count("is sent again"),
        "seconds": seconds,
        "seconds a run": seconds / len(made.cells),
    }


def unhurt(home: Path, seeds: int, _: int, here: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return the seconds of a run, two at a time, of which none is killed, at each place."""
    made = planned(home / "here", seeds)
    seconds, _said = compute(made, None)
    found: dict[str, Any] = {"place": "unhurt", "runs": len(made.cells)}
    found["here, seconds a run"] = seconds / len(made.cells)
    for name in ("ray", "slurm"):
        (home / name).mkdir()
        row = measured(name, home / name, seeds, 0, here)
        found |= {f"{name}, seconds a run": row["seconds a run"], f"{name}, equal": row["equal"]}
    return found


def spread(home: Path, seeds: int, kills: int, here: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Return what became of runs whose clients train in Ray's tasks."""
    made = planned(home / "runs", seeds)
    (home / "place").mkdir()
    began = time.perf_counter()
    with (
        ray(home / "place"),
        killing(made.out, kills, np.random.default_rng(0), PAUSE_OF_ROUNDS) as killed,
    ):
        for cell in made.cells:
            engine = ClusterWorkers(executors("ray"), cell.folder)
            run_config(cell.config, out=cell.folder, engine=engine, progress=False)
    seconds = time.perf_counter() - began
    return {
        "place": "spread",
        **compared(made, here),
        "killed": len(killed),
        "seconds": seconds,
        "seconds a run": seconds / len(made.cells),
    }


def paced(home: Path, turns: int) -> dict[str, Any]:
    """Return the median seconds of a round whose clients take about 50 ms each, by who trains them."""
    config = parse_config(PACED)
    engines: dict[str, Callable[[Path], Engine]] = {
        "sequential": lambda out: Sequential(),
        "workers": lambda out: Workers(2),
        "ray": lambda out: ClusterWorkers(executors("ray"), out),
    }
    found: dict[str, list[float]] = {name: [] for name in engines}
    home.mkdir()
    with ray(home):
        for turn in range(turns):
            for name, make in engines.items():
                out = home / f"{name}-{turn}"
                run_config(config, out=out, engine=make(out), progress=False)
                timings = read_records(out / "timings.jsonl")
                rounds = [r.value for r in timings if r.metric == "seconds"]
                found[name] += rounds[2:]  # the first begin the processes
    for _ in range(turns):
        for name, kind in {"plain loop": "plain", "Flower's simulation": "flower"}.items():
            found.setdefault(name, []).extend(others(kind, config.run.rounds))
    return {
        "place": "paced",
        "clients a round": config.run.cohort,
        **{f"{name}, seconds a round": float(np.median(found[name])) for name in found},
        "ray by workers": float(np.median(found["ray"]) / np.median(found["workers"])),
    }


def others(name: str, rounds: int) -> list[float]:
    """Return the seconds of each round but the first two, by what is no engine of fedkeep's."""
    words = [sys.executable, "-m", "benchmarks.cluster_rounds", name, str(rounds)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds[2:]


def main() -> None:
    """Run the comparison here, and then at each place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--place", nargs="*", default=["slurm", "ray", "spread", "unhurt", "paced"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    kept = args.out / "cluster.json"
    known = json.loads(kept.read_text(encoding="utf-8"))["places"] if kept.exists() else []
    rows = {row["place"]: row for row in known}
    makers: dict[str, Callable[..., dict[str, Any]]] = {"spread": spread, "unhurt": unhurt}
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
        home, here = Path(folder), dict[str, dict[str, str]]()
        for name in args.place:
            if name == "paced":
                row = paced(home / "paced", 3)
            else:
                if not here:
                    first = planned(home / "here", args.seeds)
                    seconds, _ = compute(first, None)
                    took = {"seconds": seconds, "seconds a run": seconds / len(first.cells)}
                    rows["here"] = {"place": "here", **took, "commit": commit()}
                    here = digests(first)
                (home / name).mkdir()
                given = (home / name, args.seeds, args.kills, here)
                row = makers.get(name, partial(measured, name))(*given)
            rows[name] = {**row, "commit": commit()}
            found = {"methods": METHODS, "seeds": args.seeds, "places": list(rows.values())}
            write("cluster", found, folder=args.out)
    measured_now = [rows[name] for name in args.place]
    if any(row.get(fault) for row in measured_now for fault in ("not equal", "lost", "doubled")):
        raise SystemExit("Some runs differ, are lost or doubled.")
    if any(row.get("killed", args.kills) < args.kills for row in measured_now):
        raise SystemExit(f"Fewer than {args.kills} processes were killed. Take more seeds.")


if __name__ == "__main__":
    main()
