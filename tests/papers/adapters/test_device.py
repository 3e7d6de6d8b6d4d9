"""``channel-adapters`` computes on the device that is named, and says on which GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedkeep.core.errors import ConfigError, DataError, RunError
from fedkeep.experiments.reproductions import Request, reproduce
from fedkeep_papers.adapters import backbone, table


def test_the_device_is_where_minilm_and_the_cells_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "source_of", lambda _: ())
    monkeypatch.setattr(table, "check_device", lambda device: None)
    plain = table.cells_of(Request(tmp_path, tmp_path))
    for value in ("cuda", '"cuda"'):
        cells = table.cells_of(Request(tmp_path, tmp_path, changes={"run.device": value}))
        assert {cell.device for cell in cells} == {"cuda"}
        assert [cell.slot.file for cell in cells] == [
            cell.slot.file for cell in plain
        ]  # the same but for rounding
    asked: dict[str, object] = {}

    def begin(*_: object, device: str, **__: object) -> None:
        asked["run"] = device
        raise RunError("stopped")

    def messages(*given: object) -> Any:
        asked["reading"] = given[-1]
        return type("Data", (), {"columns": {"sentence": np.zeros((1, 8))}, "meta": {"classes": 3}})

    monkeypatch.setattr(table, "simulate", begin)
    monkeypatch.setattr(table, "encoded_messages", messages)
    with pytest.raises(RunError, match="stopped"):
        next(cell for cell in cells if cell.arm == "head")()
    assert asked == {"run": "cuda", "reading": "cuda"}


def test_the_device_alone_can_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "source_of", lambda _: ())

    def ask(**changes: str) -> None:
        named = {key.replace("_", "."): value for key, value in changes.items()}
        reproduce("channel-adapters", Request(tmp_path, tmp_path, changes=named))

    with pytest.raises(ConfigError, match=r"^channel-adapters lets.*run\.device.*'run\.seed'"):
        ask(run_seed="1")
    with pytest.raises(ConfigError, match="^The device 'cuda:99' cannot be used: "):
        ask(run_device="cuda:99")


def test_the_table_says_which_gpu_a_cell_was_trained_on() -> None:
    cell = table.Found(0.5, 0.5, (0.5,), 1, 2, 60.0)
    on = {"counts": {0: cell}, "head": {0: cell, 1: replace(cell, gpu="NVIDIA H200")}}
    lines = [line.split("|")[1:-1] for line in table.sizes(on).splitlines() if line.startswith("| ")]
    assert [line[1].strip() for line in lines[1:]] == ["CPU", "CPU, NVIDIA H200"]


def test_minilm_reads_on_its_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    class Bert(nn.Module):
        def to(self, device: str) -> nn.Module:  # type: ignore[override]
            asked.append(device)
            raise DataError("stopped")

    monkeypatch.setattr(backbone, "minilm", lambda: backbone.Backbone(Bert(), None))
    with pytest.raises(DataError, match="stopped"):
        backbone.kept_encoding(tmp_path / "new", ["a"], 1, "cuda")
    assert asked == ["cuda"]
