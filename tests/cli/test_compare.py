"""``fedkeep compare``."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.commands import succeeded


@pytest.mark.usefixtures("undrawn")
def test_one_command_from_a_configuration_to_tables_and_a_page(fedkeep: Command) -> None:
    result = succeeded(fedkeep("compare", "toy.toml", "--methods", "fedavg,furl", "--seeds", "2"))
    out = Path("comparisons/toy")
    lines = result.stdout.splitlines()
    assert any(line.startswith("Best: ") for line in lines)
    assert "With 6 users nothing is claimed about users like these; that takes 10." in lines
    assert "With 2 seeds this is about these trained models; a claim about the method takes 3 seeds." in lines
    assert f"Page: {out / 'report.html'}" in lines
    with (out / "tables" / "comparison.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [
        "fedavg",
        "furl",
        "local",
        "fine_tuned",
        "counting each user's labels",
    ]
    starred = {line.split()[0] for line in lines if " % *" in line}
    assert starred == {row["method"].split()[0] for row in rows if row["bold"] == "yes"}
    again = succeeded(fedkeep("compare", "toy.toml", "--methods", "fedavg,furl", "--seeds", "0,1"))
    assert " of " not in again.stderr  # nothing was run


@pytest.mark.usefixtures("undrawn")
def test_two_data_sets_give_one_table(fedkeep: Command) -> None:
    Path("other.toml").write_text(Path("toy.toml").read_text().replace("users = 6", "users = 7"))
    words = ("--methods", "fedavg,furl", "--seeds", "1", "--no-references")
    result = succeeded(fedkeep("compare", "toy.toml", "other.toml", *words))
    out = Path("comparisons/toy-other")
    assert f"Page: {out / 'report.html'}" in result.stdout.splitlines()
    assert "average rank" in result.stdout
    assert {line.rpartition(": ")[2] for line in result.stderr.splitlines()} == {
        f"{data}/{method}-0" for data in ("toy", "other") for method in ("fedavg", "furl")
    }
    assert (out / "other" / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_what_was_unlike_is_said_and_stands_on_the_page(fedkeep: Command) -> None:
    """A round draws two of six clients, and FedRep takes more steps in it than FedAvg."""
    Path("other.toml").write_text(Path("toy.toml").read_text().replace("users = 6", "users = 7"))
    words = ("--methods", "fedavg,fedrep", "--seeds", "1", "--no-references", "--set", "run.cohort=2")
    for configs in (("toy.toml",), ("toy.toml", "other.toml")):
        result = succeeded(
            fedkeep("compare", *configs, *words, "--set", "run.rounds=1", "--out", str(len(configs)))
        )
        for told in (result.stdout, Path(str(len(configs)), "report.html").read_text("utf-8")):
            assert "Methods take unequal local steps in a round: " in told
            assert told.count("4 clients never drawn") == 1
            assert told.count("5 clients never drawn") == len(configs) - 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "fedavg,fedavg"], "--methods wants different names between commas"),
        (["--methods", "fedawg"], "--methods: there is no method 'fedawg'."),
        (["--seeds", "0"], "--seeds wants how many seeds, e.g. 5, or which, e.g. 0,1,2; got '0'."),
        (["--seeds", "x"], "--seeds wants how many seeds, e.g. 5, or which, e.g. 0,1,2; got 'x'."),
        (["--seeds", "1,1"], "--seeds names a seed twice: '1,1'."),
        (["--metric", "auc"], "auc has no value for a single example, so clients can't be compared by it."),
        (["--out", "."], ". is not empty and holds no comparison. Name another folder with --out."),
    ],
)
def test_wrong_use(refused: Callable[..., str], words: list[str], message: str) -> None:
    assert refused("compare", "toy.toml", *words).startswith(f"Error: {message}")
    assert not Path("comparisons").exists()
