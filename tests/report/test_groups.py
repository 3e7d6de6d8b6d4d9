"""Which runs are seeds of one configuration, and which metric a report is about."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedkeep.report import facts
from fedkeep.report.groups import configurations, main_metrics, scenes, user_metric
from fedkeep.report.measured import runs_table
from fedkeep.report.runs import RunFiles, read_run
from tests.report.run_folders import add_records, write_records
from tests.report.test_runs import line

Write = Callable[..., Path]


def test_seeds_are_grouped_and_equal_names_told_apart(write_run: Write) -> None:
    runs = [
        read_run(write_run("a", seed=0)),
        read_run(write_run("b", seed=1)),
        read_run(write_run("c", seed=0, config={"rate": 1})),
        read_run(write_run("d", name="Global FL")),
    ]
    groups = configurations(runs)
    assert [(g.label, len(g.runs)) for g in groups] == [
        ("Personalized FL (a)", 2),
        ("Personalized FL (c)", 1),
        ("Global FL", 1),
    ]


IDENTITY = {
    "seed": 0,
    "rounds": 20,
    "cohort": 5,
    "method": {"kind": "Method", "phases": [{"optimizer": {"learning_rate": 0.1}}]},
    "model": {"layers": "Linear(4, 3)", "initial_sha256": "aa"},
}


def called(write_run: Write, folder: str, seed: int, **info: Any) -> RunFiles:
    """A run of ``simulate(out=...)``: without a configuration."""
    identity = {**IDENTITY, "seed": seed, "model": {**IDENTITY["model"], "initial_sha256": f"{seed:02}"}}
    return read_run(write_run(folder, seed=seed, config={"": {}}, **{"identity": identity, **info}))


def test_runs_that_were_called_with_other_settings_never_pool(write_run: Write) -> None:
    """Two learning rates were once "24.5 ± 2.1 %, deviation over seeds"."""
    faster = {
        **IDENTITY,
        "seed": 1,
        "method": {"kind": "Method", "phases": [{"optimizer": {"learning_rate": 0.5}}]},
    }
    runs = [
        called(write_run, "a", 0),
        called(write_run, "b", 1),
        called(write_run, "c", 1, identity=faster),
        called(write_run, "d", 2, identity={**IDENTITY, "seed": 2, "cohort": 9}),
    ]
    groups = configurations(runs)
    assert [[r.folder.name for r in g.runs] for g in groups] == [["a", "b"], ["c"], ["d"]]
    assert [g.label for g in groups] == [f"Personalized FL ({name})" for name in ("a", "c", "d")]


def test_runs_of_code_whose_numbers_differ_never_pool(write_run: Write) -> None:
    runs = [called(write_run, "a", 0, numerics=3), called(write_run, "b", 1, numerics=4)]
    groups = configurations(runs)
    assert [[r.folder.name for r in g.runs] for g in groups] == [["a"], ["b"]]
    (differing, *_) = facts.configuration(groups)
    assert ("numerics of the code", "3", "4") in differing.rows  # type: ignore[union-attr]


def test_runs_on_data_of_other_content_never_pool(write_run: Write) -> None:
    """White noise of the same name and shape is not the data."""
    data = {"name": "images", "fingerprint": {"columns": {"image": "ab"}}, "source": {"train.bin": "12"}}
    noise = {**data, "fingerprint": {"columns": {"image": "cd"}}}
    other = {**data, "source": {"train.bin": "34"}, "follows_seed": True}
    runs = [
        called(write_run, "a", 0, data=data),
        called(write_run, "b", 1, data=data),
        called(write_run, "c", 1, data=noise),
        called(write_run, "d", 0, data={**data, "follows_seed": True}),
        called(write_run, "e", 1, data={**noise, "follows_seed": True}),
        called(write_run, "f", 1, data=other),
    ]
    assert [[r.folder.name for r in g.runs] for g in configurations(runs)] == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
        ["f"],
    ]


def test_a_generator_that_follows_the_seed_pools(write_run: Write) -> None:
    runs = [
        called(
            write_run,
            str(seed),
            seed,
            data={
                "name": "toy",
                "fingerprint": {"columns": {"x": f"{seed}"}},
                "source": {"generator": "toy", "seed": seed},
                "follows_seed": True,
            },
        )
        for seed in range(3)
    ]
    assert [len(g.runs) for g in configurations(runs)] == [3]


def test_initial_values_that_the_seed_does_not_explain_tell_runs_apart(write_run: Write) -> None:
    def begins(seed: int, vectors: str, frozen: str = "f") -> dict[str, Any]:
        return {
            "trained": {"weight": f"w{seed}", "bias": "0", "vectors": vectors},
            "frozen": {"table": frozen},
        }

    runs = [
        called(write_run, "a", 0, initial=begins(0, "glove")),
        called(write_run, "b", 1, initial=begins(1, "glove")),
        called(write_run, "c", 2, initial=begins(2, "other")),
        called(write_run, "d", 3, initial=begins(3, "glove", "g")),
    ]
    assert [[r.folder.name for r in g.runs] for g in configurations(runs)] == [["a", "b"], ["c"], ["d"]]


def test_frozen_values_that_follow_the_seed_pool(write_run: Write) -> None:
    def begins(seed: int) -> dict[str, Any]:
        model = {"layers": "Linear(4, 3)", "initial_sha256": f"i{seed}", "frozen_sha256": f"f{seed}"}
        return {
            "initial": {"trained": {"bias": "0"}, "frozen": {"head": f"{seed}", "table": "t"}},
            "identity": {**IDENTITY, "seed": seed, "model": model},
        }

    groups = configurations([called(write_run, str(seed), seed, **begins(seed)) for seed in range(3)])
    assert [len(g.runs) for g in groups] == [3]


def test_runs_on_other_data_are_another_scene(write_run: Write) -> None:
    first = read_run(write_run("a"))
    second = read_run(write_run("b", metric="auc", data={"name": "sticker"}))
    assert [(s.label, s.metrics, s.groups[0].label) for s in scenes([first, second])] == [
        ("generated-text", ("accuracy",), "Personalized FL, generated-text"),
        ("sticker", ("auc",), "Personalized FL, sticker"),
    ]


def test_the_metric_is_the_one_named_else_auc(write_run: Write) -> None:
    folder = write_run(metric="auc")
    lines = [line(1, "valid", "accuracy", 0.5), line(1, "valid", "loss", 0.5)]
    add_records(folder, "".join([*lines, line(1, "test", "accuracy", 0.5, client="only")]))
    run = read_run(folder)
    assert main_metrics([run]) == ["auc"]
    run.info["metric"] = "accuracy"
    assert main_metrics([run]) == ["auc"]  # the one that its round was chosen by
    assert main_metrics([replace(run, best={})]) == ["accuracy"]
    assert user_metric([run], "auc") == "auc"
    assert user_metric([run], "rmse") == "accuracy"


def test_a_run_that_measured_nothing_is_about_the_metric_that_it_names(write_run: Write) -> None:
    folder = write_run(status="failed", error="It broke down.")
    for name in ("records.jsonl", "timings.jsonl", "commit.json"):
        (folder / name).unlink()
    run = read_run(folder)
    assert main_metrics([run]) == ["accuracy"]
    run.info["metric"] = "rmse"
    assert main_metrics([run]) == ["rmse"]
    assert [(row[2], row[-1]) for row in runs_table(scenes([run])).rows] == [("RMSE", "failed")]


def test_each_task_has_its_metric(write_run: Write) -> None:
    folder = write_run()
    names = ("accuracy/topic", "accuracy/mood", "loss/topic")
    write_records(folder, "".join(line(1, "valid", m, 0.5) for m in names))
    assert main_metrics([read_run(folder)]) == ["accuracy/mood", "accuracy/topic"]


def test_tasks_of_different_kinds_have_a_metric_each(write_run: Write) -> None:
    folder = write_run(metric="auc")
    names = (
        "loss/likes",
        "accuracy/likes",
        "auc/likes",
        "loss/genre",
        "accuracy/genre",
        "loss/age",
        "mae/age",
        "rmse/age",
    )
    write_records(folder, "".join(line(1, "valid", m, 0.5) for m in names))
    run = read_run(folder)
    assert main_metrics([run]) == ["auc/likes", "accuracy/genre", "rmse/age"]
    run.info["metric"] = "rmse"  # where the first task is the regression
    assert main_metrics([run]) == ["rmse/age", "auc/likes", "accuracy/genre"]
