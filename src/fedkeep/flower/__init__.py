"""Flower: the transport of ``fedkeep.remote`` across real processes and machines; the one room that knows Flower.

``keep`` and ``own_values`` are for a Flower app of your own; they are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkeep.flower.keep_mod import keep, own_values

__all__ = ["keep", "own_values"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedkeep.flower' has no attribute {name!r}")
    return getattr(import_module("fedkeep.flower.keep_mod"), name)
