"""An engine with two workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from fedkeep.engines import Workers
from fedkeep.engines.workers.pool import start_method


@pytest.fixture
def engine() -> Iterator[Workers]:
    """Two workers, ended after the test whatever happens."""
    if start_method() != "fork":
        pytest.skip("the test's own classes go to the workers by fork")
    before = multiprocessing.active_children()
    with_two = Workers(2)
    yield with_two
    with_two.close()
    assert multiprocessing.active_children() == before
