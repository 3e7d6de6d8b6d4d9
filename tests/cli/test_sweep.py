"""``fedkeep sweep``: what it prints and leaves, with real training, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedkeep.core.errors import NonFiniteError, installing
from fedkeep.experiments.sweeps import trials
from tests.cli.conftest import Command
from tests.commands import succeeded

RATE = "method.optimizer.learning_rate={low = 0.05, high = 0.5, log = true}"
SMALL = ("--set", "run.rounds=2", "--set", "run.evaluate_every=1")


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("optuna")


def test_the_best_configuration_gives_the_run_that_was_chosen(fedkeep: Command) -> None:
    words = ("sweep", "toy.toml", "--range", RATE, "--trials", 2, *SMALL)
    result = succeeded(fedkeep(*words))
    out = Path("sweeps/toy")
    content = json.loads((out / "results.json").read_text(encoding="utf-8"))
    (furl,) = content["methods"]
    assert len({t["values"]["method.optimizer.learning_rate"] for t in furl["trials"]}) == 2
    assert f"2: {2} finished, 0 ended early, 0 diverged" in result.stdout
    assert result.stdout.splitlines()[-2:] == [
        "Best of furl: sweeps/toy/best-furl.toml",
        "Results: sweeps/toy/results.md",
    ]
    succeeded(fedkeep("run", out / "best-furl.toml", "--out", "again"))
    chosen = out / "trials" / f"furl-{furl['best']}" / "seed-0" / "records.jsonl"
    assert Path("again/records.jsonl").read_bytes() == chosen.read_bytes()
    for split in ("valid", "test"):
        values = [
            r["value"]
            for r in map(json.loads, chosen.read_text(encoding="utf-8").splitlines())
            if (r["split"], r["metric"], r["client"]) == ("valid", "accuracy", None)
        ]
        best = values.index(max(values)) + 1
        there = [
            r["value"]
            for r in map(json.loads, chosen.read_text(encoding="utf-8").splitlines())
            if (r["round"], r["split"], r["metric"], r["client"]) == (best, split, "accuracy", None)
        ]
        assert furl[split] == there
    other = fedkeep(*words, "--seeds", 2)
    assert other.exit_code == 2
    assert "sweeps/toy holds another sweep" in other.stderr


def test_the_best_configuration_finds_the_data_of_the_one_that_was_swept(
    fedkeep: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    rows = [f"u{n % 3},{n % 7},{n % 5},{'ab'[n % 2]}" for n in range(60)]
    Path("mine/mine.csv").write_text("\n".join(["user,height,width,label", *rows]))
    Path("table.toml").rename("mine/table.toml")
    batches = "method.batch_size={choices=[4,8]}"
    succeeded(fedkeep("sweep", "mine/table.toml", "--range", batches, "--trials", 1, "--out", "s/t"))
    succeeded(fedkeep("run", "s/t/best-furl.toml", "--out", "again"))
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path / "s"))  # where other data are
    succeeded(fedkeep("compare", "s/t/best-furl.toml", "--seeds", "3", "--out", "c"))


def test_the_status_of_a_sweep(fedkeep: Command) -> None:
    words = ("sweep", "toy.toml", "--range", RATE, *SMALL)
    asked = succeeded(fedkeep(*words, "--trials", 2, "--status"))
    assert "Expected end: not before" in asked.stdout
    assert not Path("sweeps").exists()
    succeeded(fedkeep(*words, "--trials", 1))
    asked = succeeded(fedkeep(*words, "--trials", 2, "--status"))
    assert "1 done, 0 running, 0 failed, 1 waiting." in asked.stdout
    assert "furl-0" in asked.stdout


def test_a_sweep_that_chooses_nothing_says_so_and_does_not_end_well(
    fedkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise NonFiniteError("The loss of user-1 became NaN.")

    monkeypatch.setattr(trials, "run_config", breaks)
    result = fedkeep("sweep", "toy.toml", "--range", RATE, "--trials", 2, *SMALL)
    assert result.exit_code == 1, result.output
    assert result.stderr.splitlines()[-1] == "Nothing is chosen for furl: no trial came to its end."
    assert result.stdout.splitlines()[-1] == "Results: sweeps/toy/results.md"
    assert not list(Path("sweeps/toy").glob("*.toml"))


def test_it_is_stopped_and_goes_on(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("space.toml").write_text(RATE.replace("=", " = ", 1), encoding="utf-8")
    words = ("sweep", "toy.toml", "--space", "space.toml", "--trials", 2, "--out", "s", *SMALL)
    run, calls = trials.run_config, list[int]()

    def once(*args: object, **settings: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(trials, "run_config", once)
    stopped = fedkeep(*words)
    assert stopped.exit_code == 130
    assert "Call the same command again to go on" in stopped.stderr
    assert not Path("s/results.md").exists()
    assert fedkeep(*words).exit_code == 0
    assert len(calls) == 3
    assert len(json.loads(Path("s/results.json").read_text())["methods"][0]["trials"]) == 2


@pytest.mark.slow
def test_side_by_side(fedkeep: Command) -> None:
    words = (
        "sweep",
        "toy.toml",
        "--range",
        RATE,
        "--methods",
        "furl,fedavg",
        "--trials",
        3,
        "--jobs",
        2,
        *SMALL,
    )
    result = succeeded(fedkeep(*words))
    for m in json.loads(Path("sweeps/toy/results.json").read_text())["methods"]:
        assert [(t["number"], t["state"]) for t in m["trials"]] == [(n, "finished") for n in range(3)]
        assert len({json.dumps(t["values"]) for t in m["trials"]}) == 3
        best = tomllib.loads(Path(f"sweeps/toy/best-{m['method']}.toml").read_text())
        assert best["method"]["kind"] == m["method"]
    assert "6 of 6 finished after" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "Nothing is to be searched. Give a range (in quotes), e.g. --range '",
        ),
        (
            ["--range", "method.mu"],
            "--range wants KEY=RANGE, e.g. --range 'method.optimizer.learning_rate={low=0.01",
        ),
        (
            ["--range", "method.optimizer.learning_rate={low=2.0,high=1.0}"],
            "the range is empty: low is 2.0, high is",
        ),
        (["--range", "method.batch_size=8,16"], "--range method.batch_size wants a range: "),
        (["--range", "method.mu={low=0.1,high=1.0}"], "The space does not fit furl: method.mu: unknown key."),
        (
            ["--range", RATE, "--methods", "furl,fedavgg"],
            "--methods: there is no method 'fedavgg'.",
        ),
        (["--range", RATE, "--methods", "furl,furl"], "--methods wants different names between commas"),
        (["--space", "none.toml"], "Cannot read the configuration none.toml: No such file or directory."),
    ],
)
def test_what_is_refused(refused: Callable[..., str], words: list[str], message: str) -> None:
    assert message in refused("sweep", "toy.toml", *words)
    assert not Path("sweeps").exists()


def test_without_optuna(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "optuna" else found(name, *a)
    )
    said = refused("sweep", "toy.toml", "--range", RATE)
    assert said == f"Error: This command needs Optuna, which is not installed: {installing('sweep')}."
