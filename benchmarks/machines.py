"""Claim: after a federation a hospital predicts with the models of the simulation, to the bit, whatever the method.

    python -m benchmarks.machines [--only mixture]
    python -m benchmarks.machines --rounds TREE     # on a machine that does nothing else, about 8 minutes
    python -m benchmarks.machines --memory          # Linux, two minutes

Three hospitals train each method over the transport in memory, with keys, a signed project and a file of states each.
Each then joins what the server publishes, of its best round, with what it kept of that, and adapts first where the method asks for that. Compared
with a simulation's export are all values of each hospital's model, and the predictions of it for new rows.
``results/machines.json`` says of each method what was compared, or why a hospital cannot have its model.

``--rounds`` deploys three nodes over TLS by the command of TREE, a checkout of an older commit, and by this one's, in turns,
and adds to the file how long a round took: from one that is kept by the server to the next, without the first two.

``--memory`` adds what all processes of an idle node hold together, claimed to be at most 400 MB: one node over TLS, a while
after rounds. Of pages that processes share each counts its part (PSS). Other programs of the machine share libraries too:
``alone_mb`` is what it would be without them, with the files that one process has mapped at most.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fault_processes import part_of, words_of
from benchmarks.faults import commit
from benchmarks.measure import RESULTS, write
from benchmarks.processes import ROOT, sizes_of
from benchmarks.restarts import CONFIG, NODES, serves, until
from fedkeep import load_model
from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.predicting import predict_table
from fedkeep.flower.local_federation import START, federation, local_of, rounds_done
from fedkeep.flower.processes import marked
from fedkeep.methods import METHODS
from tests.flower.test_published import LINEAR, MIXTURE, SITES, TWO_LAYERS, Hospitals, device


class Normed(nn.Module):
    """A stranger's module with batch normalisation."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(features, 5), nn.BatchNorm1d(5), nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.head(torch.relu(self.norm(self.body(x))))
        return out


TABLES = {
    "fedbn": ('kind = "fedbn"', 'kind = "benchmarks.machines:Normed"'),
    "kteps": ('kind = "kteps"\nhead = "head"\nnoise = 0.0', TWO_LAYERS),
    "kteps_star": (
        'kind = "kteps_star"\nhead = "head"\nnoise = 0.0\nstart = 1\nend = 2\ntable = "body.weight"',
        TWO_LAYERS,
    ),
    "furl": ('kind = "furl"', LINEAR),
    "mixture": ('kind = "mixture"\nlocal_epochs = 1\nmixture_epochs = 1', MIXTURE),
}
"""Tables of the method and the model, where they are not the usual ones."""
NOISELESS = "Without its noise on uploads: devices draw that from their system, so no two runs are alike."
NOTES = {
    "kteps": NOISELESS,
    "kteps_star": f"{NOISELESS} It projects the first layer, as this model has no table of words.",
}
ROUNDS = 6
APART = ("fedamp", "fedpac", "pfedhn")
"""Methods that send each client something else."""


def compared(name: str, folder: Path, head: str = "") -> dict[str, Any]:
    """Train one method at three hospitals and in a simulation, and compare."""
    method, model = TABLES.get(name, (f'kind = "{name}"\n{head}', TWO_LAYERS))
    hospitals = Hospitals(folder, method, model, rounds=ROUNDS)
    hospitals.train()
    run = hospitals.simulated()
    run.export(folder / "simulated")
    apart, adapts = name in APART, False
    tensors, different, predictions = 0, list[str](), 0
    for site in SITES:
        home = folder / site
        published = hospitals.publish(*[site] * apart)
        words: tuple[object, ...] = ("export", "--out", home / "models", "--published", published)
        done = device(home, *words)
        if done.exit_code and "fedkeep device adapt" in done.stderr:
            adapts = True
            done = device(home, "adapt")
            done = done if done.exit_code else device(home, *words)
        if done.exit_code:
            return {"method": name, "why": " ".join(done.stderr.split()) or repr(done.exception)}
        own, wanted = (
            load_model(place, site).state_dict() for place in (home / "models", folder / "simulated")
        )
        tensors += len(wanted)
        different += [f"{site}: {n}" for n in own.keys() ^ wanted.keys()]
        different += [
            f"{site}: {n}" for n in own.keys() & wanted.keys() if not torch.equal(own[n], wanted[n])
        ]
        mine, theirs = (
            predict_table(place, home / "new.csv") for place in (home / "models", folder / "simulated")
        )
        predictions += len(theirs)
        different += [f"{site}: predictions"] * (mine != theirs)
    row = {
        "method": name,
        "round": run.round,
        "adapts": adapts,
        "published": "to each site" if apart else "to all",
    }
    note = {"note": NOTES[name]} if name in NOTES else {}
    return {**row, "tensors": tensors, "predictions": predictions, "different": different, **note}


def told(name: str) -> dict[str, Any]:
    """Return what was compared of a method, or why it was not."""
    why = ""
    for head in ("", 'head = "head"'):  # found on examples, which a server does not have
        with tempfile.TemporaryDirectory() as folder:
            try:
                return compared(name, Path(folder), head)
            except FedkeepError as error:
                why = str(error)
    return {"method": name, "why": why}


TURNS, DEPLOYED = 2, 8


def round_seconds(tree: Path, folder: Path) -> list[float]:
    """Deploy by the command of a tree; return the seconds of each round but the first two."""
    config, run, ended = folder / "rounds.toml", folder / "out" / "run", list[float]()
    config.write_text(CONFIG.replace("rounds = 1000", f"rounds = {DEPLOYED}"))
    given = ["-m", "fedkeep", "deploy", "--local", "3", "--config", str(config), "--out", str(run.parent)]
    paths = os.pathsep.join(str(tree / part) for part in ("src", "papers/src", "."))
    with subprocess.Popen([sys.executable, *given], env={**os.environ, "PYTHONPATH": paths}) as process:
        while process.poll() is None:
            there = (run / "commit.json").exists()
            if there and json.loads((run / "commit.json").read_text())["round"] > len(ended):
                ended.append(time.monotonic())
            time.sleep(0.02)
    if process.returncode or len(ended) < DEPLOYED:
        raise SystemExit(f"{tree}: {len(ended)} rounds of {DEPLOYED}, exit code {process.returncode}")
    return [round(later - earlier, 2) for earlier, later in itertools.pairwise(ended[1:])]


def rounds(tree: Path) -> dict[str, Any]:
    """Return how long rounds take by an older tree's command and by this one's, in turns."""
    trees = {"before": tree.resolve(), "after": ROOT}
    found: dict[str, list[list[float]]] = {which: [] for which in trees}
    loads = []
    for _ in range(TURNS):
        for which, place in trees.items():
            loads.append(round(os.getloadavg()[0], 1))
            with tempfile.TemporaryDirectory() as folder:
                found[which].append(round_seconds(place, Path(folder)))
            print(which, found[which][-1], flush=True)
    about = {"nodes": 3, "clients": 6, "loads": loads, "cores": os.cpu_count()}
    each = {
        which: {
            "commit": subprocess.check_output(
                ["git", "-C", trees[which], "rev-parse", "HEAD"], text=True
            ).strip(),
            "median_seconds": round(statistics.median(value for turn in turns for value in turn), 2),
            "turns": turns,
        }
        for which, turns in found.items()
    }
    return {**about, **each}


MOST_MB, QUIET = 400.0, 30.0


def memory() -> dict[str, Any]:
    """Return what the processes of a node hold that has nothing to do."""
    with tempfile.TemporaryDirectory() as folder:
        place = local_of(Path(folder), CONFIG, None, 1)
        with federation(place, print) as (link, nodes):
            (node,) = nodes.values()
            settings = {"status": str(place.status), "clients": 2 * NODES, "patience": START}
            run = link.submit(place.folder / "project", settings)
            until(lambda: rounds_done(place.run) > 2, "three rounds")
            link.stop_run(run)
            until(lambda: not serves(link, node), "the last message's process ends")
            time.sleep(QUIET)
            home = f"FLWR_HOME={node.home}"
            own = [p for p in marked(link.processes.mark) if home in words_of(p, "environ")]
            sizes = {p: {**sizes_of(p, "smaps_rollup"), **sizes_of(p, "status")} for p in own}
            each = [{"process": part_of(p) or "watch", "pss_mb": in_mb(sizes[p]["Pss"])} for p in own]
    alone = sum(one["Pss_Anon"] for one in sizes.values())
    alone += sum(max(one[kind] for one in sizes.values()) for kind in ("RssFile", "RssShmem"))
    together = in_mb(sum(one["Pss"] for one in sizes.values()))
    print(
        f"{together} MB, {in_mb(alone)} MB where no other program shares libraries; claimed: {MOST_MB:g} MB"
    )
    about = {"commit": commit(), "claim_mb": MOST_MB, "idle_seconds": QUIET, "clients": 2 * NODES}
    return {**about, "pss_mb": together, "alone_mb": in_mb(alone), "processes": each}


def in_mb(kibibytes: int) -> float:
    """Return MB of a number of ``/proc``."""
    return round(kibibytes * 1024 / 1e6, 1)


def main(words: Sequence[str] | None = None) -> None:
    """Compare each method, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machines", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=sorted(METHODS))
    parser.add_argument("--rounds", type=Path, metavar="TREE")
    parser.add_argument("--memory", action="store_true")
    given = parser.parse_args(words)
    rows, path = [], RESULTS / "machines.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    more = {} if given.rounds is None else {"round_times": rounds(given.rounds)}
    more |= {"memory": memory()} if given.memory else {}
    if more:
        path.write_text(json.dumps({**known, **more}, indent=1) + "\n", encoding="utf-8")
        return
    for name in given.only or sorted(METHODS):
        rows.append(told(name))
        print(rows[-1], flush=True)
    if not given.only:
        kept = {key: known[key] for key in ("round_times", "memory") if key in known}
        write(
            "machines", {"commit": commit(), "sites": len(SITES), "rounds": ROUNDS, "methods": rows, **kept}
        )


if __name__ == "__main__":
    main()
