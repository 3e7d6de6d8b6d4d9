"""What trains a kind of model where nobody says it: one record, read by every run.

Tables, texts, images and rankings were tried on public sets (``benchmarks.first_runs``), and chosen on all of a kind together;
series on made problems alone (``tests/experiments/test_series.py`` and ``test_series_files.py``).
All of it is plain SGD, which every method takes. What a phase leaves open is filled in where a method meets its
model (``Method.resolved``), and stands in ``run.json`` with the rest of the method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fedkeep import models
from fedkeep.core.optim import UsualRate
from fedkeep.methods.phase import Phase, UsualSize


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What trains a kind of model.

    Attributes:
        rate: the learning rate.
        rate_of_numbers: where numbers are predicted: squared errors have no bound, nor have their gradients.
        rates: further rates by pattern.
        batch_size: examples a mini-batch. Clients have few; so many steps are worth more than fast ones.
        clip_of_numbers: the bound of a gradient's norm, of each half, where numbers are predicted; None: there is none.
        most_epochs: the most passes over the training data, where nobody says how many and clients take few steps.
    """

    rate: float = 0.1
    rate_of_numbers: float = 0.03
    rates: tuple[tuple[str, float], ...] = ()
    batch_size: int = 8
    clip_of_numbers: float | None = None
    most_epochs: int = 90

    def filled(self, phase: Phase, numbers: bool, clips: bool = True) -> Phase:
        """Return a phase in which nothing is open.

        Args:
            phase: the phase.
            numbers: whether numbers are predicted.
            clips: whether the method takes gradients within a bound.
        """
        optimizer = phase.optimizer
        clip: dict[str, Any] = {}
        if isinstance(optimizer.learning_rate, UsualRate) and optimizer.kind == "sgd":
            rate = self.rate_of_numbers if numbers else self.rate
            rates = (*optimizer.rates, *self.rates)
            optimizer = replace(optimizer, learning_rate=rate, rates=rates)
            if numbers and clips and phase.clip_norm is None and self.clip_of_numbers is not None:
                clip = {"clip_norm": self.clip_of_numbers, "clip_over": "halves"}
        size = self.batch_size if isinstance(phase.batch_size, UsualSize) else phase.batch_size
        return replace(phase, optimizer=optimizer, batch_size=size, **clip)


OWN = Usual(rate_of_numbers=0.1, batch_size=32)
"""Of models of one's own."""
TABLES = Usual()
LINEAR = Usual(clip_of_numbers=10.0)
"""Nothing in it bounds its outputs. Where all of a client's features are far from the others', steps grow without end at
any rate that serves the others; ordinary gradients are below the bound."""
WORDS = Usual(rates=(("*embedding.*", 3.0),), most_epochs=30)
SERIES = Usual(rate=0.5, rate_of_numbers=0.1)
IMAGES = Usual(batch_size=16)
USUAL: Mapping[type[nn.Module], Usual] = {
    models.Linear: LINEAR,
    models.MLP: TABLES,
    models.SequenceClassifier: SERIES,
    models.BagOfWords: WORDS,
    models.TextClassifier: WORDS,
    models.DocumentModel: WORDS,
    models.ResNet: IMAGES,
    models.CNN: IMAGES,
    models.CifarCNN: IMAGES,
    models.FashionCNN: IMAGES,
    models.MatrixFactorization: Usual(rate_of_numbers=0.1),
}
"""By the model's class."""


def usual_of(model: nn.Module) -> Usual:
    """Return what trains models of this one's kind, with the patterns that match what is trained of it."""
    usual, trained = USUAL.get(type(model), OWN), [n for n, p in model.named_parameters() if p.requires_grad]
    return replace(
        usual, rates=tuple((p, r) for p, r in usual.rates if any(fnmatchcase(n, p) for n in trained))
    )
