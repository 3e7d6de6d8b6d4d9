"""Models of the methods' tests, some in two steps, ``features`` and ``head``; and methods' plain references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Method, Run, declare, simulate
from tests.engines.reference import averaged, close, cohorts, mini_batches, rows_of, step
from tests.tiny import classes


class Deep(nn.Module):
    """A body, batch statistics if asked for, and a head."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.body = nn.Linear(3, 4)
            self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
            self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


class Parts(nn.Module):
    """x → encoder → tanh → classifier."""

    def __init__(self, features: int = 3, width: int = 4, labels: int = 3, seed: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoder = nn.Linear(features, width)
            self.classifier = nn.Linear(width, labels)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.encoder(x))

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(features)


class Words(Parts):
    """Word ids → mean of their vectors → encoder → tanh → classifier."""

    def __init__(self, vocabulary: int = 300, dim: int = 5, width: int = 4, labels: int = 3) -> None:
        super().__init__(dim, width, labels)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embedding = nn.Embedding(vocabulary, dim, padding_idx=0)
        declare(self, lookup={"embedding.weight": "text"})

    def forward(self, text: Tensor, text_length: Tensor) -> Tensor:
        return self.head(self.features(text, text_length))

    def features(self, text: Tensor, text_length: Tensor) -> Tensor:  # type: ignore[override]
        inside = torch.arange(text.shape[1], device=text.device) < text_length.unsqueeze(1)
        words = nn.functional.embedding(text, self.embedding.weight) * inside.unsqueeze(-1)
        return super().features(words.sum(1) / text_length.unsqueeze(1))


State = dict[str, Tensor]
Train = Callable[[State, State, list[State], int, int], State]


def plain_rounds(
    data: FederatedData,
    method: Method,
    initial: State,
    train: Train,
    *,
    cohort: int = 4,
    rounds: int = 3,
    seed: int = 3,
    uniform: bool = False,
) -> tuple[State, list[State]]:
    """Run rounds without fedkeep's engines: return the server's state and every client's own.

    Args:
        initial: of the extended model.
        train: from (all parameters, received, mini-batches, client, round) to all parameters after training.
        uniform: the server counts every client once, in place of every example.
    """
    private = method.split.is_private
    server = {n: v for n, v in initial.items() if not private(n)}
    own = [{n: v for n, v in initial.items() if private(n)} for _ in range(len(data))]
    for number, clients in enumerate(cohorts(data, cohort, rounds, seed)):
        results = []
        for c in clients:
            batches = list(mini_batches(data, c, method.client.phases[0], seed, number))
            state = train({**server, **own[c]}, server, batches, c, number)
            own[c] = {n: v for n, v in state.items() if private(n)}
            results.append({n: v for n, v in state.items() if not private(n)})
        server = averaged(results, [1.0 if uniform else float(len(rows_of(data, c))) for c in clients])
    return server, own


def descend(
    state: State,
    names: Sequence[str],
    batches: Sequence[State],
    loss: Callable[[State, State], Tensor],
    rate: float,
    momentum: float = 0.0,
) -> State:
    """Return values after a step of torch's SGD on each mini-batch; ``names`` are prefixes of what is trained."""
    values = {n: v.detach().clone() for n, v in state.items()}
    trained = [v.requires_grad_() for n, v in values.items() if n.startswith(tuple(names))]
    stepper = torch.optim.SGD(trained, rate, momentum=momentum)
    for batch in batches:
        step(stepper, loss(values, batch))
    return {n: v.detach() for n, v in values.items()}


def linear(state: State, name: str, x: Tensor) -> Tensor:
    """Return W x + b of the layer of this name."""
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def compare(run: Run, server: State, own: Sequence[State]) -> None:
    """Compare a run's parameters with a reference's."""
    assert run.server.keys() == server.keys()
    close(run.server, server)
    kept = run.private.read(range(len(own)))
    for c, state in enumerate(own):
        assert kept.keys() == state.keys()
        close({n: v[c] for n, v in kept.items()}, state)


class Normal(Parts):
    """With batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.encoder(x)))


def trained(
    method: Method, model: nn.Module | None = None, data: FederatedData | None = None, **options: Any
) -> Run:
    """Return three rounds of four of the six clients of ``classes``."""
    settings: dict[str, Any] = {"rounds": 3, "cohort": 4, "seed": 3, **options}
    return simulate((model or Parts()).double(), method, classes() if data is None else data, **settings).last
