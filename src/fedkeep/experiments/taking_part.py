"""Who takes part in a run, with how many examples, and for how many rounds."""

from __future__ import annotations

import numpy as np

from fedkeep.data import FederatedData, hold_out
from fedkeep.methods import Method


def take_part(data: FederatedData, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of clients in federation and of those held out of it.

    A client without training examples is never drawn, but judged with default private values (FURL, §4.2).
    """
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
