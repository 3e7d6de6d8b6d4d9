"""An argument that a method, a phase or an optimiser does not take is told where it is written."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import fedkeep
from fedkeep.core.errors import ConfigError
from fedkeep.methods import METHODS, Phase, furl
from tests.refusals import raises


@pytest.mark.parametrize("kind", METHODS)
def test_every_method_tells_what_belongs_to_its_phase(kind: str) -> None:
    with raises(ConfigError, said="local=fedkeep.Phase(optimizer=fedkeep.sgd(0.3))", name="lr"):
        METHODS[kind](lr=0.3)
    with raises(ConfigError, said="local=fedkeep.Phase(batch_size=8)", name="batch_size"):
        METHODS[kind](batch_size=8)


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        (
            furl,
            {"privat": "user"},
            "furl() takes no argument 'privat'. Did you mean 'private'? It takes private, local, ",
        ),
        (fedkeep.methods.fedavg, {"epochs": 8}, "local=fedkeep.Phase(epochs=8)"),
        (
            Phase,
            {"learning_rate": 0.3},
            "Phase() takes no argument 'learning_rate'. Write optimizer=fedkeep.sgd(0.3).",
        ),
        (Phase, {"epoch": 3}, "Did you mean 'epochs'?"),
        (Phase().but, {"lr": 0.3}, "optimizer=fedkeep.sgd(0.3)"),
        (fedkeep.sgd, {"lr": 0.3}, "Write learning_rate=0.3."),
        (fedkeep.adam, {"beta": (0.9, 0.99)}, "Did you mean 'betas'?"),
        (fedkeep.adagrad, {"lr": 0.3}, "Write learning_rate=0.3."),
    ],
)
def test_an_unknown_argument(call: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    with raises(ConfigError, said=said, name=next(iter(given))):
        call(**given)


def test_what_is_told_of_changes_nothing_else() -> None:
    assert list(inspect.signature(Phase).parameters)[:3] == ["loss", "trains", "optimizer"]
    assert inspect.signature(furl).parameters["private"].default == "user"
    assert "Return FURL" in (furl.__doc__ or "")
    assert pickle.loads(pickle.dumps(furl)) is furl  # noqa: S301
    with pytest.raises(TypeError):
        Phase(0.1)  # type: ignore[misc]
