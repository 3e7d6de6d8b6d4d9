"""A network of your own, with a private head and a private batch norm, on data of your own.

Forty clinics measure the same five things, but each calibrates its device differently and codes the diagnosis in its
own way. The features are learned together; the calibration and the head stay in the clinic.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import Phase


class Clinic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calibration = nn.BatchNorm1d(5)
        self.body = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.calibration(x)))
        return logits


def measurements(clinics: int = 40, patients: int = 60) -> fedkeep.FederatedData:
    draw = np.random.default_rng(0)
    clinic = np.repeat(np.arange(clinics), patients)
    health = draw.standard_normal((len(clinic), 5))
    ill = (health[:, 0] + health[:, 1] * health[:, 2] > 0).astype(np.int64)
    gain, offset = draw.uniform(0.5, 3, (clinics, 5)), 3 * draw.standard_normal((clinics, 5))
    turned = draw.random(clinics) < 0.5  # these clinics code "ill" as 0
    columns = {
        "x": (health * gain[clinic] + offset[clinic]).astype(np.float32),
        "label": np.where(turned[clinic], 1 - ill, ill),
    }
    return fedkeep.FederatedData.from_columns(clinic, columns).split_per_user(seed=0)


def main() -> dict[str, float]:
    data = measurements()
    torch.manual_seed(0)
    local = Phase(optimizer=fedkeep.sgd(0.1), epochs=2, batch_size=16)
    private = fedkeep.methods.furl(["head.*", "calibration.*"], private_init="model", local=local)
    found = {}
    for name, method in {
        "everything federated": fedkeep.methods.fedavg(local=local),
        "private": private,
    }.items():
        run = fedkeep.simulate(Clinic(), method, data, epochs=10, cohort=10, evaluate_every=0)
        found[name] = run.evaluate("test")["accuracy"]
        print(f"{name:22} accuracy on test {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
