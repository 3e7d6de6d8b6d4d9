"""Rounds of a method of fedkeep's, without a run's evaluations and records around them."""

from __future__ import annotations

from collections.abc import Sequence

from fedkeep.core.net import Net
from fedkeep.data import FederatedData
from fedkeep.engines import Engine, Job, LocalDevice, RoundReport, first_global, first_kept, run_round
from fedkeep.methods import Method
from fedkeep.store import Default, MemoryStore, PrivateStore


class Rounds:
    """A server and its clients, round after round.

    Args:
        method, net, data: what is trained, and on what.
        engine: trains the clients.
        store: of what clients keep; by default in memory.
        device: where to compute.
        seed: everything random follows from it.
    """

    def __init__(
        self,
        method: Method,
        net: Net,
        data: FederatedData,
        engine: Engine,
        store: PrivateStore | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.store = store or MemoryStore(default(method, net), data.ids)
        job = Job(method, net, data, self.store, seed, device)
        self.method, self.data, self.device = method, data, LocalDevice(job, engine)
        self.server, self.declared = first_global(method, net, data), job.declared

    def __call__(self, clients: Sequence[int]) -> RoundReport:
        """Run the server's next round with clients, by index; what they keep is staged in the store."""
        cohort = [str(self.data.ids[c]) for c in clients]
        self.server, report = run_round(self.method, self.device, self.server, cohort, self.declared)
        return report


def default(method: Method, net: Net) -> Default:
    """Return what a new client keeps."""
    return Default(first_kept(method, net), method.client.keep.value)
