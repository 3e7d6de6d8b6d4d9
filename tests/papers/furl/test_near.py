"""How many test examples lie near a training example in time: against every pair of examples."""

from __future__ import annotations

import numpy as np
import pytest

from fedkeep import FederatedData
from fedkeep_papers.furl.table1 import near_training, statistics


def messages(seed: int, clients: int = 7) -> FederatedData:
    """Return clients with 1 to 30 messages within some hours, of three labels, in no order; some only test."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 30, clients)
    owner = np.repeat(np.arange(clients), counts)
    split = rng.choice(["train", "test", "valid"], counts.sum())
    split[owner == 0] = "test"
    split[0] = "test"
    columns = {
        "x": np.zeros(len(owner)),
        "label": rng.integers(0, 3, len(owner)),
        "time": rng.choice(4 * 3600, len(owner), replace=False),
    }
    return FederatedData.from_columns(owner, columns, split.tolist(), {"classes": 3})


@pytest.mark.parametrize("seed", range(20))
def test_near(seed: int) -> None:
    data = messages(seed)
    time, label = (np.asarray(data.columns[n]) for n in ("time", "label"))
    near = same = 0
    for client in range(len(data)):
        for test in data.rows(client, "test"):
            pairs = [(abs(int(time[t] - time[test])), int(time[t]), t) for t in data.rows(client, "train")]
            if not pairs or min(pairs)[0] > 600:
                continue
            near += 1
            same += label[min(pairs)[2]] == label[test]
    assert near > 0
    assert list(near_training(data).values()) == [near, same]


def test_only_data_with_times_have_it() -> None:
    data = messages(0)
    assert len(statistics(data)) == 8
    columns = {n: c for n, c in data.columns.items() if n != "time"}
    assert len(statistics(FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta))) == 6
