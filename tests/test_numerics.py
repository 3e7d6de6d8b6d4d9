"""Two small runs without data and their numbers: what changes these by more than rounding raises ``NUMERICS``."""

from __future__ import annotations

import pytest
import torch

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.core.optim import adam
from fedkeep.models import TextClassifier
from fedkeep.version import NUMERICS
from tests.methods.parts import Parts
from tests.tiny import classes, texts

MESSAGE = (
    "This commit changes results. Raise NUMERICS (CONTRIBUTING.md, Numerics), and write the new numbers here."
)
EXPECTED = {
    "kteps_star": [2.2749104, 2.2356483, 2.2705306, 1.0412119],
    "ditto": [1.0792313, 1.048916, 0.886394, 1.084358],
}


def measured(name: str) -> list[float]:
    """Return a run's training losses by round, and its test loss."""
    if name == "kteps_star":
        data = texts(counts=(9, 4, 12), vocabulary=300)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = TextClassifier(300, 3, embedding_dim=8, hidden=4)
        local = Phase(batch_size=4, optimizer=sgd(0.2, momentum=0.9))
        run = simulate(model, methods.kteps_star(2, 6, local=local), data, rounds=3, cohort=3, seed=1)
    else:
        data = classes(kind="f4")
        run = simulate(
            Parts(),
            methods.ditto(0.1, local=Phase(batch_size=4, optimizer=adam(0.05))),
            data,
            rounds=3,
            cohort=4,
            seed=1,
        )
    return [r.value for r in run.history if r.split == "train" and r.metric == "loss"] + [
        run.last.evaluate()["loss"]
    ]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_results_are_those_of_these_numerics(name: str) -> None:
    assert NUMERICS == 3, "Write the new NUMERICS here, and the numbers above."
    assert measured(name) == pytest.approx(EXPECTED[name], rel=1e-4), MESSAGE
