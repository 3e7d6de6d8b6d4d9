"""Odd settings, refusals of the system, and Ctrl-C at any time: one clear message, no traceback."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from fedkeep.core.errors import visible
from fedkeep.experiments.progress import make_progress
from tests.cli.conftest import Command
from tests.commands import succeeded

Refused = Callable[..., str]
ROOT = Path(__file__).resolve().parents[2]


# --- odd settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("#=inf", "--set #: wanted one key."),
        ("data.#x=1", '--set data.#x: not a key of TOML; quote a pattern, as in rates."head.*"=0.1.'),
        ("data.users=" + "[" * 5000, "--set data.users: it nests deeper than 20 levels."),
        ("data.users=" + "[" * 30 + "]" * 30, "--set data.users: it nests deeper than 20 levels."),
        ("data.users=" + "7" * 5000, "--set data.users: it holds an integer of more than 64 bits."),
        ("seed=99999999999999999999", "--set seed: it holds an integer of more than 64 bits."),
        (
            "name=" + "x" * 20_000,
            "toy.toml with --set is no configuration: it holds a text of more than 10,000 characters.",
        ),
        (".".join("a" * 30) + "=1", f"--set {'.'.join('a' * 30)}: it nests deeper than 20 levels."),
        (
            "run.rounds=" + "x" * 500,
            "toy.toml:\n  run.rounds: wanted a whole number; got '" + "x" * 79 + " ….",
        ),
        ("run.epochs=inf", "toy.toml:\n  run.epochs must be finite; got inf."),
        (
            "model.features=3",
            "model.features: wanted 4, as the data have; got 3. Leave it out to take the data's.",
        ),
        (
            "model.classes=2",
            "model.classes: wanted at least 3, as the data have; got 2. Leave it out to take the data's.",
        ),
        (
            "method.loss.class_weights=[1, 20]",
            "method.loss.class_weights: wanted 3 numbers, one for each class; got 2.",
        ),
        (
            "method.loss.class_weights=[1, 20, -1]",
            "toy.toml:\n  method.loss.class_weights.2: wanted at least 0; got -1.",
        ),
        (
            "method.loss.class_weights=[1, 20, nan]",
            "toy.toml:\n  method.loss.class_weights.2: wanted a finite number; got nan.",
        ),
        (
            "method.loss.class_weights=[0, 0, 0]",
            "toy.toml:\n  method.loss: class_weights must be above 0 for one class at least; got [0.0, 0.0, 0.0].",
        ),
        (
            "method.loss.class_weights=balanced",
            "toy.toml:\n  method.loss.class_weights: wanted a list; got 'balanced'.",
        ),
        (
            "method.loss={kind='squared_error', class_weights=[1, 2, 3]}",
            "toy.toml:\n  method.loss: class_weights are for 'cross_entropy'; 'squared_error' knows no classes.",
        ),
        ("data.users=1000000000", "Generated data hold at most 100,000,000 numbers"),
    ],
)
def test_settings_that_no_run_has(refused: Refused, given: str, message: str) -> None:
    where, _, fact = message.rpartition(":\n  ")
    said = refused("run", "toy.toml", "--set", given)
    assert said.startswith(f"Error: {where}")
    assert fact in said
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + b"[" * 5000, "toy.toml is no configuration: it nests deeper than 20 levels."),
        (b"a = " + b"7" * 5000, "toy.toml is no configuration: it holds an integer of more than 64 bits."),
        (b"#" * (1 << 20) + b"\n", "The configuration toy.toml is longer than 1 MiB. Is it the right file?"),
    ],
)
def test_files_that_are_no_configuration(refused: Refused, content: bytes, message: str) -> None:
    Path("toy.toml").write_bytes(content)
    assert refused("run", "toy.toml") == f"Error: {message}"


def test_a_model_larger_than_any_memory(refused: Refused) -> None:
    text = (
        Path("toy.toml")
        .read_text()
        .replace(
            'kind = "linear"',
            'kind = "bag_of_words"\nvocabulary = 9\nuser_dim = 4\nembedding_dim = 4000000000000',
        )
    )
    Path("toy.toml").write_text(text)
    message = refused("run", "toy.toml")
    assert message.startswith("Error: model: 'bag_of_words' cannot be made of ")


@pytest.mark.parametrize(
    "model",
    [
        'kind = "bag_of_words"\nvocabulary = 9\nuser_dim = 1000000000',
        'kind = "bag_of_words"\nvocabulary = 9\nuser_dim = 4\nembedding_dim = 3000000000',
        'kind = "bag_of_words"\nvocabulary = 60000000\nuser_dim = 4\nembedding_dim = 60000000',
        'kind = "text_classifier"\nvocabulary = 9\nhidden = 60000000',
        'kind = "mlp"\nhidden = 100000000000',
        'kind = "cnn"\nchannels = 3\nside = 32\nwidths = [60000000, 60000000]',
        'kind = "resnet"\nchannels = 3\nwidths = [16, 60000000]',
    ],
)
def test_sizes_are_bounded_before_anything_is_made(refused: Refused, model: str) -> None:
    Path("large.toml").write_text(Path("toy.toml").read_text().replace('kind = "linear"', model))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "GB fit" in refused("run", "large.toml")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes; on macOS bytes
    assert not Path("runs").exists()


LONG = "1000000000000000"
TOGETHER = """
[data]
reader = "toy"
users = 6
examples = 12
"""


@pytest.mark.parametrize(
    "words",
    [
        ("run", "toy.toml", "--set", f"run.rounds={LONG}"),
        ("run", "together.toml", "--set", f"run.epochs={LONG}"),
        ("run", "toy.toml", "--set", f"method.epochs={LONG}"),
        ("run", "toy.toml", "--set", "method.kind=fedavg", "--set", f"personalization.steps={LONG}"),
        ("run", "toy.toml", "--set", f"method.adapt.epochs={LONG}", "--set", "run.evaluate_adapted=true"),
        ("compare", "toy.toml", "--set", f"run.rounds={LONG}", "--seeds", "2"),
        ("sweep", "toy.toml", "--range", "method.epochs={low=1,high=2}", "--trials", LONG),
        ("sweep", "toy.toml", "--range", f"method.epochs={{low=1,high={LONG}}}", "--trials", "2"),
    ],
)
def test_what_would_take_longer_than_a_month_is_asked_for(refused: Refused, words: tuple[str, ...]) -> None:
    Path("together.toml").write_text(TOGETHER)
    message = refused(*words)
    assert re.search(r"would take at least [\d,.e+]+ days", message), message
    assert "--yes" in message
    assert not any(Path(made).exists() for made in ("runs", "comparisons", "sweeps"))


def test_seeds_are_bounded_before_they_are_listed(refused: Refused) -> None:
    assert "1000" in refused("sweep", "toy.toml", "--range", "method.epochs={low=1,high=2}", "--seeds", LONG)
    assert "how many seeds" in refused("compare", "toy.toml", "--seeds", LONG)


def test_a_month_that_was_agreed_to(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeep.cli.settings.LONGEST", 0.0)
    assert fedkeep("run", "toy.toml").exit_code == 2
    assert not Path("runs").exists()
    assert fedkeep("run", "toy.toml", "--yes").exit_code == 0


def test_a_model_without_a_single_number(refused: Refused) -> None:
    text = (
        Path("toy.toml")
        .read_text()
        .replace('kind = "linear"', 'kind = "torch.nn:Linear"\nin_features = 0\nout_features = 3')
    )
    Path("toy.toml").write_text(text)
    message = refused("run", "toy.toml")
    assert message.startswith("Error: model: 'torch.nn:Linear' cannot be made of ")
    assert message.endswith(": Initializing zero-element tensors is a no-op.")


@pytest.mark.parametrize("command", ["run", "check", "evaluate", "personalize", "worth", "report"])
@pytest.mark.parametrize("name", ["x" * 300, "d/" * 3000])
def test_names_that_are_too_long(refused: Refused, command: str, name: str) -> None:
    assert "File name too long" in refused(command, name)


@pytest.mark.parametrize("option", ["--out", "--data"])
def test_folders_with_names_that_are_too_long(refused: Refused, option: str) -> None:
    assert "File name too long" in refused(
        "run", "toy.toml" if option == "--out" else "table.toml", option, "x" * 300
    )


def test_a_long_name_of_a_run_makes_a_short_folder(fedkeep: Command) -> None:
    succeeded(fedkeep("run", "toy.toml", "--set", f"name={'x' * 500}"))
    assert os.listdir("runs") == [f"{'x' * 80}-0"]


@pytest.mark.parametrize("k", ["7" * 5000, "-1", "٣", "1,,2"])
def test_numbers_of_examples_that_are_none(refused: Refused, k: str) -> None:
    assert refused("personalize", "nowhere", "--k", k).startswith("Error: --k wants whole numbers and 'all'")


# --- refusals of the system


@pytest.mark.parametrize(
    "command", ["run toy.toml", "check toy.toml", "evaluate toy.toml", "report toy.toml"]
)
def test_a_folder_in_place_of_a_file(refused: Refused, command: str) -> None:
    Path("toy.toml").unlink()
    Path("toy.toml").mkdir()
    assert refused(*command.split())


@pytest.mark.usefixtures("run_folder")
@pytest.mark.parametrize("name", ["run.json", "commit.json", "config.toml", "records.jsonl", "lock"])
@pytest.mark.parametrize(
    "command", ["run r --resume", "evaluate r", "report r", "worth r", "personalize r --client user-1"]
)
def test_a_folder_in_place_of_a_file_of_a_run(refused: Refused, command: str, name: str) -> None:
    if command.startswith(("report", "worth")) and name in ("commit.json", "config.toml", "lock"):
        pytest.skip("neither reads it")
    Path("r", name).unlink(missing_ok=True)
    Path("r", name).mkdir()
    assert refused(*command.split())


@pytest.mark.usefixtures("run_folder")
def test_a_read_only_file_system(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "r/lock")

    monkeypatch.setattr(filelock.FileLock, "acquire", read_only)
    message = refused("run", "r", "--resume")
    assert "Read-only file system" in message


def test_an_error_of_the_system_that_nobody_foresaw(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "some/file")

    monkeypatch.setattr("fedkeep.experiments.build.run_config", broken)
    assert refused("run", "toy.toml") == (
        "Error: some/file: Input/output error. Check the path, its rights, and whether the disk can be written."
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_too_little_memory(refused: Refused, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("fedkeep.experiments.build.run_config", broken)
    assert refused("run", "toy.toml") == (
        "Error: There is not enough memory for this. Take fewer users or examples, or a smaller model or batch."
    )


def test_other_errors_of_the_program_keep_their_traceback(
    fedkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr("fedkeep.experiments.build.run_config", broken)
    assert isinstance(fedkeep("run", "toy.toml").exception, RuntimeError)


# --- terminals


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Zoë – 名前\nnext line", "Zoë – 名前\nnext line"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\u202eb", "a\\u202eb"),
        ("\ud800", "\\ud800"),
        ("a\rb\tc\x07", "a\\rb\\tc\\x07"),
        ("10\u00a0000", "10\u00a0000"),
    ],
)
def test_what_does_not_print_is_written_out(text: str, wanted: str) -> None:
    assert visible(text) == wanted


def test_no_file_drives_the_terminal(fedkeep: Command) -> None:
    text = Path("toy.toml").read_text().replace('name = "Toy"', 'name = "\\u001b[2J\\u202eToy"')
    Path("toy.toml").write_text(text)
    result = succeeded(fedkeep("run", "toy.toml", "--out", "r"))
    assert "\\x1b[2J\\u202eToy" in result.stdout
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output


def test_no_name_drives_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with make_progress(True, "\x1b[2J\u202e[red]Toy", 3) as bar:
        bar.update(1, {})
    shown = capsys.readouterr().err
    assert "\\x1b[2J\\u202e[red]Toy" in shown
    assert "\u202e" not in shown


# --- Ctrl-C


def test_ctrl_c_while_the_libraries_are_loaded(tmp_path: Path) -> None:
    """A torch that never finishes loading stands for the second that the real one takes."""
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    # Where tests run in the background, Ctrl-C is ignored, and processes inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", f"{heard}from fedkeep_command import main; main()", "doctor"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=30)
    assert (process.returncode, complaint) == (130, "Stopped.\n")


@pytest.mark.slow
def test_the_script_runs_the_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", "from fedkeep_command import main; main()", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("fedkeep ")
