"""The plain loop: for each client load the weights, train on mini-batches, and average, as a researcher writes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.contenders import Options, Serve
from benchmarks.workloads import Workload, pick, tensors


class Plain:
    """The plain loop, in this process."""

    def __init__(self, of: Workload, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.of, self.dtype, self.device = of, dtype, device
        self.model = of.initial(dtype).to(device)
        self.data = of.data()
        self.private: dict[int, Tensor] = {}
        self.facts = {"threads": str(torch.get_num_threads())}

    def round(self, turn: int, clients: list[int]) -> float:
        """Run a round; return the mean training loss."""
        start = {n: v.clone() for n, v in self.model.state_dict().items() if n != self.of.private}
        total, loss, examples = self.train(start, turn, clients)
        self.model.load_state_dict({n: v / examples for n, v in total.items()}, strict=False)
        return loss / examples

    def train(
        self, start: dict[str, Tensor], turn: int, clients: list[int]
    ) -> tuple[dict[str, Tensor], float, int]:
        """Train clients; return the sums of their weights and losses times their examples, and the examples."""
        total = {n: torch.zeros_like(v) for n, v in start.items()}
        losses, examples = 0.0, 0
        for client in clients:
            own = {n: self.private.get(client, torch.zeros(32)).to(self.device) for n in self.names()}
            self.model.load_state_dict({**start, **own})
            columns = {n: v.to(self.device) for n, v in tensors(self.data[client], self.dtype).items()}
            loss = train(self.of, self.model, columns, client, turn)
            trained, n = self.model.state_dict(), len(columns["label"])
            for name in self.names():
                self.private[client] = trained[name].clone()
            for name in total:
                total[name] += n * trained[name]
            losses, examples = losses + n * loss, examples + n
        return total, losses, examples

    def names(self) -> list[str]:
        """Return the names of private parameters."""
        return [] if self.of.private is None else [self.of.private]

    def state(self) -> dict[str, Tensor]:
        """Return the server's federated values."""
        return {n: v for n, v in self.model.state_dict().items() if n not in self.names()}


def train(of: Workload, model: nn.Module, columns: dict[str, Tensor], client: int, turn: int) -> float:
    """Train a model on a client's examples; return the mean loss of the mini-batches."""
    optimizer = of.optimizer_of(model)
    total, steps = torch.zeros((), device=columns["label"].device), 0
    for chosen in of.batches(client, turn, len(columns["label"])):
        inputs, label = pick(columns, chosen)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(*inputs), label)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        steps += 1
    return float(total) / steps


def run(options: Options, serve: Serve) -> None:
    """Serve rounds of the plain loop."""
    of = options.padded_work if options.contender == "plain_padded" else options.work
    serve(Plain(of, options.dtype, options.device))
