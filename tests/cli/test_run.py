"""``fedkeep run``: what it prints, what it keeps, how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

import fedkeep as package
from fedkeep.core.records import read_records, read_sealed_records
from fedkeep.experiments import drive, progress
from tests.cli.conftest import Command
from tests.commands import succeeded
from tests.tiny import interrupt, kept_in


def states(folder: Path) -> dict[str, bytes]:
    """Everything that a run determines, byte by byte."""
    found = {name: (folder / name).read_bytes() for name in ("records.jsonl", "config.toml")}
    found["private"] = kept_in(folder / "private" / "store.db")
    return found | {p.name: p.read_bytes() for p in folder.glob("server-*.safetensors")}


def test_prints_the_metrics_of_the_best_epoch_and_nothing_else(fedkeep: Command) -> None:
    result = succeeded(fedkeep("run", "toy.toml"))
    records = [r for r in read_records(Path("runs/toy-0/records.jsonl")) if r.client is None]
    valid = {r.round: r.value for r in records if r.split == "valid" and r.metric == "accuracy"}
    best = max(valid, key=lambda t: (valid[t], -t))
    test = next(r.value for r in records if (r.round, r.split, r.metric) == (best, "test", "accuracy"))
    line = next(line for line in result.stdout.splitlines() if line.startswith("Accuracy "))
    assert line.split() == [
        "Accuracy",
        *(word for value in (valid[best], test) for word in (f"{100 * value:.1f}", "%")),
    ]
    assert result.stdout.startswith(f"Toy: epoch {best // 2} of 2, the best by accuracy on valid\n")
    assert result.stdout.splitlines()[-1] == "Run folder: runs/toy-0"
    assert result.stderr == ""  # no progress where there is no terminal


@pytest.mark.usefixtures("undrawn")
def test_where_auc_is_not_defined_the_page_shows_accuracy(fedkeep: Command) -> None:
    """Labels are of both classes in training alone; of the four on test two are predicted right."""
    rows = [f"{user},{x},{int(x > 0)},train" for user in "ab" for x in (-2, -1, 1, 2)]
    rows += [f"{user},{x},0,{split}" for user in "ab" for split in ("valid", "test") for x in (-9, 9)]
    Path("one.csv").write_text("\n".join(["user,x,label,split", *rows]) + "\n")
    Path("one.toml").write_text(
        'data = { reader = "table", path = "one.csv", features = ["x"] }\nmodel = { kind = "linear" }\n'
        "method = { kind = 'fedavg', optimizer = { learning_rate = 0.5 } }\nrun = { rounds = 8, cohort = 2 }\n"
    )
    result = succeeded(fedkeep("run", "one.toml", "--data", ".", "--out", "r"))
    assert result.stdout.startswith("one: epoch 8 of 8, the last; AUC is not defined on valid\n")
    assert fedkeep("report", "r").exit_code == 0
    page = Path("r/report.md").read_text(encoding="utf-8")
    assert "| configuration | test accuracy | accuracy, mean over users | best valid AUC |" in page
    assert "| fedavg | 50.0 % | 50.0 % | – |" in page
    assert "| fedavg | 0 | accuracy | 50.0 % | – | 8 | 8 | finished |" in page


def test_the_engine_is_told_and_workers_change_no_result(fedkeep: Command) -> None:
    for name, options in {
        "auto": [],
        "workers": ["--workers", 2, "--set", "run.engine=workers"],
        "one": ["--workers", 1],
    }.items():
        result = succeeded(fedkeep("run", "toy.toml", "--out", name, *options))
        told = [line for line in result.stdout.splitlines() if line.startswith("Engine: ")]
        info = json.loads(Path(name, "run.json").read_text(encoding="utf-8"))
        reason = info["engine_reason"]
        assert told == ([f"Engine: {info['engine']}, because {reason}."] if reason else [])
        assert info["engine"] == ("workers" if name == "workers" else "sequential")
    assert reason == "there is one core to use"
    without = {name: v for name, v in states(Path("auto")).items() if name != "config.toml"}
    assert without.items() <= states(Path("workers")).items()
    assert (
        Path("auto/config.toml").read_text() == Path("one/config.toml").read_text()
    )  # no setting of the run


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "workers", "auto"])
def test_one_worker_is_what_every_engine_has(fedkeep: Command, engine: str) -> None:
    succeeded(fedkeep("run", "toy.toml", "--workers", 1, "--set", f"run.engine={engine}", "--out", engine))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--workers", 2, "--set", "run.centralised=true"],
            "Centralised training has no clients side by side",
        ),
        (["--set", "run.workers=0"], "run.workers must be at least 1; got 0."),
        (["--set", "run.workers=two"], "run.workers: wanted a whole number; got 'two'."),
        (["--workers", 0], "0 is not in the range x>=1"),
    ],
)
def test_bad_numbers_of_workers(fedkeep: Command, options: list[object], message: str) -> None:
    result = fedkeep("run", "toy.toml", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not Path("runs").exists()


def test_a_progress_bar_is_shown_on_a_terminal(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    # as if standard error were a terminal
    monkeypatch.setattr(progress, "Silent", lambda: progress.ProgressBar("Toy", 4))
    result = succeeded(fedkeep("run", "toy.toml"))
    for shown in ("Toy", "4/4", "rounds/s", "valid accuracy 0."):
        assert shown in result.stderr


def test_the_folder_keeps_the_effective_configuration(fedkeep: Command) -> None:
    succeeded(
        fedkeep(
            "run",
            "toy.toml",
            "--set",
            "run.rounds=2",
            "--set",
            'method.optimizer.rates."us*"=0.3',
            "--seed",
            7,
        )
    )
    kept = tomllib.loads(Path("runs/toy-7/config.toml").read_text(encoding="utf-8"))
    assert kept["seed"] == 7
    assert kept["run"] == {"rounds": 2, "cohort": 3}
    assert kept["method"]["optimizer"]["rates"] == {"user": 0.5, "us*": 0.3}
    info = json.loads(Path("runs/toy-7/run.json").read_text(encoding="utf-8"))
    assert (info["seed"], info["rounds"], info["name"], info["status"]) == (7, 2, "Toy", "finished")


def test_a_finished_run_goes_on_to_more_rounds(fedkeep: Command) -> None:
    tuned = ("--set", "personalization.steps=2", "--set", "personalization.every=1")
    assert fedkeep("run", "toy.toml", "--out", "r", *tuned).exit_code == 0
    succeeded(fedkeep("run", "r", "--resume", "--set", "run.rounds=6"))
    assert fedkeep("run", "toy.toml", "--out", "other", *tuned, "--set", "run.rounds=6").exit_code == 0
    assert states(Path("r")) == states(Path("other"))
    curves = [read_sealed_records(Path(n, "personalization.jsonl"))[0] for n in ("r", "other")]
    assert curves[0] == curves[1]  # made anew: the one of round 4 is not shown as that of round 6
    assert {r.round for r in curves[0]} == {6}
    assert fedkeep("evaluate", "r").stdout.splitlines()[0] == "r: after round 6"
    before = states(Path("r"))
    result = fedkeep("run", "r", "--resume", "--set", "run.rounds=2")
    assert result.exit_code == 2
    assert result.stderr.strip().endswith(
        "Error: r has finished 6 rounds already, so it cannot end after 2. Name at least 6, or another folder."
    )
    assert states(Path("r")) == before


def test_without_overrides_the_file_is_kept_as_it_is(fedkeep: Command) -> None:
    text = "# a comment\n" + Path("toy.toml").read_text(encoding="utf-8")
    Path("toy.toml").write_text(text, encoding="utf-8")
    assert fedkeep("run", "toy.toml", "--out", "here").exit_code == 0
    assert Path("here/config.toml").read_text(encoding="utf-8") == text


def test_the_folder_does_not_name_the_folder_of_data(fedkeep: Command, csv: object) -> None:
    csv()  # type: ignore[operator]
    assert fedkeep("run", "table.toml", "--data", "data", "--out", "here").exit_code == 0
    for name in ("config.toml", "run.json", "records.jsonl"):
        assert str(Path("data").resolve()) not in Path("here", name).read_text(encoding="utf-8")


def test_fedkeep_data_names_the_folder_of_data(
    fedkeep: Command, csv: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(csv()))  # type: ignore[operator]
    result = succeeded(fedkeep("run", "table.toml"))
    assert "Accuracy" in result.stdout


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    fedkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fedkeep("run", "toy.toml", "--out", "whole").exit_code == 0
    original, rounds = drive.run_round, iter(range(3))

    def stopping(*arguments: object) -> object:
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        return original(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(drive, "run_round", stopping)
        result = fedkeep("run", "toy.toml", "--out", "in two")
    assert result.exit_code == 130
    assert result.stderr == 'Stopped after round 3. Go on with: fedkeep run "in two" --resume\n'
    succeeded(fedkeep("run", "in two", "--resume"))
    assert states(Path("whole")) == states(Path("in two"))


def test_stopped_before_the_first_round(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.experiments.build.build_model", interrupt)
    result = fedkeep("run", "toy.toml")
    assert (result.exit_code, result.stderr) == (
        130,
        "Stopped before the first round. Nothing was written.\n",
    )
    assert not Path("runs").exists()


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_of_a_real_process(fedkeep: Command) -> None:
    start = (
        "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from fedkeep.cli import main; main()"
    )
    settings = ["--set", "run.rounds=100000", "--set", "run.evaluate_every=0"]
    source = Path(package.__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", start, "run", "toy.toml", "--out", "long", *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 60
        while not Path("long/commit.json").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err
    done = json.loads(Path("long/commit.json").read_text(encoding="utf-8"))["round"]
    assert err == f"Stopped after round {done}. Go on with: fedkeep run long --resume\n"
    assert out == ""
    result = succeeded(fedkeep("evaluate", "long"))
    assert result.stdout.startswith(f"long: after round {done}\n")


def test_a_built_in_configuration_by_name(fedkeep: Command) -> None:
    small = ["--set", "data.users=4", "--set", "data.examples=10", "--set", "run.epochs=1"]
    result = succeeded(fedkeep("run", "demo/personalized-fl", *small))
    assert "Best possible accuracy on test: " in result.stdout
    assert Path("runs/demo-personalized-fl-0/commit.json").exists()


def test_nothing_judged(fedkeep: Command) -> None:
    result = succeeded(fedkeep("run", "toy.toml", "--set", "run.evaluate_every=0"))
    assert result.stdout.startswith("Toy: 4 rounds, nothing was judged")


def test_without_valid_the_last_epoch_is_shown_with_the_shared_part_and_fine_tuning(fedkeep: Command) -> None:
    changes = {
        "data.split.fractions": "[0.7, 0.0, 0.3]",
        "run.evaluate_shared": "true",
        "personalization.steps": "4",
        "personalization.every": "2",
        "personalization.ratio": "1.0",
    }
    given = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    result = succeeded(fedkeep("run", "toy.toml", *given))
    lines = result.stdout.splitlines()
    assert lines[0] == "Toy: epoch 2 of 2, the last; there is no valid"
    assert lines[1].split() == ["test", "test,", "shared", "part"]
    records = list(read_records(Path("runs/toy-0/records.jsonl")))
    curve = read_sealed_records(Path("runs/toy-0/personalization.jsonl"))[0]
    assert {r.split for r in curve} == {"personalization/0", "personalization/2", "personalization/4"}
    assert all(r.split != "test/shared" or r.round in (2, 4) for r in records)
    mean = sum(r.value for r in curve) / len(curve)
    (said,) = [line for line in lines if line.startswith("Fine-tuned on each user, mean over users: ")]
    assert said.endswith(f"{100 * mean:.1f} % on average over the tests (Ap).")


def test_a_tracker_is_told_and_goes_on_with_the_run(fedkeep: Command) -> None:
    own = "tests.experiments.test_trackers:Unnamed"
    succeeded(fedkeep("run", "toy.toml", "--out", "r", "--track", own))
    kept = tomllib.loads(Path("r/config.toml").read_text(encoding="utf-8"))
    assert kept["run"]["trackers"] == [own]
    before = json.loads(Path("r/tracked.json").read_text(encoding="utf-8"))["own"]
    assert before["records"] == len(list(read_records(Path("r/records.jsonl"))))
    assert fedkeep("run", "r", "--resume", "--set", "run.rounds=6").exit_code == 0
    after = json.loads(Path("r/tracked.json").read_text(encoding="utf-8"))["own"]
    assert after["records"] == len(list(read_records(Path("r/records.jsonl")))) > before["records"]
    refused = fedkeep("run", "toy.toml", "--out", "s", "--track", "tensorbord")
    assert refused.exit_code == 2
    assert "got 'tensorbord'. Did you mean 'tensorboard'?" in refused.stderr
    assert not Path("s").exists()


def threads() -> Executor:
    return ThreadPoolExecutor(2)


def test_its_clients_train_in_an_executor(fedkeep: Command) -> None:
    here = fedkeep("run", "toy.toml", "--out", "here")
    there = fedkeep("run", "toy.toml", "--out", "there", "--on", f"{__name__}:threads", "--workers", "2")
    assert there.exit_code == 0, there.output
    shown = [[line for line in found.stdout.splitlines() if "%" in line] for found in (here, there)]
    assert shown[0] == shown[1]
    assert len(shown[0]) > 1
    one, two = states(Path("here")), states(Path("there"))
    assert {name: one[name] for name in one if name != "records.jsonl"} == {
        name: two[name] for name in two if name != "records.jsonl"
    }


def test_a_place_for_a_run_is_said_to_be_none(fedkeep: Command) -> None:
    found = fedkeep("run", "toy.toml", "--on", "cluster")
    assert found.exit_code == 2
    assert "--on" in found.stderr
    assert not Path("runs").exists()


def test_parts_of_epochs_are_told_in_two_digits(fedkeep: Command) -> None:
    told = succeeded(fedkeep("run", "toy.toml", "--set", "run.rounds=1", "--set", "data.users=8"))
    assert "epoch 0.33 of 0.33, " in told.stdout  # a round of three
