"""Rounds of ``benchmarks.cluster``'s paced clients by others: a plain loop of torch, and Flower's simulation by its FedAvg.

``python -m benchmarks.cluster_rounds plain|flower ROUNDS`` prints a line of JSON: each round's seconds. Clients, model,
batches and steps are those of fedkeep's run; values are not compared.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterable
from functools import cache
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from benchmarks.cluster import PACED
from fedkeep.data import FederatedData
from fedkeep.experiments.build import build_data, build_model
from fedkeep.experiments.config import parse_config

client = ClientApp()
CONFIG = parse_config(PACED)
SIZE, RATE = CONFIG.method.batch_size, CONFIG.method.optimizer.learning_rate


@cache
def scene() -> tuple[FederatedData, nn.Module]:
    """Return data and model, once a process."""
    torch.set_num_threads(1)
    data = build_data(CONFIG, None)
    return data, build_model(CONFIG, data)


def train(values: dict[str, Tensor], number: int, turn: int) -> tuple[dict[str, Tensor], int]:
    """Train one client; return its values and how many examples it has."""
    data, model = scene()
    model.load_state_dict(values)
    own = data.rows(number, "train")
    batch = data.batch(np.arange(own.start, own.stop))
    optimizer, draw = torch.optim.SGD(model.parameters(), RATE), torch.Generator().manual_seed(turn)
    for rows in torch.randperm(len(batch["label"]), generator=draw).split(SIZE):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"][rows]), batch["label"][rows]).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, len(batch["label"])


@client.train()
def fit(message: Message, context: Context) -> Message:
    """Train one client in Flower's simulation."""
    config, number = message.content["config"], int(context.node_config["partition-id"])
    values = message.content["arrays"].to_torch_state_dict()
    trained, count = train(values, number, int(config["server-round"]))
    record = {"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": count})}
    return Message(RecordDict(record), reply_to=message)


class Timed(FedAvg):
    """Notes when each round begins."""

    def __init__(self) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=CONFIG.run.cohort)
        self.began = list[float]()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message to each node."""
        self.began.append(time.perf_counter())
        return super().configure_train(server_round, arrays, config, grid)


def plain(rounds: int) -> list[float]:
    """Train one client after the other, and average."""
    data, model = scene()
    values, seconds = {name: value.clone() for name, value in model.state_dict().items()}, list[float]()
    for turn in range(rounds):
        began = time.perf_counter()
        found = [train(values, number, turn) for number in range(len(data))]
        total = sum(count for _, count in found)
        values = {name: sum(v[name] * (n / total) for v, n in found) for name in values}  # type: ignore[misc]
        seconds.append(time.perf_counter() - began)
    return seconds


def flower(rounds: int) -> list[float]:
    """Train in Flower's simulation, by two actors."""
    from benchmarks import cluster_rounds  # Ray's actors cannot import a main module

    logging.getLogger("flwr").setLevel(logging.WARNING)
    server, strategy, ended = ServerApp(), Timed(), list[float]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, ArrayRecord(scene()[1].state_dict()), num_rounds=rounds)
        ended.append(time.perf_counter())

    backend: dict[str, Any] = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2}}
    run_simulation(server, cluster_rounds.client, num_supernodes=CONFIG.run.cohort, backend_config=backend)
    times = [*strategy.began, *ended]
    return [b - a for a, b in itertools.pairwise(times)]


if __name__ == "__main__":
    print(json.dumps({"plain": plain, "flower": flower}[sys.argv[1]](int(sys.argv[2]))))
