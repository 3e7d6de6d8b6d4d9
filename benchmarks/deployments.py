"""Claim: four methods, deployed on nodes of Flower over TLS, end with the bits of the simulation.

    python -m benchmarks.deployments FOLDER [--only mixture]

FOLDER keeps each method's deployment; a second call goes on where the first was stopped. FedAvg, FURL, fine-tuning and the
mixture of experts train three clients on two nodes for two rounds, and the last two adapt every client by order afterwards.
Compared are the server's values, what each device keeps of its last version, and what it holds adapted.
``results/deployments.json`` names how many tensors of each method were compared, and those that differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.faults import commit
from benchmarks.measure import write
from fedkeep import Run
from fedkeep.core.files import load_verified
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.personalize import adapt_clients
from fedkeep.flower.local_federation import Local, federation, local_of, train
from fedkeep.remote.device_file import DeviceFile
from fedkeep.remote.device_store import counted

DOCUMENT = 'kind = "document"\nembedding_dim = 4\nhidden = 8\nmlp = 8\npool = "max"\n'
TEXTS = '{ kind = "text_classifier", embedding_dim = 4, hidden = 4 }'
GATE = TEXTS.replace("}", ", classes = 1 }")
EXPERTS = f"""kind = "mixture_of_experts"
global_expert = {TEXTS}
local_expert = {TEXTS}
gate = {{ kind = "gate", network = {GATE} }}
"""
METHODS = {
    "fedavg": (DOCUMENT, 'kind = "fedavg"'),
    "furl": (DOCUMENT + "user_dim = 4\n", 'kind = "furl"\nprivate = "user"'),
    "fine_tuned": (DOCUMENT, 'kind = "fine_tuned"\nadapt = { epochs = 2 }'),
    "mixture": (EXPERTS, 'kind = "mixture"\nadapt = { epochs = 2 }\nepochs = 1'),
}
"""Each method's tables of the model and of the method."""


def configuration(name: str) -> str:
    """Return a method's configuration."""
    model, method = METHODS[name]
    return f"""name = "small"
seed = 3
[data]
reader = "many_user_text"
users = 3
examples = 12
[model]
{model}
[method]
{method}
batch_size = 4
[run]
rounds = 2
cohort = 2
"""


Pair = tuple[str, Tensor, Tensor]
"""What is compared: its name, on machines, and simulated."""


def server_values(place: Local, run: Run) -> Iterator[Pair]:
    """Yield the server's values."""
    committed = read_commit(place.run, read_info(place.run))
    if committed.chosen != run.round:
        raise SystemExit(f"the deployment is of round {committed.chosen}, the simulation of {run.round}")
    best = committed.best if committed.best.server else committed.moment
    server = load_verified(place.run / best.server, best.sha256)
    for name, value in run.server.items():
        yield name, server[f"params/{name}"], value


def device_values(place: Local, run: Run) -> Iterator[Pair]:
    """Yield what each device keeps of the best round and, where the method adapts, what it holds adapted."""
    adapted = adapt_clients(run, progress=False) if run.method.adapt.phases else None
    for node, clients in place.clients.items():
        file = DeviceFile(next((place.folder / "nodes" / node / "state").glob("*.db")), node)
        for client in clients:
            version, lacking = counted(file, client, run.round)
            if lacking:
                raise SystemExit(lacking)
            own = run.private.read([run.data.index(client)])
            if version is not None:
                for name, value in file.values(version).items():
                    yield f"{client}: {name}", value, own[name][0]
            if adapted is not None:
                mine, theirs = file.adapted_values(file.adapted()[client]), adapted.own(client)
                if mine.keys() != theirs.keys():
                    raise SystemExit(f"{client} has {sorted(mine)} adapted, the simulation {sorted(theirs)}")
                for name, value in mine.items():
                    yield f"{client}, adapted: {name}", value, theirs[name]
        file.close()


def deployed(folder: Path, name: str) -> dict[str, Any]:
    """Train one method on nodes and in a simulation, and compare."""
    text, place = configuration(name), folder / name
    local = local_of(place / "federation", text, None, 2)
    run = run_config(parse_config(text, "", {"run.engine": "sequential"}))
    with federation(local, print) as (link, _):
        train(local, link, print)
        if run.method.adapt.phases:
            train(local, link, print, {"only": "adapt"})
    pairs = [*server_values(local, run), *device_values(local, run)]
    different = [name for name, there, here in pairs if not torch.equal(there, here)]
    return {"method": name, "tensors": len(pairs), "different": different}


def main(words: Sequence[str] | None = None) -> None:
    """Compare each method, and write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deployments", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", choices=list(METHODS))
    given = parser.parse_args(words)
    rows = [deployed(given.folder, name) for name in given.only or METHODS]
    write("deployments", {"commit": commit(), "nodes": 2, "clients": 3, "rounds": 2, "methods": rows})


if __name__ == "__main__":
    main()
