"""Random streams named by (seed, purpose, client, round), and torch's own generators.

A draw depends on its stream's name alone, so results don't depend on the number of workers, the order of
clients or the engine. Dropout draws from torch's own generators, of the CPU and of a GPU; what draws from others is found.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch

from fedkeep.core.errors import MethodError


def stream(seed: int, purpose: str, client: str = "", round: int = 0) -> int:
    """Return the 63-bit number that seeds the stream of this name."""
    name = f"{seed}\x1f{purpose}\x1f{client}\x1f{round}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, client: str = "", round: int = 0) -> torch.Generator:
    """Return a CPU ``torch.Generator`` at the start of the stream of this name."""
    return torch.Generator().manual_seed(stream(seed, purpose, client, round))


def numpy_generator(seed: int, purpose: str, client: str = "", round: int = 0) -> np.random.Generator:
    """Return a numpy generator at the start of the stream of this name."""
    return np.random.default_rng(stream(seed, purpose, client, round))


T = TypeVar("T")


def position() -> tuple[object, ...]:
    """Return how far Python's and NumPy's global generators have come, which no seed governs.

    Normal numbers are drawn by twos, and one may be left.
    """
    there: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    _, own, left = random.getstate()
    return int(there[2]), int(there[3]), own[-1], own[0], left


def forked(device: str) -> AbstractContextManager[None]:
    """Leave torch's generators afterwards as they were, a GPU's too."""
    return torch.random.fork_rng(devices=[device] if device.startswith("cuda") else [])


def seed_all(seed: int, device: str) -> None:
    """Seed torch's own generators, which dropout draws from."""
    # Not torch.manual_seed, which notes a traceback for a GPU each time.
    torch.default_generator.manual_seed(seed)
    if device.startswith("cuda"):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def without_draws(what: str, hook: Callable[[], T], device: str) -> T:
    """Return what a hook gives that runs on a device.

    Raises:
        MethodError: it drew random numbers, so that its result would depend on the order of clients.
    """
    cuda = device.startswith("cuda")

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

    before, place = states(), position()
    found = hook()
    if position() != place or not all(map(torch.equal, before, states())):
        raise MethodError(
            "The {what} drew random numbers, so its result would depend on the order of clients. A model "
            "may draw in training alone, e.g. functional.dropout(x, p, self.training); a hook draws from "
            "a generator of its own, seeded by what it is given.",
            what=what,
        )
    return found
