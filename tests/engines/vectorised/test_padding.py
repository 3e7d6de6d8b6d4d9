"""Padding: its row of a table is not trained, and a loss that depends on how far texts are padded is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep import FederatedData, Method, Phase, methods, sgd
from fedkeep.data import Ragged
from fedkeep.engines import Sequential, Vectorised
from fedkeep.engines.vectorised.stacked_lanes import lengthened
from fedkeep.models import TextClassifier
from tests.engines.vectorised.cohorts import TEXTS, close, cohort, document, words
from tests.tiny import job, texts

LOCAL = Phase(batch_size=2, epochs=2, optimizer=sgd(0.3, momentum=0.5))
FEDAVG = methods.fedavg(local=LOCAL)
SHORT = texts(counts=(4,) * 40)
VECTORS = 3


class Model(nn.Module):
    """A table, what is made of a batch by it, and a head."""

    def __init__(
        self, of: Callable[[Model, Tensor], Tensor], table: nn.Module | None = None, head: int = VECTORS
    ) -> None:
        super().__init__()
        self.of, self.table, self.head = of, table or nn.Embedding(40, VECTORS), nn.Linear(head, 3)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.of(self, text))  # type: ignore[no-any-return]


def ids() -> FederatedData:
    """Return clients with five ids an example, all of which are words."""
    rng = np.random.default_rng(0)
    owner = np.repeat(["a", "b", "c", "d"], (4, 6, 3, 5))
    columns = {"text": rng.integers(0, 6, (18, 5)), "label": rng.integers(0, 3, 18)}
    return FederatedData.from_columns(
        owner, columns, ["train"] * 18, meta={"task": "multiclass", "classes": 3}
    )


def summed(model: Model, text: Tensor) -> Tensor:
    return model.table(text).sum(1)  # type: ignore[no-any-return]


def weight(model: Model) -> Tensor:
    return model.table.weight  # type: ignore[return-value]


def bag(model: Model, text: Tensor) -> Tensor:
    return model.table(text)  # type: ignore[no-any-return]


TABLES: dict[str, Callable[[], Model]] = {
    "first": lambda: Model(summed, nn.Embedding(6, VECTORS, padding_idx=0)),
    "another": lambda: Model(summed, nn.Embedding(6, VECTORS, padding_idx=4)),
    "from behind": lambda: Model(summed, nn.Embedding(6, VECTORS, padding_idx=-1)),
    "function": lambda: Model(
        lambda m, text: F.embedding(text, weight(m), -2).sum(1), nn.Embedding(6, VECTORS)
    ),
    "torch.embedding": lambda: Model(
        lambda m, text: torch.embedding(weight(m), text, 3).sum(1), nn.Embedding(6, VECTORS)
    ),
    "bag": lambda: Model(bag, nn.EmbeddingBag(6, VECTORS, mode="sum", padding_idx=0)),
    "by frequency": lambda: Model(summed, nn.Embedding(6, VECTORS, padding_idx=0, scale_grad_by_freq=True)),
}


@pytest.mark.filterwarnings("ignore:.*batching rule for aten..embedding_bag")
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("method", [FEDAVG, methods.furl("table.*", local=LOCAL)], ids=["shared", "private"])
def test_the_row_of_padding_is_trained_by_nobody(name: str, method: Method) -> None:
    torch.manual_seed(0)
    work = job(TABLES[name]().double(), method, ids())
    close(cohort(work, Vectorised()), cohort(work, Sequential()))


def test_padded_texts_leave_the_row_of_padding_alone() -> None:
    torch.manual_seed(0)
    work = job(Model(summed, nn.Embedding(40, VECTORS, padding_idx=0)).double(), FEDAVG, TEXTS)
    result = cohort(work, Vectorised())
    close(result, cohort(work, Sequential()))
    assert all(not each.upload.deltas["table.weight"][0].any() for each in result if each.upload)


def long(length: int) -> FederatedData:
    """Return clients with texts of almost the same length."""
    rng = np.random.default_rng(0)
    owner = np.repeat([f"user-{k}" for k in range(20)], 4)
    rows = [rng.integers(1, 40, length - rng.integers(0, 9)) for _ in owner]
    return FederatedData.from_columns(
        owner,
        {"text": Ragged.from_rows(rows), "label": rng.integers(0, 3, len(owner))},
        ["train"] * len(owner),
        meta={"task": "multiclass", "classes": 3},
    )


def largest(model: Model, text: Tensor) -> Tensor:
    return model.table(text).amax(1)  # type: ignore[no-any-return]


def straight_through(model: Model, text: Tensor) -> Tensor:
    """Padding shows in a gradient alone, and little."""
    padding = 0.05 * weight(model)[0] * (text == 0).sum(1, keepdim=True)
    found: Tensor = (model.table(text) * (text != 0).unsqueeze(-1)).sum(1)
    return found + padding - padding.detach()


DEPENDENT: dict[str, tuple[Callable[[], Model], FederatedData]] = {
    "largest": (lambda: Model(largest, nn.Embedding(12, VECTORS)), SHORT),
    "largest of many": (lambda: Model(largest, nn.Embedding(40, 16), 16), long(120)),
    "largest in a bag": (lambda: Model(bag, nn.EmbeddingBag(12, VECTORS, mode="max")), SHORT),
    "largest, or zero": (lambda: Model(largest, nn.Embedding(12, VECTORS, padding_idx=0)), SHORT),
    "mean": (lambda: Model(lambda m, text: m.table(text).mean(1)), TEXTS),
    "a gradient": (lambda: Model(straight_through), TEXTS),
    "zero that is trained": (lambda: Model(summed, zero_first(nn.Embedding(40, VECTORS))), TEXTS),
}


def zero_first(table: nn.Embedding) -> nn.Embedding:
    with torch.no_grad():
        table.weight[0] = 0.0
    return table


@pytest.mark.filterwarnings("ignore:.*batching rule for aten..embedding_bag")
@pytest.mark.parametrize("name", DEPENDENT)
@pytest.mark.parametrize("seed", range(3))
def test_losses_that_depend_on_padding_are_refused(name: str, seed: int) -> None:
    make, data = DEPENDENT[name]
    torch.manual_seed(seed)
    assert (
        Vectorised.suits(job(make(), FEDAVG, data))
        == "the loss depends on how far texts are padded, which differs with the clients trained at once."
    )


class Attention(nn.Module):
    """Words look at words, with positions for the longest text and no more."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(40, 4), nn.Parameter(torch.randn(longest, 4))
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head, self.idle = nn.Linear(4, 3), nn.Parameter(torch.ones(2))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        x, mask = self.table(text) + self.place[places], text == 0
        x = self.layer(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        return self.head((x * ~mask.unsqueeze(-1)).sum(1) / (~mask).sum(1, keepdim=True))  # type: ignore[no-any-return]


class Factor(Model):
    """Takes a factor of its table apart, which fails for most values."""

    def __init__(self) -> None:
        super().__init__(lambda m, text: (m.table(text) * (text != 0).unsqueeze(-1)).sum(1))
        self.square = nn.Parameter(torch.eye(VECTORS))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.of(self, text) @ torch.linalg.cholesky(self.square))  # type: ignore[no-any-return]


def masked(model: Model, text: Tensor) -> Tensor:
    return model.table(text).masked_fill((text == 0).unsqueeze(-1), -torch.inf).amax(1)  # type: ignore[no-any-return]


INDIFFERENT: dict[str, tuple[Callable[[], nn.Module], FederatedData]] = {
    "masked mean": (words, TEXTS),
    "largest of words": (lambda: Model(masked), TEXTS),
    "zero that is not trained": (lambda: Model(summed, nn.Embedding(40, VECTORS, padding_idx=0)), TEXTS),
    "recurrent": (lambda: TextClassifier(40, 3, embedding_dim=5, hidden=4), TEXTS),
    "documents": (document, TEXTS),
    "attention": (lambda: Attention(8), TEXTS),
    "a factor": (Factor, TEXTS),
    "one length": (lambda: Model(largest), ids()),
}


@pytest.mark.parametrize("name", INDIFFERENT)
def test_losses_that_do_not_are_computed_together(name: str) -> None:
    make, data = INDIFFERENT[name]
    torch.manual_seed(0)
    assert Vectorised.suits(job(make(), FEDAVG, data)) is None


def test_series_are_padded_behind_in_their_length_alone() -> None:
    series = torch.ones(2, 3, 4, 5)
    assert torch.equal(lengthened(series, 6), torch.cat([series, torch.zeros(2, 3, 2, 5)], 2))
