"""Trials of a comparison: every method gets as many, of its rates and its own strength, and what is best on ``valid`` stays."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from fedkeep.core.optim import Optimizer
from fedkeep.experiments.build import method_maker
from fedkeep.experiments.config import Config

STRENGTHS = ("lam", "mu")
"""What methods call the strength of what is theirs."""
Settings = Mapping[str, float]
"""Values that a trial has, by name: ``rate``, and the strength's."""


def trials(config: Config, optimizer: Optimizer, number: int) -> list[tuple[Config, Settings]]:
    """Return a method's trials, the first with the values that it has, the others around them.

    Rates are 1, 0.3, 3, 0.1, 10, … times as high, all of them together; a strength 1, 0.1, 10, … times.

    Args:
        config: the experiment with the method.
        optimizer: what trains there without a trial.
        number: how many.
    """
    name, strength = strength_of(config)
    far = range(-number, number + 1)
    steps = sorted(product(far, far if name else [0]), key=lambda s: (abs(s[0]) + abs(s[1]), abs(s[1]), *s))
    found: list[tuple[Config, Settings]] = []
    for rate_step, strength_step in steps[:number]:
        factor = _factor(rate_step)
        tried = replace(
            optimizer,
            learning_rate=_short(optimizer.learning_rate * factor),
            rates=tuple((pattern, _short(rate * factor)) for pattern, rate in optimizer.rates),
        )
        own = {name: _short(strength * 10.0**strength_step)} if name else {}
        method = config.method.model_copy(update={"optimizer": tried, **own})
        found.append((config.model_copy(update={"method": method}), {"rate": tried.learning_rate, **own}))
    return found


def strength_of(config: Config) -> tuple[str, float]:
    """Return the name and value of a method's own strength; an empty name: it has none, or that is 0."""
    wanted = inspect.signature(method_maker(config.method.kind)).parameters
    for name in STRENGTHS:
        value = config.method.options.get(name, wanted[name].default if name in wanted else 0)
        if isinstance(value, int | float) and value > 0:
            return name, float(value)
    return "", 0.0


def told(settings: Settings) -> str:
    """Return ``rate 0.3, lam 1``."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def _factor(step: int) -> float:
    """Return 1, 3, 10, 30, … for steps from 0 on, and 0.3, 0.1, 0.03, … for those below."""
    whole, half = divmod(step, 2)
    return 10.0**whole * (3 if half else 1)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
