"""The reproduction of FURL's Table 3 on tiny generated scenes: whole, interrupted, and with a run that diverges."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import ConfigError, DataError, RunError
from fedkeep.experiments.build import build_data
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.plugins import builtin_text
from fedkeep.experiments.reproductions import Request, reproduce, reproductions
from fedkeep.report.blocks import Figure
from fedkeep.version import NUMERICS
from fedkeep_papers.furl import jobs, scenes, sweep, table3
from fedkeep_papers.furl.untrained import most_frequent_label
from fedkeep_papers.kit import plots

RUNS = f"numerics-{NUMERICS}"
TINY = {
    "run.epochs": "2",
    "data.users": "12",
    "data.examples": "20",
    "model.hidden": "4",
    "model.embedding_dim": "4",
    "model.mlp": "8",
}


def scene(name: str = "sticker-like (generated)") -> scenes.Scene:
    found = next(s for s in scenes.SCENES if s.name == name)
    return replace(found, quick=TINY, medium=TINY)


def request(folder: Path, **changes: object) -> Request:
    return Request(data=None, out=folder, progress=False, **changes)  # type: ignore[arg-type]


def test_every_reproduction_is_described() -> None:
    with pytest.raises(ConfigError, match=r"There is no reproduction.*'furl-tabel3'.*'furl-table3'"):
        reproduce("furl-tabel3", request(Path("results")))
    assert {"furl-table3", "furl-sweep", "kteps-table3", "kteps-figure5"} <= set(reproductions())


def test_what_each_scale_runs(tmp_path: Path) -> None:
    names = {}
    for one in scenes.SCENES:
        full = scenes.specs_of(one, Request(tmp_path, tmp_path, "full"), tmp_path, {})
        assert len(full) == (6 if one.order == "time" else 18)
        for (row, seed), spec in full.items():
            own = {**one.always, "seed": str(seed), "name": f'"{row}"'}
            alone = parse_config(builtin_text(spec.config), "it", own)
            assert spec.resolved() == alone  # nothing is cut
        medium = scenes.specs_of(one, Request(tmp_path, tmp_path, "medium"), tmp_path, {})
        names[one.stands_for] = {
            row: spec.resolved().run.epochs for (row, seed), spec in medium.items() if not seed
        }
        assert len(names[one.stands_for]) == len(medium)
        assert (scenes.changes_of(one, "full") == "nothing.") == (one.order == "random")
    longer = {"Personalized Server": 12, "Personalized FL, best recipe": 12}
    shorter = ("Global Server", "Global FL, paper's recipe", "Personalized FL, paper's recipe")
    assert names["Subreddit"] == longer | dict.fromkeys(shorter, 6)
    assert names["Subreddit-words"]["Global FL, paper's recipe"] == 8
    assert names["Subreddit-words"]["Global FL, best recipe"] == 15
    assert set(names["Sticker"].values()) == {20}
    said = scenes.changes_of(scenes.SCENES[0], "medium")
    assert said == (
        "`run.epochs = 12`, `data.max_length = 80`; Global Server `run.epochs = 6`; Global FL, paper's recipe "
        "`run.epochs = 6`; Personalized FL, paper's recipe `run.epochs = 6`; Global FL, best recipe was not run."
    )


@pytest.mark.slow
def test_table3_writes_results_figures_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table3, "SCENES", (scene(),))
    figures, write = dict[str, Figure](), plots.write
    monkeypatch.setattr(
        plots, "write", lambda figure, folder, name: write(figures.setdefault(name, figure), folder, name)
    )
    path = reproduce("furl-table3", request(tmp_path, seeds=[0, 1]))
    assert path == tmp_path / "furl-table3-quick.md"
    rows = json.loads((tmp_path / "furl-table3-quick.json").read_text(encoding="utf-8"))
    trained = {r["method"]: r for r in rows if not r["method"].startswith("(")}
    assert list(trained) == [c.name for c in scene().rows]
    assert trained["Personalized Server"]["published"] == 0.6560
    assert all(
        r["seeds"] == [0, 1] and r["std"] is not None and r["metric"] == "auc" for r in trained.values()
    )
    settings = [
        parse_config(builtin_text("furl-sticker/global-fl"), "it", TINY | {"seed": str(s)}) for s in (0, 1)
    ]
    best = [build_data(config).meta["best"] for config in settings]
    known = next(r for r in rows if r["method"] == "(best possible, user known)")
    assert best[0] != best[1]  # each seed has its own data
    assert (known["seeds"], known["value"]) == ([0, 1], pytest.approx(sum(best) / 2, rel=1e-6))
    (bars,) = figures["sticker-figure2"].panels  # the picture shows the table's numbers, over all seeds
    assert [(bar.label, bar.ours, bar.std) for bar in bars.bars] == [
        (name, pytest.approx(row["value"], rel=1e-7), pytest.approx(row["std"], rel=1e-6))
        for name, row in trained.items()
    ]
    finished = [
        p for p in (tmp_path / "runs" / RUNS / "furl-table3-quick").iterdir() if "held-out" not in p.name
    ]
    assert len(finished) == 12
    outcomes = [jobs.outcome(p) for p in finished if p.name.startswith("sticker-global-server")]
    mean = sum(o.test for o in outcomes) / 2
    assert trained["Global Server"]["value"] == pytest.approx(mean, rel=1e-7)  # seven digits are kept
    text = path.read_text(encoding="utf-8")
    for figure in ("figure2", "figure3", "figure45", "aggregation", "users", "cold-start"):
        assert f"sticker-{figure}.png" in text
        assert (tmp_path / "furl-table3-quick" / f"sticker-{figure}.png").stat().st_size > 5_000
    assert "differ from the paper's" in text
    page = (tmp_path / "furl-table3-quick" / "page" / "report.html").read_text(encoding="utf-8")
    assert "Personalized Server" in page
    assert "embedding_map" in json.loads(
        next(
            (tmp_path / "runs" / RUNS / "furl-table3-quick").glob(
                "*personalized-fl-0-[0-9a-f]*/analyses.json"
            )
        ).read_text()
    )


@pytest.mark.slow
def test_what_is_kept_of_a_run_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table3, "SCENES", (scene(),))
    first, second = tmp_path / "first", tmp_path / "second"
    text = reproduce("furl-table3", request(first)).read_text(encoding="utf-8")
    shutil.copytree(first / "furl-table3-quick", second / "furl-table3-quick")
    shutil.copytree(first / "runs" / RUNS / "furl-quick", second / "runs" / RUNS / "furl-quick")
    drawn = {p.name: p.read_bytes() for p in (second / "furl-table3-quick").glob("*.png")}
    capsys.readouterr()
    assert reproduce("furl-table3", request(second)).read_text(encoding="utf-8") == text
    assert capsys.readouterr().err == ""  # nothing was run
    assert not (second / "runs" / RUNS / "furl-table3-quick").exists()
    assert {p.name: p.read_bytes() for p in (second / "furl-table3-quick").glob("*.png")} == drawn
    # Another seed is another run; so is another setting.
    with monkeypatch.context() as patch:
        ran: list[str] = []
        patch.setattr(jobs, "run_long_jobs", lambda tasks, *_, on: ran.extend(t.name for t in tasks))
        reproduce("furl-table3", request(second, seeds=[0, 1]))
        assert len(ran) == 6
        assert all(name.endswith("-1") for name in ran)
        patch.setattr(table3, "SCENES", (replace(scene(), quick=TINY | {"run.epochs": "3"}),))
        reproduce("furl-table3", request(second))
        assert len(ran) == 13  # new users are measured by a run of their own
    damaged = next((second / "runs" / RUNS / "furl-quick").glob("*-global-server-*"))
    damaged.write_text('{"outcome": {"metric": "auc"}}')
    with pytest.raises(RunError, match=r"holds no finished cell:"):
        reproduce("furl-table3", request(second))


@pytest.mark.slow
def test_a_run_of_other_settings_or_data_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value(out: Path, users: str) -> float:
        monkeypatch.setattr(table3, "SCENES", (replace(scene(), quick=TINY | {"data.users": users}),))
        reproduce("furl-table3", request(out, only=("*-global-server-0",)))
        rows = json.loads((out / "furl-table3-quick.json").read_text(encoding="utf-8"))
        return float(next(r["value"] for r in rows if r["method"] == "Global Server"))

    before = value(tmp_path / "one", "8")
    assert value(tmp_path / "one", "12") == value(tmp_path / "fresh", "12") != before
    assert value(tmp_path / "one", "8") == before
    job = jobs.JobSpec("furl-sticker/global-fl", (), tmp_path, "run", None, {"file": "ab"})
    other = replace(job, source={"file": "cd"})
    assert other.folder != job.folder
    assert other.slot(tmp_path).file != job.slot(tmp_path).file
    # New users are measured by a run too: numbers of another one don't stand on the page.
    monkeypatch.setattr(table3, "SCENES", (scene(),))
    sheet = table3._Sheet(request(tmp_path / "one"))
    held = sheet.held_out(sheet_scene := table3.SCENES[0])
    file = tmp_path / "one" / "furl-table3-quick" / "sticker-cold-start.json"
    for run, there in ((held.file, True), ("sticker-personalized-fl-0-held-out-0000000000", False)):
        file.write_text(json.dumps({"run": run, "metric": "accuracy"}), encoding="utf-8")
        assert (held not in sheet.missing(sheet_scene)) == there
        assert (sheet._new_users(sheet_scene) is not None) == there


def test_an_outcome_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = jobs.Outcome(
        "auc", math.nan, math.nan, 2.0, math.nan, ((1.0, 0.25),), "loss became NaN", {"a/b": 0.5}
    )
    monkeypatch.setattr(jobs, "outcome", lambda _: found)
    monkeypatch.setattr(jobs, "read_info", lambda _: {"environment": {"commit": "an older one"}})
    job = jobs.JobSpec("furl-sticker/global-fl", (("seed", "3"),), tmp_path, "run", None, {"file": "ab"})
    slot = job.slot(tmp_path / "kept")
    assert slot.file.parent == tmp_path / "kept"
    jobs.keep(job, slot)
    back = slot.read()
    assert back.settings["seed"] == 3
    assert str(back.outcome) == str(found)
    assert (back.environment, slot.find().commit) == ({"commit": "an older one"}, "an older one")


@pytest.mark.slow
def test_an_interrupted_table_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table3, "SCENES", (scene(),))
    ran: list[str] = []
    whole = jobs.JobSpec.__call__

    def stopped(job: jobs.JobSpec, **how: Any) -> object:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(job.name)
        return whole(job, **how)

    monkeypatch.setattr(jobs.JobSpec, "__call__", stopped)
    with pytest.raises(KeyboardInterrupt):
        reproduce("furl-table3", request(tmp_path))
    monkeypatch.setattr(
        jobs.JobSpec, "__call__", lambda job, **how: (ran.append(job.name), whole(job, **how))[1]
    )
    reproduce("furl-table3", request(tmp_path))
    assert len(ran) == len(set(ran))


@pytest.mark.slow
def test_a_table_is_run_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table3, "SCENES", (scene(),))
    ran: list[str] = []
    whole = jobs.JobSpec.__call__
    monkeypatch.setattr(
        jobs.JobSpec, "__call__", lambda job, **how: (ran.append(job.name), whole(job, **how))[1]
    )

    def values() -> dict[str, tuple[float | None, list[int]]]:
        rows = json.loads((tmp_path / "furl-table3-quick.json").read_text(encoding="utf-8"))
        return {r["method"]: (r["value"], r["seeds"]) for r in rows if not r["method"].startswith("(")}

    def piece(*patterns: str) -> set[str]:
        ran.clear()
        reproduce("furl-table3", request(tmp_path, seeds=[0, 1], only=patterns))
        return set(ran)

    assert piece("*-server-1", "sticker-global-fl-0") == {
        "sticker-global-server-1",
        "sticker-personalized-server-1",
        "sticker-global-fl-0",
    }
    first = values()
    assert {name: seeds for name, (_, seeds) in first.items() if seeds} == {
        "Global Server": [1],
        "Personalized Server": [1],
        "Global FL, best recipe": [0],
    }
    assert piece("*-global-fl-?") == {"sticker-global-fl-1"}  # what is there is not run again
    second = values()
    assert second["Global FL, best recipe"][1] == [0, 1]
    assert second["Global Server"] == first["Global Server"]
    assert not list((tmp_path / "furl-table3-quick").glob("*cold-start*"))
    assert piece("*-personalized-server-0") == {"sticker-personalized-server-0"}
    assert piece("*-personalized-fl-0") == {"sticker-personalized-fl-0"}
    assert piece("*-personalized-fl-0") == set()
    assert not list((tmp_path / "furl-table3-quick").glob("*cold-start*"))
    assert piece("*-held-out") == {"sticker-personalized-fl-0-held-out"}  # trained for a picture
    assert (tmp_path / "furl-table3-quick" / "sticker-cold-start.png").exists()
    assert len(piece()) == 12 - 6  # the rest
    assert all(seeds == [0, 1] for _, seeds in values().values())
    with pytest.raises(ConfigError, match=r"No run matches 'reddit\*'\..*0"):
        piece("sticker-*", "reddit*")
    assert ran == []


def test_what_cannot_be_run_in_pieces(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"kteps-table1 cannot be run in",
    ):
        reproduce("kteps-table1", request(tmp_path, only=("*",)))


@pytest.mark.slow
def test_a_sweep_multiplies_all_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "SWEPT", (scene(),))
    monkeypatch.setattr(sweep, "FACTORS", (0.5, 1e30))
    asked: list[jobs.JobSpec] = []
    whole = jobs.run_jobs

    def noted(specs: list[jobs.JobSpec], *how: Any) -> None:
        asked.extend(specs)
        whole(specs, *how)

    monkeypatch.setattr(jobs, "run_jobs", noted)
    only = ("*-personalized-fl-?-rates-*", "*-global-fl-paper-*")
    text = reproduce("furl-sweep", request(tmp_path, seeds=[0, 1], only=only)).read_text(encoding="utf-8")
    packaged = parse_config(builtin_text("furl-sticker/personalized-fl"), "it").method.optimizer
    assert packaged.rates  # by name, too
    for spec in asked:
        if spec.name.startswith("sticker-personalized-fl-0-rates-0.5"):
            own = spec.resolved().method.optimizer
            assert own.learning_rate == 0.5 * packaged.learning_rate
            assert dict(own.rates) == {name: 0.5 * rate for name, rate in packaged.rates}
    assert [s.name for s in asked if s.name.endswith("0-rates-0.5")] == [
        "sticker-global-fl-paper-0-rates-0.5",
        "sticker-personalized-fl-0-rates-0.5",
    ]
    rows = json.loads((tmp_path / "furl-sweep-quick.json").read_text(encoding="utf-8"))
    found = {r["method"]: (r["value"], r["seeds"]) for r in rows}
    assert len(found) == len(scene().rows) * 2
    valid = [jobs.outcome(s.folder).valid for s in asked if "personalized-fl" in s.name and "0.5" in s.name]
    value, seeds = found["Personalized FL, best recipe, rates × 0.5"]
    assert (value, seeds) == (pytest.approx(sum(valid) / 2, rel=1e-6), [0, 1])
    assert found["Global FL, paper's recipe, rates × 1e+30"] == (None, [])  # broke down
    assert found["Global Server, rates × 0.5"] == (None, [])  # not run
    best = text[text.index("Best here, where one was:") : text.index("\n## ")]
    assert "- sticker-like (generated): Personalized FL, best recipe, rates × 0.5\n" in best
    assert "Global Server" not in best
    environment = json.loads((asked[0].folder / "run.json").read_text(encoding="utf-8"))["environment"]
    sources = {r["method"]: (r["commit"], r["numerics"]) for r in rows}
    assert sources["Personalized FL, best recipe, rates × 0.5"] == (environment["commit"] or "", [NUMERICS])
    assert sources["Global Server, rates × 0.5"] == ("", [])
    alike = jobs.Outcome("auc", 0.5, 0.5, 1.0, 2.0)
    monkeypatch.setattr(jobs, "outcome", lambda _: alike)
    text = reproduce("furl-sweep", request(tmp_path, seeds=[0, 1], only=only)).read_text(encoding="utf-8")
    assert "rates" not in text[text.index("Best here, where one was:") : text.index("\n## ")]


def test_a_scene_of_real_data_wants_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="The scene zulip_channels.*--data.*DIR"):
        reproduce("furl-table3", request(tmp_path))


def test_outcome_of_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="There is no run in"):
        jobs.outcome(tmp_path)
    assert not jobs.is_finished(tmp_path)


def test_folder_names_are_safe_and_distinct() -> None:
    assert jobs.folder_name("a", "b.c", "0") == "a-b.c-0"
    odd, other = jobs.folder_name("../x"), jobs.folder_name("/./x")
    assert odd != other
    assert not set(odd) & set('/\\:*?"<>|')


def test_most_frequent_label_by_hand() -> None:
    from fedkeep import FederatedData

    data = FederatedData.from_columns(
        ["a"] * 4 + ["b"] * 3,
        {"label": [0, 0, 1, 0, 2, 2, 1]},
        split=["train", "train", "train", "test", "train", "train", "test"],
        meta={"classes": 3},
    )
    assert most_frequent_label(data) == 0.5
    assert math.isnan(most_frequent_label(data, "valid"))
