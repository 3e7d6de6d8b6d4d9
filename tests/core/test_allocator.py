"""Memory that is freed stays with the process: no page faults at the next step."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from fedkeep.core.allocator import OWN, tune_allocator
from fedkeep.core.errors import ConfigError

FAULTS = """
import resource, torch
from fedkeep.core.allocator import tune_allocator
print(tune_allocator())
for step in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.ones(1 << 21) for _ in range(4)]  # 8 MB each, 2048 pages
    del made
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="only glibc is tuned"
)
def test_freed_memory_is_kept() -> None:
    environment = {n: v for n, v in os.environ.items() if n not in (*OWN, "FEDKEEP_MALLOC")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True
    )
    tuned, faults = done.stdout.split()
    assert tuned == "True"
    assert int(faults) < 100


@pytest.mark.parametrize("setting", [("FEDKEEP_MALLOC", "default"), ("MALLOC_TOP_PAD_", "131072")])
def test_it_can_be_left_alone(setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*setting)
    assert tune_allocator.__wrapped__() is False


def test_an_unknown_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEP_MALLOC", "jemalloc")
    with pytest.raises(ConfigError) as error:
        tune_allocator.__wrapped__()
    assert str(error.value) == "FEDKEEP_MALLOC must be 'keep' or 'default'; got 'jemalloc'."


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OWN, "FEDKEEP_MALLOC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tune_allocator.__wrapped__() is False
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())  # a C library without mallopt
    assert tune_allocator.__wrapped__() is False
