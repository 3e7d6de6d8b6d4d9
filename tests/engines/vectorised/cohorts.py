"""Cohorts trained by an engine, and how near two results must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkeep import Method, Phase, methods, sgd
from fedkeep.core.optim import Optimizer
from fedkeep.core.params import Params
from fedkeep.engines import ClientResult, ClientToTrain, Engine, Job
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.models import BagOfWords, DocumentModel
from fedkeep.split import Upload
from tests.tiny import classes, results, texts

RAGGED = classes(counts=(5, 11, 2, 14, 9, 8))
TEXTS = texts(counts=(4, 9, 3, 5, 12, 2), vocabulary=40)
STEEP = sgd(0.2, momentum=0.9)


def cohort(
    work: Job, engine: Engine, clients: Sequence[int] | None = None, round: int = 3
) -> list[ClientResult]:
    """Return what a cohort gives back, all clients by default."""
    chosen = range(len(work.data)) if clients is None else clients
    return results(work, chosen, engine, round=round, progress=0.25)


def uploads(found: Sequence[ClientResult]) -> list[Upload]:
    """Return the uploads; every client has one."""
    given = [result.upload for result in found if result.upload is not None]
    assert len(given) == len(found)
    return given


def close(ours: Sequence[ClientResult], theirs: Sequence[ClientResult], most: float = 1e-12) -> None:
    """Check that two results are the same but for rounding."""
    assert [result.client for result in ours] == [result.client for result in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert (type(one.fault), str(one.fault)) == (type(two.fault), str(two.fault))
        assert np.allclose(one.loss, two.loss, rtol=10 * most, atol=most, equal_nan=True)
        if two.upload is None or two.kept is None:
            assert one.upload is two.upload is one.kept is two.kept is None
            continue
        assert one.upload is not None
        assert one.kept is not None
        a, b = one.upload, two.upload
        assert (a.weight, a.nbytes) == (b.weight, b.nbytes)
        assert a.rows.keys() == b.rows.keys()
        assert all(torch.equal(a.rows[n], b.rows[n]) for n in b.rows)
        alike(a.deltas, b.deltas, most)
        alike(one.kept, two.kept, most)


def alike(ours: Params, theirs: Params, most: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        largest = float(value.double().abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            ours[name], value, rtol=0, atol=most * max(1.0, largest), check_device=False
        )


def words() -> nn.Module:
    """Return a text model of which every client trains its own rows."""
    return BagOfWords(40, 3, 4, embedding_dim=5, mlp=6)


def document() -> nn.Module:
    """Return a text model on recurrent layers."""
    return DocumentModel(40, 3, 4, embedding_dim=5, hidden=8, mlp=6, dropout=0.2)


def furl(optimizer: Optimizer = STEEP, **local: Any) -> Method:
    return methods.furl("user", local=Phase(batch_size=4, epochs=2, optimizer=optimizer, **local))


def first(work: Job) -> tuple[Any, ...]:
    """Return what ``Stacked`` takes to train one client, the second, in a first round."""
    sent = work.method.split.federated(work.net.initial())
    return work, [ClientToTrain(1, sent)], work.kept([1]), 0, 0.0


@dataclass(frozen=True)
class Judged(Term):
    """A loss that looks at its value, which no tensor program can."""

    def __call__(self, net: Any, params: Any, batch: Any, received: Any) -> Any:
        loss = cross_entropy()(net, params, batch, received)
        return loss if loss.item() > 0 else 2 * loss
