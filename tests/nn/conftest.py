"""Both ways of a recurrent layer, and one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fedkeep.kernels.native import status
from fedkeep.nn import native_recurrent


@pytest.fixture(params=["native", "pure"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "pure":
        monkeypatch.setattr(native_recurrent, "usable", lambda *_: False)
    elif not status().native:
        pytest.skip(str(status()))
    return str(request.param)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
