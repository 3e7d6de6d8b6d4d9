"""What all tests share: one thread a process, reproducible property tests, and the papers' package as if it were installed."""

from __future__ import annotations

import os
import sys
import tempfile
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


@pytest.fixture(autouse=True)
def _own_random_state() -> None:
    """Start every test from the same state of torch's global generator, whatever ran before it."""
    torch.manual_seed(0)
