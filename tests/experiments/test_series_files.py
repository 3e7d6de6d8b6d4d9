"""Series of a file, as a stranger brings them: started, checked, trained by the usual model, predicted, audited."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedkeep.audit.canaries import floats_of, number_columns, numbers_replaced, replaced, with_lengths
from fedkeep.cli.app import app
from fedkeep.data import FederatedData
from fedkeep.data.readers import read_table
from fedkeep.experiments.build import build_model, run_config, settled
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.learned import cut_inputs
from fedkeep.experiments.simulate import simulate
from fedkeep.methods import fedavg
from fedkeep.models import SequenceClassifier


def table(folder: Path, people: int = 6, each: int = 30) -> Path:
    """Two channels of 5 to 12 steps; the label is the channel that rises first."""
    draw, path = np.random.default_rng(0), folder / "steps.jsonl"
    lines = []
    for person in range(people):
        for _ in range(each):
            length = int(draw.integers(5, 13))
            first, second = draw.permutation(length)[:2]
            a, b = (np.where(np.arange(length) == at, 50.0, 10.0) for at in (first, second))
            row = {"person": f"p{person}", "a": a.tolist(), "b": b.tolist(), "side": int(first < second)}
            lines.append(
                json.dumps({**row, "way": "a" if first < second else "b", "lead": (second - first) / 2})
            )
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("label", ["way", "side", "lead"])
def test_start_check_run_and_predict(tmp_path: Path, label: str) -> None:
    path = table(tmp_path)
    toml, run, models = tmp_path / "steps.toml", tmp_path / "run", tmp_path / "models"
    for words in (
        ["start", path, "--label", label],
        ["check", toml],
        ["run", toml, "--out", run, "--set", "run.epochs=2"],
        ["evaluate", run],
        ["export", run, "--all", "--out", models],
    ):
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert not done.exit_code, (words, done.output)
    config = parse_config(toml.read_text())
    data = read_table(path, **{n: v for n, v in config.data.options.items() if n != "path"}).split_per_user()
    assert isinstance(build_model(settled(config, data), data), SequenceClassifier)
    done = CliRunner().invoke(app, ["predict", str(models), "--data", str(path), "--json"])
    assert not done.exit_code, done.output
    said = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert len(said) == 180


def test_padding_changes_nothing_and_engines_agree(tmp_path: Path) -> None:
    data = read_table(table(tmp_path), user="person", features=["a", "b"], label="way").split_per_user()
    torch.manual_seed(0)
    model = SequenceClassifier(2, 2, hidden=4)
    losses = {
        engine: simulate(model, fedavg(), data, rounds=2, cohort=3, engine=engine).evaluate("test")["loss"]
        for engine in ("sequential", "vectorised")
    }
    assert losses["sequential"] == pytest.approx(losses["vectorised"], rel=1e-4)


def test_a_number_is_learned_from_series_with_nothing_but_the_columns(tmp_path: Path) -> None:
    text = f"""
        [data]
        reader = "table"
        path = "{table(tmp_path, 10, 60)}"
        user = "person"
        features = ["a", "b"]
        label = "lead"
        task = "regression"
    """
    run = run_config(parse_config(text), progress=False, workers=1)
    found = run.evaluate("valid")["rmse"]
    labels = run.data.columns["label"] * run.data.meta["units"][1]
    assert found < 0.3 * labels.std()  # 0.2; with the rate of tables 0.38


def test_cut_series_are_told(tmp_path: Path) -> None:
    names = {"user": "person", "features": ["a", "b"], "label": "way"}
    assert "series" in cut_inputs(read_table(table(tmp_path), **names, max_length=6))
    assert not cut_inputs(read_table(table(tmp_path), **names))


def series(folder: Path) -> FederatedData:
    return read_table(table(folder), user="person", features=["a", "b"], label="way").split_per_user()


def test_an_audit_changes_series_and_their_lengths(tmp_path: Path) -> None:
    data, rows = series(tmp_path), np.array([0, 2])
    assert number_columns(data) == ["x"]
    for other in (replaced(data, rows, 1), replaced(data, rows, 1, -1), numbers_replaced(data, rows, 1)):
        moved = [not np.array_equal(a, b) for a, b in zip(other.columns["x"], data.columns["x"], strict=True)]
        assert np.flatnonzero(moved).tolist() == [0, 2]
    assert (replaced(data, rows, 1, -1).columns["x"][0] <= 0).all()
    assert floats_of(data, rows).shape[0] == 2
    longer = with_lengths(data, rows, longer=True).columns["x"]
    assert len(longer[0]) > max(map(len, data.columns["x"]))
    assert longer[0].shape[1] == 2
