"""Who sent this, and what is she like: a client's trait from its uploads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedkeep.attacks.sightings import Sighting
from fedkeep.core.params import Params

Floats = np.ndarray[Any, np.dtype[np.float64]]


def likeness(
    earlier: Sequence[Sighting], later: Sequence[Sighting], names: Sequence[str] | None = None
) -> Floats:
    """Return how alike changes of two rounds are, (earlier, later): cosines, each round's mean taken off first.

    Args:
        earlier, later: what was seen; a name that is in only one of them counts as zeros.
        names: of the tensors to look at; None: all. Of tensors that never left nothing is seen, and all is 0.
    """

    def chosen(sightings: Sequence[Sighting]) -> list[Params]:
        known = set(sightings[0].changes) if names is None else set(names) & set(sightings[0].changes)
        return [
            {n: v.double() for n, v in s.changes.items() if n in known and v.is_floating_point()}
            for s in sightings
        ]

    cross, one, two = (
        _products(chosen(a), chosen(b)) for a, b in ((earlier, later), (earlier, earlier), (later, later))
    )
    size = np.sqrt(np.maximum(np.outer(one.diagonal(), two.diagonal()), 0))
    return np.divide(cross, size, out=np.zeros_like(cross), where=size > 1e-12 * size.max(initial=0))


def _products(a: Sequence[Params], b: Sequence[Params]) -> Floats:
    """Return the inner products of changes, (a, b), after the mean of each list is taken off."""
    total = np.zeros((len(a), len(b)))
    for name in a[0].keys() & b[0].keys():
        one, two = (torch.stack([each[name].reshape(-1) for each in some]) for some in (a, b))
        total += ((one - one.mean(0)) @ (two - two.mean(0)).T).numpy()
    return total


def recognised(alike: Floats) -> Floats:
    """Return of each later upload how likely the attacker names its client, (later,): 1 or 0, and 1 / n in a tie of n.

    The attacker knows one earlier upload of every client by name, and sees later ones without names: it takes the
    nearest. Guessing is right once in N. Uploads that say nothing tie, and ties are guesses.

    Args:
        alike: (N, N) by ``likeness``; both rounds in the same order.
    """
    tied = alike == alike.max(0, keepdims=True)
    found: Floats = tied.diagonal() / tied.sum(0)
    return found


def present(
    alike: Floats, inside: np.ndarray[Any, Any]
) -> tuple[Floats, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return scores, truth and client of every pair of a client and something seen later: is she in it?

    The attacker knows one earlier upload of a client by name, bare, and sees what is released of a later round. The AUC
    of the scores is judged; guessing gives ½.

    Args:
        alike: (clients, later) by ``likeness``.
        inside: (clients, later) bool.
    """
    client = np.repeat(np.arange(len(alike)), alike.shape[1])
    return alike.reshape(-1), np.asarray(inside).reshape(-1).astype(float), client


def label_guesses(sightings: Sequence[Sighting], bias: str) -> dict[str, int]:
    """Return the class that each client holds most, as the attacker guesses it.

    The server knows the model, and sees changes. The gradient of the last layer's bias is Σ (p − y), so classes that a
    client holds more than the model expects rise: the guess is the class that rises most (Zhao et al., iDLG, 2020, for
    one example; Wainakh et al., LLG, 2022). Of a sum, every client in it gets the sum's. Guessing: the class that most
    clients hold most.

    Args:
        sightings: what was seen.
        bias: name of the last layer's bias, (classes,).
    """
    return {client: int(s.changes[bias].argmax()) for s in sightings for client in s.clients}


def trait_guesses(sightings: Sequence[Sighting], trait: Sequence[int], penalty: float = 0.1) -> list[int]:
    """Return a trait of each client from its upload, by a linear classifier over the others' uploads.

    The attacker sees single uploads, and knows the trait of all clients but one. Ridge regression on cosines to the
    mean-free uploads, one client left out at a time. Guessing: the commonest trait among the others.

    Args:
        sightings: one upload of each client.
        trait: (N,) from 0 on.
        penalty: added to the diagonal, in units of the mean of the diagonal.
    """
    alike, number = likeness(sightings, sightings), np.asarray(trait)
    classes = np.unique(number)
    target = (number[:, None] == classes).astype(np.float64)
    guesses = []
    for left in range(len(number)):
        rest = np.arange(len(number)) != left
        inner, mean = alike[np.ix_(rest, rest)], target[rest].mean(0)
        found = np.linalg.solve(inner + penalty * np.eye(len(inner)), target[rest] - mean)
        guesses.append(int(classes[(mean + alike[left, rest] @ found).argmax()]))
    return guesses
