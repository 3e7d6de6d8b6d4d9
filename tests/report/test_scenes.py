"""Runs in one table: whether they are on the same data is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedkeep.report.blocks import Text
from fedkeep.report.groups import scenes
from fedkeep.report.measured import results, users
from fedkeep.report.runs import read_run
from tests.report.run_folders import write_records
from tests.report.test_runs import line

Write = Callable[..., Path]
DATA: dict[str, Any] = {
    "name": "toy",
    "fingerprint": {"columns": {"x": "ab", "label": "cd"}, "partition": "ef", "clients": 6},
}


def warnings(*folders: Path) -> list[str]:
    made = scenes([read_run(folder) for folder in folders])
    assert len(made) == 1
    return [block.text for block in results(made) if isinstance(block, Text) and block.warning]


def other(**columns: str) -> dict[str, Any]:
    return DATA | {"fingerprint": DATA["fingerprint"] | {"columns": columns, "partition": "gh"}}


def test_other_data_of_the_same_name_are_said(write_run: Write) -> None:
    first, same = write_run("a", data=DATA), write_run("b", name="FedAvg", data=DATA)
    assert warnings(first, same) == []
    third = write_run("c", name="Ditto", data=other(x="xy", label="cd"))
    (said,) = warnings(first, same, third)
    assert said == (
        "These runs are on data called toy that differ in columns.x, partition. Their numbers do not compare as those "
        "on the same data do."
    )


def test_data_that_follow_the_seed_differ_by_it(write_run: Write) -> None:
    drawn = [
        write_run(str(seed), seed=seed, data=other(x=f"x{seed}", label="cd") | {"follows_seed": True})
        for seed in range(2)
    ]
    assert warnings(*drawn) == []


def test_a_run_across_machines_knows_its_encoding_alone(write_run: Write) -> None:
    remote = [
        write_run(name, name=name, data=DATA | {"fingerprint": {"encoding": encoding}})
        for name, encoding in (("r", "1"), ("s", "2"))
    ]
    assert warnings(write_run("a", data=DATA), remote[0]) == []
    (said,) = warnings(*remote)
    assert "differ in encoding." in said


def test_users_of_several_tasks_are_shown_at_the_first_ones_round(write_run: Write) -> None:
    """Their values are kept at its best round alone, the other tasks' results stand at a best round of their own."""
    folder = write_run(metric="auc")
    lines = [line(1, "valid", m, 0.5) for m in ("auc/likes", "accuracy/genre")]
    lines += [line(1, "test", "accuracy/genre", 0.5, client="ann"), line(1, "test", "auc/likes", 0.5)]
    write_records(folder, "".join(lines))
    (scene,) = scenes([read_run(folder)])
    (found,) = users(scene.groups, scene.metrics)
    said = "Of several tasks this is at the round that is best on valid by the first one."
    assert found.caption.endswith(said)
    (alone,) = users(scene.groups, scene.metrics[1:])
    assert said not in alone.caption
