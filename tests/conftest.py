"""What all tests share: one thread a process, reproducible property tests, and blocks of documents as examples."""

from __future__ import annotations

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported: two workers shall not fight for cores

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "fedkeep", deadline=None, derandomize=True, database=None, print_blob=False
)
hypothesis.settings.load_profile("fedkeep")


@pytest.fixture(autouse=True)
def _own_random_state() -> None:
    """Start every test from the same state of torch's global generator, whatever ran before it."""
    torch.manual_seed(0)
