"""fedkeep: personalised federated learning. Name the parameters that are private; the rest is federated.

run = fedkeep.simulate(model, fedkeep.methods.furl("user"), data, rounds=100, cohort=10)
run.evaluate("test")
"""

from fedkeep import data, methods, models, nn
from fedkeep.core import errors
from fedkeep.core.optim import adagrad, adam, sgd
from fedkeep.data import FederatedData
from fedkeep.experiments import trackers
from fedkeep.experiments.exported import load_encoding, load_model
from fedkeep.experiments.run import Run
from fedkeep.experiments.serving import export_models
from fedkeep.experiments.simulate import simulate
from fedkeep.methods import Adapt, Client, Init, Method, Optimize, Phase, Server, WeightedMean, averaging
from fedkeep.nn.accelerate import accelerate
from fedkeep.nn.adapters import adapters, load_adapter, save_adapter
from fedkeep.split import Split, check_split
from fedkeep.version import __version__

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
    "errors",
    "export_models",
    "load_adapter",
    "load_encoding",
    "load_model",
    "methods",
    "models",
    "nn",
    "save_adapter",
    "sgd",
    "simulate",
    "trackers",
]
