"""Whatever is wrong gets a clear message and exit code 2, and loses nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedkeep.experiments.run_directory import RunDirectory
from tests.cli.conftest import Command
from tests.cli.test_run import states
from tests.commands import succeeded
from tests.tiny import interrupt

Refused = Callable[..., str]
Csv = Callable[..., Path]


def change(old: str, new: str, path: str = "toy.toml") -> None:
    text = Path(path).read_text(encoding="utf-8")
    assert old in text
    Path(path).write_text(text.replace(old, new), encoding="utf-8")


# --- configurations


@pytest.mark.parametrize(
    ("words", "begins", "ends"),
    [
        ("run demo/personalised-fl", "There is no configuration", "Did you mean 'demo/personalized-fl'?"),
        (
            "run runs/ci2 --resume",
            "There is no run to resume in 'runs/ci2': ",
            "fedkeep run CONFIG --out runs/ci2.",
        ),
        ("check demo", "There is", "one of demo/global-fl, demo/personalized-fl, demo/personalized-server?"),
        ("run no.toml", "no.toml is no valid TOML: ", ""),
        ("run no-text", "Cannot read the configuration no-text: ", ""),
        ("run toy.toml --set run.rounds", "--set wants key=value", "got 'run.rounds'."),
        ("run toy.toml --set name.first=1", "--set name.first: 'name' is a value, not a table.", ""),
        ("run table.toml", "Wanted the data file ", "in a configuration it is data.path."),
        ("run table.toml --data nowhere", "The folder of data nowhere does not exist.", ""),
        ("run toy.toml --resume", "There is no run in runs/toy-0: ", ""),
        ("evaluate nowhere", "There is no run in nowhere: ", ""),
        ("personalize nowhere", "There is no run in nowhere: ", ""),
        ("report nowhere", "There is no run in nowhere: ", ""),
        ("evaluate toy.toml", "There is no run in toy.toml: it is a file.", "and writes one."),
        ("evaluate .", "There is no run in .: ", "that do: made."),
        ("evaluate mad", "There is no run in mad: ", "Did you mean 'made'?"),
        (
            "predict made --data x.csv",
            "There are no exported models in made: ",
            "fedkeep export made --all --out FOLDER.",
        ),
        ("predict mad --data x.csv", "There are no exported models in mad: ", "run.export(FOLDER, [ID])."),
        ("run rows.csv", "rows.csv is a table, not a configuration. fedkeep start rows.csv", ""),
        ("run toi.toml", "There is no configuration 'toi.toml': ", "Did you mean 'toy.toml'?"),
        ("run toy", "There is no configuration 'toy': ", "Did you mean 'toy.toml'?"),
        ("run .", "There is no run in .: ", "that do: made."),
        ("start row.csv", "Wanted the data file row.csv, ", "Did you mean 'rows.csv'?"),
        ("start no/row.csv", "Wanted the data file no/row.csv, ", "There is no folder no either."),
        (
            "run toy.toml --set epochs=4",
            "toy.toml with epochs = 4:\n  epochs: unknown key. Did you mean run.epochs",
            "",
        ),
        ("run toy.toml --out no.toml/r", "Cannot make the run's folder no.toml/r: ", ""),
    ],
)
def test_what_is_not_there(refused: Refused, words: str, begins: str, ends: str) -> None:
    Path("no.toml").write_text("name = 'Toy\n", encoding="utf-8")
    Path("no-text").write_bytes(b"\xff\xfe\x00")
    Path("rows.csv").write_text("user,label\n", encoding="utf-8")
    Path("made").mkdir()
    Path("made/run.json").write_text("{}", encoding="utf-8")
    message = refused(*words.split())
    assert message.startswith(f"Error: {begins}")
    assert message.endswith(ends)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "cohort = 3",
            "cohrot = 3",
            "toy.toml:\n  run.cohrot: unknown key. Did you mean run.cohort?",
        ),
        (
            "learning_rate = 0.1",
            "learning_rat = 0.1",
            "toy.toml:\n  method.optimizer.learning_rat: unknown key. Did you mean method.optimizer.learning_rate?",
        ),
        (
            'kind = "furl"',
            'kind = "furl"\nbatch_sizes = 3',
            "method.batch_sizes: unknown key. Did you mean method.batch_size?",
        ),
        ("users = 6", "user = 6", "data.user: unknown key. Did you mean data.users?"),
        ("cohort = 3", 'cohort = "3"', "toy.toml:\n  run.cohort: wanted a whole number; got '3'."),
        ("cohort = 3", "cohort = true", "toy.toml:\n  run.cohort: wanted a whole number; got true."),
        ("cohort = 3", "cohort = 0", "toy.toml:\n  run.cohort must be at least 1; got 0."),
        ("users = 6", "users = 2.5", "data.users: wanted a whole number; got 2.5."),
        (
            'kind = "furl"',
            'kind = "furl"\nepochs = "two"',
            "method.epochs: wanted a whole number; got 'two'.",
        ),
        ('reader = "toy"', 'reader = "toys"', "data.reader: there is no reader 'toys'."),
        ('kind = "linear"', 'kind = "liner"', "model.kind: there is no model 'liner'."),
        ('kind = "furl"', 'kind = "fulr"', "method.kind: there is no method 'fulr'."),
        ("rounds = 4", "rounds = 4\nepochs = 2", "toy.toml:\n  run: Got rounds=4 and epochs=2.0."),
        (
            "rounds = 4",
            'rounds = 4\nengine = "poled"',
            "engine: there is no engine 'poled'. There are auto, sequential, ",
        ),
        ("rounds = 4", 'rounds = 4\ndevice = "warp"', "The device 'warp' cannot be used: "),
        (
            'kind = "furl"',
            'kind = "furl"\nprivate = "usr"',
            (
                "The private pattern 'usr' matches no parameter of Linear. Did you mean 'user'? In a "
                "configuration it is method.private."
            ),
        ),
        ('kind = "furl"', 'kind = "furl"\nbatch_size = 0', "method: batch_size must be at least 1; got 0."),
        ("user = 0.5", "usr = 0.5", "The learning rate pattern 'usr' matches no parameter; "),
        (
            'kind = "furl"',
            'kind = "local"\nserver_optimizer = {}',
            "method.server_optimizer: 'local' has no server ",
        ),
    ],
)
def test_settings(refused: Refused, old: str, new: str, message: str) -> None:
    change(old, new)
    assert refused("run", "toy.toml").startswith(f"Error: {message}")
    assert not Path("runs/toy-0").exists()


# --- data


def test_a_missing_data_file(refused: Refused, csv: Csv) -> None:
    (csv() / "mine.csv").unlink()
    assert str(Path("data/mine.csv")) in refused("run", "table.toml", "--data", "data")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ann,1,2", "line 32: wanted 4 cells, as in the header; got 3."),
        ("ann,tall,2,1", "line 32: wanted a number in column 'height'; got 'tall'."),
        ("ann,inf,2,1", "line 32: wanted a number in column 'height'; got 'inf'."),
        ("ann,1,2,maybe", "line 32: label 'maybe' is not one of label_names, ['0', '1']."),
        (",1,2,1", "line 32: column 'user': A client id is a text of 1 to 200 printable characters, "),
    ],
)
def test_a_malformed_line(refused: Refused, csv: Csv, line: str, message: str) -> None:
    csv(line)
    names = 'data.label_names=["0", "1"]'
    assert f"{Path('data/mine.csv')}, {message}" in refused(
        "run", "table.toml", "--data", "data", "--set", names
    )


def test_a_user_with_one_example_takes_part(fedkeep: Command, csv: Csv) -> None:
    csv("dot,1,2,1")
    succeeded(fedkeep("run", "table.toml", "--data", "data", "--out", "one"))
    info = json.loads(Path("one/run.json").read_text(encoding="utf-8"))
    assert info["data"]["clients"] == 4


def test_a_loss_that_becomes_nan(refused: Refused, fedkeep: Command) -> None:
    change("learning_rate = 0.1", "learning_rate = 1e38")
    change("rounds = 4", "rounds = 50")
    message = refused("run", "toy.toml")
    assert message.startswith("Error: Client 'user-")
    assert "became NaN or infinite" in message
    assert message.endswith("Lower the learning rate, set clip_norm, or look for NaN in this client's data.")
    succeeded(
        fedkeep(
            "run",
            "toy.toml",
            "--out",
            "skipping",
            "--set",
            "run.on_nonfinite=skip",
            "--set",
            "run.rounds=2",
            "--set",
            "method.batch_size=32",
        )
    )


# --- run folders


@pytest.mark.usefixtures("run_folder")
def test_a_run_folder_that_exists(refused: Refused) -> None:
    before = states(Path("r"))
    told = refused("run", "toy.toml", "--out", "r")
    assert told.startswith("Error: r already exists and is not empty.")
    assert "fedkeep run r --resume" in told
    assert states(Path("r")) == before


@pytest.mark.usefixtures("run_folder")
def test_a_run_goes_on_with_its_own_settings_only(refused: Refused) -> None:
    before = states(Path("r"))
    message = refused("run", "r", "--resume", "--seed", "3")
    assert message.startswith("Error: r is a run of another configuration")
    assert "  seed: 0 in the run, 3 now\n" in message
    assert states(Path("r")) == before


@pytest.mark.usefixtures("run_folder")
@pytest.mark.parametrize("command", ["run r --resume", "evaluate r", "personalize r --client user-1"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", b'{"format": 1', "run.json is damaged: "),
        ("commit.json", b"[]", "commit.json is damaged: "),
        ("config.toml", b"name = ", "is no valid TOML: "),
        (
            "server-4.safetensors",
            b"too short",
            "server-4.safetensors is damaged: its hash is not the committed one.",
        ),
        ("private/store.db", b"short", "store.db does not begin as a private store does"),
        ("records.jsonl", b"", "records.jsonl is shorter than the "),
    ],
)
def test_a_damaged_run(
    refused: Refused, fedkeep: Command, command: str, name: str, content: bytes, message: str
) -> None:
    whole = Path(shutil.copytree("r", "whole"))
    (Path("r") / name).write_bytes(content)
    assert message in refused(*command.split())
    shutil.copyfile(whole / name, Path("r") / name)  # restored from a copy, it is as good as before
    succeeded(fedkeep(*command.split()))


@pytest.mark.usefixtures("run_folder")
def test_a_run_that_is_in_use(refused: Refused) -> None:
    busy = RunDirectory.open(Path("r"))
    try:
        for command in (("run", "r", "--resume"), ("evaluate", "r")):
            assert refused(*command) == (
                "Error: r is in use by another process. Wait for it, or name another folder."
            )
    finally:
        busy.close()


# --- errors that nobody foresaw


def test_debug_shows_where_an_error_came_from(fedkeep: Command) -> None:
    result = fedkeep("--debug", "run", "nothing")
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert "Error: There is no configuration 'nothing'" in result.stderr


def test_ctrl_c_outside_of_training(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.experiments.load.load_run", interrupt)
    result = fedkeep("evaluate", "somewhere")
    assert (result.exit_code, result.stderr) == (130, "Stopped.\n")
