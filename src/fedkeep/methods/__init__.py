"""Federated methods as values: one file each, and the table that names them for configurations."""

from collections.abc import Callable

from fedkeep.methods import terms
from fedkeep.methods.base import Method, Phase
from fedkeep.methods.fedavg import fedavg
from fedkeep.methods.furl import furl
from fedkeep.methods.local import local

METHODS: dict[str, Callable[..., Method]] = {"fedavg": fedavg, "furl": furl, "local": local}

__all__ = ["METHODS", "Method", "Phase", "fedavg", "furl", "local", "terms"]
