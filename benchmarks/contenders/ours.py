"""fedkeep, by its public parts: the engine is the contender's name behind ``fedkeep_``, e.g. ``fedkeep_sequential``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedkeep
from benchmarks.contenders import Options, Serve
from benchmarks.models import CNN
from benchmarks.workloads import SEED, Columns, Workload
from fedkeep.core.net import Net
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.columns import offsets_of
from fedkeep.engines import Engine, Job, Server, run_round
from fedkeep.experiments.simulate import ENGINES
from fedkeep.methods import Method
from fedkeep.models import DocumentModel
from fedkeep.nn import GRU
from fedkeep.store import Default, MemoryStore

PREFIX = "fedkeep_"
RENAMED = {"mlp.1.": "mlp.0.", "mlp.3.": "mlp.2."}  # DocumentModel's MLP begins with a dropout


class Words(nn.Module):
    """W2's model with fedkeep's layer: embedding → BiGRU → masked mean → MLP."""

    lookup: ClassVar = {"embedding.weight": "text"}

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 200)
        self.gru = GRU(200, 64, bidirectional=True)
        self.mlp = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        """Return logits (B, 2) for word ids (B, L) and lengths (B,)."""
        logits: Tensor = self.mlp(self.gru.pooled_ids(text, self.embedding.weight, text_length, "mean"))
        return logits


class FusedCNN(CNN):
    """W3's model with fedkeep's convolution."""

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (B, classes) for images (B, 3, 32, 32)."""
        return super().forward(image)


class Ours:
    """Rounds of fedkeep with one of its engines."""

    def __init__(self, options: Options) -> None:
        of = options.work
        plain = of.initial(options.dtype)
        module = model_of(of, plain).to(options.device)
        method, net, data = method_of(of), Net(module), federated(of.data())
        initial = net.initial()
        store = MemoryStore(Default(method.split.personal(initial), method.private_init))
        self.job = Job(method, net, data, store, seed=SEED, device=options.device)
        self.server = Server(method.split.federated(initial))
        name = options.contender.removeprefix(PREFIX)
        self.engine = engine_of(name)
        self.facts = {"engine": self.engine.name, "threads": str(torch.get_num_threads())}

    def round(self, turn: int, clients: list[int]) -> float:
        """Run a round; return the mean training loss."""
        self.server.round = turn
        report = run_round(self.job, self.engine, self.server, clients)
        self.job.store.apply()
        return report.loss

    def state(self) -> dict[str, Tensor]:
        """Return the server's federated values, under the plain model's names."""
        return {renamed(n): v for n, v in self.server.params.items()}


def model_of(of: Workload, plain: nn.Module) -> nn.Module:
    """Return fedkeep's model of a workload with the plain model's values."""
    start = plain.state_dict()
    if of.name == "W2":
        module: nn.Module = Words(len(start["embedding.weight"]))
    elif of.name == "W3":
        module = FusedCNN()
    else:
        module = DocumentModel(100, 64, 32, embedding_dim=32, hidden=64, mlp=64)
    module.to(next(iter(start.values())).dtype)
    known = module.state_dict()
    module.load_state_dict({n: start[renamed(n)] for n in known})
    return module


def renamed(name: str) -> str:
    """Return the plain model's name of a parameter."""
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs) if name.startswith(ours) else name
    return name


def method_of(of: Workload) -> Method:
    """Return a workload's method."""
    if of.optimizer == "adam":
        optimizer = fedkeep.adam(of.rate)
    else:
        optimizer = fedkeep.sgd(of.rate, momentum=of.momentum)
    if of.private:
        return fedkeep.methods.furl(
            of.private, optimizer=optimizer, epochs=of.epochs, batch_size=of.batch
        )
    return fedkeep.methods.fedavg(optimizer=optimizer, epochs=of.epochs, batch_size=of.batch)


def federated(clients: list[Columns]) -> FederatedData:
    """Return the clients' columns as a federated data set, all for training."""
    owner = np.repeat(np.arange(len(clients)), [len(c["label"]) for c in clients])
    joined = {n: np.concatenate([c[n] for c in clients]) for n in clients[0]}
    columns: dict[str, Any] = {n: v for n, v in joined.items() if not n.startswith("text")}
    if "text" in joined:
        columns["text"] = Ragged(joined["text"], offsets_of(joined["text_length"]))
    return FederatedData.from_columns(owner, columns, split=["train"] * len(owner))


def engine_of(name: str) -> Engine:
    """Return the engine of this name."""
    return ENGINES[name]()


def run(options: Options, serve: Serve) -> None:
    """Serve rounds of fedkeep."""
    serve(Ours(options))
