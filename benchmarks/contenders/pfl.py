"""pfl (apple/pfl-research) on PyTorch: FederatedAveraging, simulated backend, private values in its user storage."""

from __future__ import annotations

from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from benchmarks.contenders import Options, Serve
from benchmarks.workloads import Workload, tensors


class Furl(FederatedAveraging):
    """Federated averaging that keeps each user's private parameter in a storage of pfl's, and out of the statistics."""

    def __init__(self, private: str) -> None:
        super().__init__()
        self.private = private
        self.storage = InMemoryUserStateStorage()
        self.known: set[str] = set()

    def train_one_user(
        self, initial_model_state: Any, model: Any, user_dataset: Any, central_context: Any
    ) -> tuple[Any, Metrics]:
        """Train from the user's own value, keep the trained one, and drop it from what is aggregated."""
        value, user = model.variable_map[self.private], user_dataset.user_id
        if user in self.known:
            value.data.copy_(self.storage.load_state(user)["value"])
        statistics, metrics = super().train_one_user(
            initial_model_state, model, user_dataset, central_context
        )
        self.storage.save_state({"value": value.detach().clone()}, user)
        self.known.add(user)
        shared = {n: change for n, change in statistics.items() if n != self.private}
        return MappedVectorStatistics(shared), metrics


class WithLoss(nn.Module):
    """The plain model with the two functions that pfl asks for."""

    def __init__(self, of: Workload) -> None:
        super().__init__()
        self.plain = of.initial()
        self.total, self.steps, self.counting = 0.0, 0, True

    def loss(self, *columns: Tensor) -> Tensor:
        """Return the mean loss of a mini-batch, its texts cut to the longest."""
        *inputs, label = columns
        if len(inputs) == 2:
            inputs[0] = inputs[0][:, : int(inputs[1].max())]
        loss = nn.functional.cross_entropy(self.plain(*inputs), label)
        if self.counting:
            self.total, self.steps = self.total + float(loss), self.steps + 1
        return loss

    def metrics(self, *columns: Tensor) -> dict[str, Any]:
        """Return a metric, which pfl asks for in its first round."""
        self.counting = False
        loss = float(self.loss(*columns))
        self.counting = True
        return {"loss": Weighted(loss, 1)}


class Pfl:
    """Rounds of pfl's ``FederatedAlgorithm.run``."""

    def __init__(self, options: Options) -> None:
        self.of = options.padded_work
        self.data = self.of.data()
        self.cohort: list[int] = []
        self.turn = self.iterations = 0
        self.module = WithLoss(self.of)
        central = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.model = PyTorchModel(self.module, self.local_optimizer, central)
        self.algorithm = Furl("plain." + self.of.private) if self.of.private else FederatedAveraging()
        users = FederatedDataset(self.dataset, lambda: str(self.cohort.pop(0)))
        self.backend = SimulatedBackend(users, users, [WeightByDatapoints()])
        self.facts = {"threads": str(torch.get_num_threads())}

    def local_optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        """Return a local optimiser; pfl passes the rate."""
        if self.of.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=lr)
        return torch.optim.SGD(parameters, lr=lr, momentum=self.of.momentum)

    def dataset(self, user: str) -> Dataset:
        """Return a user's examples in the order of the round's mini-batches; pfl itself doesn't shuffle."""
        columns = tensors(self.data[int(user)])
        order = torch.cat(list(self.of.batches(int(user), self.turn, len(columns["label"]))))
        return Dataset(tuple(value[order] for value in columns.values()), user_id=user)

    def round(self, turn: int, clients: list[int]) -> float:
        """Run a round; return the mean training loss."""
        self.turn, self.cohort = turn, list(clients)
        self.module.total, self.module.steps = 0.0, 0
        self.iterations += 1
        self.algorithm.run(
            NNAlgorithmParams(self.iterations, 10**9, len(clients), None),
            self.backend,
            self.model,
            # the passes lie one after the other in the data
            NNTrainHyperParams(
                local_num_epochs=1, local_learning_rate=self.of.rate, local_batch_size=self.of.batch
            ),
        )
        return self.module.total / self.module.steps

    def state(self) -> dict[str, Tensor]:
        """Return the server's federated values."""
        found = self.module.plain.state_dict()
        return {n: v for n, v in found.items() if n != self.of.private}


def run(options: Options, serve: Serve) -> None:
    """Serve rounds of pfl."""
    serve(Pfl(options))
