"""``fedkeep attack``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkeep.experiments.trackers import tracked
from tests.cli.conftest import Command
from tests.commands import succeeded

ONE = ("--attacks", "who,words", "--epsilons", "none")


def test_a_table_sentences_and_a_page(fedkeep: Command, tmp_path: Path) -> None:
    result = succeeded(fedkeep("attack", "toy.toml", *ONE, "--out", "page", "--clients", 5))
    assert "Toy: what attackers find" in result.stdout
    assert "no table of words is in an upload." in result.stdout
    assert result.stdout.splitlines()[-1] == "Page: page/attacks.html"
    page = (tmp_path / "page" / "attacks.html").read_text(encoding="utf-8")
    assert "What keeping parameters home is worth, and what it is not: Toy" in page
    assert "The attacker knows one earlier upload of every client by name" in page
    assert "Args:" not in page
    content = json.loads((tmp_path / "page" / "attacks.json").read_text(encoding="utf-8"))
    assert {row["protection"] for row in content["summary"]} == {"plain", "split", "secure"}
    assert (tmp_path / "page" / "attacks.md").exists()


@pytest.mark.usefixtures("run_folder")
def test_json_of_a_run_and_again_the_same(fedkeep: Command) -> None:
    first, second = (
        fedkeep("attack", "r", "--attacks", "who", "--epsilons", "none", "--json") for _ in range(2)
    )
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    rows = json.loads(first.stdout)
    assert {row["verdict"] for row in rows} <= {"found", "nothing", "–"}
    config = fedkeep("attack", "toy.toml", "--attacks", "who", "--epsilons", "none", "--json")
    assert json.loads(config.stdout) == rows  # a run is what its configuration gives


@pytest.mark.usefixtures("run_folder")
def test_wrong_use(fedkeep: Command, refused: Callable[..., str]) -> None:
    assert "An attack must be 'who'" in refused("attack", "toy.toml", "--attacks", "whom")
    wanted = "Error: --epsilons wants numbers with commas between, e.g. 1,8, or none; got 'one'."
    assert refused("attack", "toy.toml", "--epsilons", "one") == wanted
    for epsilon in ("0", "-1", "nan"):
        said = refused("attack", "toy.toml", f"--epsilons={epsilon}", "--attacks", "who")
        assert "ε must be positive; got " in said
        assert "Training" not in said  # before hours of it
    assert "A run is attacked as it is" in refused("attack", "r", "--set", "seed=1")


def test_what_was_found_is_shown_where_the_page_cannot_be_written(fedkeep: Command, tmp_path: Path) -> None:
    (tmp_path / "page").write_text("a file")
    result = fedkeep("attack", "toy.toml", *ONE, "--out", "page", "--clients", 5)
    assert result.exit_code == 2
    assert "Toy: what attackers find" in result.stdout
    assert "Error: page" in result.stderr


@pytest.mark.usefixtures("run_folder")
def test_trackers_are_not_told_of_what_an_attacker_trains(
    fedkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    def watched(trackers: object, *rest: Any) -> Any:
        told.append(trackers)
        return tracked({}, *rest)

    monkeypatch.setattr("fedkeep.experiments.drive.tracked", watched)
    asked = ("attack", "toy.toml", "--attacks", "who", "--epsilons", "none", "--clients", 5)
    assert fedkeep(*asked, "--set", 'run.trackers=["tensorboard"]').exit_code == 0
    assert told
    assert not any(told)
