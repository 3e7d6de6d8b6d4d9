"""The table of engines, and the one that a run gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedkeep.core.errors import ConfigError, check_choice, did_you_mean
from fedkeep.engines import (
    Auto,
    Engine,
    Sequential,
    Vectorised,
    Workers,
)
from fedkeep.engines.workers.workers import check_device
from fedkeep.methods import Method
from fedkeep.metrics import CLASS_METRICS
from fedkeep.tasks import Task

ENGINES: dict[str, Callable[[], Engine]] = {
    "sequential": Sequential,
    "workers": Workers,
    "vectorised": Vectorised,
}


def check_engine(name: str, workers: int | None, device: str) -> None:
    """Check what a user asks for.

    Raises:
        ConfigError: no such engine, it has no workers, or it can't compute on the device.
    """
    if name not in (*ENGINES, "auto"):
        hint = did_you_mean(name, [*ENGINES, "auto"])
        raise ConfigError(f"Unknown engine {name!r}; the engines are {['auto', *ENGINES]}.{hint}")
    if workers not in (None, 1) and name not in ("workers", "auto"):  # one process is what every engine has
        raise ConfigError(f"workers={workers} is for engine='workers' or 'auto'; the engine is {name!r}.")
    if name == "workers":
        check_device(device)


def check_judging(method: Method, shared: bool, adapted: bool) -> None:
    """Raise ConfigError where the method has no shared part that predicts, or no adaptation, and it is to be judged."""
    if shared and method.predict_shared is None:
        raise ConfigError(
            f"evaluate_shared: the shared part of {method.name!r} cannot predict alone. Leave it out."
        )
    if adapted and not method.adapt.phases:
        raise ConfigError(f"evaluate_adapted: {method.name!r} has no phases of adaptation. Leave it out.")


def named_metrics(names: Sequence[str], tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return the metrics that are measured beside the usual ones.

    Raises:
        ConfigError: one is not known or named twice, or no task is of classes.
    """
    for name in names:
        check_choice("metrics must be of", name, CLASS_METRICS)
    if len(set(names)) < len(names):
        raise ConfigError(f"metrics names one twice: {list(names)}.")
    if names and not any(task.kind.has_classes for task in tasks):
        raise ConfigError(
            f"metrics: {names[0]} is of classes, and the data's task is {tasks[0].kind.name!r}. Leave it out."
        )
    return tuple(names)


def make_engine(name: str, workers: int | None, device: str, cohort: int, rounds: int) -> tuple[Engine, str]:
    """Return the engine of a name, and why it was chosen; for ``auto`` the best one here, or one that finds out."""
    if name == "auto":
        return Auto(cohort, rounds, workers, device), ""
    return (Workers(workers) if name == "workers" else ENGINES[name]()), ""
