"""KTEPS on the plateau of knowing nothing: what a run that stays there is told."""

from __future__ import annotations

import math

import pytest
from torch import nn

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.methods.kteps import note_on_plateau
from fedkeep.methods.terms import cross_entropy
from tests.methods.parts import Parts
from tests.tiny import classes


def test_a_run_on_the_plateau_is_told() -> None:
    """Two branches of two classes that know nothing: 2 ln 2 = 1.386; 95 % of it is 1.317."""
    loss = methods.kteps().client.phases[0].loss
    told = note_on_plateau(loss, 2, [0.5, *[1.36] * 9, 1.375])
    assert told == (
        "The training loss of the last 10 rounds was 1.36 to 1.38, about that of two branches that know nothing, 1.39. "
        "Train for longer, set diversity = 0 to see whether HSIC holds it there, or take kernel = 'median', whose "
        "gradient does not shrink features."
    )
    assert not note_on_plateau(loss, 2, [*[1.36] * 10, 1.31])
    assert not note_on_plateau(loss, 2, [1.36] * 9)
    assert not note_on_plateau(loss, 2, [*[1.36] * 10, math.nan])
    assert not note_on_plateau(loss, None, [1.36] * 10)
    assert not note_on_plateau(methods.kteps(share=0.5).client.phases[0].loss, 2, [0.65] * 10)  # of 0.693
    assert note_on_plateau(methods.kteps(share=0.5).client.phases[0].loss, 2, [0.68] * 10)
    assert not note_on_plateau(cross_entropy(), 2, [1.36] * 10)


def test_a_simulation_warns_of_the_plateau() -> None:
    class Ignorant(Parts):
        """Its classifier knows nothing: logits are 0."""

        def __init__(self) -> None:
            super().__init__()
            nn.init.zeros_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)

    method = methods.kteps(noise=0, local=Phase(batch_size=4, optimizer=sgd(1e-9)))
    with pytest.warns(UserWarning, match=r"^The training loss of the.*10.*2\.2"):
        simulate(Ignorant().double(), method, classes(), rounds=10, cohort=4)
