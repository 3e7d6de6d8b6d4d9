"""Data on their way to worker processes: shared or mapped, never copied."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from fedkeep import FederatedData, Phase, methods
from fedkeep.engines import Workers
from fedkeep.engines.workers.dataset import SentData
from tests.engines.workers.rounds import LINUX, processes, rounds
from tests.tiny import Logits, classes, same_bits, texts


@LINUX
def test_the_data_are_not_copied(engine: Workers) -> None:
    """40 MB of examples; a worker that has trained on all of them has less than half of that for itself."""
    features = 1000
    data = classes(counts=(5000, 5000), features=features, kind="f4", valid=0, test=0)
    method = methods.furl("user", local=Phase(batch_size=100))
    rounds(engine, [[0, 1], [0, 1]], model=lambda: Logits(features=features), method=method, data=data)
    for pid in processes(engine):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        own = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        assert own < 20_000


@pytest.mark.parametrize("mapped", [False, True])
def test_data_on_their_way_to_another_process(tmp_path: Path, mapped: bool) -> None:
    data = texts(counts=(4, 9, 3, 5), vocabulary=300)
    if mapped:
        data.save(tmp_path / "data")
        data = FederatedData.load(tmp_path / "data")
    sent = SentData(data)
    assert bool(sent.mapped) == mapped
    found: FederatedData = pickle.loads(pickle.dumps(sent)).data  # noqa: S301 - as multiprocessing does
    assert found.fingerprint() == data.fingerprint()
    assert found.meta == data.meta
    rows = np.arange(5, 12)
    assert same_bits(found.batch(rows), data.batch(rows))
    for column in ("text", "label"):
        assert len(pickle.dumps(sent)) < 20_000 or column not in found.columns
    sent.arena.close()
