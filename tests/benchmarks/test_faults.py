"""The campaign of hostile inputs: a part of it, and that it sees what it looks for."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks import fault_inputs, faults
from benchmarks.fault_inputs import Worker
from benchmarks.fault_makers import SilentError
from fedkeep.core.errors import DataError

FEW = 300  # of 10 000


@pytest.mark.slow
def test_a_part_of_the_campaign_finds_nothing() -> None:
    found = list(fault_inputs.classes(FEW, seed=1))
    assert [one["name"] for one in found] == list(fault_inputs.makers())
    assert sum(one["tried"] for one in found) == FEW
    assert [one for one in found if one["silent"] or one["crashed"] or one["hung"]] == []


def raising(error: BaseException) -> Any:
    def trial() -> None:
        raise error

    return lambda random, folder: trial


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (SilentError("a label is no class"), "silent"),
        (ZeroDivisionError(), "crashed"),
        (RecursionError(), "crashed"),
        (MemoryError(), "hung"),
        (DataError("refused"), "refused"),
    ],
)
def test_verdicts(error: BaseException, verdict: str) -> None:
    assert fault_inputs.verdict_on(raising(error), "key")[0] == verdict


def test_memory_that_a_refusal_hides_is_seen() -> None:
    def trial() -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise DataError("damaged") from error

    assert fault_inputs.verdict_on(lambda random, folder: trial, "key")[0] == "hung"


def test_an_input_that_takes_too_long_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_inputs, "SECONDS", 0.05)
    assert fault_inputs.verdict_on(lambda random, folder: lambda: time.sleep(5), "key")[0] == "hung"


def test_inputs_are_drawn_from_their_key(tmp_path: Path) -> None:
    made: dict[str, list[dict[str, bytes]]] = {}
    for name, maker in fault_inputs.makers().items():
        for turn in ("a", "b"):
            folder = tmp_path / name.replace(" ", "") / turn
            folder.mkdir(parents=True)
            maker(Random(f"0/{name}/3"), folder)  # noqa: S311
            made.setdefault(name, []).append(
                {p.name: p.read_bytes() for p in sorted(folder.glob("*")) if p.is_file()}
            )
    assert all(first == second for first, second in made.values())


@pytest.mark.slow
def test_a_process_that_ends_is_a_crash() -> None:
    worker = Worker()
    try:
        assert worker.ask("no such class", "key")[0] == "crashed"  # ends the process
        assert worker.ask("client ids", "0/client ids/0")[0] in ("accepted", "refused")  # in another
    finally:
        worker.close()


@pytest.mark.parametrize("silent", [0, 1])
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], silent: int
) -> None:
    def classes(tried: int, seed: int) -> Iterator[dict[str, Any]]:
        yield {"name": "tables", "tried": tried, "silent": silent, "crashed": 0, "hung": seed - 7}

    monkeypatch.setattr(importlib.import_module("benchmarks.fault_inputs"), "classes", classes)
    out = tmp_path / "faults.json"
    assert faults.main(["--part", "inputs", "--tried", "5", "--seed", "7", "--out", str(out)]) == silent
    content = json.loads(out.read_text())
    assert content["classes"] == [
        {"name": "inputs: tables", "tried": 5, "silent": silent, "crashed": 0, "hung": 0}
    ]
    assert set(content) == {"classes", "commit", "machine", "seed"}
    assert content["seed"] == 7
    assert f"inputs: tables: 5 tried, {silent} silent" in capsys.readouterr().out
