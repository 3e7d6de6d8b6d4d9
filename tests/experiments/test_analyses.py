"""Analyses of finished runs, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, Run, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.run_files import Commit
from fedkeep.core.sealed import FORMAT, sealed_bytes
from fedkeep.data.ids import SomeIds
from fedkeep.experiments.analyses import (
    UserTrait,
    _shown,
    adapted_form,
    aggregation_time,
    embedding_map,
    user_trait,
    user_vectors,
    write_analyses,
)
from fedkeep.experiments.personalize import adapt_clients
from fedkeep.methods.aggregate import RunningMean
from fedkeep.report.runs import read_sealed_analyses
from fedkeep.split import Upload
from tests.refusals import raises
from tests.tiny import Logits, classes, pairs, parts


def labelled(labels: dict[str, list[int]], **meta: object) -> FederatedData:
    """Return clients with these training labels, and one test example of label 0 each."""
    owner = [c for c, own in labels.items() for _ in [*own, 0]]
    column = [label for own in labels.values() for label in [*own, 0]]
    split = [s for own in labels.values() for s in parts(len(own), 0, 1)]
    return FederatedData.from_columns(owner, {"x": np.ones((len(owner), 3)), "label": column}, split, meta)


class Line(nn.Module):
    """ŷ = x + user."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.user = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x[:, 0] + self.user[0]


def unmoved(model: nn.Module, data: FederatedData) -> Run:
    """Return a run whose clients still have their default values."""
    return simulate(model, methods.furl("user", local=Phase(optimizer=sgd(0.0))), data, rounds=0)


def test_a_user_is_known_by_the_label_it_uses_most() -> None:
    data = labelled({"a": [0, 1, 1], "b": [2, 2, 0], "c": []}, task="multiclass", classes=3)
    trait = user_trait(data)
    assert (trait.name, trait.kind, trait.values) == ("most-used label", "categorical", ["1", "2", None])
    named = labelled({"a": [0, 1, 1]}, task="multiclass", classes=2, label_names=["tea", "pots"])
    assert user_trait(named).values == ["pots"]


class Compared(str):
    """A label that counts how often it is compared."""

    times = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)


def test_a_map_shows_users_of_the_five_most_frequent_labels() -> None:
    labels = [
        *(f"l{user % 200}" for user in range(400)),
        *("a" * 9),
        *("b" * 9),
        "c",
        "c",
        "c",
        "l199",
        "l7",
        None,
    ]
    values = [label and Compared(label) for label in labels]
    clients = SomeIds([str(user) for user in range(len(labels))], np.arange(len(labels)))
    shown = _shown(UserTrait("most-used label", "categorical", values), clients)
    assert Compared.times < 10 * len(labels)  # not each label with each user's
    assert {labels[user] for user in shown.positions} == {"a", "b", "c", "l199", "l7"}
    assert len(shown) == 9 + 9 + 3 + 3 + 3


def test_a_user_is_known_by_its_share_of_positive_labels_or_its_mean_label() -> None:
    trait = user_trait(labelled({"a": [0, 1, 1, 1], "b": [0]}, task="binary", classes=2))
    assert (trait.name, trait.kind, trait.values) == ("share of positive labels", "continuous", [0.75, 0.0])
    trait = user_trait(pairs({"a": [(1, 2.0), (1, 5.0), (1, 90.0)], "b": [(1, 90.0)]}, test=1))
    assert (trait.name, trait.values[0]) == ("mean label", 3.5)
    assert math.isnan(trait.values[1])


def test_examples_without_a_label_do_not_count() -> None:
    tasks = {
        "first": {"task": "multiclass", "label": "topic"},
        "second": {"task": "binary", "label": "liked"},
    }
    columns = {"x": np.ones((4, 3)), "topic": [-1, -1, 1, 0], "liked": [1, 1, -1, -1]}
    data = FederatedData.from_columns(["a"] * 4, columns, ["train"] * 4, {"tasks": tasks, "classes": 2})
    assert user_trait(data).values == ["0"]  # of 1 and 0, once each, the lower one
    tasks = {"second": tasks["second"]}
    data = FederatedData.from_columns(["a"] * 4, columns, ["train"] * 4, {"tasks": tasks, "classes": 2})
    assert user_trait(data).values == [1.0]


def test_a_map_of_a_regression_shows_errors_of_the_right_name(tmp_path: Path) -> None:
    rows = {f"u{k}": [(1.0, 1.0 + k), (1.0, 1.0), (1.0, 1.0 - k)] for k in range(6)}
    run = unmoved(Line(), pairs(rows, test=2))
    found = embedding_map({"ours": run}, perplexity=1.5)
    assert found["value_name"] == "rmse"
    points = {p["client"]: p for p in found["panels"][0]["points"]}
    # ŷ is 1 everywhere, so the errors on test are 0 and k.
    for k in range(6):
        point = points[f"u{k}"]
        assert (point["trait"], point["n"]) == (1.0 + k, 1)
        assert point["value"] == pytest.approx(k / math.sqrt(2))
    assert found["linear_cka"] is None
    kept_run(tmp_path)
    write_analyses(tmp_path, {"embedding_map": found})
    assert read_sealed_analyses(tmp_path / "analyses.json")[0]["embedding_map"]["value_name"] == "rmse"


def test_a_map_shows_the_users_of_the_five_most_frequent_labels() -> None:
    most = [0] * 3 + [1] * 3 + [2] * 3 + [3] * 2 + [4] * 2 + [5]
    data = labelled({f"u{k:02}": [m, m] for k, m in enumerate(most)}, task="multiclass", classes=6)
    run = unmoved(Logits(labels=6).double(), data)
    found = embedding_map({"a": run, "b": run}, perplexity=2.0)
    assert [p["trait"] for p in found["panels"][0]["points"]] == [str(m) for m in most if m < 5]
    assert found["value_name"] == "accuracy"
    assert [panel["name"] for panel in found["panels"]] == ["a", "b"]
    shares = np.bincount(most[:-1]) / 13
    chance = found["panels"][0]["numbers"]["chance_agreement"]
    # Of the 12 others, those of the same label: (n − 1) / 12, over labels of n users each.
    assert chance == pytest.approx(float((shares * (np.bincount(most[:-1]) - 1) / 12).sum()))


def test_a_map_leaves_out_users_without_a_training_label() -> None:
    """They were one more label, "-1", and counted in the numbers."""
    rows: dict[str, list[int]] = {f"u{k}": [k % 2] * 2 for k in range(6)}
    data = labelled({**rows, "v0": [], "v1": [], "v2": []}, task="multiclass", classes=2)
    found = embedding_map({"a": unmoved(Logits(labels=2).double(), data)}, perplexity=2.0)
    assert {p["client"] for p in found["panels"][0]["points"]} == set(rows)


def test_user_vectors_are_the_private_user_or_all_that_is_private() -> None:
    class Two(Line):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))

    data = pairs({"a": [(1, 1)], "b": [(1, 2)]})
    both = simulate(Two(), methods.furl(["user", "bias"]), data, rounds=0)
    assert user_vectors(both, ["b"]).tolist() == [[0.0, 0.0]]
    other = simulate(Two(), methods.furl(["bias", "w"], private_init="model"), data, rounds=0)
    with pytest.raises(ConfigError, match="no private parameters"):
        user_vectors(simulate(Two(), methods.fedavg(), data, rounds=0), ["a"])
    assert sorted(user_vectors(other, other.clients)[1].tolist()) == [1.0, 3.0, 4.0]


def test_clients_before_and_after_adapting_and_their_means() -> None:
    data = classes(counts=(8, 6), valid=0, test=4)
    run = simulate(
        Logits().double(), methods.fine_tuned(tune_epochs=4, local=Phase(optimizer=sgd(0.3))), data, rounds=2
    )
    found = adapt_clients(run)
    form = adapted_form(found)
    assert form["columns"] == ["client", "accuracy on test, before", "accuracy on test, after"]
    assert [row[0] for row in form["rows"]] == ["user-0", "user-1", "mean over clients"]
    for place, client in enumerate(found.clients):
        before = run.evaluate("test", clients=[client], stage="shared")["accuracy"]
        assert form["rows"][place][1:] == [before, found.clients_frame()["accuracy"].to_pylist()[place]]
    for column in (1, 2):
        assert form["rows"][2][column] == (form["rows"][0][column] + form["rows"][1][column]) / 2


def test_aggregation_is_timed_for_every_cohort() -> None:
    found = aggregation_time({"w": torch.zeros(7, 3), "seen": torch.zeros((), dtype=torch.int64)}, (1, 12), 2)
    assert found["cohort"] == [1, 12]
    assert len(found["seconds"]) == 2
    assert min(found["seconds"]) > 0
    assert "uploads of 22 numbers" in found["note"]


def test_aggregation_is_timed_as_rounds_aggregate(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Upload] = []
    add = RunningMean.add
    monkeypatch.setattr(
        RunningMean, "add", lambda mean, client, upload: (added.append(upload), add(mean, client, upload))[1]
    )
    aggregation_time({"w": torch.zeros(7, 3, dtype=torch.float64), "seen": torch.zeros(2).long()}, (3, 12), 2)
    assert len(added) == (3 + 12) * 2
    assert {n: (v.shape, v.dtype) for n, v in added[0].deltas.items()} == {
        "w": ((7, 3), torch.float64),
        "seen": ((2,), torch.int64),
    }


def kept_run(folder: Path, round: int = 1) -> None:
    """Write what a run's folder says of a finished run."""
    info = {"format": FORMAT, "run": "mine", "rounds": 9}
    (folder / "run.json").write_bytes(sealed_bytes(info))
    commit = Commit(run="mine", round=round, server=f"server-{round}.safetensors")
    (folder / "commit.json").write_bytes(commit.to_bytes())


def test_analyses_of_another_run_or_round(tmp_path: Path) -> None:
    kept_run(tmp_path, 1)
    path = write_analyses(tmp_path, {"a": {"columns": ["x"], "rows": [[1]]}})
    kept_run(tmp_path, 2)
    write_analyses(tmp_path, {"b": {"columns": ["x"], "rows": [[1]]}})
    assert set(read_sealed_analyses(path)[0]) == {"b"}
    other = json.loads(path.read_text(encoding="utf-8"))
    path.write_bytes(sealed_bytes({**other, "about": {"run": "yours", "round": 2}}))
    with raises(RunError, said="Delete it, or restore the run's own"):
        write_analyses(tmp_path, {"c": {"columns": ["x"], "rows": [[1]]}})
    path.write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        write_analyses(tmp_path, {})


def test_analyses_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    kept_run(tmp_path)
    write_analyses(tmp_path, {"a": {"columns": ["x"], "rows": [[1]]}, "b": {"columns": ["x"], "rows": []}})
    path = write_analyses(tmp_path, {"b": {"columns": ["y"], "rows": []}})
    found = read_sealed_analyses(path)[0]
    assert {name: form["columns"] for name, form in found.items()} == {"a": ["x"], "b": ["y"]}
