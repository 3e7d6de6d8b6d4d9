"""Descriptions tell settings apart."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeep
from fedkeep import Method, Phase
from fedkeep.core.describe import check_kind, describe, differences, digest
from fedkeep.core.errors import ConfigError, did_you_mean
from tests.refusals import raises


def test_methods_are_described_to_the_last_field() -> None:
    one = describe(fedkeep.methods.furl("user", local=Phase(optimizer=fedkeep.sgd(0.1, rates={"user": 0.5}))))
    two = describe(
        fedkeep.methods.furl("user", local=Phase(optimizer=fedkeep.sgd(0.1, rates={"user": 0.25})))
    )
    assert one["split"]["private"] == ["user"]
    assert one["predict"] == "forward"
    assert differences(one, one) == []
    lines = differences(one, two)
    assert any(line.startswith("client.phases[0].optimizer.rates") for line in lines)


def test_differences_are_named_by_path() -> None:
    lines = differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": 4})
    assert lines == ["a.c: 5 in the run, 2 now", "d: None in the run, 3 now", "e: 4 in the run, None now"]
    phases = [{"batch_size": 9, "trains": "all"}], [{"batch_size": 8, "trains": "all"}]
    assert differences(*({"phases": one} for one in phases)) == ["phases[0].batch_size: 8 in the run, 9 now"]
    assert differences([1, 2], [1]) == [": [1] in the run, [1, 2] now"]


def test_digest_sees_names_shapes_types_and_values() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.tensor(1)}
    others = [
        {"a": torch.zeros(3, 2), "b": torch.tensor(1)},
        {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.tensor(1)},
        {"a": torch.zeros(2, 3), "b": torch.tensor(2)},
        {"a": torch.zeros(2, 3), "c": torch.tensor(1)},
        {"a": -torch.zeros(2, 3), "b": torch.tensor(1)},
    ]
    assert len({digest(t) for t in [base, *others]}) == 6
    assert digest(base) == digest(dict(reversed(base.items())))
    assert digest({"e": torch.zeros(0)}) != digest({})


def test_suggestions() -> None:
    assert did_you_mean("haed", ["head", "body"]) == " Did you mean 'head'?"
    assert did_you_mean("xyz", ["head", "body"]) == ""


def scaled(value: float, by: float = 2.0) -> float:
    return by * value


@dataclass(frozen=True)
class Decay:
    rate: float = 0.01

    def __call__(self, value: float) -> float:
        return value * (1 - self.rate)


def test_functions_are_told_apart_by_where_they_are_found() -> None:
    assert describe(scaled).endswith("test_describe.scaled")
    partial = describe(functools.partial(scaled, by=3.0))
    assert partial == {"partial": describe(scaled), "args": [], "keywords": {"by": 3.0}}
    assert describe(Decay(0.5))["rate"] == 0.5
    assert describe(Decay).endswith("test_describe.Decay")


def closed_over(rate: float) -> Callable[[float], float]:
    def decay(value: float) -> float:
        return value * rate

    return decay


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (lambda value: value, "the function '<lambda>', which cannot be imported by its name, "),
        (
            closed_over(0.5),
            "the function 'closed_over.<locals>.decay', which cannot be imported by its name, ",
        ),
        (torch.zeros(2), "a Tensor, "),
        (object(), "a object, "),
    ],
)
def test_what_cannot_be_told_apart_is_refused_when_a_method_is_made(value: Any, what: str) -> None:
    with raises(ConfigError, said=f"methods.mine.predict is {what}so a run"):
        Method(name="mine", predict=value)


SCRIPT = """
import sys
import torch, fedkeep
from fedkeep import Method

def predict(net, params, batch):
    return {factor} * net(params, batch)

torch.manual_seed(0)
fedkeep.simulate(
    fedkeep.models.Linear(4, 3), Method(name="mine", predict=predict), fedkeep.data.toy(), rounds=int(sys.argv[2]),
    out=sys.argv[1], resume=len(sys.argv) > 3, engine="sequential",
)
"""


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_function_of_the_script(tmp_path: Path) -> None:
    def go(factor: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(factor=factor))
        command = [sys.executable, str(script), str(tmp_path / "run"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment())

    assert go(1, "2").returncode == 0
    again = go(1, "2", "resume")
    assert again.returncode == 0, again.stderr
    other = go(5, "2", "resume")
    assert other.returncode != 0
    assert "method.predict.source_sha256" in other.stderr


def environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}


def test_a_class_or_a_function_in_place_of_what_it_makes_is_told_to_be_called() -> None:
    for given in (torch.nn.Linear, test_a_class_or_a_function_in_place_of_what_it_makes_is_told_to_be_called):
        with raises(ConfigError, said=f"call it, {given.__name__}(...)", name="model"):
            check_kind("model", given, torch.nn.Module, "a torch.nn.Module")
    with raises(ConfigError, call=""):
        check_kind("model", int, torch.nn.Module, "a torch.nn.Module")
