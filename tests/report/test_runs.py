import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import RunError
from fedkeep.core.records import Record, to_line
from fedkeep.report.groups import configurations, main_metrics, scenes, user_metric
from fedkeep.report.runs import read_run

Write = Callable[..., Path]


def line(round: int, split: str, metric: str, value: float, client: str | None = None) -> str:
    return to_line(Record(round, float(round), split, client, metric, value, 5))


def test_reads_a_run(write_run: Write) -> None:
    run = read_run(write_run())
    assert (run.name, run.method, run.seed, run.finished, run.notes) == (
        "Personalized FL",
        "furl",
        0,
        True,
        (),
    )
    assert run.rounds == 20
    assert len(run.clients("accuracy")) == 40


def test_the_test_number_is_taken_at_the_best_valid_round(write_run: Write) -> None:
    folder = write_run()
    lines = [
        line(1, "valid", "accuracy", 0.5), line(1, "test", "accuracy", 0.48), line(2, "valid", "accuracy", 0.6),
        line(2, "test", "accuracy", 0.55), line(3, "valid", "accuracy", 0.4), line(3, "test", "accuracy", 0.9),
    ]  # fmt: skip
    (folder / "records.jsonl").write_text("".join(lines))
    chosen = read_run(folder).selected("accuracy", "accuracy")
    assert chosen is not None
    assert chosen.value == 0.55
    (folder / "records.jsonl").write_text("".join(lines[:3] + lines[4:]))  # not measured on test at round 2
    chosen = read_run(folder).selected("accuracy", "accuracy")
    assert chosen is not None
    assert chosen.round == 3


def test_of_a_loss_the_lowest_is_best(write_run: Write) -> None:
    folder = write_run()
    (folder / "records.jsonl").write_text(line(1, "valid", "rmse", 2.0) + line(2, "valid", "rmse", 1.0))
    best = read_run(folder).best_valid("rmse")
    assert best is not None
    assert best.round == 2


def test_timings_are_read_too(write_run: Write) -> None:
    folder = write_run()
    (folder / "timings.jsonl").write_text(line(1, "time", "extra_seconds", 3.0))
    assert [r.value for r in read_run(folder).series("extra_seconds", "time")] == [3.0]


def test_a_torn_last_line_is_tolerated_only_while_running(write_run: Write) -> None:
    running, finished = write_run("a", status="running"), write_run("b")
    for folder in (running, finished):
        with (folder / "records.jsonl").open("a") as file:
            file.write('{"round": 9, "ep')
    assert read_run(running).notes == (
        "This run is not finished (status: running); its numbers may still change.",
        "The last line of records.jsonl (line 37) was not written to its end and is left out.",
    )
    with pytest.raises(RunError, match=r"b/records\.jsonl, line 79: .* torn"):
        read_run(finished)


def test_an_unfinished_run_may_have_no_records(write_run: Write) -> None:
    folder = write_run(status="running")
    (folder / "records.jsonl").unlink()
    assert read_run(folder).notes[1] == "It has no records."


@pytest.mark.parametrize(
    "damage", ["{}\n", "garbage\n", line(1, "test", "accuracy", 0.5).replace("0.5", '"x"'), "\n"]
)
def test_a_damaged_line_is_named(write_run: Write, damage: str) -> None:
    folder = write_run()
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join([*lines[:4], damage, *lines[5:]]))
    with pytest.raises(RunError, match=r"records\.jsonl, line 5: not a record"):
        read_run(folder)


def test_a_finished_run_without_records_is_an_error(write_run: Write) -> None:
    folder = write_run()
    (folder / "records.jsonl").unlink()
    with pytest.raises(RunError, match=r"Cannot read the records .*records\.jsonl"):
        read_run(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no run directory: it has no run.json."),
        ("{", "run.json is damaged: Expecting"),
        ("[]", "run.json is damaged: wanted an object, got list."),
        ('{"data": 3}', "run.json is damaged: 'data' must be an object, got int."),
        ('{"best": "high"}', "run.json is damaged: 'best' must be a number or null, got str."),
        (
            '{"split_table": [{"name": "x"}]}',
            "run.json is damaged: 'split_table' must be a list of {name, shape, half",
        ),
    ],
)
def test_a_damaged_run_json_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError) as error:
        read_run(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("analyses", "message"),
    [
        ([], "wanted an object of analyses, got list"),
        ({"x": 1}, "x: wanted an object, got int"),
        (
            {"x": {}},
            "x: not embedding_map, cold_start or aggregation_time, so it must be a table with columns and rows",
        ),
        ({"x": {"columns": ["a"], "rows": [[1, 2]]}}, "x.rows[0]: wanted a list of 1 cells"),
        ({"cold_start": {"k": [1], "mean": [0.1, 0.2]}}, "cold_start.mean: wanted 1 numbers, got 2"),
        (
            {"cold_start": {"k": ["most"], "mean": [0.1]}},
            "cold_start.k: wanted numbers of examples or 'all', got 'most'",
        ),
        ({"cold_start": {"k": [1], "mean": ["x"]}}, "cold_start.mean[0]: wanted a number or null, got 'x'"),
        ({"cold_start": {"k": [1], "mean": [0.1], "metric": 3}}, "cold_start.metric: wanted text, got 3"),
        (
            {"cold_start": {"k": [1], "series": [4]}},
            "cold_start.series[0]: wanted an object with name, mean and std",
        ),
        ({"cold_start": {"k": [1], "mean": [0.1], "note": 4}}, "cold_start.note: wanted text, got 4"),
        (
            {"embedding_map": {"panels": [{"name": "a", "numbers": [], "points": []}]}},
            "embedding_map.panels[0].numbers: wanted an object, got list",
        ),
        (
            {"embedding_map": {"panels": [{"name": "a", "points": [{"x": 1}]}]}},
            "embedding_map.panels[0].points[0]: wanted an object with client, x, y and trait",
        ),
        (
            {
                "embedding_map": {
                    "panels": [{"name": "a", "points": [{"client": "u", "x": 1, "y": 2, "trait": 0.5}]}]
                }
            },
            "embedding_map.panels[0].points[0].trait: wanted text or an integer, got 0.5",
        ),
        ({"aggregation_time": {"cohort": [1]}}, "aggregation_time.seconds: wanted a list, got nothing"),
        (
            {"embedding_map": {"panels": [{}]}},
            "embedding_map.panels[0]: wanted an object with a name and points",
        ),
        (
            {"embedding_map": {"panels": [], "trait_kind": "odd"}},
            "embedding_map.trait_kind: wanted 'categorical' or",
        ),
        (
            {"embedding_map": {"panels": [{"name": "a", "points": [{"client": "u", "x": 1, "y": None}]}]}},
            "embedding_map.panels[0].points[0].y: wanted a number, got null",
        ),
    ],
)
def test_a_damaged_analysis_is_named(write_run: Write, analyses: Any, message: str) -> None:
    folder = write_run()
    (folder / "analyses.json").write_text(json.dumps(analyses))
    with pytest.raises(RunError) as error:
        read_run(folder)
    assert str(error.value).startswith(f"{folder / 'analyses.json'}: {message}")


def test_analyses_that_are_no_json_are_named(write_run: Write) -> None:
    folder = write_run()
    (folder / "analyses.json").write_text("{")
    with pytest.raises(RunError, match=r"analyses\.json is damaged: Expecting"):
        read_run(folder)


def test_seeds_are_grouped_and_equal_names_told_apart(write_run: Write) -> None:
    runs = [
        read_run(write_run("a", seed=0)), read_run(write_run("b", seed=1)),
        read_run(write_run("c", seed=0, config={"rate": 1})), read_run(write_run("d", name="Global FL")),
    ]  # fmt: skip
    groups = configurations(runs)
    assert [(g.label, len(g.runs)) for g in groups] == [
        ("Personalized FL (a)", 2), ("Personalized FL (c)", 1), ("Global FL", 1),
    ]  # fmt: skip


def test_runs_on_other_data_are_another_scene(write_run: Write) -> None:
    first = read_run(write_run("a"))
    second = read_run(write_run("b", metric="auc", data={"name": "sticker"}))
    assert [(s.label, s.metrics, s.groups[0].label) for s in scenes([first, second])] == [
        ("generated-text", ("accuracy",), "Personalized FL, generated-text"),
        ("sticker", ("auc",), "Personalized FL, sticker"),
    ]


def test_the_metric_is_the_one_named_else_auc(write_run: Write) -> None:
    folder = write_run(metric="auc")
    with (folder / "records.jsonl").open("a") as file:
        file.write(line(1, "valid", "accuracy", 0.5) + line(1, "valid", "loss", 0.5))
        file.write(line(1, "test", "accuracy", 0.5, client="only"))
    run = read_run(folder)
    assert main_metrics([run]) == ["auc"]
    run.info["metric"] = "accuracy"
    assert main_metrics([run]) == ["accuracy"]
    assert user_metric([run], "auc") == "auc"
    assert user_metric([run], "rmse") == "accuracy"


def test_each_task_has_its_metric(write_run: Write) -> None:
    folder = write_run()
    names = ("accuracy/topic", "accuracy/mood", "loss/topic")
    (folder / "records.jsonl").write_text("".join(line(1, "valid", m, 0.5) for m in names))
    assert main_metrics([read_run(folder)]) == ["accuracy/mood", "accuracy/topic"]
