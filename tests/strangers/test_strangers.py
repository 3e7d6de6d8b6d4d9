"""A seeded sample of the table of strangers' modules; ``make strangers`` runs the whole."""

from __future__ import annotations

import numpy as np
import pytest

from fedkeep.methods import METHODS
from tests.strangers.loops import row
from tests.strangers.modules import STRANGERS

CELLS = [(name, method) for name in STRANGERS for method in METHODS if method != "fedavg"]
REFUSED = {
    *(
        "EMA in a buffer",
        "EMA, assigned",
        "BYOL's target",
        "BYOL's target by .data",
        "MoCo's queue",
        "VQ codebook",
    ),
    *("by position", "counter in a buffer", "buffer that is not persistent", "VAE", "complex weights"),
    *("own batch norm", "lazy", "ScriptModule", "traced", "quantised", "compiled", "compiled layer", "DDP"),
    "DataParallel",
}
"""Modules that no engine trains by FedAvg."""
DRAWN = [CELLS[k] for k in np.random.default_rng(1).choice(len(CELLS), 30, replace=False)]
HALF = [one if k % 2 else pytest.param(*one, marks=pytest.mark.slow) for k, one in enumerate(DRAWN)]


def check(name: str, method: str, *engines: str) -> dict[str, str]:
    """Return a cell's results, none of which is a fault."""
    stranger = STRANGERS[name]
    try:
        stranger.make()
    except ImportError as error:
        pytest.skip(f"{error}: make strangers")
    found = row(stranger, method, engines)
    assert all(result.startswith(("equal", "refused", "trained")) for result in found.values()), found
    return found


@pytest.mark.parametrize("name", STRANGERS)
def test_fedavg_trains_as_the_authors_own_loop_or_refuses(name: str) -> None:
    found = check(name, "fedavg", "sequential", "vectorised")
    assert found["sequential"].startswith("refused") is (name in REFUSED)


@pytest.mark.parametrize(("name", "method"), HALF)
def test_engines_agree_or_refuse(name: str, method: str) -> None:
    check(name, method, "sequential", "auto", "vectorised")
