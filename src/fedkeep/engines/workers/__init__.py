"""Clients side by side in processes of one thread each."""

from fedkeep.engines.workers.cores import available_cores
from fedkeep.engines.workers.workers import Workers

__all__ = ["Workers", "available_cores"]
