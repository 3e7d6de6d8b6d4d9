"""Random streams named by (seed, purpose, client, round).

A draw depends on its stream's name alone, so results don't depend on the number of workers, the order of
clients or the engine.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


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
