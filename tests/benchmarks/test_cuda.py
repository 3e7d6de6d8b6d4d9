"""The benchmark of users' own models on a GPU: what it makes of its seconds, and what it says without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import cuda
from benchmarks.own_clock import made
from benchmarks.own_models import Ours, Plain


class Told:
    """A contender whose rounds take so many seconds; without any it refuses the model."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def ask(self, **request: Any) -> dict[str, Any]:
        if "make" in request:
            return {}
        return {"refused": "no"} if self.seconds is None else {"seconds": self.seconds, "engine": "lanes"}


def test_ratios_are_of_the_same_turn_and_a_refusal_is_a_dash() -> None:
    contenders: Any = dict(
        zip(("plain, 1 thread", *cuda.WAYS), map(Told, (6.0, 2.0, 8.0, None)), strict=True)
    )
    row = cuda.measured("two towers", contenders, 2)
    assert row["over_plain"] == {"auto": [3.0] * 3, "sequential": [0.75] * 3}
    assert (row["engine"], row["refused"]) == ("lanes", {"vectorised": "no"})
    assert "| two towers | lanes | 3.00 (3.00, 3.00) | 0.75 (0.75, 0.75) | – |" in cuda.page([row], "A GPU")
    with pytest.raises(AssertionError, match=r"sequential 0\.75.*1 models are"):
        cuda.check([row])


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["cuda"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU"):
        cuda.main()


def test_a_plain_loop_and_ours_begin_on_the_device_that_is_named() -> None:
    plain, ours = made("plain, 1 thread", "two towers", "meta"), made("sequential", "two towers", "cpu")
    assert isinstance(plain, Plain)
    assert isinstance(ours, Ours)
    assert {v.device.type for batch in plain.data for v in batch.values()} == {"meta"}
    assert {v.device.type for v in plain.start.values()} == {"meta"}
    other = made("plain, 1 thread", "two towers")
    assert isinstance(other, Plain)
    for run in (other, ours):
        run.round(0, [1, 2])
    mine = ours.rounds.server.params
    assert all(torch.allclose(mine[n], v, atol=1e-6) for n, v in other.start.items())
