"""What a run says of where it was computed."""

from __future__ import annotations

import importlib
import inspect
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeep
from fedkeep.experiments import environment
from tests.documents import ROOT


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no clone")
def test_the_commit_is_the_clones() -> None:
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    wanted = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    assert len(wanted) == 12
    assert environment.commit() == wanted
    assert environment.environment()["commit"] == wanted
    assert environment.environment()["fedkeep"] == fedkeep.__version__


def test_an_installed_package_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        environment, "__file__", str(tmp_path / "lib" / "fedkeep" / "experiments" / "environment.py")
    )
    assert environment.commit() is None


MINE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.head(x.tanh())  # {comment}
"""


def test_a_run_whose_modules_code_has_changed_is_read_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another comment is no change; another activation is, though every value still fits."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def written(text: str) -> Any:
        (tmp_path / "of_a_stranger.py").write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop("of_a_stranger", None)
        torch.manual_seed(0)
        return importlib.import_module("of_a_stranger").Net()

    data = fedkeep.data.toy(users=4, examples=10, features=4, classes=3)
    method = fedkeep.methods.fedavg()
    fedkeep.simulate(written(MINE), method, data, rounds=1, cohort=2, out=tmp_path / "run")
    given: dict[str, Any] = {"method": method, "data": data}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedkeep.load_run(tmp_path / "run", model=written(MINE.replace("{comment}", "of tanh")), **given)
    changed = written(MINE.replace("tanh()", "relu()"))
    with pytest.warns(UserWarning, match=r"of_a_stranger\.Net.*run"):
        fedkeep.load_run(tmp_path / "run", model=changed, **given)
    with pytest.warns(UserWarning, match=r"of_a_stranger\.Net"):
        fedkeep.simulate(changed, method, data, rounds=1, cohort=2, out=tmp_path / "run", resume=True)
    older = fedkeep.load_run(tmp_path / "run", model=written(MINE), **given)
    changed = written(MINE.replace("tanh()", "relu()"))
    for folder in (None, tmp_path / "next"):
        with pytest.warns(UserWarning, match=r"of_a_stranger\.Net.*goes on"):
            fedkeep.simulate(changed, method, data, rounds=1, cohort=2, out=folder, continue_from=older)
    assert environment.code_of(torch.nn.Linear(2, 2)) == {}


class Mine(torch.nn.Linear):
    """A class of a user's."""


def test_the_code_of_a_class_is_read_once_and_that_of_torch_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks for a class in the syntax tree of its whole file: a twentieth of a second for torch's own."""
    seen, getsource = [], inspect.getsource

    def watched(kind: Any) -> str:
        seen.append(kind)
        return getsource(kind)

    monkeypatch.setattr(inspect, "getsource", watched)
    module = torch.nn.Sequential(Mine(2, 2), torch.nn.ReLU())
    one, two = environment.code_of(module), environment.code_of(module)
    assert list(one) == [f"{__name__}.Mine"]
    assert one == two
    assert seen == [Mine]
