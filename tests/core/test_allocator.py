"""Memory that is freed stays with the process: no page faults at the next step."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedkeep
from fedkeep.cli import app
from fedkeep.core.allocator import OWN, is_tuned, tune_allocator
from fedkeep.core.errors import ConfigError
from fedkeep.core.net import Net
from fedkeep.engines.client_step import Job
from fedkeep.engines.workers.pool import Pool
from fedkeep.store import Default, MemoryStore
from tests.refusals import raises

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


def environment() -> dict[str, str]:
    """Return variables that say nothing of the allocator, and lead to this tree's fedkeep."""
    own = {n: v for n, v in os.environ.items() if n not in (*OWN, "FEDKEEP_MALLOC")}
    return {**own, "PYTHONPATH": str(Path(fedkeep.__file__).parent.parent)}


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="only glibc is tuned"
)
def test_freed_memory_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment(), capture_output=True, text=True, check=True
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
    with raises(ConfigError, text="FEDKEEP_MALLOC must be 'keep' or 'default'; got 'jemalloc'."):
        tune_allocator.__wrapped__()


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OWN, "FEDKEEP_MALLOC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tune_allocator.__wrapped__() is False
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())  # a C library without mallopt
    assert tune_allocator.__wrapped__() is False


SIMULATED = """
import fedkeep
from fedkeep.core import allocator
from fedkeep.experiments.processes import processes

def run():
    fedkeep.simulate(fedkeep.models.Linear(4, 3), fedkeep.methods.fedavg(), fedkeep.data.toy(users=4), rounds=1)
    with processes(1) as pool:
        return allocator.is_tuned(), pool.submit(allocator.is_tuned).result()

if __name__ == "__main__":
    alone = run()
    allocator.tune_allocator()
    print(alone, run())
"""


@pytest.mark.slow
def test_a_library_leaves_the_process_alone_and_its_processes_follow_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SIMULATED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "program.py"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    tuned = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"
    assert done.stdout == f"(False, False) ({tuned}, {tuned})\n"


def test_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(
        fedkeep.methods.fedavg(),
        Net(fedkeep.models.Linear(4, 3)),
        fedkeep.data.toy(users=2),
        MemoryStore(Default({}), ()),
        0,
    )
    for tuned in (False, True):
        monkeypatch.setattr("fedkeep.engines.workers.pool.is_tuned", lambda tuned=tuned: tuned)
        assert Pool(job, "fork").worker_job.tuned is tuned


def test_the_command_line_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(sys.modules["fedkeep.cli.app"], "tune_allocator", lambda: asked.append(True))
    assert CliRunner().invoke(app, ["list"]).exit_code == 0
    assert asked == [True]
    tune_allocator.cache_clear()
    monkeypatch.undo()
    monkeypatch.setenv("FEDKEEP_MALLOC", "jemalloc")
    refused = CliRunner().invoke(app, ["list"])
    assert refused.exit_code == 2
    assert refused.stderr == "Error: FEDKEEP_MALLOC must be 'keep' or 'default'; got 'jemalloc'.\n"
    assert not is_tuned()


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_large_memory_goes_back_at_once() -> None:
    code = """
import resource, torch
from fedkeep.core.allocator import give_large_back
assert give_large_back()
held = [torch.ones(5_000_000) for _ in range(2)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(5_000_000)
assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 4 * 8  # pages, of 2 MB at most, that are the system's again
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
