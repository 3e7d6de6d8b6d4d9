"""A training script for one data set, and the same with a `Dataset` for each client: which lines change.

``python -m examples.training_script``. `alone` is the script as it was; `together` is what it became.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

import fedkeep


class Clinic(Dataset[tuple[torch.Tensor, int]]):
    """A clinic's measurements, made here; it draws its threshold elsewhere than others."""

    def __init__(self, number: int, train: bool) -> None:
        draw = torch.Generator().manual_seed(2 * number + train)
        self.x = torch.randn(120 if train else 60, 6, generator=draw)
        self.y = (self.x[:, :3].sum(1) * (-1) ** number > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return self.x[number], int(self.y[number])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))


def alone() -> float:
    train = ConcatDataset([Clinic(number, train=True) for number in range(4)])
    test = ConcatDataset([Clinic(number, train=False) for number in range(4)])
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        for x, y in DataLoader(train, batch_size=16, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(test, batch_size=64))
    return right / len(test)


def together() -> float:
    clinics = {n: {"train": Clinic(n, train=True), "test": Clinic(n, train=False)} for n in range(4)}
    data = fedkeep.FederatedData.from_datasets(clinics)
    local = fedkeep.Phase(optimizer=fedkeep.adam(1e-2), batch_size=16)
    method = fedkeep.methods.fedper("2.*", local=local)
    run = fedkeep.simulate(network(), method, data, rounds=20)
    return run.evaluate()["accuracy"]


def main() -> dict[str, float]:
    return {"one model": alone(), "a head for each clinic": together()}


if __name__ == "__main__":
    print(main())
