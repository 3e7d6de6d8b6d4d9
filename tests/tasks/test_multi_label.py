"""The task of several labels: trained, judged, kept, counted and shown."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedkeep
from fedkeep.core.errors import DataError
from fedkeep.core.optim import sgd
from fedkeep.data import FederatedData, read_table
from fedkeep.data.preparation import Encoding, merged
from fedkeep.data.readers import raw_table
from fedkeep.experiments.worth import counted
from fedkeep.methods import fedavg, terms
from fedkeep.metrics.worth.pooled_gains import pooled_gain
from fedkeep.tasks.multi_label import micro_f1_pooled
from tests.commands import call

USERS, EACH, LABELS = 12, 20, 3
NAMES = ("billing", "spam", "urgent")
CONFIG = """
[data]
reader = "table"
path = "table.csv"
features = ["a", "b", "c"]
label = "tags"
task = "multi_label"

[data.split]

[model]
kind = "linear"

[method]
kind = "fedavg"
loss = { kind = "binary_cross_entropy" }
optimizer = { learning_rate = 0.5 }

[run]
rounds = 30
cohort = 6
"""
LOCAL = fedkeep.Phase(loss=terms.binary_cross_entropy(), optimizer=sgd(0.5), epochs=2)


def made(**meta: object) -> FederatedData:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((USERS * EACH, 4)).astype("f4")
    label = (x[:, :LABELS] + 0.5 * rng.standard_normal((len(x), LABELS)) > 0.3).astype(int)
    split = (["train"] * 12 + ["valid"] * 4 + ["test"] * 4) * USERS
    owner = np.repeat(np.arange(USERS), EACH)
    return FederatedData.from_columns(owner, {"x": x, "label": label}, split, {"task": "multi_label", **meta})


def trained(engine: str = "sequential", **options: object) -> fedkeep.Run:
    torch.manual_seed(0)
    settings = {"rounds": 30, "cohort": 6, "seed": 1, "progress": False, "engine": engine}
    return fedkeep.simulate(nn.Linear(4, LABELS), fedavg(local=LOCAL), made(), **(settings | options))


def test_counting_scores_a_label_by_the_logit_of_its_share() -> None:
    run = trained()
    share = counted(run.data, run.examples)()
    train = run.data.split_rows("train")
    label, owner = np.asarray(run.data.columns["label"])[train], run.data.clients_of(train)
    everywhere = (label.sum(0) + 1) / (len(label) + 2)
    own = owner == share.client[0]
    p = (label[own].sum(0) + everywhere) / (own.sum() + 1)
    assert share.score[:LABELS] == pytest.approx(np.log(p / (1 - p)))


def test_a_gain_in_micro_f1_leaves_out_one_client_at_a_time() -> None:
    client, found, wrong = np.array([0, 0, 1, 1]), np.array([1.0, 0, 1, 1]), np.array([0.0, 1, 0, 0])
    whole, without = micro_f1_pooled(client, found, wrong)
    assert whole == pytest.approx(6 / 7)
    assert without.tolist() == pytest.approx([1.0, 2 / 3])
    gain = pooled_gain(micro_f1_pooled, client, [(found, wrong)], [(found, 1 - found)])
    assert gain.mean == pytest.approx(0.0)
    assert math.isnan(micro_f1_pooled(client, 0 * found, 0 * wrong)[0])


def test_another_number_of_labels_than_was_said_is_refused() -> None:
    with pytest.raises(DataError) as refused:
        made(classes=LABELS + 1)
    assert refused.value.facts == {"wanted": LABELS + 1, "got": LABELS}
    assert made().meta["classes"] == LABELS


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def table_of(folder: Path) -> Path:
    """Write a table whose labels stand in one cell, and in a column each."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((USERS * EACH, LABELS))
    lines = [",".join(("user", "a", "b", "c", "tags", *NAMES))]
    for row, numbers in enumerate(x):
        there = [name for name, value in zip(NAMES, numbers, strict=True) if value > 0.2]
        cells = [f"u{row % USERS}", *(f"{n:.4f}" for n in numbers), " | ".join(there)]
        lines.append(",".join([*cells, *(str(int(name in there)) for name in NAMES)]))
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"


def test_labels_in_a_cell_are_those_in_columns(tmp_path: Path) -> None:
    path = table_of(tmp_path)
    features = ("a", "b", "c")
    one = read_table(path, features=features, label="tags", task="multi_label")
    several = read_table(path, features=features, label=NAMES)
    lists = [{**row, "tags": [word for word in row["tags"].split(" | ") if word]} for row in rows_of(path)]
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, lists)))
    listed = read_table(tmp_path / "table.jsonl", features=features, label="tags", task="multi_label")
    for data in (several, listed):
        assert data.meta["task"] == "multi_label"
        assert data.meta["label_names"] == list(NAMES)
        assert np.array_equal(data.columns["label"], one.columns["label"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"label": "tags", "task": "multi_label", "label_names": ["spam"]}, {"names": ["spam"]}),
        ({"label": "tags", "task": "multi_label", "label_separator": ""}, {}),
        ({"label": ["user", "spam"]}, {"column": "user", "got": "u0"}),
        ({"label": [*NAMES], "task": "binary"}, {"task": "binary"}),
        ({"label": [*NAMES], "label_names": NAMES}, {"columns": list(NAMES)}),
        ({"label": []}, {"columns": []}),
        ({"label": ["spam", "a"]}, {"label": "a"}),
    ],
)
def test_a_table_of_labels_that_does_not_fit_is_refused(
    tmp_path: Path, options: dict[str, Any], facts: dict[str, object]
) -> None:
    with pytest.raises(DataError) as refused:
        read_table(table_of(tmp_path), features=("a", "b", "c"), **options)
    assert refused.value.facts | facts == refused.value.facts


def test_one_label_and_several_are_not_the_same_encoding(tmp_path: Path) -> None:
    path, features = table_of(tmp_path), ("a", "b", "c")
    several, one = (
        raw_table(path, features=features, label=NAMES),
        raw_table(path, features=features, label="spam"),
    )
    for ours, theirs in ((one, several), (several, one)):
        with pytest.raises(DataError):
            ours.encoded(Encoding.of(theirs.summary()))
        with pytest.raises(DataError):
            merged([ours.summary(), theirs.summary()])
    batch = Encoding.of(several.summary()).batch(label=[["spam"], [], ["urgent", "billing"]])
    assert batch["label"].tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 1]]


def test_a_loss_of_one_class_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("several.toml").write_text(CONFIG.replace("binary_cross_entropy", "cross_entropy"))
    result = call("run", "several.toml", "--data", ".", "--out", "r")
    assert result.exit_code == 2
    assert "'binary_cross_entropy'" in " ".join(result.output.split())
    assert not Path("r").exists()
