"""The likeliest mistakes, some sixty, at the command line and in Python: each message says what is wrong and what to type.

Facts are asserted, not sentences: what was given, what was wanted, and what comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import FederatedData, Phase, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, DataError, FedkeepError, MethodError, RunError, SplitError
from fedkeep.data.readers import read_table
from tests.cli.conftest import TABLE, TOY
from tests.commands import call

ROWS = [f"u{n % 4},{n / 7:.2f},{n % 5},{'ab'[n % 2]}" for n in range(60)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, two configurations, a run and its models."""
    folder = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("toy.toml").write_text(TOY, encoding="utf-8")
        Path("table.toml").write_text(TABLE, encoding="utf-8")
        Path("rows.csv").write_text("\n".join(["user,height,width,label", *ROWS]) + "\n", encoding="utf-8")
        Path("new.csv").write_text("user,height\nu1,2\n", encoding="utf-8")
        Path("groups.csv").write_text("name,side\nx,1\n", encoding="utf-8")
        Path("notes.txt").write_text("hello", encoding="utf-8")
        assert call("run", "toy.toml", "--out", "r").exit_code == 0
        assert call("export", "r", "--all", "--out", "m").exit_code == 0
    return folder


@pytest.fixture(autouse=True)
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)


TYPED = {
    "start rows.cvs": ("rows.cvs", ".csv", "Did you mean 'rows.csv'"),
    "start rows.csv --label labl": ("'labl'", "'width'", "Did you mean 'label'"),
    "start rows.csv --client usr": ("'usr'", "Did you mean 'user'"),
    "start toy.toml": ("configuration", "fedkeep run toy.toml"),
    "start notes.txt": ("notes.txt", ".csv", ".parquet"),
    "start": ("PLACE", "CSV", "folder"),
    "run": ("CONFIG", "TOML", "fedkeep list"),
    "run toy.tml": ("'toy.tml'", "Did you mean 'toy.toml'"),
    "run rows.csv": ("table", "fedkeep start rows.csv"),
    "run toy.toml --seed one": ("--seed", "'one'", "integer"),
    "run toy.toml --set cohort=2": ("cohort", "Did you mean run.cohort"),
    "run toy.toml --set run.cohort=0": ("run.cohort", "at least 1", "0"),
    "run toy.toml --set run.cohrot=2": ("run.cohrot", "Did you mean run.cohort"),
    "run toy.toml --set run.rounds": ("key=value", "'run.rounds'"),
    "run toy.toml --set method.kind=fedprx": ("'fedprx'", "Did you mean 'fedprox'"),
    "run toy.toml --set run.device=gpu": ("'gpu'", "'cpu'", "'cuda'"),
    "run toy.toml --set run.engine=fast": ("'fast'", "vectorised", "auto"),
    "run toy.toml --out r": ("r already exists", "fedkeep run r --resume", "--out FOLDER"),
    "run r2 --resume": ("'r2'", "Did you mean 'r'", "--out r2"),
    "run toy.toml --worker 2": ("--worker", "--workers"),
    "run toy.toml --epochs 3": ("--epochs", "--set run.epochs=VALUE"),
    "run table.toml": ("mine.csv", "does not exist"),
    "check toy.toml --set model.kind=resnt": ("'resnt'", "Did you mean 'resnet'"),
    "check toy.toml --set method.private=head": ("'head'", "'linear.weight'", "method.private"),
    "run toy.toml --set method.lr=1": ("lr", "method.optimizer.learning_rate"),
    "run toy.toml --set run.seed=1": ("run.seed", "Did you mean seed"),
    "run toy.toml --set data.path=x": ("data.path", "'toy'", "users"),
    "run table.toml --set data.client=user": ("data.client", "Did you mean data.user"),
    "run table.toml --set data.target=label": ("data.target", "Did you mean data.label"),
    "run toy.toml --out toy.toml": ("toy.toml", "--out FOLDER"),
    "start rows.csv --out /x/rows.toml": ("--out", "/x/rows.toml"),
    "list toy.toml": ("toy.toml", "--for CONFIG"),
    "list --for toy": ("'toy'", "Did you mean 'toy.toml'"),
    "evaluate toy.toml": ("toy.toml", "it is a file", "fedkeep run toy.toml"),
    "evaluate rr": ("rr", "Did you mean 'r'"),
    "compare toy.toml --methods furl,fedavgg": ("'fedavgg'", "Did you mean 'fedavg'"),
    "compare toy.toml --methods furl fedavg": ("'fedavg'", "--methods A,B"),
    "compare toy.toml --seeds many": ("--seeds", "'many'", "e.g. 5"),
    "compare toy.toml --methods furl --groups groups.csv": ("'x'", "'user-0'", "first column"),
    "worth r": ("run.evaluate_shared=true", "--against OTHER"),
    "worth r --against toy.toml": ("toy.toml", "method.kind=local", "fedkeep worth r --against OTHER"),
    "report nothing --out p": ("nothing", "no such folder"),
    "export r": ("fedkeep export RUN --out DIR (--client ID | --all).", "new folder"),
    "export r --client nobody --out m2": ("'nobody'", "'user-0'"),
    "predict m --data new.csv": ("new.csv", "'x'", "'height'"),
    "predict r --data rows.csv": ("it holds a run", "fedkeep export r --all --out FOLDER"),
    "predict m --data nw.csv": ("nw.csv", "Did you mean 'new.csv'"),
    "sweep": ("fedkeep sweep CONFIG (--space FILE | --range KEY=RANGE).",),
    "sweep toy.toml": ("--space", "--range"),
    "budget": ("RUN", "folder"),
    "deploy toy.toml": ("fedkeep deploy --local N --config CONFIG",),
    "resume r": ("'resume'", "--resume"),
    "device run toy.toml": ("toy.toml", "DIR/NAME/node.toml", "fedkeep flower init"),
    "run toy.toml --set model.kind=cnn": ("'image'", "'x'", "Take a model that reads"),
    "evaluete r": ("'evaluete'", "'evaluate'"),
    "reproduce all": ("'all'", "furl-table1"),
    "recommend r --client user-1": ("'item'", "'label'"),
}
"""By what was typed: facts of the message."""


@pytest.mark.parametrize("line", TYPED)
def test_what_is_typed(line: str) -> None:
    found = call(*line.split())
    assert found.exit_code == 2
    told = " ".join(found.stderr.replace("│", " ").split())
    assert [fact for fact in TYPED[line] if fact not in told] == []


class Taste(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.user = nn.Linear(3, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.user


class Otherwise(Taste):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features)


class Narrow(Taste):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :1]


WHO = [f"u{n % 4}" for n in range(40)]
X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
LABEL = np.arange(40) % 2
FURL = methods.furl("user")


def columns(**more: Any) -> FederatedData:
    return FederatedData.from_columns(WHO, {"x": X, "label": LABEL} | more).split_per_user()


def run(model: Any = None, method: Any = FURL, data: Any = None, **settings: Any) -> Any:
    data = columns() if data is None else data
    return simulate(Taste() if model is None else model, method, data, **{"rounds": 1} | settings)


WRITTEN: dict[str, tuple[Callable[[], Any], type[FedkeepError], tuple[str, ...]]] = {
    "columns of unequal length": (lambda: columns(x=X[:30]), DataError, ("'x'", "40", "30")),
    "texts as labels": (
        lambda: columns(label=np.array(list("ab") * 20)),
        DataError,
        ("'label'", "np.unique"),
    ),
    "a number that is missing": (
        lambda: columns(x=np.full((40, 3), np.nan, np.float32)),
        DataError,
        ("'x'", "row 0", "'u0'", "fill in"),
    ),
    "a class for the model": (lambda: run(Taste), ConfigError, ("model", "Taste", "call it")),
    "a name for the method": (lambda: run(method="furl"), ConfigError, ("'furl'", "fedkeep.methods")),
    "an array for the data": (lambda: run(data=X), ConfigError, ("FederatedData.from_columns",)),
    "a pattern of nothing": (lambda: run(method=methods.furl("usr")), SplitError, ("'usr'", "'user'")),
    "a forward of another column": (lambda: run(Otherwise()), MethodError, ("'features'", "'x'")),
    "too few outputs": (lambda: run(Narrow()), MethodError, ("(8, 1)", "(B, 2)", "last layer")),
    "whole numbers for a linear layer": (
        lambda: run(data=columns(x=(X * 9).astype(int))),
        MethodError,
        ("int64", "float32"),
    ),
    "labels from 1": (lambda: run(data=columns(label=LABEL + 1)), MethodError, ("number labels from 0",)),
    "rounds and epochs": (lambda: run(epochs=2), ConfigError, ("rounds", "epochs")),
    "an engine of another name": (
        lambda: run(engine="gpu"),
        ConfigError,
        ("'gpu'", "vectorised", "device = 'cuda'"),
    ),
    "resume without a folder": (lambda: run(resume=True), ConfigError, ("out=",)),
    "a rate below 0": (lambda: sgd(-1.0), ConfigError, ("learning_rate", "-1.0")),
    "a batch of none": (lambda: Phase(batch_size=0), MethodError, ("batch_size", "at least 1")),
    "a rate as a method's": (
        lambda: methods.furl("user", lr=0.1),
        ConfigError,
        ("'lr'", "fedkeep.sgd(0.1)"),
    ),
    "a client of another name": (lambda: run().parameters("u9"), DataError, ("'u9'", "'u0'")),
    "rows of another column": (
        lambda: run().predict("u1", {"features": [[1, 2, 3]]}),
        DataError,
        ("'features'", "x, label"),
    ),
    "one id for several": (lambda: run().export("no", "u1"), DataError, ("['u1']",)),
    "models that nobody wrote": (
        lambda: fedkeep.load_model("nowhere", "u1", model=Taste()),
        RunError,
        ("nowhere", "run.export"),
    ),
    "a feature misspelled": (
        lambda: read_table("rows.csv", user="user", features=["heigth"], label="label"),
        DataError,
        ("'heigth'", "'height'"),
    ),
    "a reader's argument of another name": (
        lambda: read_table("rows.csv", client="user"),
        ConfigError,
        ("'client'", "Did you mean 'user'"),
    ),
    "a generator's argument of another name": (
        lambda: fedkeep.data.toy(clients=3),
        ConfigError,
        ("'clients'", "Did you mean 'users'"),
    ),
    "shares above 1": (
        lambda: FederatedData.from_columns(WHO, {"x": X, "label": LABEL}).split_per_user((0.8, 0.3, 0.1)),
        DataError,
        ("0.3", "sum to 1", "(0.8, 0.1, 0.1)"),
    ),
}
"""By what is wrong: how it is written, the error's class, and facts of its message."""


@pytest.mark.filterwarnings("ignore:Labels are 1 to 2")
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written(name: str) -> None:
    make, kind, facts = WRITTEN[name]
    with pytest.raises(FedkeepError) as caught:
        make()
    assert type(caught.value) is kind
    assert [fact for fact in facts if fact not in str(caught.value)] == []
