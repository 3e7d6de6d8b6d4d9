"""``fedkeep audit`` and ``fedkeep prove``: the table of what leaves, the verdict, and the exit code."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedkeep.audit.findings import HALVES, JOINT
from tests.cli.conftest import Command
from tests.commands import succeeded

FEW = ("--rounds", "1", "--set", "data.users=3", "--set", "data.examples=8")


def test_nothing_leaves_undeclared(fedkeep: Command) -> None:
    result = succeeded(fedkeep("audit", "toy.toml", *FEW))
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert (
        "upload/linear.weight float32 3 × 4 server; clients (in the mean) through declared gradients 48 B"
        in rows
    )
    assert "weight float64 server unchanged 8 B" in rows
    said = "· loss with private parameter user (allow = 'loss'); training examples (allow = 'loss')"
    assert said in rows[rows.index("What changes, declared") :]
    assert "allowed besides: loss, judged." in result.stdout


def test_a_page_and_the_bytes_that_were_searched(fedkeep: Command, tmp_path: Path) -> None:
    result = succeeded(fedkeep("audit", "toy.toml", *FEW, "--out", "page"))
    assert (
        "The messages' very bytes were searched for canaries, as they travel in fedkeep's own ("
        in result.stdout
    )
    assert (", Flower's (" in result.stdout) == (find_spec("flwr") is not None)
    assert "Page: page/audit.html" in result.stdout.splitlines()
    page = (tmp_path / "page" / "audit.html").read_text(encoding="utf-8")
    for text in (
        "What leaves a device: Toy",
        "Nothing leaves undeclared.",
        "upload/linear.weight",
        "very bytes",
    ):
        assert text in page, text
    content = json.loads((tmp_path / "page" / "audit.json").read_text(encoding="utf-8"))
    assert {"gradients", "declared"} == {row["verdict"] for row in content["summary"]}


def test_a_leak_fails(fedkeep: Command) -> None:
    result = fedkeep("audit", "toy.toml", *FEW, "--set", 'audit.allow=["judged"]', "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert report["leaks"] == [
        "loss changes with private parameter user",
        "loss changes with training examples",
    ]
    assert {one["label"] for one in report["left"]} >= {"upload/linear.bias", "counts/train", "here/summary"}


COMMANDS = [("audit", *FEW), ("prove", *FEW[2:])]


@pytest.mark.parametrize("command", COMMANDS, ids=["audit", "prove"])
@pytest.mark.parametrize("bound", ["0.01", "1e6"])
def test_the_joint_norm_is_named_by_both_whether_it_was_cut_or_not(
    fedkeep: Command, command: tuple[str, ...], bound: str
) -> None:
    clipped = (command[0], "toy.toml", *command[1:], "--set", f"method.clip_norm={bound}")
    result = fedkeep(*clipped)
    assert result.exit_code == 1, result.output
    (line,) = {line for line in result.stderr.splitlines() if JOINT in line}
    assert line.startswith("✗ LEAK: ")
    assert HALVES in line
    for mended in ("method.clip_over=halves", 'audit.allow=["loss", "judged", "clip"]'):
        succeeded(fedkeep(*clipped, "--set", mended))


@pytest.mark.parametrize("command", ["audit", "prove"])
def test_the_demonstration_lets_nothing_out_undeclared(fedkeep: Command, command: str) -> None:
    result = succeeded(fedkeep(command, "demo/personalized-fl", "--set", "data.users=6"))
    assert "✗" not in result.stdout + result.stderr


def test_what_was_not_looked_at_is_no_success(fedkeep: Command) -> None:
    result = fedkeep("audit", "toy.toml", *FEW, "--set", "method.optimizer.learning_rate=1e200")
    assert result.exit_code == 1, result.output
    assert "✗ NOT looked at: what training sends, as client " in result.stderr
    assert "Nothing leaves undeclared" not in result.stdout


def test_centralised_training_is_refused(fedkeep: Command) -> None:
    result = fedkeep("audit", "toy.toml", "--set", "run.centralised=true")
    assert result.exit_code == 2
    assert "nothing leaves a device" in result.stderr


def test_an_unknown_entry_is_refused(fedkeep: Command) -> None:
    result = fedkeep("audit", "toy.toml", "--set", 'audit.allow=["everything"]')
    assert result.exit_code == 2
    assert "An entry of allow must begin with" in result.stderr
