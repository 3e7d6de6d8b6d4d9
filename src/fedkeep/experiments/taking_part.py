"""Who takes part in a run, with how many examples, and for how many rounds."""

from __future__ import annotations

import math

import numpy as np

from fedkeep.core.errors import ConfigError
from fedkeep.data import FederatedData, hold_out
from fedkeep.methods import Method


def take_part(data: FederatedData, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of clients in federation and of those held out of it.

    A client without training examples is never drawn, but judged with default private values (FURL, §4.2).
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"hold_out must be a fraction in [0, 1); got {fraction}.")
    return hold_out(data, fraction, seed) if fraction else (np.arange(len(data)), np.zeros(0, np.int64))


def train_counts(data: FederatedData, method: Method) -> np.ndarray:
    """Return for each client how many examples a round would train on: where all phases want opted-in ones, those.

    A client that opted out wholly is then never drawn (mixture of experts, authors' later code), but judged. Where all
    clients did, all are drawn, and rounds change nothing.
    """
    opted = data.columns.get("opted_in")
    if opted is None or any(phase.examples == "all" for phase in method.client.phases):
        return data.counts("train")
    rows = data.split_rows("train")
    inside = np.bincount(data.clients_of(rows[np.asarray(opted)[rows]]), minlength=len(data))
    return inside if inside.any() else data.counts("train")


def who_trains(data: FederatedData, method: Method, clients: np.ndarray) -> np.ndarray:
    """Return those of some clients from whom cohorts are drawn: they have something to train on."""
    found: np.ndarray = clients[train_counts(data, method)[clients] > 0]
    return found


def count_rounds(rounds: int | None, epochs: float | None, per_epoch: int) -> int:
    """Return the number of rounds that ``rounds`` or ``epochs`` asks for."""
    if (rounds is None) == (epochs is None):
        raise ConfigError("Give either rounds or epochs.")
    if epochs is not None and not 0 <= epochs < math.inf:
        raise ConfigError(f"epochs must be a number of at least 0; got {epochs}.")
    wanted = rounds if rounds is not None else round(float(epochs or 0) * per_epoch)
    if wanted < 0:
        raise ConfigError(f"rounds must be at least 0; got {wanted}.")
    return wanted
