"""What all tests share: one thread a process, reproducible property tests, and the papers' package as if it were installed."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: two workers shall not fight for cores

import hypothesis
import pytest
import torch

from fedkeep.core.seeds import seed_all
from fedkeep.engines import Job
from fedkeep.engines.lanes import local_run
from fedkeep.engines.tables import local_rows
from fedkeep.experiments.simulate import simulate
from tests.installed import skip_without_flower, write_papers

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "fedkeep", max_examples=40, deadline=None, derandomize=True, database=None, print_blob=False
)
hypothesis.settings.load_profile("fedkeep")

# Before tests are collected, and first: this tree's entry points, not those of another that may be installed.
_PACKAGES = tempfile.TemporaryDirectory(prefix="fedkeep-tests-")
sys.path.insert(0, str(write_papers(Path(_PACKAGES.name))))


CONFORMANCE = {  # tests of the conformance table, and the engine that they try; None: the first part of the id
    "test_engines_agree": None,
    "test_nodes_equal_sequential_to_the_bit_and_no_private_value_leaves": "nodes",
    "test_a_run_across_machines_equals_sequential_to_the_bit": "server and nodes",
}

# Rooms that put together what other tests try piece by piece. Tracing makes their Python 1.5 times as slow, and finds
# half a per cent of all branches more.
UNTRACED = (
    "benchmarks",
    "cli/test_demo.py",
    "cli/test_last_tracebacks.py",
    "engines/tables/test_momentum.py",
    "engines/test_buffers.py",
    "engines/test_conformance.py",
    "engines/test_opt_out.py",
    "experiments/test_kill.py",
    "fuzz",
    "methods/test_added_parts.py",
    "methods/test_every_method.py",
    "methods/test_private.py",
    "nn/test_higher.py",
    "papers/test_results.py",
    "remote/test_node_conformance.py",
    "test_docs.py",
    "test_house.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let whoever has a GPU run the tests on it: ``pytest --device cuda tests/engines``."""
    parser.addoption("--device", default="cpu", help="where runs compute that name no device, e.g. cuda")


def pytest_configure(config: pytest.Config) -> None:
    """Make the device the default of what tests call."""
    if (device := config.getoption("--device")) != "cpu":
        made: Any = Job.__init__
        made.__defaults__ = (device, *made.__defaults__[1:])
        for function in (simulate, local_run):
            function.__kwdefaults__["device"] = device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave ``UNTRACED`` out of the coverage that is measured; what is covered can only be more than is told."""
    rooms = tuple(Path(__file__).parent / room for room in UNTRACED)
    assert all(room.exists() for room in rooms), "UNTRACED names what is not there"
    left = {path for path in {item.path for item in items} if any(map(path.is_relative_to, rooms))}
    for item in items:
        if item.path in left:
            item.add_marker("no_cover")


def module_name(file: Path) -> str:
    """Return a test file's name as a module."""
    return ".".join(file.relative_to(Path(__file__).parents[1]).with_suffix("").parts)


class File(pytest.Module):
    """A file of tests."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            sys.modules.pop(module_name(self.path), None)  # it is half there
            skip_without_flower(self.nodeid, error.__cause__)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> File:
    """Collect files of tests so that those which import Flower say where it is missing."""
    return File.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test that meets no Flower after its file was imported."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        skip_without_flower(item.nodeid, error)
        raise


pytest_runtest_call = pytest_runtest_setup


LEFT = pytest.StashKey[int]()


def import_all(number: int, count: int) -> None:
    """Import all tests, each worker from another file on: one compiles a file, the others read what it has written."""
    files = sorted(Path(__file__).parent.rglob("test_*.py"))
    first = len(files) * number // count
    for file in (*files[first:], *files[:first]):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which is told where tests are collected
            import_module(module_name(file))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep what is collected out of garbage collection, which would look through all of it over and over."""
    gc.disable()
    worker = getattr(session.config, "workerinput", None)
    if worker and session.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        import_all(int(worker["workerid"].removeprefix("gw")), worker["workercount"])
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the rows of the conformance table that are left out; a worker of xdist tells its number."""
    config = items[0].config
    count = sum(getattr(item, "originalname", None) in CONFORMANCE for item in items)
    config.stash[LEFT] = config.stash.get(LEFT, 0) + count
    if hasattr(config, "workeroutput"):
        config.workeroutput["left"] = config.stash[LEFT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take the number that a worker tells; all have the same."""
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which rows of the conformance table were tried."""
    tried: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        name, _, row = report.nodeid.rpartition("::")[2].partition("[")
        if name in CONFORMANCE:
            kind = "float32" if row.endswith("-float32]") else "float64"  # nodes have float64 alone
            tried[f"{CONFORMANCE[name] or row.split('-')[0]} in {kind}"] += 1
    if tried:
        rows = ", ".join(f"{engine}: {count}" for engine, count in sorted(tried.items()))
        left = terminalreporter.config.stash.get(LEFT, 0)
        terminalreporter.write_line(
            f"conformance, rows tried: {rows}; left out: {left} (slow, or not chosen)"
        )


@pytest.fixture(autouse=True)
def _own_random_state(request: pytest.FixtureRequest) -> None:
    """Start every test from the same state of torch's global generators, whatever ran before it."""
    seed_all(0, request.config.getoption("--device"))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures empty: drawing has tests of its own, and takes a while."""
    from fedkeep.report import drawing

    monkeypatch.setattr(drawing.Drawing, "_draw", lambda *_: None)
    monkeypatch.setattr(drawing.Drawing, "inline", lambda _: "<svg/>")
    monkeypatch.setattr(drawing.Drawing, "file", lambda *_: b"")


@pytest.fixture
def no_table_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients train their own rows of the smallest tables too."""
    monkeypatch.setattr(local_rows, "SMALL", 1)
