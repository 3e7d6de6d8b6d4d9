"""The table of tasks: each is trained, judged, kept, counted, shown, read from a table and predicted.

A task is a file in ``fedkeep.tasks`` with its line in ``KINDS``, and a row here.
"""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep.core.errors import ConfigError, DataError, MethodError
from fedkeep.core.params import Params
from fedkeep.data import FederatedData, read_table
from fedkeep.data.preparation import Encoding, Rules
from fedkeep.data.readers import raw_table, tables
from fedkeep.engines.tally import tallied
from fedkeep.experiments.worth import counted, counted_rows
from fedkeep.methods import fedavg, terms
from fedkeep.report.page import write_report
from fedkeep.tasks import KINDS, Kind, tasks_in
from fedkeep.tasks.results import read_examples
from tests.commands import call, succeeded

log, e = math.log, math.e


@dataclass(frozen=True, kw_only=True)
class Table:
    """How a task stands in a table.

    Attributes:
        columns: from numbers (rows, 2) and noise (rows, 2) the columns of labels, as cells.
        settings: of ``[data]`` in a configuration.
        right: whether a prediction is of a row with these cells, for nine rows of ten.
        bound: what the metric that chooses the best round must reach.
        started: whether ``fedkeep start`` finds the task by the labels.
        more: checks more in the folder with the configuration ``t.toml``, the run ``r`` and the models ``m``.
    """

    columns: Callable[[np.ndarray, np.ndarray], Mapping[str, Sequence[Any]]]
    settings: str
    right: Callable[[Any, Mapping[str, str]], bool]
    bound: float
    started: bool = False
    more: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A task, and what comes of a few examples of it, by hand.

    Attributes:
        trained: labels of two training examples of Ann, and of two of Bob.
        label: labels of two test examples of Ann, and of one of Bob.
        output: a model's outputs of these.
        loss: the mean loss of all their results.
        metrics: all others.
        size: of a model's output.
        counted: the mean loss of counting the training labels; None: they are not counted.
        columns: further columns of the seven examples.
        misfit: the shape of one example's output that does not fit; None: any fits.
        outside: labels that the task does not have, in place of ``label``; None: it has all.
        table: how it stands in a table; None: it does not.
    """

    trained: Any
    label: Any
    output: Any
    loss: float
    metrics: Mapping[str, float]
    size: int
    counted: float | None
    columns: Mapping[str, Any] = field(default_factory=dict)
    misfit: tuple[int, ...] | None
    outside: Any
    table: Table | None


def logs(*shares: float) -> list[float]:
    """Return logits that have these probabilities."""
    return [log(share) for share in shares]


def several_as_said() -> None:
    """A row of labels is a list in JSON, by name, and a cell in CSV."""
    succeeded(call(*["predict", "m", "--data", "t.csv", "--out", "said.csv"]))
    in_json = [json.loads(line) for line in Path("said.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in rows_of("said.csv")] == [
        "|".join(row["prediction"]) for row in in_json
    ]
    for row in in_json:
        assert row["prediction"] == [name for name, share in row["probabilities"].items() if share > 0.5]


def outputs_in_units() -> None:
    """Each of several numbers is judged and predicted in units of its own."""
    scales = np.asarray(fedkeep.load_run("r").data.meta["units"][1])
    found = fedkeep.load_run("r").evaluate()
    each = np.asarray([found["rmse/price"], found["rmse/weight"]])
    assert (each < (120, 0.05)).all()
    assert found["rmse"] == pytest.approx(float(np.sqrt(((each / scales) ** 2).mean())))
    told = succeeded(call("evaluate", "r")).stdout
    assert [name for name in ("RMSE of price", "RMSE of weight") if name not in told] == []
    result = succeeded(call(*["predict", "m", "--data", "t.csv", "--out", "said.csv"]))
    said = np.asarray(
        [[float(row[f"prediction.{n}"]) for n in ("price", "weight")] for row in rows_of("said.csv")]
    )
    true = np.asarray([[float(row[n]) for n in ("price", "weight")] for row in rows_of("t.csv")])
    error = np.sqrt(((said - true) ** 2).mean(0))
    assert (error < (120, 0.05)).all()  # their deviations are 300 and 0.1
    told = {
        line.split(" on ")[0]: float(line.rpartition(": ")[2])
        for line in result.stderr.splitlines()
        if " on " in line
    }
    assert told == pytest.approx({"RMSE of price": error[0], "RMSE of weight": error[1]}, rel=1e-2)
    one = json.loads(Path("said.jsonl").read_text().splitlines()[0])
    assert set(one["prediction"]) == {"price", "weight"}


OF_TOKENS = Row(
    trained=[[0, 1], [1, 1], [0, 0], [1, -100]],
    label=[[0, 1], [1, -100], [1, 0]],
    output=[
        [logs(0.75, 0.25), logs(0.75, 0.25)],
        [logs(0.25, 0.75), logs(0.5, 0.5)],
        [logs(0.25, 0.75), logs(0.75, 0.25)],
    ],
    loss=-(4 * log(0.75) + log(0.25)) / 5,
    metrics={"accuracy": 4 / 5, "accuracy_user_mean": 5 / 6},
    size=2,
    counted=None,
    misfit=(2,),
    outside=[[0, -1], [1, 1], [0, 0]],
    table=None,
)
TASKS = {
    "multiclass": Row(
        trained=[0, 1, 2, 2],
        label=[0, 2, 2],
        output=[logs(0.5, 0.25, 0.25), logs(0.25, 0.5, 0.25), logs(0.125, 0.125, 0.75)],
        loss=log(2 * 4 * 4 / 3) / 3,
        metrics={"accuracy": 2 / 3, "accuracy_user_mean": 3 / 4},
        size=3,
        # shares everywhere are (1 + 1, 1 + 1, 2 + 1) / 7, so Ann's (1 + 2/7, 1 + 2/7, 3/7) / 3 and Bob's (2/7, 2/7, 2 + 3/7) / 3
        counted=-log(3 / 7 * 1 / 7 * 17 / 21) / 3,
        misfit=None,
        outside=[0, -2, 1],
        table=Table(
            columns=lambda x, noise: {
                "y": np.array(["no", "so", "yes"])[(x[:, 0] > -0.5) + 0 + (x[:, 0] > 0.5)]
            },
            settings='label = "y"',
            right=lambda said, cells: said == cells["y"],
            bound=0.8,
            started=True,
        ),
    ),
    "binary": Row(
        trained=[1, 0, 1, 1],
        label=[1, 0, 1],
        output=[[0.0, 1], [0, 1], [0, 2]],
        loss=(log(1 + 1 / e) + log(1 + e) + log(1 + 1 / e**2)) / 3,
        metrics={"accuracy": 2 / 3, "accuracy_user_mean": 3 / 4, "auc": 3 / 4},
        size=2,
        # shares everywhere are (1 + 1, 3 + 1) / 6, so Ann's (4/9, 5/9) and Bob's (1/9, 8/9)
        counted=-log(5 / 9 * 4 / 9 * 8 / 9) / 3,
        misfit=None,
        outside=[0, 2, 1],
        table=Table(
            columns=lambda x, noise: {"y": (x[:, 0] > 0).astype(int)},
            settings='label = "y"',
            right=lambda said, cells: said == cells["y"],
            bound=0.9,
            started=True,
        ),
    ),
    "regression": Row(
        trained=[1.0, 3, 5, 7],
        label=[5.0, 1, 5],
        output=[4.0, 3, 5.5],
        loss=(1 + 4 + 0.25) / 3,
        metrics={"rmse": math.sqrt(1.75), "mae": 3.5 / 3},
        size=1,
        # the mean everywhere is 4, Ann's (4 + 4) / 3 and Bob's (12 + 4) / 3: errors −7/3, 5/3 and 1/3
        counted=75 / 9 / 3,
        misfit=(2,),
        outside=None,
        table=Table(
            columns=lambda x, noise: {"y": 1000 + 300 * x[:, 0] + 30 * noise[:, 0]},
            settings='label = "y"\ntask = "regression"',
            right=lambda said, cells: abs(said - float(cells["y"])) < 150,
            bound=100,
            started=True,
        ),
    ),
    "multi_output": Row(
        trained=[[1.0, 0], [3, 0], [5, 2], [7, 2]],
        label=[[5.0, 1], [1, 1], [5, 0]],
        output=[[4.0, 1], [3, 2], [5.5, 0]],
        loss=(1 + 4 + 1 + 0.25) / 6,
        metrics={
            "rmse": math.sqrt(6.25 / 6),
            "mae": 4.5 / 6,
            "rmse/0": math.sqrt(5.25 / 3),
            "rmse/1": math.sqrt(1 / 3),
        },
        size=2,
        # the means everywhere are (4, 1), Ann's (8, 1) / 3 and Bob's (16, 5) / 3: errors (−7, −2) / 3, (5, −2) / 3 and (1, 5) / 3
        counted=(49 + 4 + 25 + 4 + 1 + 25) / 9 / 6,
        misfit=(3,),
        outside=None,
        table=Table(
            columns=lambda x, noise: {
                "price": 1000 + 300 * x[:, 0] + 30 * noise[:, 0],
                "weight": 0.5 - 0.1 * x[:, 1] + 0.01 * noise[:, 1],
            },
            settings='label = ["price", "weight"]\ntask = "regression"',
            right=lambda said, cells: (
                abs(said["price"] - float(cells["price"])) < 150
                and abs(said["weight"] - float(cells["weight"])) < 0.05
            ),
            bound=0.4,
            more=outputs_in_units,
        ),
    ),
    "multi_label": Row(
        trained=[[1, 0], [0, 0], [1, 1], [1, 0]],
        label=[[1, 0], [1, 1], [0, 1]],
        output=[[1.0, -1], [-1, 2], [1, 1]],
        loss=(3 * log(1 + 1 / e) + 2 * log(1 + e) + log(1 + 1 / e**2)) / 6,
        # found are 3 of 4, and 1 that is not there; of pairs 5.5 of 8 are in order
        metrics={"accuracy": 4 / 6, "accuracy_user_mean": 5 / 8, "micro_f1": 6 / 8, "auc": 5.5 / 8},
        size=2,
        # shares everywhere are (3 + 1, 1 + 1) / 6, so Ann's (5/9, 1/9) and Bob's (8/9, 4/9)
        counted=-log(5 / 9 * 8 / 9 * 5 / 9 * 1 / 9 * 1 / 9 * 4 / 9) / 6,
        misfit=(3,),
        outside=[[1, 0], [2, 1], [0, 1]],
        table=Table(
            columns=lambda x, noise: {
                "y": [
                    " | ".join(n for n, v in zip(("spam", "urgent"), row, strict=True) if v > 0.2)
                    for row in x
                ]
            },
            settings='label = "y"\ntask = "multi_label"',
            right=lambda said, cells: said == [word for word in cells["y"].split(" | ") if word],
            bound=0.8,
            more=several_as_said,
        ),
    ),
    "ranking": Row(
        trained=[0, 0, 0, 1],
        label=[0, 1, 2],
        output=[
            [1.0, *[0] * 10],
            [1, 0, *[1] * 9],
            [2, 2, 1, *[0] * 8],
        ],
        loss=(log(e + 10) - 1 + log(10 * e + 1) + log(e + 2 * e**2 + 8) - 1) / 3,
        metrics={"hr10": 2 / 3, "ndcg10": (1 + 1 / math.log2(4)) / 3},  # ranks 1, 11 and 3
        size=3,
        columns={"item": [list(range(11))] * 7},
        # item 0 was taken three times, item 1 once: 4, 2 and nine of 1
        counted=log(15**3 / 8) / 3,
        misfit=(10,),
        outside=[0, -1, 2],
        table=None,
    ),
    "tokens": OF_TOKENS,
    "next_token": Row(
        **(vars(OF_TOKENS) | {"metrics": OF_TOKENS.metrics | {"perplexity": math.exp(OF_TOKENS.loss)}})
    ),
    "pixels": Row(
        **(
            vars(OF_TOKENS)
            | {name: [[own] for own in getattr(OF_TOKENS, name)] for name in ("trained", "label", "outside")}
            | {"output": [[[list(of)] for of in zip(*own, strict=True)] for own in OF_TOKENS.output]}
            | {"misfit": (2, 1, 3)}
        )
    ),
}


class Known(nn.Module):
    """Gives each example's outputs by its number."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, number: Tensor) -> Tensor:
        return self.outputs[number]


def write_table(path: Path, table: Table) -> None:
    x, noise = np.random.default_rng(0).standard_normal((2, 240, 2))
    columns = {"a": x[:, 0], "b": x[:, 1], **table.columns(x, noise)}
    lines = [[f"u{n % 8}", *map(str, cells)] for n, cells in enumerate(zip(*columns.values(), strict=True))]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["user", *columns], *lines])


def data_of(kind: str, row: Row, label: Any = None, **meta: Any) -> FederatedData:
    trained, test = np.asarray(row.trained), np.asarray(row.label if label is None else label)
    every = np.concatenate([trained[:2], test[:2], trained[2:], test[2:]])
    columns = {"number": np.arange(7), "label": every, **{n: np.asarray(v) for n, v in row.columns.items()}}
    split = ["train", "train", "test", "test", "train", "train", "test"]
    return FederatedData.from_columns(["ann"] * 4 + ["bob"] * 3, columns, split, {"task": kind, **meta})


def run_of(kind: str, row: Row, **options: Any) -> fedkeep.Run:
    output = torch.tensor(row.output)
    every = torch.zeros(7, *output.shape[1:])
    every[[2, 3, 6]] = output  # what trains on others moves none of them
    local = fedkeep.Phase(loss=terms.named(KINDS[kind].loss), optimizer=fedkeep.sgd(0.1), batch_size=2)
    return fedkeep.simulate(
        Known(every), fedavg(local=local), data_of(kind, row), rounds=1, progress=False, **options
    )


def test_every_task_has_its_row() -> None:
    assert TASKS.keys() == KINDS.keys()
    assert {kind for kind, row in TASKS.items() if row.table} == {n for n, k in KINDS.items() if k.from_table}


@pytest.mark.parametrize("kind", TASKS)
def test_the_loss_that_is_trained(kind: str) -> None:
    row, label = TASKS[kind], torch.tensor(TASKS[kind].label)
    output = torch.tensor(row.output, dtype=torch.float64, requires_grad=True)
    for loss in (terms.named(KINDS[kind].loss), terms.TaskLoss(KINDS[kind])):
        found = loss(lambda params, batch: output, Params(), {"label": label}, Params())
        assert found.item() == pytest.approx(row.loss)
        (gradient,) = torch.autograd.grad(found, output)
        assert gradient.any()


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("kind", TASKS)
def test_a_task_is_judged_kept_counted_and_shown(kind: str, engine: Any, tmp_path: Path) -> None:
    row = TASKS[kind]
    run = run_of(kind, row, engine=engine, out=tmp_path / "run")
    assert run.data.meta["classes"] == row.size
    found = run.evaluate("test")
    assert found == pytest.approx({"loss": row.loss, **row.metrics}, rel=1e-5)
    (judged,) = run.judge(("own",), "test")
    sums = tallied(judged.task, ("own",), (judged.of("own"),), run.data.ids).metrics("own")
    exact = {n: v for n, v in judged.metrics("own").items() if not n.startswith("auc")}
    assert {n: sums[n] for n in exact} == pytest.approx(exact)
    assert abs(sums.get("auc", 0) - found.get("auc", 0)) <= sums.get("auc_error", 0)
    labels = np.asarray(row.label)
    counts = labels.ravel() != KINDS[kind].ignored
    assert np.array_equal(judged.of("own").label, labels.ravel()[counts])
    results = run.examples()
    assert results.kind == KINDS[kind]
    assert np.array_equal(results.row, np.repeat([2, 3, 6], labels[0].size)[counts])
    assert (results.place is not None) == KINDS[kind].several
    if results.place is not None:
        assert results.place.tolist() == [*range(row.size)] * 3
    if not KINDS[kind].has_classes:
        assert results.classes is None
    assert results.loss.mean() == pytest.approx(row.loss, rel=1e-5)
    page = write_report([tmp_path / "run"], tmp_path / "page").read_text(encoding="utf-8")
    assert KINDS[kind].headline.words.lower() in page.lower()


@pytest.mark.parametrize("kind", TASKS)
def test_a_copy_of_a_record_under_another_name_is_the_same_task(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast("dict[str, Kind]", KINDS), "copied", replace(KINDS[kind], name="copied"))
    row, table = TASKS[kind], TASKS[kind].table
    run = run_of("copied", row)
    assert run.evaluate("test") == run_of(kind, row).evaluate("test")
    assert run.examples().kind.name == "copied"
    if table is None:
        return
    monkeypatch.setattr(tables, "TASKS", (kind, "copied"))
    settings = tomllib.loads(table.settings)
    write_table(tmp_path / "t.csv", table)
    one, other = (
        read_table(tmp_path / "t.csv", features=["a", "b"], label=settings["label"], task=task)
        for task in (kind, "copied")
    )
    of_encoding = ("encoding", "encoded_by")
    found, wanted = ({n: v for n, v in data.meta.items() if n not in of_encoding} for data in (other, one))
    assert found == wanted | {"task": "copied"}
    assert np.array_equal(*(np.asarray(data.columns["label"]) for data in (one, other)))


def test_a_task_that_wants_its_numbers_as_they_are_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "TASKS", ("plain",))
    for kind in ("regression", "multi_output"):
        monkeypatch.setitem(
            cast("dict[str, Kind]", KINDS), "plain", replace(KINDS[kind], name="plain", standardised=False)
        )
        table = TASKS[kind].table
        assert table is not None
        write_table(tmp_path / "t.csv", table)
        label = tomllib.loads(table.settings)["label"]
        raw = raw_table(tmp_path / "t.csv", features=["a", "b"], label=label, task="plain")
        for rules in (Rules(), Rules(standardise=True)):
            encoding = Encoding.of(raw.summary(rules))
            assert "units" not in encoding.meta
            with pytest.warns(UserWarning, match="reaches"):
                data = raw.encoded(encoding)
            assert np.asarray(data.columns["label"]).max() > 1000


@pytest.mark.parametrize("kind", TASKS)
def test_what_counting_gives(kind: str) -> None:
    row, data = TASKS[kind], data_of(kind, TASKS[kind])
    (task,) = tasks_in(data.meta)
    labels = np.asarray(row.label)
    rows = np.repeat([2, 3, 6], labels[0].size)
    if row.counted is None:
        with pytest.raises(ConfigError):
            counted_rows(data, task, rows)
        return
    assert counted_rows(data, task, rows)["loss"].mean() == pytest.approx(row.counted, rel=1e-5)
    run = run_of(kind, row)
    assert counted(data, run.examples)().loss.mean() == pytest.approx(row.counted, rel=1e-5)


@pytest.mark.parametrize("kind", [kind for kind, row in TASKS.items() if row.outside is not None])
def test_labels_outside_a_task_are_refused(kind: str) -> None:
    row = TASKS[kind]
    with pytest.raises(DataError):
        data_of(kind, row, row.outside, classes=row.size)


@pytest.mark.parametrize("kind", [kind for kind, row in TASKS.items() if row.misfit is not None])
def test_outputs_that_do_not_fit_are_refused(kind: str) -> None:
    row = TASKS[kind]
    with pytest.raises(MethodError):
        run_of(kind, Row(**(vars(row) | {"output": torch.zeros(3, *row.misfit or ()).tolist()})))


CONFIG = """
[data]
reader = "table"
path = "t.csv"
features = ["a", "b"]
{settings}

[data.split]

[model]
kind = "linear"

[method]
kind = "fedavg"

[run]
rounds = 60
"""


def rows_of(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text(encoding="utf-8").splitlines()))


@pytest.mark.parametrize("kind", [kind for kind, row in TASKS.items() if row.table])
def test_a_table_goes_through_training_and_judging_to_predictions(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TASKS[kind].table
    assert table is not None
    monkeypatch.chdir(tmp_path)
    write_table(Path("t.csv"), table)
    Path("t.toml").write_text(CONFIG.format(settings=table.settings), encoding="utf-8")
    for command in (
        "check t.toml",
        "run t.toml --out r",
        "evaluate r",
        "report r --out page",
        "export r --all --out m",
        "predict m --data t.csv --json --out said.jsonl",
    ):
        succeeded(call(*command.split()))
    assert read_examples(Path("r"))().kind is KINDS[kind]
    headline, found = KINDS[kind].headline, fedkeep.load_run("r").evaluate()
    assert found[headline.name] < table.bound if headline.lower else found[headline.name] > table.bound
    said = [json.loads(line)["prediction"] for line in Path("said.jsonl").read_text().splitlines()]
    assert np.mean([table.right(one, own) for one, own in zip(said, rows_of("t.csv"), strict=True)]) > 0.9
    if table.started:
        label, task = (
            tomllib.loads(f"[data]\n{table.settings}")["data"].get(name) for name in ("label", "task")
        )
        succeeded(call("start", "t.csv", "--label", label, "--out", "started.toml"))
        settings = tomllib.loads(Path("started.toml").read_text(encoding="utf-8"))["data"]
        assert (settings["label"], settings.get("task")) == (label, task)
        succeeded(call("check", "started.toml"))
    table.more()
