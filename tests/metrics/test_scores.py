import math

import pytest

from fedkeep.metrics import per_client


def test_per_client_by_hand() -> None:
    summary = per_client({f"u{i}": i / 10 for i in range(11)} | {"empty": math.nan})
    assert (summary.clients, summary.undefined) == (11, 1)
    assert summary.mean == pytest.approx(0.5)
    assert summary.std == pytest.approx(math.sqrt(0.1))  # variance of 0..10 is 10, in tenths 0.1
    assert (summary.min, summary.max, summary.worst) == (0.0, 1.0, "u0")
    assert summary.deciles == pytest.approx([i / 10 for i in range(1, 10)])
    assert summary.median == pytest.approx(0.5)


def test_per_client_without_values() -> None:
    summary = per_client({"a": math.nan})
    assert (summary.clients, summary.undefined, summary.worst) == (0, 1, None)
    assert math.isnan(summary.mean)
    assert math.isnan(summary.median)
