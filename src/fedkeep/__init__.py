"""fedkeep: personalised federated learning. Name the parameters that are private; the rest is federated.

run = fedkeep.simulate(model, fedkeep.methods.furl("user"), data, rounds=100, cohort=10)
run.evaluate("test")

A name is imported when it is first used, so that the command line can answer without loading torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedkeep.version import __version__

if TYPE_CHECKING:
    from fedkeep import data, methods, models, nn
    from fedkeep.core import errors
    from fedkeep.core.declared import declare
    from fedkeep.core.optim import adagrad, adam, sgd
    from fedkeep.data import FederatedData
    from fedkeep.experiments import trackers
    from fedkeep.experiments.load import load_run
    from fedkeep.experiments.personalize.exported import load_encoding, load_model
    from fedkeep.experiments.run import Run
    from fedkeep.experiments.simulate import simulate
    from fedkeep.methods import Adapt, Client, Init, Method, Optimize, Phase, Server, WeightedMean, averaging
    from fedkeep.nn.accelerate import accelerate
    from fedkeep.nn.adapters import adapters, load_adapter, save_adapter
    from fedkeep.split import Split, check_split

__all__ = [
    "Adapt",
    "Client",
    "FederatedData",
    "Init",
    "Method",
    "Optimize",
    "Phase",
    "Run",
    "Server",
    "Split",
    "WeightedMean",
    "__version__",
    "accelerate",
    "adagrad",
    "adam",
    "adapters",
    "averaging",
    "check_split",
    "data",
    "declare",
    "errors",
    "load_adapter",
    "load_encoding",
    "load_model",
    "load_run",
    "methods",
    "models",
    "nn",
    "save_adapter",
    "sgd",
    "simulate",
    "trackers",
]

_HOME = {
    "core.declared": ("declare",),
    "core.optim": ("adagrad", "adam", "sgd"),
    "data": ("FederatedData",),
    "experiments.personalize.exported": ("load_encoding", "load_model"),
    "experiments.load": ("load_run",),
    "experiments.run": ("Run",),
    "experiments.simulate": ("simulate",),
    "methods": (
        "Adapt",
        "Client",
        "Init",
        "Method",
        "Optimize",
        "Phase",
        "Server",
        "WeightedMean",
        "averaging",
    ),
    "nn.accelerate": ("accelerate",),
    "nn.adapters": ("adapters", "load_adapter", "save_adapter"),
    "split": ("Split", "check_split"),
}
_MODULES = {"errors": "core.errors", "trackers": "experiments.trackers"}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of fedkeep, when it is first used."""
    for module, names in _HOME.items():
        if name in names:
            found = getattr(import_module(f"fedkeep.{module}"), name)
            break
    else:
        path = _MODULES.get(name, name)
        if name.startswith("__"):
            raise AttributeError(f"module 'fedkeep' has no attribute {name!r}")
        try:
            found = import_module(f"fedkeep.{path}")
        except ModuleNotFoundError as error:
            if error.name != f"fedkeep.{path}":
                raise
            raise AttributeError(
                f"module 'fedkeep' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
            ) from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
