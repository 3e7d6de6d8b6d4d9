"""``fedkeep evaluate``, ``report`` and ``reproduce``."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fedkeep.core.records import read_records
from fedkeep.experiments.load import load_run
from fedkeep.experiments.run_directory import RunDirectory
from tests.cli.conftest import Command
from tests.commands import succeeded
from tests.tiny import interrupt

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize(
    ("round", "options", "told"), [(2, (), "2 of 4, the best on valid"), (4, ("--round", "last"), "4")]
)
def test_a_rounds_metrics(
    fedkeep: Command, run_folder: Path, round: int, options: tuple[str, ...], told: str
) -> None:
    recorded = {
        (r.split, r.metric): r.value
        for r in read_records(run_folder / "records.jsonl")
        if r.client is None and r.round == round
    }
    for split in ("valid", "test"):
        result = succeeded(fedkeep("evaluate", "r", "--split", split, *options))
        assert result.stdout.startswith(f"r: after round {told}\n")
        line = next(line for line in result.stdout.splitlines() if line.startswith("Accuracy "))
        assert line.split() == ["Accuracy", f"{100 * recorded[split, 'accuracy']:.1f}", "%"]


def test_every_user(fedkeep: Command, run_folder: Path) -> None:
    recorded = {
        r.client: r
        for r in read_records(run_folder / "records.jsonl")
        if r.client is not None and r.metric == "accuracy"
    }
    result = fedkeep("evaluate", "r", "--per-client")
    shown = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.startswith("user-")}
    assert shown.keys() == recorded.keys()
    assert {name: int(cells[1]) for name, cells in shown.items()} == {c: r.n for c, r in recorded.items()}


def test_every_users_result_as_a_file(
    fedkeep: Command, run_folder: Path, refused: Callable[..., str]
) -> None:
    for name in ("users.parquet", "users.csv"):
        succeeded(fedkeep("evaluate", "r", "--out", name))
    rows = pq.read_table("users.parquet").to_pylist()
    wanted = load_run(run_folder).clients_frame().to_pylist()
    assert rows == wanted
    with Path("users.csv").open(encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [(r["client"], int(r["examples"]), float(r["accuracy"])) for r in read] == [
        (r["client"], r["examples"], r["accuracy"]) for r in wanted
    ]
    for wrong in ("users.xlsx", "nowhere/users.csv"):
        message = refused("evaluate", "r", "--out", wrong)
        assert ".parquet" in message
        assert wrong in message
        assert not Path(wrong).exists()


def test_an_unfinished_run_is_said_to_be_one(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """On standard error, by every command that takes numbers or models from it."""
    commit = RunDirectory.commit

    def interrupt(self: RunDirectory, round: int, *rest: Any, **more: Any) -> None:
        if round == 4:
            raise KeyboardInterrupt
        commit(self, round, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "commit", interrupt)
        settings = ["--set", "run.evaluate_shared=true", "--set", "run.evaluate_every=1"]
        assert fedkeep("run", "toy.toml", "--out", "half", *settings).exit_code == 130
    said = "half is not finished: it stands after round 3 of 4, so its numbers may still change.\n"
    for command in (
        "evaluate half",
        "export half --client user-1 --out models",
        "personalize half --client user-1",
        "worth half --json",
        "attack half --attacks who --clients 4 --epsilons none --json",
    ):
        result = succeeded(fedkeep(*command.split()))
        assert result.stderr == said
        assert said not in result.stdout
    assert fedkeep("run", "half", "--resume").exit_code == 0
    assert fedkeep("evaluate", "half").stderr == ""


def test_an_unknown_split(refused: Callable[..., str], run_folder: Path) -> None:
    message = "Error: --split wants 'train', 'valid' or 'test'; got 'tests'. Did you mean 'test'?"
    assert refused("evaluate", "r", "--split", "tests") == message


def test_nothing_to_judge(fedkeep: Command, refused: Callable[..., str]) -> None:
    settings = ["--set", "data.split={fractions=[0.9,0.0,0.1]}"]
    succeeded(fedkeep("run", "toy.toml", "--out", "r", *settings))
    message = "Error: There is nothing to judge: none of the 6 clients has an example in the split 'valid'."
    assert refused("evaluate", "r", "--split", "valid").startswith(message)


def test_an_unknown_device(refused: Callable[..., str], run_folder: Path) -> None:
    assert refused("evaluate", "r", "--device", "warp").startswith(
        "Error: The device 'warp' cannot be used: "
    )


def test_a_report_of_one_run_lies_in_its_folder(fedkeep: Command, run_folder: Path) -> None:
    result = succeeded(fedkeep("report", "r"))
    assert result.stdout == f"Page: {Path('r/report.html')}\n"
    assert Path("r/report.html").read_text(encoding="utf-8").startswith("<!")
    assert Path("r/report.md").exists()
    assert fedkeep("run", "r", "--resume").exit_code == 0  # the page does not disturb the run


def test_a_report_of_several_runs(fedkeep: Command, run_folder: Path) -> None:
    assert fedkeep("run", "toy.toml", "--out", "s", "--seed", 1).exit_code == 0
    assert fedkeep("report", "r", "s").stdout == f"Page: {Path('report/report.html')}\n"
    succeeded(fedkeep("report", "r", "s", "--out", "page", "--title", "Two seeds"))
    assert json.loads(Path("page/report.json").read_text(encoding="utf-8"))["title"] == "Two seeds"


@pytest.mark.skipif(sys.platform != "linux", reason="names of folders are texts there")
def test_a_report_of_a_run_in_a_folder_whose_name_is_no_utf_8(fedkeep: Command, run_folder: Path) -> None:
    folder = Path(os.fsdecode(b"a\xffb"))
    run_folder.rename(folder)
    succeeded(fedkeep("report", str(folder)))
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!")


def test_a_report_needs_runs(fedkeep: Command) -> None:
    assert fedkeep("report").exit_code == 2


def test_a_report_that_cannot_be_written(refused: Callable[..., str], run_folder: Path) -> None:
    Path("file").write_text("", encoding="utf-8")
    assert refused("report", "r", "--out", "file/page").startswith("Error: file")


def test_an_unknown_reproduction(refused: Callable[..., str]) -> None:
    message = refused("reproduce", "furl-table4")
    assert "There is no reproduction 'furl-table4'. Did you mean 'furl-table3'?" in message


def test_a_reproduction_without_its_data(refused: Callable[..., str]) -> None:
    assert "--data DIR or the variable FEDKEEP_DATA" in refused("reproduce", "furl-table3")


def test_a_reproduction_is_called_with_what_was_asked(
    fedkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def reproduce(name: str, request: Any) -> Path:
        asked.append((name, request))
        return request.out / "furl-table3.md"

    monkeypatch.setattr("fedkeep.experiments.reproductions.reproduce", reproduce)
    result = succeeded(
        fedkeep(
            "reproduce",
            "furl-table3",
            "--data",
            "d",
            "--scale",
            "full",
            "--seeds",
            "0,2",
            "--out",
            "o",
            "--only",
            "sticker-*",
            "--only",
            "*-0",
            "--set",
            "data.reader=reviews",
            "--set",
            "run.rounds=3",
        )
    )
    assert result.stdout == f"Results: {Path('o/furl-table3.md')}\n"
    ((name, request),) = asked
    assert (name, request.data, request.out) == ("furl-table3", Path("d"), Path("o"))
    assert (request.scale, request.seeds, request.jobs) == ("full", [0, 2], 1)
    assert request.only == ("sticker-*", "*-0")
    assert request.changes == {"data.reader": "reviews", "run.rounds": "3"}


def test_settings_that_a_reproduction_does_not_take_are_refused(refused: Callable[..., str]) -> None:
    assert refused("reproduce", "kteps-table3", "--set", "nokey").startswith("Error: --set wants key=value")
    assert refused("reproduce", "toy-table", "--set", "run.rounds=2").startswith("Error: ")


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ("0,a", "--seeds wants whole numbers between commas, e.g. 0,1,2; got '0,a'."),
        ("1,1", "--seeds names a seed twice: '1,1'."),
    ],
)
def test_wrong_seeds(refused: Callable[..., str], seeds: str, message: str) -> None:
    assert refused("reproduce", "furl-table3", "--seeds", seeds) == f"Error: {message}"


def test_a_stopped_reproduction(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.experiments.reproductions.reproduce", interrupt)
    result = fedkeep("reproduce", "furl-table3")
    assert result.exit_code == 130
    assert result.stderr.startswith("Stopped. Call the same command again to go on")
