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
from fedkeep.core.run_files import Commit, read_info
from fedkeep.experiments.run_directory import of_length
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
        return simulate(Breaking(), method, classes(), rounds=3, evaluate_every=0, progress=False, **options)

    broken[0] = False
    whole = run()
    broken[0] = True
    with pytest.raises(NonFiniteError) as error:
        run(out=folder)
    info = read_info(folder)
    assert (info["status"], info["error"]) == ("failed", str(error.value))
    warn_of_unfinished([folder])
    assert " ".join(capsys.readouterr().err.split()).endswith(
        f"after round 0 of 3, so its numbers may still change. It ended in an error: {error.value}"
    )
    broken[0] = False
    again = run(out=folder, resume=True)
    info = read_info(folder)
    assert info["status"] == "finished"
    assert "error" not in info
    assert same_bits(again.server, whole.server)


def test_an_error_that_is_none_of_fedkeeps_is_kept_with_its_kind(tmp_path: Path) -> None:
    folder, method, broken = tmp_path / "run", methods.fedavg(), [True]

    class Breaking(Logits):
        def forward(self, x: Tensor) -> Tensor:
            if self.training and broken[0] and (folder / "commit.json").exists():
                raise ArithmeticError("user")
            return super().forward(x)

    options: dict[str, Any] = {"rounds": 3, "cohort": 1, "engine": "sequential", "out": folder}
    with pytest.raises(ArithmeticError):
        simulate(Breaking(), method, classes(), **options)
    info = read_info(folder)
    assert (info["status"], info["error"]) == ("failed", "ArithmeticError: user")
    broken[0] = False
    simulate(Breaking(), method, classes(), **options, resume=True)
    assert read_info(folder)["status"] == "finished"
    assert "error" not in read_info(folder)


def test_a_run_of_another_length_begins_without_the_error_of_the_one_before() -> None:
    identity = {"rounds": 3, "evaluate_every": 1}
    info = {"identity": identity, "rounds": 3, "status": "failed", "error": "The disk is full."}
    now = of_length(Path("run"), info, identity | {"rounds": 5}, {}, Commit(run="a", round=2))
    assert now == {"identity": identity | {"rounds": 5}, "rounds": 5, "status": "running"}
