"""Flower's simulation, two actors: FedAvg as its documentation shows it, private values in ``Context.state``."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from benchmarks.contenders import Options, Serve
from benchmarks.contenders.plain import train
from benchmarks.workloads import Columns, Workload, padded, tensors, workload

client = ClientApp()


@cache
def _prepared(name: str, quick: bool) -> tuple[Workload, list[Columns], torch.nn.Module]:
    """Return the workload, its data and a model, once per actor."""
    torch.set_num_threads(1)  # an actor has one core
    of = padded(workload(name, None, quick))
    return of, of.data(), of.initial()


@client.query()
def tell(message: Message, context: Context) -> Message:
    """Answer which client a node is."""
    number = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
    return Message(RecordDict({"who": number}), reply_to=message)


@client.train()
def fit(message: Message, context: Context) -> Message:
    """Train one client."""
    config, number = message.content["config"], int(context.node_config["partition-id"])
    of, data, model = _prepared(str(config["workload"]), bool(config["quick"]))
    state = message.content["arrays"].to_torch_state_dict()
    if of.private:
        known = context.state.get("private")
        state |= known.to_torch_state_dict() if known else {of.private: torch.zeros(32)}
    model.load_state_dict(state)
    columns = tensors(data[number])
    loss = train(of, model, columns, number, int(config["turn"]))
    trained = model.state_dict()
    if of.private:
        context.state["private"] = ArrayRecord({of.private: trained.pop(of.private)})
    metrics = MetricRecord({"loss": loss, "num-examples": len(columns["label"])})
    return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)


class Cohort(FedAvg):
    """FedAvg with a cohort that is told, so that all contenders train the same clients."""

    nodes: list[int]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message to each node of the cohort."""
        config["server-round"] = server_round
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, self.nodes, "train")


class Flower:
    """Rounds as ``Strategy.start`` runs them, one at a time."""

    def __init__(self, options: Options, grid: Grid) -> None:
        of = options.work
        self.options, self.grid, self.strategy = options, grid, Cohort(fraction_evaluate=0.0)
        names = [n for n in of.initial().state_dict() if n != of.private]
        self.arrays = ArrayRecord({n: of.initial().state_dict()[n] for n in names})
        asked = [Message(RecordDict(), dst_node_id=n, message_type="query") for n in grid.get_node_ids()]
        answers = {m.metadata.src_node_id: m.content["who"] for m in grid.send_and_receive(asked)}
        self.node = {int(answer["partition-id"]): node for node, answer in answers.items()}
        self.facts = {"processes": "2 actors"}

    def round(self, turn: int, clients: list[int]) -> float:
        """Run a round; return the mean training loss."""
        self.strategy.nodes = [self.node[c] for c in clients]
        config: Any = {"turn": turn, "workload": self.options.workload, "quick": self.options.quick}
        messages = self.strategy.configure_train(turn + 1, self.arrays, ConfigRecord(config), self.grid)
        replies = list(self.grid.send_and_receive(messages))
        failed = [m.error.reason for m in replies if m.has_error()]
        if failed or len(replies) < len(clients):
            raise RuntimeError(f"{len(replies)} of {len(clients)} nodes answered: {failed[:1]}")
        arrays, metrics = self.strategy.aggregate_train(turn + 1, replies)
        assert arrays is not None
        assert metrics is not None
        self.arrays = arrays
        return float(metrics["loss"])  # type: ignore[arg-type]

    def state(self) -> dict[str, Tensor]:
        """Return the server's federated values."""
        return dict(self.arrays.to_torch_state_dict())


def run(options: Options, serve: Serve) -> None:
    """Serve rounds from inside a server app."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        serve(Flower(options, grid))

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=len(options.work.data()),
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2}},
    )
