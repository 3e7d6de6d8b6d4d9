"""Trackers: what they are told and when, what a resumed run tells them, and what becomes of one that fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedkeep.core.errors import ConfigError, installing
from fedkeep.core.records import Record, from_line
from fedkeep.experiments.run_directory import RunDirectory
from fedkeep.experiments.trackers import EndRun, Facts
from tests.experiments.runs import Stop, run, with_id
from tests.refusals import raises
from tests.tiny import lasting


class Own:
    """Keeps what it is told; may fail, or end the run, when it is told of a round."""

    def __init__(self, name: str = "own", fails: str = "", ends: int = 99, dies: int = 99) -> None:
        self.name, self.fails, self.ends, self.dies = name, fails, ends, dies
        self.facts: list[Facts] = []
        self.records: list[Record] = []
        self.ends_seen: list[str] = []
        self.committed: list[int] = []

    def started(self, facts: Facts) -> None:
        if self.fails == "started":
            raise OSError("no such server")
        self.facts.append(facts)
        self.records = [r for r in self.records if r.round < facts.since]

    def recorded(self, records: Sequence[Record]) -> None:
        last = max(r.round for r in records)
        if self.fails == "recorded" and last == 2:
            raise OSError("no such server")
        self.records += records
        folder = self.facts[-1].folder
        if folder is not None:
            self.committed.append(json.loads((folder / "commit.json").read_text())["round"])
        if last == self.dies:
            raise KeyboardInterrupt
        if last == self.ends:
            raise EndRun

    def finished(self, how: str) -> None:
        self.ends_seen.append(how)


class Unnamed(Own):
    """Can be made of a configuration."""


def lines(folder: Path) -> list[Record]:
    """Return all that a run measured, by round."""
    found = [
        from_line(line)
        for n in ("records", "timings")
        for line in (folder / f"{n}.jsonl").read_text().splitlines(keepends=True)
    ]
    return sorted(found, key=lambda r: r.round)


def by_round(records: Sequence[Record]) -> list[Record]:
    return sorted(records, key=lambda r: r.round)


def test_every_record_is_told_after_its_round_was_committed_and_changes_nothing(tmp_path: Path) -> None:
    own = Own()
    with with_id("one"):
        made = run(tmp_path / "a", trackers=[own])
        run(tmp_path / "b")
    wanted = lines(tmp_path / "a")
    assert {r.round for r in wanted} == {1, 2, 3, 4}
    assert {(r.split, r.metric) for r in wanted} >= {
        ("train", "loss"),
        ("time", "seconds"),
        ("valid", "accuracy"),
    }
    assert any(r.client is not None for r in wanted)
    assert own.records == wanted
    assert own.committed == [1, 2, 3, 4]
    (facts,) = own.facts
    assert (facts.run, facts.folder, facts.round, facts.since) == ("one", tmp_path / "a", 0, 1)
    assert facts.settings["rounds"] == 4
    assert own.ends_seen == ["finished"]
    kept = {k: v for k, v in lasting(tmp_path / "a").items() if k != "tracked.json"}
    assert kept == lasting(tmp_path / "b")
    alone = Own()
    run(None, trackers=[alone])
    assert [r for r in alone.records if r.split != "time"] == made.history
    assert alone.facts[0].folder is None


@pytest.mark.parametrize("when", ["told", "committed"])
def test_a_run_that_goes_on_tells_each_record_once(tmp_path: Path, when: str) -> None:
    """Interrupted after all were told of round 2, or once it was committed and before the tracker's mark."""
    own, folder = Own(dies=2 if when == "committed" else 99), tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        if when == "told":
            commit = RunDirectory.commit

            def stopping(self: RunDirectory, round: int, *arguments: object, **options: object) -> None:
                if round > 2:
                    raise Stop
                commit(self, round, *arguments, **options)  # type: ignore[arg-type]

            patch.setattr(RunDirectory, "commit", stopping)
        else:  # killed before the mark: it stays as it was after round 1
            from fedkeep.experiments.trackers import _TrackerLines

            mark = _TrackerLines._mark
            patch.setattr(
                _TrackerLines, "_mark", lambda self: mark(self) if own.committed in ([], [1]) else None
            )
        with pytest.raises(Stop if when == "told" else KeyboardInterrupt):
            run(folder, trackers=[own])
    assert own.ends_seen == ["failed" if when == "told" else "stopped"]
    own.dies = 99
    run(folder, resume=True, trackers=[own])
    assert own.facts[1].round == 2
    assert own.facts[1].since == (3 if when == "told" else 2)
    assert own.facts[1].run == own.facts[0].run
    assert {r.round for r in own.facts[1].history} == {1, 2}
    assert by_round(own.records) == lines(folder)
    run(folder, resume=True, trackers=[own])  # finished: nothing is told again
    assert by_round(own.records) == lines(folder)
    assert own.ends_seen[1:] == ["finished", "finished"]


def test_one_that_comes_later_is_told_all(tmp_path: Path) -> None:
    run(tmp_path / "run", trackers=[Own("first")])
    later = Own("later")
    run(tmp_path / "run", resume=True, trackers=[later])
    assert later.records == lines(tmp_path / "run")
    (tmp_path / "run" / "tracked.json").write_text('{"later": 3}')
    again = Own("later")
    run(tmp_path / "run", resume=True, trackers=[again])  # the mark is damaged
    assert again.records == lines(tmp_path / "run")


@pytest.mark.parametrize("when", ["started", "recorded"])
def test_one_that_fails_costs_nothing_but_itself(tmp_path: Path, when: str) -> None:
    bad, good = Own("bad", fails=when), Own("good")
    with pytest.warns(
        UserWarning,
        match=r"^The tracker 'bad' failed and.*OSError.*resumed",
    ) as told:
        run(tmp_path / "run", trackers=[bad, good])
    assert len(told) == 1
    assert good.records == lines(tmp_path / "run")
    assert {r.round for r in bad.records} == (set() if when == "started" else {1})
    assert bad.ends_seen == []
    bad.fails = ""
    run(tmp_path / "run", resume=True, trackers=[bad, good])
    assert bad.records == good.records == lines(tmp_path / "run")


def test_one_may_end_the_run(tmp_path: Path) -> None:
    other, ends = Own("other"), Own("ends", ends=2)
    made = run(tmp_path / "run", trackers=[ends, other])
    assert made.round == 2
    assert {r.round for r in other.records} == {1, 2}
    assert other.ends_seen == ends.ends_seen == ["stopped"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"
    with with_id("x"):
        whole = run(tmp_path / "whole")
    assert run(tmp_path / "run", resume=True).history == whole.history


def test_those_that_cannot_be_told_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "mlflow" else found(n, *a))
    wrong = {
        "run.trackers wants package.module:Class, 'tensorboard', 'mlflow' or 'wandb'; got 'tensorbord'. Did you mean "
        "'tensorboard'?": ["tensorbord"],
        f"The tracker 'mlflow' needs a package that is not installed: {installing('mlflow')}.": ["mlflow"],
        "run.trackers: 'nowhere:Tracker' cannot be made: No module named 'nowhere'.": ["nowhere:Tracker"],
        "Two trackers have the name 'own'. Give each an attribute `name` of its own.": [Own(), Own()],
        "trackers: wanted a name, or an object with started, recorded and finished; got 3.": [3],
    }
    for message, trackers in wrong.items():
        with raises(ConfigError, said=message):
            run(tmp_path / "run", trackers=trackers)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"^A run without a folder wants.*TensorBoard"):
        run(None, trackers=["tensorboard"])


def test_a_class_of_ones_own_is_named_in_a_configuration(tmp_path: Path) -> None:
    run(tmp_path / "run", trackers=[f"{__name__}:Unnamed"])
    assert list(json.loads((tmp_path / "run" / "tracked.json").read_text())) == ["own"]
