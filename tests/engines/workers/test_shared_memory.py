"""Shared memory: what one process puts in, another takes out with the same bits; data are shared or mapped, not copied."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep import FederatedData, Phase, methods
from fedkeep.engines import Workers
from fedkeep.engines.workers.shared_memory import ALIGNMENT, Arena, SentData
from tests.engines.workers.rounds import LINUX, processes, rounds
from tests.tiny import Logits, classes, same_bits, texts

TENSORS = {
    "float": torch.randn(3, 5),
    "double": torch.randn(7, dtype=torch.float64),
    "half": torch.randn(4).bfloat16(),
    "scalar": torch.tensor(-0.0),
    "none": torch.zeros(0, 4),
    "count": torch.tensor(12345678901),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).T,
    "row of a stack": torch.randn(3, 4)[1],
    "every second": torch.arange(10)[::2],
    "expanded": torch.ones(1).expand(5),
}


def test_what_is_put_in_is_taken_out() -> None:
    arena = Arena()
    found = arena.take(arena.put(TENSORS))
    assert same_bits(found, TENSORS)
    for name, value in found.items():
        assert (value.dtype, value.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
        assert value.data_ptr() % ALIGNMENT == 0
    for name in ("channels last", "transposed"):  # a copy keeps the order in memory, as torch's own copies do
        assert found[name].stride() == TENSORS[name].stride() == TENSORS[name].clone().stride()
    arena.close()


def test_views_follow_the_memory_and_layouts_are_reused() -> None:
    arena = Arena()
    first = arena.put({"a": torch.zeros(3)})
    view = arena.take(first)["a"]
    assert arena.put({"a": torch.ones(3)}) is first
    assert view.tolist() == [1, 1, 1]
    other = arena.put({"a": torch.ones(4)})
    assert other != first
    assert arena.take(other)["a"].shape == (4,)


def test_gradients_stay_behind() -> None:
    arena = Arena()
    found = arena.take(arena.put({"a": torch.ones(2, requires_grad=True)}))["a"]
    assert not found.requires_grad


def test_it_grows_on_both_sides() -> None:
    ours = Arena(64)
    theirs = pickle.loads(pickle.dumps(ours))  # noqa: S301 - as multiprocessing does at a process's start
    for size in (10, 1000, 100_000, 3):
        value = torch.randn(size)
        assert torch.equal(theirs.take(ours.put({"a": value}))["a"], value)
        assert torch.equal(ours.take(theirs.put({"b": -value}))["b"], -value)
    ours.close()
    assert torch.equal(theirs.take(theirs.put({"a": torch.ones(2)}))["a"], torch.ones(2))
    theirs.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name")
def test_it_has_no_name_that_could_be_left_behind() -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    arena = Arena(1 << 20)
    assert (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()) <= before
    assert os.readlink(arena.path).startswith("/memfd:")


def test_where_memory_needs_a_name_it_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    arena = Arena(64)
    value: Tensor = torch.randn(1000)
    assert torch.equal(arena.take(arena.put({"a": value}))["a"], value)
    assert os.path.exists(arena.path)
    arena.close()
    assert not os.path.exists(arena.path)
    arena.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_file_is_removed_when_it_is_no_longer_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows removes no file that is mapped."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    arena, removed = Arena(64), list[str]()
    arena.take(arena.put({"a": torch.randn(1000)}))
    assert arena.path in Path("/proc/self/maps").read_text()

    def unlink(path: str, remove: Callable[[str], None] = os.unlink) -> None:
        assert path not in Path("/proc/self/maps").read_text()
        remove(path)
        removed.append(path)

    monkeypatch.setattr(os, "unlink", unlink)
    arena.close()
    assert removed == [arena.path]


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
