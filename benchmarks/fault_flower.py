"""Faults on real processes: a link, a server app and nodes on loopback, one of them harmed at a random instant.

``python -m benchmarks.fault_flower [--faults 50] [--seed 0]`` goes on where it was stopped and writes
``results/faults-flower.json``, together with the faults in memory of ``results/faults-remote.json``. Campaigns of
several seeds may run side by side in one folder: the result has the faults of all, and of earlier campaigns. A leg is one
training with ``LEG`` faults, one after another; at its end the server's values and every private state are compared, to the
bit, with a simulation that nothing happened to. It computes with as many threads as the nodes do, as sums differ with
that in their last bit. ``--recheck`` compares the legs that differed again; their folders are kept. The claim: no
private state is lost or mixed, no run goes on from a wrong place, and every run ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_processes import KINDS, Harm, StuckError
from benchmarks.faults import commit
from benchmarks.measure import RESULTS, processor
from fedkeep.core.errors import FedkeepError
from fedkeep.core.files import load_verified
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.flower.local_federation import federation, local_of, rounds_done
from fedkeep.remote.device_file import DeviceFile

LEG = 5
ROUNDS = 5 * LEG  # a few pass between two faults
NODES, CLIENTS = 2, 4
CONFIG = """name = "faults"
seed = {seed}

[data]
reader = "many_user_text"
users = {clients}
examples = 12

[model]
kind = "document"
user_dim = 4
embedding_dim = 4
hidden = 8
mlp = 8
pool = "max"

[method]
kind = "furl"
private = "user"
batch_size = 8
{clip}

[run]
rounds = {rounds}
cohort = {clients}
evaluate_every = 2

[rounds]
minimum = {clients}
"""


def main(words: Sequence[str] | None = None) -> int:
    """Return 0 if nothing was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fault_flower", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("fault-flower"), help="of the trainings")
    parser.add_argument("--recheck", action="store_true", help="compare again the legs that differed")
    parser.add_argument("--again", action="store_true", help="do the legs again that did not come out equal")
    given = parser.parse_args(words)
    given.folder.mkdir(parents=True, exist_ok=True)
    log = given.folder / f"faults-{given.seed}.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done += [line for line in kept() if line["seed"] == given.seed and line["leg"] not in legs(done)]
    if given.again:
        done = [line for line in done if not line["wrong"]]
    log.write_text("".join(json.dumps(line) + "\n" for line in done))
    if given.recheck:
        for line in done:
            if line["wrong"]:
                folder = given.folder / f"leg-{given.seed}-{line['leg']}"
                text = (folder / "project" / "config.toml").read_text(encoding="utf-8")
                shutil.rmtree(folder / "simulation", ignore_errors=True)
                line |= {"wrong_at_first": line["wrong"], "wrong": differences(folder, text)}
        log.write_text("".join(json.dumps(line) + "\n" for line in done))
    write_result(given.folder)
    while len(done) < given.faults:
        leg = next(number for number in itertools.count() if number not in legs(done))
        lines = one_leg(given.folder / f"leg-{given.seed}-{leg}", given.seed, leg)
        with log.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        done += lines
        write_result(given.folder)
    return int(any(line["wrong"] for line in done))


def legs(lines: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the legs that faults were of."""
    return {line["leg"] for line in lines}


def kept() -> list[dict[str, Any]]:
    """Return the faults of whole legs that earlier campaigns left in their result."""
    result = RESULTS / "faults-flower.json"
    lines = json.loads(result.read_text(encoding="utf-8"))["processes"]["lines"] if result.exists() else []
    return list(lines)


def one_leg(folder: Path, seed: int, leg: int) -> list[dict[str, Any]]:
    """Train once, with faults; return a line of each."""
    shutil.rmtree(folder, ignore_errors=True)
    draw = random.Random(f"{seed}/{leg}")  # noqa: S311
    text = CONFIG.format(seed=leg, clients=CLIENTS, rounds=ROUNDS, clip="" if leg % 2 else "clip_norm = 5.0")
    place = local_of(folder, text, None, NODES)
    kinds = [draw.choice(list(KINDS)) for _ in range(LEG)]
    lines = []
    with federation(place, say) as (link, nodes):
        harm = Harm(place, link, nodes, draw)
        try:
            harm.begin()
            for number, kind in enumerate(kinds):
                harm.await_round(1)
                line = {
                    "number": leg * LEG + number,
                    "leg": leg,
                    "kind": kind,
                    **harm.do(kind),
                    "wrong": "",
                    "commit": commit(),
                }
                say(json.dumps(line))
                lines.append(line)
            harm.await_end(ROUNDS)
            wrong = ""
        except (StuckError, FedkeepError) as error:
            wrong = f"did not end: {error}"
            say(wrong)
        finally:
            harm.end()
    for number in range(len(lines), LEG):
        about = {"number": leg * LEG + number, "leg": leg, "kind": kinds[number]}
        lines.append({**about, "what": "not done, or not survived", "seconds": 0.0, "commit": commit()})
    wrong = wrong or differences(place.folder, text)
    say(f"leg {leg}: {wrong or 'equal to a simulation, to the bit'}")
    for line in lines:
        line["wrong"] = wrong
    if not wrong:
        shutil.rmtree(folder, ignore_errors=True)
    return lines


def differences(folder: Path, text: str) -> str:
    """Return what differs from a simulation that nothing happened to."""
    run = folder / "run"
    expected = run_config(
        parse_config(text, "faults", {"run.engine": "sequential"}), out=folder / "simulation"
    ).last
    if rounds_done(run) != expected.round:
        return f"{rounds_done(run)} rounds instead of {expected.round}"
    last = read_commit(run, read_info(run))
    found = load_verified(run / last.server, last.server_sha256)
    for name, value in expected.server.items():
        if not torch.equal(found[f"params/{name}"], value):
            return f"the server's {name} differs"
    for node in sorted((folder / "nodes").iterdir()):
        file = DeviceFile(next((node / "state").glob("*.db")), node.name)
        try:
            for client in {version.client for version in file.versions()}:
                kept = max((v for v in file.versions(client) if v.accepted), key=lambda v: v.version)
                own = expected.private.read([expected.data.index(client)])
                if kept.version != expected.round:
                    return f"{client} has version {kept.version}"
                for name, value in file.values(kept).items():
                    if not torch.equal(own[name][0], value):
                        return f"{client}'s {name} differs"
        finally:
            file.close()
    return ""


def write_result(folder: Path) -> None:
    """Write the summary of this part, and of the one in memory."""
    logs = {int(log.stem.rpartition("-")[2]): log for log in sorted(folder.glob("faults-*.jsonl"))}
    lines = [line for line in kept() if line["seed"] not in logs]
    for seed, log in logs.items():
        lines += [{"seed": seed, **json.loads(line)} for line in log.read_text().splitlines()]
    seconds = {kind: [line["seconds"] for line in lines if line["kind"] == kind] for kind in KINDS}
    memory = RESULTS / "faults-remote.json"
    content = {
        "memory": json.loads(memory.read_text()) if memory.exists() else None,
        "processes": {
            "faults": len(lines),
            "by_kind": dict(Counter(line["kind"] for line in lines)),
            "wrong": sorted({line["wrong"] for line in lines} - {""}),
            "slowest_seconds": {kind: max(found) for kind, found in seconds.items() if found},
            "lines": lines,
        },
        "commit": commit(),
        "machine": processor(),
    }
    (RESULTS / "faults-flower.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def say(text: str) -> None:
    """Say it, with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
