"""Federations in this process: cases of the conformance table, their clients dealt out to nodes, over a virtual clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedkeep import FederatedData, Method
from fedkeep.core.params import Params
from fedkeep.data.preparation import Ready
from fedkeep.remote.node import Experiment, Node, OwnerTerms
from fedkeep.remote.served_run import Federation
from fedkeep.remote.transport import MemoryTransport
from fedkeep.store import Line
from tests.engines.test_conformance import CASES, COHORT, ROUNDS, SEED
from tests.remote.device_states import begun


def experiment(text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
    """Return model and method of ``case, type``."""
    case, kind = text.rsplit(", ", 1)
    torch.manual_seed(0)
    return CASES[case].model().to(getattr(torch, kind)), CASES[case].method


def federation(case: str, kind: str = "float32", **changes: Any) -> Federation:
    """Return a case of the conformance table as a run across machines."""
    what, text = CASES[case], f"{case}, {kind}"
    options = {"cohort": COHORT, "seed": SEED, "evaluate_every": 2, "rounds": ROUNDS, **what.options}
    given: dict[str, Any] = {
        "name": case,
        "text": text,
        "build": lambda encoding: experiment(text, encoding),
        "clients": len(what.data),
        "leaves": "clients",
        "simulated_noise": True,
        **options,
        **changes,
    }
    return Federation(**given)


class Devices:
    """Nodes with device stores on the disk, among which the clients of a case, or of other data, are dealt out in turn.

    Attributes:
        nodes: by their number, the process that lives now.
        transport: reaches them; a node that dies comes back under another name.
    """

    def __init__(
        self,
        case: str,
        folder: Path,
        nodes: int = 2,
        *,
        back: float = 30.0,
        data: FederatedData | None = None,
        experiment: Experiment = experiment,
        **options: Any,
    ) -> None:
        self.data, self.folder, self.back = data or CASES[case].data, folder, back
        self.experiment = experiment
        self.count = min(nodes, len(self.data))
        self.nodes = [self.start(number) for number in range(self.count)]
        self.names = {f"node-{number}": number for number in range(self.count)}
        self.lives = [0] * self.count
        served = {name: self.nodes[number].serve for name, number in self.names.items()}
        self.transport = MemoryTransport(served, **{"takes": lambda name, packet: 1.0, **options})
        self.transport.on_death = lambda name: self.transport.after(self.back, lambda: self.restart(name))

    def start(self, number: int) -> Node:
        """Return a new process of a node."""
        data = self.data.select(list(range(number, len(self.data), self.count)))
        terms = OwnerTerms(
            owner="ann",
            leaves="clients",
            judge_adapted=True,
            judge_opted_out=True,
            simulated_noise=True,
            patience=0.1,
        )
        return Node(Ready(data=data), self.folder / str(number), terms, self.experiment)

    def restart(self, name: str) -> None:
        """Let a node come back as another process under another name."""
        number = self.names[name]
        self.transport.leave(name)
        self.nodes[number].close()
        self.lives[number] += 1
        self.nodes[number] = self.start(number)
        new = f"node-{number}.{self.lives[number]}"
        self.names[new] = number
        self.transport.join(new, self.nodes[number].serve)

    def kept(self, entries: Mapping[str, Any], run: str = "") -> Params:
        """Return what all clients keep of the versions that a ledger names, stacked in the order of the data."""
        rows: dict[str, Params] = {}
        for node in self.nodes:
            run = run or next(iter(node._runs))
            store = node._runs[run].store
            if not store.is_open:
                store.open()
            for client in node.clients:
                entry = entries[client]
                rows[client] = begun(store, client, Line(entry.version, entry.attempt, entry.share))
            store.clear()
        every = [rows[str(client)] for client in self.data.ids]
        return {name: torch.stack([row[name] for row in every]) for name in every[0]}

    def close(self) -> None:
        """Let go of all files."""
        for node in self.nodes:
            node.close()
