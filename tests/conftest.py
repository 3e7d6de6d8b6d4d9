"""What all tests share: one thread a process, reproducible property tests, and the papers' package as if it were installed."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: two workers shall not fight for cores

import hypothesis
import pytest
import torch

from tests.installed import write_papers

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "fedkeep", deadline=None, derandomize=True, database=None, print_blob=False
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which rows of the conformance table were tried."""
    tried: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        name, _, row = report.nodeid.rpartition("::")[2].partition("[")
        if name in CONFORMANCE:
            tried[f"{CONFORMANCE[name] or row.split('-')[0]} in {row.rpartition('-')[2].rstrip(']')}"] += 1
    if tried:
        rows = ", ".join(f"{engine}: {count}" for engine, count in sorted(tried.items()))
        terminalreporter.write_line(f"conformance with sequential, rows tried: {rows} (the others: -m slow)")


@pytest.fixture(autouse=True)
def _own_random_state() -> None:
    """Start every test from the same state of torch's global generator, whatever ran before it."""
    torch.manual_seed(0)
