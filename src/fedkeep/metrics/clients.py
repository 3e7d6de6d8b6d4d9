"""How a metric is spread over clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """A metric's distribution over clients, each counted once whatever its number of examples.

    Attributes:
        clients: how many clients have a defined value.
        undefined: how many have none (NaN), e.g. an AUC on one class; they count nowhere else.
        mean: the mean over clients.
        std: the standard deviation over these clients (division by their number).
        min: the lowest value.
        max: the highest value.
        deciles: the nine values below which 10 %, 20 % .. 90 % of clients lie, interpolated linearly.
        worst: the id of the client with the worst value, the first one of several; None without clients.
    """

    clients: int
    undefined: int
    mean: float
    std: float
    min: float
    max: float
    deciles: tuple[float, ...]
    worst: str | None

    @property
    def median(self) -> float:
        """The fifth decile."""
        return self.deciles[4]


def per_client(values: Mapping[str, float], *, higher_is_better: bool = True) -> ClientSummary:
    """Summarise a metric over clients.

    Args:
        values: the metric by client id. NaN means not defined for this client.
        higher_is_better: which end is the worst client's.

    Returns:
        The summary; all its numbers are NaN where no client has a value.
    """
    ids = [client for client, value in values.items() if not math.isnan(value)]
    undefined = len(values) - len(ids)
    if not ids:
        nan = math.nan
        return ClientSummary(0, undefined, nan, nan, nan, nan, deciles=(nan,) * 9, worst=None)
    array = np.array([values[client] for client in ids], dtype=np.float64)
    deciles = np.quantile(array, np.arange(1, 10) / 10)
    return ClientSummary(
        clients=len(ids),
        undefined=undefined,
        mean=float(array.mean()),
        std=float(array.std()),
        min=float(array.min()),
        max=float(array.max()),
        deciles=tuple(float(d) for d in deciles),
        worst=ids[int(array.argmin() if higher_is_better else array.argmax())],
    )
