"""Settings of engines, rounds and clients that are refused, each with what the error says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, FedkeepError, MethodError
from fedkeep.engines import Adaptation, Sampler, Vectorised
from fedkeep.engines.faults import Faults
from fedkeep.methods import Client, EarlyStopping, Init, Phase
from fedkeep.methods.client import by_share, zeros_like_trainable

SAMPLER = {"clients": 5, "cohort": 1, "mode": "shuffled", "seed": 0}
AGREE = "Phases that take turns on every mini-batch must agree in epochs, steps, batch_size and examples"
TURNS = "a number of steps of at least 1 for each of the 1 phases; got"

REFUSED: list[tuple[Callable[..., object], dict[str, Any], type[FedkeepError], str]] = [
    (Sampler, {**SAMPLER, "cohort": 0}, ConfigError, "cohort must be at least 1; got 0"),
    (Sampler, {**SAMPLER, "clients": np.zeros(0, np.int64)}, ConfigError, "no client with training examples"),
    (Sampler, {**SAMPLER, "mode": "random"}, ConfigError, "'independent' or 'poisson'; got 'random'"),
    (Vectorised, {"clients": 0}, ConfigError, "clients must be at least 1; got 0"),
    (Vectorised, {"memory": 0}, ConfigError, "memory must be at least 1; got 0"),
    (Faults, {"broken": "ignore"}, ConfigError, "broken must be 'stop' or 'skip'; got 'ignore'"),
    (Faults, {"minimum": -1}, ConfigError, "minimum must be at least 0; got -1"),
    (Faults, {"heaviest": 0}, ConfigError, "heaviest must be positive; got 0"),
    (Adaptation, {"examples": -1}, ConfigError, "examples must be at least 0; got -1"),
    (Adaptation, {"begin": "sent"}, ConfigError, "begin must be 'kept', 'default' or 'initial'; got 'sent'"),
    (EarlyStopping, {"every": 0}, MethodError, "every must be at least 1; got 0"),
    (EarlyStopping, {"patience": 0}, MethodError, "patience must be at least 1; got 0"),
    (EarlyStopping, {"min_improvement": -1.0}, MethodError, "min_improvement must be at least 0; got -1.0"),
    (
        EarlyStopping,
        {"min_improvement": math.nan},
        MethodError,
        "min_improvement must be at least 0; got nan",
    ),
    (Phase, {"clip_over": "both"}, MethodError, "clip_over must be 'all' or 'halves'; got 'both'"),
    (Client, {"phases": (Phase(), Phase(batch_size=3)), "turns": "batches"}, MethodError, AGREE),
    (Client, {"phases": (Phase(), Phase(examples="query")), "turns": (1, 2)}, MethodError, AGREE),
    (
        Client,
        {"phases": (Phase(early_stopping=EarlyStopping()),), "turns": "batches"},
        MethodError,
        "cannot stop early",
    ),
    (Client, {"turns": "other"}, MethodError, f"{TURNS} 'other'"),
    (Client, {"turns": (0,)}, MethodError, f"{TURNS} (0,)"),
    (Client, {"turns": [1, 2]}, MethodError, f"{TURNS} (1, 2)"),
    (Client, {"tables": "other"}, MethodError, "tables must be 'exact', 'local' or 'whole'; got 'other'"),
    (Client, {"pools": "other"}, MethodError, "pools must be 'examples' or 'clients'; got 'other'"),
    (Client, {"phases": ()}, MethodError, "at least one phase"),
    (Client, {"sends": zeros_like_trainable}, MethodError, "What sends declares is given by finish"),
    (Client, {"keep": Init(every_round=True), "accept": by_share}, MethodError, "leave out accept"),
]


@pytest.mark.parametrize(("make", "given", "kind", "said"), REFUSED)
def test_settings_that_make_no_sense_are_refused(
    make: Callable[..., object], given: dict[str, Any], kind: type[FedkeepError], said: str
) -> None:
    with pytest.raises(kind) as error:
        make(**given)
    assert type(error.value) is kind
    assert said in str(error.value)
