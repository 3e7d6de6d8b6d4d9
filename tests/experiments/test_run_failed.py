"""A run's folder says that the run ended in an error, and by which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.cli.output import warn_of_unfinished
from fedkeep.core.errors import NonFiniteError
from fedkeep.core.run_files import read_info
from tests.tiny import Logits, classes, same_bits


def test_a_run_that_ended_in_an_error_says_so_until_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, broken = tmp_path / "run", [True]

    class Breaking(Logits):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (torch.nan if self.training and broken[0] else 1.0)

    def run(**options: Any) -> Any:
        method = methods.furl("user", local=Phase(optimizer=sgd(0.1)))
        return simulate(
            Breaking(), method, classes(), rounds=3, out=folder, evaluate_every=0, progress=False, **options
        )

    broken[0] = False
    whole = simulate(
        Breaking(),
        methods.furl("user", local=Phase(optimizer=sgd(0.1))),
        classes(),
        rounds=3,
        evaluate_every=0,
        progress=False,
    )
    broken[0] = True
    with pytest.raises(NonFiniteError) as error:
        run()
    info = read_info(folder)
    assert (info["status"], info["error"]) == ("failed", str(error.value))
    warn_of_unfinished([folder])
    assert " ".join(capsys.readouterr().err.split()).endswith(
        f"after round 0 of 3, so its numbers may still change. It ended in an error: {error.value}"
    )
    broken[0] = False
    again = run(resume=True)
    info = read_info(folder)
    assert info["status"] == "finished"
    assert "error" not in info
    assert same_bits(again.server, whole.server)
