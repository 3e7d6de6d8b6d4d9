"""fedkeep, by its public parts: the engine is the contender's name behind ``fedkeep_``, e.g. ``fedkeep_sequential``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedkeep
from benchmarks.contenders import Options, Serve
from benchmarks.rounds import Rounds
from benchmarks.workloads import SEED, Columns, Workload
from fedkeep import Phase
from fedkeep.core.allocator import tune_allocator
from fedkeep.core.net import Net
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.columns import offsets_of
from fedkeep.engines import Engine
from fedkeep.experiments.simulate import make_engine
from fedkeep.methods import Method
from fedkeep.models import CifarCNN, DocumentModel, TextClassifier
from fedkeep.nn import ConvPool, Linear

PREFIX = "fedkeep_"
ROUNDS = 1000  # of the run that ``auto`` chooses for
RENAMED = {  # our names: the plain model's; DocumentModel's MLP begins with a dropout
    "mlp.1.": "mlp.0.",
    "mlp.3.": "mlp.2.",
    "encoder.": "gru.",
    "classifier.": "mlp.",
}


class FusedCNN(nn.Module):
    """W3's model with fedkeep's layers: convolution, ReLU and max-pool in one; a linear layer with its ReLU."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = ConvPool(3, 32, 5, 2)
        self.conv2 = ConvPool(32, 64, 5, 2, flat=True)
        self.fc1 = Linear(64 * 8 * 8, 512, relu=True)
        self.out = Linear(512, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (B, classes) for images (B, 3, 32, 32)."""
        logits: Tensor = self.out(self.fc1(self.conv2(self.conv1(image))))
        return logits


class Ours:
    """Rounds of fedkeep with one of its engines."""

    def __init__(self, of: Workload, module: nn.Module, engine: Engine, device: str = "cpu") -> None:
        net = Net(module.to(device))
        self.rounds = Rounds(method_of(of), net, federated(of.data()), engine, device=device, seed=SEED)
        self.engine = engine

    @property
    def facts(self) -> dict[str, str]:
        """The engine in use, which ``auto`` picks while it runs."""
        return {"engine": self.engine.name, "threads": str(torch.get_num_threads())}

    def round(self, turn: int, clients: list[int]) -> float:
        """Run a round; return the mean training loss."""
        self.rounds.server = self.rounds.server.but(round=turn)
        report = self.rounds(clients)
        self.rounds.device.committed()
        return report.loss

    def state(self) -> dict[str, Tensor]:
        """Return the server's federated values, under the plain model's names."""
        return {renamed(n): v for n, v in self.rounds.server.params.items()}


def model_of(of: Workload, plain: nn.Module) -> nn.Module:
    """Return fedkeep's model of a workload with the plain model's values."""
    start = plain.state_dict()
    if of.name == "W2":
        module: nn.Module = TextClassifier(len(start["embedding.weight"]), 2, mlp=64)
    elif of.name == "W3":
        module = FusedCNN()
    elif of.name == "W4":
        module = CifarCNN(10, dropout=0.0)
    else:
        module = DocumentModel(100, 64, 32, embedding_dim=32, hidden=64, mlp=64)
    module.to(next(iter(start.values())).dtype)
    known = module.state_dict()
    module.load_state_dict({n: start[renamed(n)] for n in known})
    return module


def renamed(name: str) -> str:
    """Return the plain model's name of a parameter."""
    known = next((prefix for prefix in RENAMED if name.startswith(prefix)), None)
    return name if known is None else RENAMED[known] + name.removeprefix(known)


def method_of(of: Workload) -> Method:
    """Return a workload's method."""
    if of.optimizer == "adam":
        optimizer = fedkeep.adam(of.rate)
    else:
        optimizer = fedkeep.sgd(of.rate, momentum=of.momentum)
    if of.private:
        return fedkeep.methods.furl(
            of.private, local=Phase(optimizer=optimizer, epochs=of.epochs, batch_size=of.batch)
        )
    return fedkeep.methods.fedavg(local=Phase(optimizer=optimizer, epochs=of.epochs, batch_size=of.batch))


def federated(clients: list[Columns]) -> FederatedData:
    """Return the clients' columns as a federated data set, all for training."""
    owner = np.repeat(np.arange(len(clients)), [len(c["label"]) for c in clients])
    joined = {n: np.concatenate([c[n] for c in clients]) for n in clients[0]}
    columns: dict[str, Any] = {n: v for n, v in joined.items() if not n.startswith("text")}
    if "text" in joined:
        columns["text"] = Ragged(joined["text"], offsets_of(joined["text_length"]))
    return FederatedData.from_columns(owner, columns, split=["train"] * len(owner))


def run(options: Options, serve: Serve) -> None:
    """Serve rounds of fedkeep."""
    tune_allocator()  # as the command line does
    of = options.work
    engine, _ = make_engine(options.contender.removeprefix(PREFIX), None, options.device, of.cohort, ROUNDS)
    serve(Ours(of, model_of(of, of.initial(options.dtype)), engine, options.device))
