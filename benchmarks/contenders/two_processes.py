"""The plain loop on half of the clients in each of two single-threaded processes, weights in shared memory."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch
from torch import Tensor, multiprocessing

from benchmarks.contenders import Options, Serve
from benchmarks.contenders.plain import Plain

Tensors = dict[str, Tensor]


class TwoProcesses:
    """Two processes that wait for clients to train."""

    def __init__(self, options: Options) -> None:
        of = options.work
        model = of.initial(options.dtype)
        self.start = {n: v.clone().share_memory_() for n, v in model.state_dict().items() if n != of.private}
        self.sums = [
            {n: torch.zeros_like(v).share_memory_() for n, v in self.start.items()} for _ in range(2)
        ]
        self.facts = {"processes": "2"}
        self.ends: list[Connection] = []
        spawn = multiprocessing.get_context("spawn")
        for sums in self.sums:
            here, there = spawn.Pipe()
            spawn.Process(target=work, args=(options, self.start, sums, there), daemon=True).start()
            self.ends.append(here)
        for end in self.ends:
            end.recv()  # it is ready

    def round(self, turn: int, clients: list[int]) -> float:
        """Run a round; return the mean training loss."""
        for number, end in enumerate(self.ends):
            end.send((turn, clients[number::2]))
        losses, examples = map(sum, zip(*(end.recv() for end in self.ends), strict=True))
        for name, value in self.start.items():
            value.copy_((self.sums[0][name] + self.sums[1][name]) / examples)
        return float(losses / examples)

    def state(self) -> Tensors:
        """Return the server's federated values."""
        return self.start


def work(options: Options, start: Tensors, sums: Tensors, end: Connection) -> None:
    """Train clients as told, until the pipe is closed."""
    torch.set_num_threads(1)
    loop = Plain(options.padded_work, options.dtype)
    end.send("ready")
    while True:
        try:
            turn, clients = end.recv()
        except EOFError:
            return
        total, losses, examples = loop.train(start, turn, clients)
        for name, value in sums.items():
            value.copy_(total[name]) if name in total else value.zero_()
        end.send((losses, examples))


def run(options: Options, serve: Serve) -> None:
    """Serve rounds of two processes."""
    serve(TwoProcesses(options))
