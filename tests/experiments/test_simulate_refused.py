"""Calls of ``simulate`` that are refused: the whole message, and nothing written before."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep import FederatedData, Method, Phase, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, DataError, MethodError, SplitError
from fedkeep.data import toy
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.methods import EarlyStopping
from fedkeep.store import Default, MemoryStore
from tests.refusals import raises
from tests.tiny import Logits, classes, texts

DATA = classes(counts=(5, 9, 3, 7, 4, 6), kind="f4")
FURL = methods.furl("user", local=Phase(batch_size=4, optimizer=sgd(0.3)))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"rounds": 1, "epochs": 1}, ConfigError, "Got rounds=1 and epochs=1. Give one of them."),
        ({"rounds": -1}, ConfigError, "rounds must be at least 0; got -1."),
        ({"rounds": 2.0}, ConfigError, "rounds must be a whole number; got 2.0."),
        ({"rounds": 1, "cohort": "2"}, ConfigError, "cohort must be a whole number; got '2'."),
        ({"rounds": 1, "seed": None}, ConfigError, "seed must be a whole number; got None."),
        ({"rounds": 1, "workers": 1.5}, ConfigError, "workers must be a whole number; got 1.5."),
        (
            {"rounds": 1, "evaluate_every": 0.5},
            ConfigError,
            "evaluate_every must be a whole number; got 0.5.",
        ),
        ({"rounds": 1, "min_clients": 1.5}, ConfigError, "min_clients must be a whole number; got 1.5."),
        ({"epochs": -1}, ConfigError, "epochs must be at least 0; got -1."),
        ({"epochs": math.nan}, ConfigError, "epochs must be at least 0; got nan."),
        ({"epochs": math.inf}, ConfigError, "epochs must be finite; got inf."),
        ({"rounds": 1, "cohort": 0}, ConfigError, "cohort must be at least 1; got 0."),
        (
            {"rounds": 1, "engine": "sequentail"},
            ConfigError,
            "engine: there is no engine 'sequentail'. Did you mean 'sequential'? auto takes the one that it expects to be fastest.",
        ),
        (
            {"rounds": 1, "evaluate_every": -1},
            ConfigError,
            "evaluate_every must be at least 0; got -1.",
        ),
        (
            {"rounds": 1, "hold_out": 1.0},
            ConfigError,
            "hold_out must be a fraction in [0, 1), or a list of clients' ids; got 1.0.",
        ),
        (
            {"rounds": 1, "sampling": "all"},
            ConfigError,
            "sampling must be 'shuffled', 'independent' or 'poisson'; got 'all'.",
        ),
        (
            {"rounds": 1, "resume": True},
            ConfigError,
            "resume=True wants the folder of the run that is to go on: out='FOLDER'.",
        ),
    ],
)
def test_bad_calls(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with raises(kind, text=message):
        simulate(Logits(), FURL, DATA, **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": Logits}, "model must be a torch.nn.Module; got <class 'tests.tiny.Logits'>."),
        (
            {"method": "furl"},
            "method must be a method, e.g. fedkeep.methods.furl('head.*'), which names what stays private; got 'furl'.",
        ),
        ({"data": [1]}, "data must be a fedkeep.FederatedData, e.g. FederatedData.from_columns(client=ids, "),
    ],
)
def test_arguments_of_another_kind(given: dict[str, Any], message: str) -> None:
    with raises(ConfigError, said=message):
        simulate(**{"model": Logits(), "method": FURL, "data": DATA, **given}, rounds=1)


def test_a_model_that_returns_no_tensor() -> None:
    class List(Logits):
        def forward(self, x: Tensor) -> Tensor:
            return [super().forward(x)]  # type: ignore[return-value]

    with raises(MethodError, got="list"):
        simulate(List().double(), FURL, DATA, rounds=1)


class Features(Logits):
    """Gives no logits."""

    def forward(self, x: Tensor) -> Tensor:
        return {"last_hidden_state": super().forward(x), "pooled": x}  # type: ignore[return-value]


def test_a_model_without_logits() -> None:
    with raises(MethodError, there=["last_hidden_state", "pooled"]):
        simulate(Features().double(), FURL, DATA, rounds=1)


class One(Logits):
    """Gives one logit for two classes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :1]


class Flat(Logits):
    """Gives one logit for two classes, without an axis."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]


@pytest.mark.parametrize(("model", "shape"), [(One, (4, 1)), (Flat, (4,))])
def test_one_logit_for_a_binary_task(model: type[Logits], shape: tuple[int, ...]) -> None:
    with raises(MethodError, said="Classes want logits of shape", shape=shape):
        simulate(model().double(), FURL, DATA, rounds=1, engine="sequential")


def test_data_without_the_column_of_the_loss() -> None:
    data = FederatedData.from_columns(["a"] * 3, {"x": np.ones((3, 3)), "labels": [0, 1, 2]}, ["train"] * 3)
    with raises(MethodError, column="label", there=["labels", "x"]):
        simulate(Logits().double(), FURL, data, rounds=1)


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="on_nonfinite must be 'stop' or 'skip'; got 'ignore'"):
        simulate(Logits(), FURL, DATA, rounds=1, on_nonfinite="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="^The device 'cuda:99' cannot be used: .*Use device = 'cpu'"):
        simulate(Logits(), FURL, DATA, rounds=1, device="cuda:99")
    with pytest.raises(ConfigError, match="^The device 'gpu' cannot be used: "):
        simulate(Logits(), FURL, DATA, rounds=1, device="gpu")


def test_nothing_is_written_before_the_call_is_checked(tmp_path: Any) -> None:
    for options in (
        {"rounds": -1},
        {"rounds": 1, "engine": "x"},
        {"rounds": 1, "private": MemoryStore(Default({}), ())},
    ):
        with pytest.raises(ConfigError):
            simulate(Logits(), FURL, DATA, out=tmp_path / "run", **options)  # type: ignore[arg-type]
    with pytest.raises(SplitError):
        simulate(Logits(), methods.furl("usr"), DATA, rounds=1, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_before_its_first_round_leaves_no_folder(tmp_path: Any) -> None:
    """The corrected run was told that the folder is not empty."""
    out = tmp_path / "runs" / "one"
    with pytest.raises(MethodError):
        simulate(Features().double(), FURL, DATA, rounds=1, out=out)
    assert not out.exists()
    simulate(Logits().double(), FURL, DATA, rounds=1, out=out)
    (tmp_path / "two").mkdir()
    with pytest.raises(MethodError):  # its folder was there before
        simulate(Features().double(), FURL, DATA, rounds=1, out=tmp_path / "two")
    assert (tmp_path / "two" / "run.json").exists()


def test_a_run_that_fails_after_a_round_keeps_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RunDirectory.commit

    def commit(directory: RunDirectory, round: int, *arguments: Any, **options: Any) -> None:
        real(directory, round, *arguments, **options)
        raise MethodError("no more")

    monkeypatch.setattr(RunDirectory, "commit", commit)
    with pytest.raises(MethodError, match="no more"):
        simulate(Logits().double(), FURL, DATA, rounds=2, out=tmp_path / "run")
    assert (tmp_path / "run" / "commit.json").exists()


def test_data_without_a_column() -> None:
    with pytest.raises(MethodError, match=r"^Logits.forward wants the column 'x'; the data have "):
        simulate(Logits(), FURL, texts(), rounds=1)


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [
        (lambda: Phase(batch_size=None), MethodError, "batch_size"),  # type: ignore[arg-type]
        (lambda: sgd(0.1, rates=[("bias", 0.0)]), ConfigError, "rates"),  # type: ignore[arg-type]
        (lambda: sgd(0.1, bounds=[("bias", (0, 1))]), ConfigError, "bounds"),  # type: ignore[arg-type]
    ],
)
def test_options_of_another_type_are_refused_by_name(make: Any, kind: Any, name: str) -> None:
    with raises(kind, name=name):
        make()


@pytest.mark.parametrize(
    ("fractions", "more", "split"),
    [
        ((0.5, 0.5, 0.0), {"evaluate_shared": True}, "test"),
        ((0.5, 0.5, 0.0), {"evaluate_adapted": True}, "test"),
        ((0.5, 0.0, 0.5), {"method": methods.local(local=Phase(early_stopping=EarlyStopping()))}, "valid"),
    ],
)
def test_an_empty_split_that_is_asked_for(
    tmp_path: Path, fractions: tuple[float, float, float], more: dict[str, Any], split: str
) -> None:
    data, given = DATA.split_per_user(fractions), {"method": methods.fedavg(), "rounds": 1, **more}
    with raises(DataError, split=split):
        simulate(Logits(), data=data, out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_evaluations_that_would_see_no_example() -> None:
    data = DATA.split_per_user((1.0, 0.0, 0.0))
    with pytest.raises(DataError, match="evaluate_every = 1 wants examples"):
        simulate(Logits(), methods.fedavg(), data, rounds=1, evaluate_every=1)
    simulate(Logits(), methods.fedavg(), data, rounds=1)


@pytest.mark.parametrize(("method", "unmet"), [(methods.furl("user"), "user"), (methods.fedrep(), "head.*")])
def test_where_no_head_is_found_the_names_that_were_looked_for_are_told(method: Method, unmet: str) -> None:
    with raises(MethodError, said=f"no parameter of Linear matches '{unmet}'", model="Linear") as caught:
        simulate(torch.nn.Linear(4, 3), method, toy(), rounds=1)
    assert "'weight', 'bias'" in str(caught.value)
