"""Claim: after a federation a hospital predicts with the models of the simulation, to the bit, whatever the method.

    python -m benchmarks.machines [--only mixture]

Three hospitals train each method over the transport in memory, with keys, a signed project and a file of states each.
Each then joins what the server publishes, of its best round, with what it kept of that, and adapts first where the method asks for that. Compared
with a simulation's export are all values of each hospital's model, and the predictions of it for new rows.
``results/machines.json`` says of each method what was compared, or why a hospital cannot have its model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults import commit
from benchmarks.measure import write
from fedkeep import load_model
from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.predicting import predict_table
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


def main(words: Sequence[str] | None = None) -> None:
    """Compare each method, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machines", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=sorted(METHODS))
    given = parser.parse_args(words)
    rows = []
    for name in given.only or sorted(METHODS):
        rows.append(told(name))
        print(rows[-1], flush=True)
    if not given.only:
        write("machines", {"commit": commit(), "sites": len(SITES), "rounds": ROUNDS, "methods": rows})


if __name__ == "__main__":
    main()
