"""The workloads on which speed is measured: W1 FURL, W1 ragged, W2 KTEPS, W3 and W4 CNNs for the mixture.

Data are drawn from a fixed seed, in every process alike. Nothing here knows fedkeep: the environments of its peers
load this module too.

- **W1**: 200 users × 96 texts of 64 characters, vocabulary 100, 10 users a round (or 40, 160), 1 epoch, batch 16:
  char embedding 32 → BiLSTM 64 per direction → ‖ private user vector 32 → MLP 64 → 64 classes; SGD 0.1.
- **W1 ragged**: the same with texts of 10–200 characters, 150–500 texts a user, 6 users a round.
- **W2**: 16 clients, all each round, 200 texts of 200 words, vocabulary 50 000 × 200, trained → BiGRU 64 → masked
  mean → MLP 64 → 2 classes; SGD 0.01, momentum 0.9, batch 8, 1 epoch. A client's words are some 2 400 of the
  vocabulary, and of these the r-th is used in proportion to 1/r (Zipf's law).
- **W3**: 5 clients × 500 images 3 × 32 × 32, conv 5 × 5 of 32 and of 64 channels (padding 2, ReLU, max-pool 2) → FC
  512 → FC 10; Adam 1e-4, batch 10, 3 epochs.
- **W4**: the same with the paper's network of its Table 2, without dropout: conv 5 × 5 of 6 and of 16 channels (ReLU,
  max-pool 2) → FC 120 → FC 84 → FC 10. A round is one of the 1500 of FedAvg there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.models import CNN, Document, PaddedDocument, SmallCNN, Words

Columns = dict[str, np.ndarray]
SEED = 0
OWN = "own: "


@dataclass(frozen=True)
class Workload:
    """What every contender computes.

    Attributes:
        name: ``W1``, ``W1 ragged``, ``W2``, ``W3`` or ``W4``.
        clients, cohort, batch, epochs: of the federation, a round, a step, a client's local training.
        optimizer: ``sgd`` or ``adam``; ``rate`` and ``momentum`` are its numbers.
        private: the private parameter, zero at first; None: everything is federated.
        model: makes the plain model, with the initial values that all contenders start from.
        draw: draws one client's columns from a generator.
        few: how many clients take part in the round whose results are compared, few where a round is long.
        draw_small: draws one of two more clients, which that round takes; None: it takes usual ones. Adam and
            max-pooling amplify the last bit: after W3's 150 steps in single precision the plain loop with one thread
            and the plain loop with two are 2e-3 apart, so its small clients take 3 steps.
    """

    name: str
    clients: int
    cohort: int
    batch: int
    epochs: int
    optimizer: Literal["sgd", "adam"]
    rate: float
    momentum: float
    private: str | None
    model: Callable[[], nn.Module]
    draw: Callable[[np.random.Generator], Columns]
    few: int
    draw_small: Callable[[np.random.Generator], Columns] | None = None

    def data(self) -> list[Columns]:
        """Return every client's columns: ``label``, and ``text`` and ``text_length`` (flat) or ``image``."""
        rng = np.random.default_rng(SEED)
        more = [self.draw_small] * 2 if self.draw_small else []
        return [draw(rng) for draw in [self.draw] * self.clients + more]

    def initial(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the plain model with its initial values."""
        torch.manual_seed(SEED)
        return self.model().to(dtype)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a new local optimiser of torch."""
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=self.rate)
        return torch.optim.SGD(model.parameters(), lr=self.rate, momentum=self.momentum)

    def cohort_of(self, turn: int) -> list[int]:
        """Return the clients of a turn, drawn without replacement."""
        return np.random.default_rng([SEED, turn]).permutation(self.clients)[: self.cohort].tolist()

    def compared(self) -> list[int]:
        """Return the clients of the round whose results are compared."""
        if self.draw_small:
            return [self.clients, self.clients + 1]
        return self.cohort_of(0)[: self.few]

    def batches(self, client: int, turn: int, examples: int) -> Iterator[Tensor]:
        """Yield the positions of each mini-batch among a client's examples, as fedkeep draws them."""
        rng = np.random.default_rng(stream(SEED, "batches/0", str(client), turn))
        for _ in range(self.epochs):
            yield from torch.from_numpy(rng.permutation(examples)).split(self.batch)


def stream(seed: int, purpose: str, client: str, round: int) -> int:
    """Return the seed of a random stream as ``fedkeep.core.seeds`` names it (peers' environments have no fedkeep)."""
    name = f"{seed}\x1f{purpose}\x1f{client}\x1f{round}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def tensors(columns: Columns, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a client's columns as a model takes them: texts (n, longest) padded with 0, floats of this dtype."""
    out = {"label": torch.from_numpy(columns["label"])}
    if "text_length" not in columns:
        name = next(n for n in columns if n != "label")
        value = torch.from_numpy(columns[name])
        return {name: value.to(dtype) if value.is_floating_point() else value, **out}
    length = columns["text_length"]
    ids = np.zeros((len(length), length.max()), np.int64)
    ids[np.arange(ids.shape[1]) < length[:, None]] = columns["text"]
    return {"text": torch.from_numpy(ids), "text_length": torch.from_numpy(length), **out}


def pick(client: dict[str, Tensor], chosen: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the arguments of a model's ``forward`` for these examples, cut to their longest text, and the labels."""
    if "text_length" not in client:
        return [v[chosen] for n, v in client.items() if n != "label"], client["label"][chosen]
    length = client["text_length"][chosen]
    return [client["text"][chosen, : int(length.max())], length], client["label"][chosen]


def texts(
    rng: np.random.Generator, count: tuple[int, int], length: tuple[int, int], vocabulary: int, classes: int
) -> Columns:
    """Draw texts of uniformly drawn characters; numbers of texts and lengths lie between the two bounds."""
    n = int(rng.integers(count[0], count[1] + 1))
    lengths = rng.integers(length[0], length[1] + 1, n)
    ids = rng.integers(1, vocabulary, lengths.sum(), dtype=np.uint8)
    return {"text": ids, "text_length": lengths, "label": rng.integers(0, classes, n)}


def documents(rng: np.random.Generator, count: int, length: int, vocabulary: int, own: int) -> Columns:
    """Draw texts of the client's ``own`` words, the r-th of them in proportion to 1/r."""
    words = rng.permutation(np.arange(1, vocabulary, dtype=np.int32))[:own]
    share = 1 / np.arange(1, own + 1)
    ids = words[rng.choice(own, count * length, p=share / share.sum())]
    return {"text": ids, "text_length": np.full(count, length), "label": rng.integers(0, 2, count)}


def images(rng: np.random.Generator, count: int, side: int) -> Columns:
    """Draw noise, with labels 0 to 9."""
    pixels = rng.standard_normal((count, 3, side, side), np.float32)
    return {"image": pixels, "label": rng.integers(0, 10, count)}


W1 = Workload(
    "W1",
    200,
    10,
    16,
    1,
    "sgd",
    0.1,
    0.0,
    "user",
    Document,
    lambda rng: texts(rng, (96, 96), (64, 64), 100, 64),
    10,
)
RAGGED = replace(
    W1, name="W1 ragged", cohort=6, few=2, draw=lambda rng: texts(rng, (150, 500), (10, 200), 100, 64)
)
W2 = Workload(
    "W2",
    16,
    16,
    8,
    1,
    "sgd",
    0.01,
    0.9,
    None,
    Words,
    lambda rng: documents(rng, 200, 200, 50_000, 2_600),
    2,
)
W3 = Workload(
    "W3",
    5,
    5,
    10,
    3,
    "adam",
    1e-4,
    0.0,
    None,
    CNN,
    lambda rng: images(rng, 500, 32),
    2,
    lambda rng: images(rng, 10, 32),
)
W4 = replace(W3, name="W4", model=SmallCNN)

WORKLOADS = {w.name: w for w in (W1, RAGGED, W2, W3, W4)}
QUICK = {  # as small as makes sense: to see that everything runs
    "W1": replace(W1, clients=6, cohort=3, few=2, draw=lambda rng: texts(rng, (20, 20), (8, 8), 100, 64)),
    "W1 ragged": replace(
        RAGGED, clients=6, cohort=3, few=2, draw=lambda rng: texts(rng, (10, 30), (2, 12), 100, 64)
    ),
    "W2": replace(
        W2,
        clients=3,
        cohort=3,
        few=2,
        model=lambda: Words(500),
        draw=lambda rng: documents(rng, 16, 10, 500, 60),
    ),
    "W3": replace(
        W3, clients=2, cohort=2, epochs=2, few=2, draw=lambda rng: images(rng, 20, 32), draw_small=None
    ),
    "W4": replace(
        W4, clients=2, cohort=2, epochs=2, few=2, draw=lambda rng: images(rng, 20, 32), draw_small=None
    ),
}


def workload(name: str, cohort: int | None = None, quick: bool = False) -> Workload:
    """Return a workload by name, with another cohort if one is given; ``own: NAME`` is a case of ``more_cases``."""
    if name.startswith(OWN):
        from benchmarks.more_cases import own_workload  # needs fedkeep, which the others do without

        found = own_workload(name)
    else:
        found = (QUICK if quick else WORKLOADS)[name]
    return found if cohort is None else replace(found, cohort=cohort, few=min(cohort, found.few))


def padded(of: Workload) -> Workload:
    """Return a workload with the plain model that pads ragged texts instead of packing them."""
    return replace(of, model=PaddedDocument) if of.name == "W1 ragged" else of
