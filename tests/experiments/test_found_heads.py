"""What was found of a model's head goes with a run: into its folder, back out of it, and with exported models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeep.experiments.build import build_data, run_config
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.load import load_run
from fedkeep.experiments.personalize.exported import load_model
from fedkeep.experiments.run_directory import read_info

TEXT = """
name = "found"
[data]
reader = "toy"
[model]
kind = "linear"
[method]
kind = "{kind}"
[run]
rounds = 2
cohort = 3
"""


@pytest.mark.parametrize("kind", ["fedper", "fedrod", "feddbe"])
@pytest.mark.filterwarnings("ignore:.*were never drawn:UserWarning")
def test_a_run_is_read_and_exported_with_the_head_that_it_found(kind: str, tmp_path: Path) -> None:
    config = parse_config(TEXT.format(kind=kind))
    data, told = build_data(config), list[str]()
    run = run_config(config, data=data, out=tmp_path / "run", tell=told.append, progress=False)
    assert any(line.startswith("Head: linear (15 numbers)") for line in told)
    assert read_info(tmp_path / "run")["head"] == "linear"
    again = load_run(tmp_path / "run", data=data)
    assert again.method.head == run.method.head
    assert again.evaluate("test") == run.evaluate("test")
    run.export(tmp_path / "models")
    client = str(data.ids[0])
    rows = data.rows(0, "test")
    batch = data.batch(range(rows.start, rows.stop))
    model = load_model(tmp_path / "models", client)
    with torch.no_grad():
        output = model(x=batch["x"])
    assert output.shape == (len(rows), 3)
    assert output.isfinite().all()


def test_a_configuration_names_the_head() -> None:
    config = parse_config(TEXT.format(kind="fedper").replace("[run]", 'head = "lin*"\n[run]'))
    run = run_config(config, data=build_data(config), progress=False)
    assert run.method.split.private == ("linear.*",)
