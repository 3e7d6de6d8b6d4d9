"""How much memory clients side by side take, and what happens where it isn't enough."""

from __future__ import annotations

import pytest
import torch

from fedkeep import Method, Phase, adam, methods, sgd
from fedkeep.core.optim import Optimizer
from fedkeep.engines import Sequential, Vectorised
from fedkeep.engines.vectorised import costs
from fedkeep.engines.vectorised.stacked_lanes import Stacked
from tests.engines.vectorised.cohorts import RAGGED, STEEP, TEXTS, close, cohort, document, first, furl
from tests.tiny import Logits, classes, job


def test_a_cohort_too_large_for_memory_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    work = job(Logits().double(), furl(), RAGGED)
    expected = cohort(work, Sequential())
    sizes: list[int] = []
    run = Stacked.train

    def limited(clients: Stacked) -> None:
        sizes.append(len(clients.clients))
        if len(clients.clients) > 2:
            raise torch.OutOfMemoryError("no memory")
        run(clients)

    monkeypatch.setattr(Stacked, "train", limited)
    engine = Vectorised(clients=6)
    close(cohort(work, engine), expected)
    assert sizes == [6, 3, 1, 1, 1, 1, 1, 1]
    sizes.clear()
    cohort(work, engine)
    assert sizes == [1] * 6  # it remembers

    def none(_: Stacked) -> None:
        raise torch.OutOfMemoryError("no memory at all")

    monkeypatch.setattr(Stacked, "train", none)
    with pytest.raises(torch.OutOfMemoryError, match="no memory at all"):
        cohort(work, engine)


def test_memory_is_counted() -> None:
    """Largest client: 30 examples of 3 features and a label, 8 bytes each; 15 parameters of 8 bytes."""
    data = classes(counts=(5, 30), valid=0, test=0)

    def needed(optimizer: Optimizer) -> int:
        one = Stacked(*first(job(Logits().double(), furl(optimizer), data)))
        assert one.nbytes == 30 * 4 * 8 + 15 * 8
        return costs.bytes_of(one, {})

    plain = needed(sgd(0.1))
    assert plain > 30 * 4 * 8 + 3 * 15 * 8
    assert needed(STEEP) == plain + 15 * 8
    assert needed(adam(0.1)) == plain + 2 * 15 * 8
    work = job(Logits().double(), furl(sgd(0.1)), data)
    assert [costs.room(work, memory) for memory in (1, plain, 2 * plain - 1, 2 * plain)] == [1, 1, 1, 2]
    assert costs.room(work) == costs.CPU_BYTES // plain


def test_memory_of_a_loss_that_takes_a_gradient_step() -> None:
    """Per-FedAvg: torch.func allows no look at what is saved, so all that is made counts; more than FedAvg needs."""
    data = classes(counts=(5, 30), valid=0, test=0)

    def needed(method: Method) -> int:
        return costs.bytes_of(Stacked(*first(job(Logits().double(), method, data))), {})

    small, large = (needed(methods.per_fedavg(0.1, local=Phase(batch_size=b))) for b in (5, 30))
    assert large > small > needed(methods.fedavg(local=Phase(batch_size=5)))


def test_longer_texts_take_more_memory() -> None:
    torch.manual_seed(0)
    one = Stacked(*first(job(document(), furl(), TEXTS)))
    assert costs.bytes_of(one, {"text": 80}) > 5 * costs.bytes_of(one, {"text": 8}) / 2
