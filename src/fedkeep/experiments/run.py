"""``Run``: what a simulation has made, finished or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedkeep.core.net import Net
from fedkeep.core.params import Params, State
from fedkeep.core.records import Record
from fedkeep.data import FederatedData
from fedkeep.engines import judge
from fedkeep.methods import Global, Kept, Method, Sent
from fedkeep.store import PrivateStore


@dataclass
class Run:
    """A finished or resumed simulation.

    Attributes:
        net: the model as a function.
        method: the method.
        data: the data set.
        server: federated parameters, by name.
        state: the method's own on the server, by name.
        private: the store of what clients keep.
        history: records, in order.
        engine: the engine that ran, as ``auto`` picked it.
        engine_reason: why ``auto`` picked it.
        round: finished rounds.
        rounds_per_epoch: rounds that use every training example once.
        clients: indices of the clients that take part in federation.
        held_out: indices of those that don't.
        folder: the run's folder, or None.
        device: where it computes.
    """

    net: Net
    method: Method
    data: FederatedData
    server: Params
    private: PrivateStore
    engine: str
    rounds_per_epoch: int
    clients: np.ndarray
    held_out: np.ndarray
    history: list[Record] = field(default_factory=list)
    round: int = 0
    folder: Path | None = None
    device: str = "cpu"
    engine_reason: str = ""
    state: State = field(default_factory=dict)

    @property
    def whole(self) -> Global:
        """All that the server has."""
        return Global(
            params=self.server, state=self.state, round=self.round, trainable=self.net.trainable(),
            clients=self.data,
        )  # fmt: skip

    def evaluate(
        self, split: str = "test", *, clients: Sequence[int] | None = None, shared: bool = False
    ) -> dict[str, float]:
        """Return metrics of the clients' personalised models on their own examples of a split.

        Args:
            split: ``train``, ``valid`` or ``test``.
            clients: indices; by default the clients that take part in federation.
            shared: judge the shared part alone, with default private values; so too where clients have models of their
                own only after adapting (mixture of experts).

        Returns:
            Metrics over all examples pooled; ``accuracy_user_mean`` is the unweighted mean over clients.
        """
        chosen = self.clients if clients is None else np.asarray(clients)
        out: dict[str, float] = {}
        for judgement in judge(
            self.method, self.net, self.whole, self.private, self.data, chosen.tolist(), split,
            device=self.device, shared=shared or self.method.waits(sorted(self.net.trainable())),
        ):  # fmt: skip
            out |= judgement.metrics()
        return out

    def parameters(self, client: str | int) -> Params:
        """Return the whole model of a client, named by its id: frozen, federated and its private parameters."""
        frozen = self.method.split.halves(self.net.module).frozen(self.net.initial())
        name = str(self.data.ids[self.data.index(client)])
        own = self.method.split.merge(self.sent(name).params, self.kept(name).params)
        return {**frozen, **own}

    def sent(self, client: str) -> Sent:
        """Return what the server would send a client now."""
        return self.method.server.sent(self.whole, client)

    def kept(self, client: str) -> Kept:
        """Return what a client keeps, or the default of one that was never trained."""
        stacked = self.private.read([self.data.index(client)])
        return Kept.of({n: v[0] for n, v in stacked.items()})

    @property
    def epoch(self) -> float:
        """Passes over the training data that the finished rounds make."""
        return self.round / self.rounds_per_epoch
