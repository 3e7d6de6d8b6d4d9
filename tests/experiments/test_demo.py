"""The demonstration: small and fast here, in full where time allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedkeep.core.errors import RunError
from fedkeep.core.records import read_records
from fedkeep.experiments.demo import SHOWN, Demo, DemoRow, demo_folder, run_demo


def test_a_small_one(tmp_path: Path) -> None:
    told: list[str] = []
    small = {"data.users": "8", "data.examples": "15", "run.epochs": "1"}
    found = run_demo(tmp_path / "demo", overrides=small, say=told.append)
    assert [row.method for row in found.rows.values()] == [
        "Global FL",
        "Personalized Server",
        "Personalized FL",
    ]
    assert [t.split()[0] for t in told] == ["Training", "Training", "Training", "Mapping"]
    for key in SHOWN:
        row = found.rows[f"demo/{key}"]
        assert row.folder == tmp_path / "demo" / key
        info = json.loads((row.folder / "run.json").read_text(encoding="utf-8"))
        assert info["status"] == "finished"
        assert row.best == pytest.approx(info["best_global" if key == "global-fl" else "best"])
        tests = [
            r.value
            for r in read_records(row.folder / "records.jsonl")
            if (r.split, r.metric, r.client) == ("test", "accuracy", None)
        ]
        assert row.accuracy in tests
        assert row.seconds > 0
    analyses = json.loads(
        (tmp_path / "demo" / "personalized-fl" / "analyses.json").read_text(encoding="utf-8")
    )
    names = [panel["name"] for panel in analyses["embedding_map"]["panels"]]
    assert names == ["Personalized Server", "Personalized FL"]


def test_gain_and_lack() -> None:
    rows = {
        f"demo/{key}": DemoRow(key, accuracy, 0.9, 1.0, Path())
        for key, accuracy in zip(SHOWN, (0.25, 0.8, 0.85), strict=True)
    }
    assert Demo(rows).gain == pytest.approx(0.6)
    assert Demo(rows).lacking == pytest.approx(0.05)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo_folder(None) == Path("runs/demo")
    for taken in ("demo", "demo-2"):
        (tmp_path / "runs" / taken).mkdir(parents=True)
    assert demo_folder(None) == Path("runs/demo-3")
    assert demo_folder(Path("runs/demo")) == Path("runs/demo")  # empty
    (tmp_path / "runs" / "demo" / "file").touch()
    for wrong in ("runs/demo", "runs/demo/file"):
        with pytest.raises(RunError, match="already exists and is not empty"):
            demo_folder(Path(wrong))


@pytest.mark.slow
def test_personalisation_is_worth_what_the_readme_says(tmp_path: Path) -> None:
    found = run_demo(tmp_path / "demo")
    assert found.gain >= 0.15
    assert found.lacking <= 0.02
