"""Comparisons by macro-F1: the numbers are those of the runs' records, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.data import FederatedData
from fedkeep.experiments.comparing import plan, run
from fedkeep.experiments.config import Config, parse_config
from fedkeep.experiments.worth import worth_of
from fedkeep.metrics import macro_f1
from fedkeep.report.runs import read_run
from fedkeep.tasks.results import read_examples

TEXT = """
name = "Rare"
seed = 7
[data]
reader = "saved"
folder = "rare"
[model]
kind = "linear"
[method]
kind = "furl"
optimizer = { learning_rate = 0.3 }
[run]
rounds = 3
cohort = 6
metrics = ["macro_f1"]
"""


def config(**changes: str) -> Config:
    return parse_config(TEXT, overrides={key.replace("__", "."): value for key, value in changes.items()})


def data(classes: int, rare: int = 12) -> FederatedData:
    """Return twelve users of unequal size; ``rare`` of them have test examples of the last class."""
    rng, owner, label, split = np.random.default_rng(0), list[int](), list[int](), list[str]()
    for user in range(12):
        own = [*range(classes - (user >= rare)), *rng.integers(0, classes - 1, user + 4).tolist()]
        owner += [user] * 2 * len(own)
        label += own * 2
        split += ["train"] * len(own) + ["test"] * (len(own) - 1) + ["valid"]
    x = np.eye(classes)[label] + rng.standard_normal((len(label), classes))
    columns = {"x": x.astype("f4"), "label": np.array(label)}
    meta = {"task": "binary" if classes == 2 else "multiclass", "classes": classes}
    return FederatedData.from_columns(owner, columns, split, meta)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("classes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_numbers_are_those_of_the_runs(classes: int, tmp_path: Path) -> None:
    data(classes).save(tmp_path / "rare")
    made = plan([config()], ["furl"], (0, 1), tmp_path / "c", folder=tmp_path, metric="macro_f1")
    found, page = run(made, progress=False)
    (compared,) = found.compared
    assert compared.name == "Macro-F1, over all examples"
    stands = dict(zip(compared.labels, compared.standings, strict=True))
    for name, model in (("furl", "own"), ("local", "own"), ("fine_tuned", "adapted")):
        for seed, value in zip((0, 1), stands[name].by_seed, strict=True):
            folder = tmp_path / "c" / "runs" / f"{name}-{seed}"
            kept = read_examples(folder)
            split = "test/adapted" if model == "adapted" else "test"
            (record,) = (
                r.value
                for r in read_run(folder).records
                if (r.metric, r.split, r.client, r.round) == ("macro_f1", split, None, kept.round)
            )
            assert value == pytest.approx(record, rel=1e-12)
    counts = np.zeros((12, classes))
    whole = data(classes)
    owner, label = whole.clients_of(range(len(whole.columns["label"]))), np.asarray(whole.columns["label"])
    train, test = (whole.split_rows(name) for name in ("train", "test"))
    np.add.at(counts, (owner[train], label[train]), 1)
    counts += 0.5 * np.bincount(label[train], minlength=classes) / len(train)  # ties go by what is frequent
    wanted = macro_f1(label[test], counts.argmax(1)[owner[test]])
    assert stands["counting each user's labels"].mean == pytest.approx(wanted)
    assert {c.metric for c in found.gains} == {"macro_f1"}
    text = page.with_suffix(".md").read_text()
    assert "Gains in macro-F1 over all examples" in text
    assert "Who gains, who loses" not in text
    rows = (tmp_path / "c" / "tables" / "gains.csv").read_text().splitlines()
    assert rows[1].endswith(",,,,")  # nobody is named


def test_what_is_refused(tmp_path: Path) -> None:
    def refused(**more: Any) -> str:
        with pytest.raises(ConfigError) as error:
            plan([config(**more)], ["furl"], (0,), tmp_path / "c", folder=tmp_path, metric="macro_f1")
        return str(error.value)

    data(3).save(tmp_path / "rare")
    assert refused(run__metrics="['balanced_accuracy']") == (
        "--metric macro_f1 wants every run's predicted classes. Add --set \"run.metrics=['macro_f1']\", or metrics = "
        "['macro_f1'] under [run]."
    )
    data(3, rare=9).save(tmp_path / "few")
    assert "of the class 2 9 have some" in refused(data__folder="'few'")
    with pytest.raises(ConfigError, match="macro_f1 has no value for a"):
        worth_of([tmp_path], metric="macro_f1")
