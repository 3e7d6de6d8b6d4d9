"""The command as a whole: help, version, what there is to choose from."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from click.testing import Result
from typer.main import get_command

from fedkeep import __version__
from fedkeep.cli import app, main
from fedkeep.cli.listing import _comment
from fedkeep.cli.settings import safe_name
from fedkeep.experiments.build import MODELS
from fedkeep.experiments.plugins import builtin_names, builtin_text
from fedkeep.experiments.reproductions import reproductions
from fedkeep.experiments.sources import offered_readers
from fedkeep.methods import METHODS
from tests.cli.conftest import Command
from tests.commands import succeeded

COMMANDS = [
    "demo",
    "start",
    "prepare",
    "run",
    "check",
    "audit",
    "prove",
    "evaluate",
    "personalize",
    "export",
    "predict",
    "recommend",
    "worth",
    "compare",
    "sweep",
    "budget",
    "attack",
    "report",
    "reproduce",
    "deploy",
    "list",
    "explain",
    "doctor",
    "completion",
    "flower",
    "device",
]


def test_the_commands() -> None:
    assert list(get_command(app).commands) == COMMANDS  # type: ignore[attr-defined]


def test_help_names_every_command(fedkeep: Command) -> None:
    result = succeeded(fedkeep("--help"))
    for name in COMMANDS:
        assert f" {name} " in result.stdout
    assert "Start with: fedkeep demo" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_an_example(fedkeep: Command, name: str) -> None:
    result = succeeded(fedkeep(name, "--help"))
    assert f"Example: fedkeep {name}" in result.stdout


def test_no_command_shows_the_help(fedkeep: Command) -> None:
    assert "Usage: fedkeep [OPTIONS] COMMAND" in fedkeep().output


def said(result: Result) -> str:
    """Return what click's box says, in one line."""
    assert result.exit_code == 2
    return " ".join(result.stderr.replace("│", " ").split())


def test_an_unknown_command_is_told_which_there_are(fedkeep: Command) -> None:
    told = said(fedkeep("train", "toy.toml"))
    assert all(name in told for name in COMMANDS)
    assert "init" in said(fedkeep("flower", "begin"))


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--epochs", "run.epochs"),
        ("--device", "run.device"),
        ("--batch-size", "method.batch_size"),
        ("--lr", "method.optimizer.learning_rate"),
    ],
)
def test_a_setting_given_as_an_option_is_told_its_key(fedkeep: Command, option: str, key: str) -> None:
    assert f"--set {key}=VALUE" in said(fedkeep("run", "toy.toml", option, "5"))


def test_a_misspelt_option_is_told_the_near_one(fedkeep: Command) -> None:
    assert "'--out'" in said(fedkeep("run", "toy.toml", "--output", "x"))


def test_a_setting_torn_in_two_is_told_to_be_one_word(fedkeep: Command) -> None:
    assert "--set run.epochs=VALUE" in said(fedkeep("run", "toy.toml", "--set", "run.epochs", "5"))


def test_a_missing_option_is_told_with_its_meaning(fedkeep: Command) -> None:
    told = said(fedkeep("predict", "models"))
    assert "--data FILE" in told
    assert "table" in told


def test_a_path_begins_at_home_wherever_it_stands(
    fedkeep: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert (
        fedkeep("flower", "init", "~/visits", "--config", "demo/personalized-fl").exit_code == 0
    )  # as from a configuration, and --out=~/x of a shell
    assert (tmp_path / "visits" / "project" / "config.toml").exists()


def test_version(fedkeep: Command) -> None:
    assert fedkeep("--version").stdout == f"fedkeep {__version__}\n"


def test_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fedkeep", "--version"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fedkeep {__version__}\n"


def test_list_names_everything(fedkeep: Command) -> None:
    result = succeeded(fedkeep("list"))
    words = result.stdout.split()
    readers, tables = offered_readers(), reproductions()
    for name in [*METHODS, *MODELS, *readers, *builtin_names(), *tables, "sequential", "vectorised"]:
        assert name in words
    assert {"toy", "zulip_channels"} <= set(readers)
    assert "furl" in words
    shown = " ".join(words)
    assert "FURL: private user parameters beside a federated model." in shown
    assert "Read a Hugging Face data set." in shown
    assert all(one.about in shown for one in tables.values())


def test_list_shows_which_methods_fit_a_configuration(
    fedkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {kind: METHODS[kind] for kind in ("fedavg", "fedper", "fedbn")}
    monkeypatch.setattr("fedkeep.experiments.variants.offered_methods", lambda: few)
    result = succeeded(fedkeep("list", "--for", "toy.toml"))
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "3 of 4 methods fit toy.toml; private is"
    assert {"fedavg nothing", "fedper linear.* (15 of 18 numbers)", "furl user (3 of 18 numbers)"} <= set(
        lines
    )
    assert any(line.startswith("fedbn: ") and "batch normalisation" in line for line in lines)
    assert fedkeep("list", "--for", "none.toml").exit_code == 2
    model = fedkeep("list", "--for", "toy.toml", "--set", "model.kind=nowhere:Mine")
    assert (model.exit_code, "methods fit" in model.output) == (2, False)
    assert model.stderr.count("'nowhere:Mine'") == 1


def test_list_shows_whole_sentences(fedkeep: Command) -> None:
    shown = " ".join(fedkeep("list").stdout.split())
    assert ":class:" not in shown
    assert ":meth:" not in shown
    own = [_comment(builtin_text(name)) for name in builtin_names()]
    assert all(text.endswith(".") and text in shown for text in own)
    assert (
        _comment("# One of p = 0.8, which goes\n# on. And another.\n\n# Not this.\n")
        == "One of p = 0.8, which goes on."
    )
    assert _comment('name = "bare"\n') == "bare"


def test_names_of_folders_are_safe_on_any_system() -> None:
    assert safe_name("Personalized FL, paper's recipe") == "personalized-fl-paper-s-recipe"
    assert safe_name("../a:b\\c*?") == "a-b-c"
    assert safe_name("...") == "run"


def test_python_runs_the_command_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedkeep", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"fedkeep {__version__}\n"


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command, those of groups too."""
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, *path, name)


def written(command: Any) -> Iterator[str]:
    """Yield the paragraphs of a command's help as its source has them, a line each."""
    function = inspect.unwrap(command.callback)
    if not hasattr(command, "commands"):  # of groups the help is a setting
        yield from (" ".join(part.split()) for part in (inspect.getdoc(function) or "").split("\n\n"))
    for hint in get_type_hints(function, include_extras=True).values():
        yield from (text for m in getattr(hint, "__metadata__", ()) if (text := getattr(m, "help", None)))


def test_help_is_shown_as_it_is_written(fedkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 500)
    seen = 0
    for path, command in commands(get_command(app)):
        shown = fedkeep(*path, "--help").stdout
        for paragraph in written(command) if command.callback else ():
            assert paragraph in shown
            seen += "[" in paragraph
    assert seen >= 4  # brackets are what rich would take for markup
