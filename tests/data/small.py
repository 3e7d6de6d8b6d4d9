"""Data sets of a few rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedkeep.data import FederatedData, Ragged


def small() -> FederatedData:
    """Return six rows of two clients, given in disorder; x holds the number of the row as given."""
    return FederatedData.from_columns(
        ["b", "a", "b", "b", "a", "b"],
        {
            "x": np.arange(6, dtype=np.float32),
            "text": Ragged.from_rows([[2], [3, 4], [], [5], [6, 7, 8], [9]], "uint8"),
            "label": np.array([0, 1, 2, 1, 0, 2]),
        },
        ["test", "train", "train", "valid", "train", "train"],
        {"name": "small"},
    )


def tiny(**changes: Any) -> FederatedData:
    settings: dict[str, Any] = {
        "columns": {"x": np.zeros(3), "label": np.array([0, 1, 0])},
        "offsets": [0, 2, 3],
        "ids": ["a", "b"],
    }
    return FederatedData(**(settings | changes))


def sample(**changes: Any) -> FederatedData:
    """Return two clients with a ragged column, an id that no file may be named by, and meta of several kinds."""
    settings: dict[str, Any] = {
        "columns": {
            "x": np.arange(10, dtype=np.float32).reshape(5, 2),
            "text": Ragged.from_rows([[1], [], [2, 3], [4], [5]], "uint8"),
            "label": np.array([0, 1, 2, 1, 0]),
            "_best": np.linspace(0, 1, 5),
        },
        "offsets": [0, 3, 5],
        "ids": ["../weird/ä", "b"],
        "bounds": np.array([[0, 1, 2, 3], [3, 4, 4, 5]]),
        "meta": {"name": "sample", "traits": {"colour": ["red", "blue"]}, "best": np.float64(0.5)},
    }
    return FederatedData(**(settings | changes))
