import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedkeep.core.errors import RunError
from fedkeep.core.records import Record, sealed_records, to_line
from fedkeep.core.run_files import read_commit
from fedkeep.report.runs import read_run
from tests.refusals import raises
from tests.report.run_folders import write_analyses, write_info, write_records

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
        line(1, "valid", "accuracy", 0.5),
        line(1, "test", "accuracy", 0.48),
        line(2, "valid", "accuracy", 0.6),
        line(2, "test", "accuracy", 0.55),
        line(3, "valid", "accuracy", 0.4),
        line(3, "test", "accuracy", 0.9),
    ]
    write_records(folder, "".join(lines))
    chosen = read_run(folder).selected("accuracy", "accuracy")
    assert chosen.value == 0.55
    write_records(folder, "".join(lines[:3] + lines[4:]))  # not measured on test at round 2
    chosen = read_run(folder).selected("accuracy", "accuracy")
    assert chosen.round == 3


def test_of_a_loss_the_lowest_is_best_and_of_equal_ones_the_earliest(write_run: Write) -> None:
    folder = write_run()
    write_records(folder, "".join(line(k, "valid", "rmse", v) for k, v in ((1, 2.0), (2, 1.0), (3, 1.0))))
    best = read_run(folder).best_valid("rmse")
    assert best.round == 2


def test_timings_are_read_too(write_run: Write) -> None:
    folder = write_run()
    write_records(folder, "", line(1, "time", "extra_seconds", 3.0))
    assert [r.value for r in read_run(folder).series("extra_seconds", "time")] == [3.0]


@pytest.mark.parametrize("status", ["running", "finished"])
def test_what_follows_the_last_commit_is_left_out_and_said(write_run: Write, status: str) -> None:
    folder = write_run(status=status)
    before = read_run(folder).records
    with (folder / "records.jsonl").open("a") as file:
        file.write(line(9, "valid", "accuracy", 0.99) + '{"round": 9, "ep')
    run = read_run(folder)
    assert run.records == before
    assert run.notes[-1] == "What records.jsonl holds after round 20 is of no finished round and is left out."


@pytest.mark.parametrize(
    "name", ["records.jsonl", "timings.jsonl", "run.json", "commit.json", "analyses.json"]
)
def test_a_number_that_was_changed_is_refused(write_run: Write, name: str) -> None:
    """Each of these files was read as it stood, so a flipped digit became a number on the page."""
    folder = write_run(analyses={"a": {"columns": ["x"], "rows": [[0.25]]}})
    write_records(folder, line(1, "test", "accuracy", 0.25), line(1, "time", "seconds", 0.25))
    read_run(folder)
    path = folder / name
    text = path.read_text()
    old, new = ("21504", "21505") if name == "run.json" else ('"round": 20', '"round": 19')
    old, new = ("0.25", "0.35") if name in ("records.jsonl", "timings.jsonl", "analyses.json") else (old, new)
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(RunError) as error:
        read_run(folder)
    assert str(error.value).startswith(f"{path} is damaged or was edited: its checksum is not ")


@pytest.mark.parametrize("name", ["commit.json", "analyses.json", "personalization.jsonl"])
def test_a_file_of_another_run_is_refused(write_run: Write, name: str) -> None:
    analyses = {"a": {"columns": ["x"], "rows": [[1]]}}
    one, two = write_run("one", analyses=analyses), write_run("two", analyses=analyses)
    for folder in (one, two):
        lines = [Record(20, 5.0, "personalization/0", "user-1", "accuracy", 0.5, 3)]
        about = {"run": folder.name, "round": 20}
        (folder / "personalization.jsonl").write_bytes(sealed_records(lines, about))
    read_run(one)
    (one / name).write_bytes((two / name).read_bytes())
    with pytest.raises(RunError) as error:
        read_run(one)
    assert str(error.value).startswith(
        f"{one / name} is of the run two, but run.json of the run one."
        if name == "commit.json"
        else f"{one / name} is of another run than run.json beside it."
    )


def test_a_curve_that_was_changed_is_refused(write_run: Write) -> None:
    folder = write_run()
    path = folder / "personalization.jsonl"
    lines = [Record(20, 5.0, "personalization/0", "user-1", "accuracy", 0.5, 3)]
    content = sealed_records(lines, {"run": "run", "round": 20})
    path.write_bytes(content)
    assert read_run(folder).records[-1] == lines[0]
    for harmed in (
        content.replace(b"0.5", b"0.6"),
        content[:-1],
        content[:40],
        b"",
        content + b"\n{}",
        b"\xff",
    ):
        path.write_bytes(harmed)
        if harmed == content[:-1]:
            assert read_run(folder).records[-1] == lines[0]  # nothing but the newline at the end is gone
            continue
        with raises(RunError, said="is damaged or was edited: its last line does"):
            read_run(folder)


def test_what_was_made_after_an_earlier_round_is_left_out_and_said(write_run: Write) -> None:
    """A run that was continued does not show the maps and curves of its younger self as its own."""
    folder = write_run()
    write_analyses(folder, {"a": {"columns": ["x"], "rows": [[1]]}}, round=12)
    about = {"run": "run", "round": 12}
    (folder / "personalization.jsonl").write_bytes(
        sealed_records([Record(12, 3.0, "p/0", "u", "accuracy", 0.5, 3)], about)
    )
    run = read_run(folder)
    assert run.analyses == {}
    assert not [r for r in run.records if r.split == "p/0"]
    assert run.notes == (
        "personalization.jsonl was made after round 12, the run stands at 20: it is left out.",
        "analyses.json was made after round 12, the run stands at 20: it is left out.",
    )


def test_an_unfinished_run_may_have_no_records(write_run: Write) -> None:
    folder = write_run(status="running")
    for name in ("records.jsonl", "timings.jsonl", "commit.json"):
        (folder / name).unlink()
    assert read_run(folder).notes[1] == "It has no records."


@pytest.mark.parametrize(
    "damage", ["{}\n", "garbage\n", line(1, "test", "accuracy", 0.5).replace("0.5", '"x"'), "\n"]
)
def test_a_damaged_line_is_named(write_run: Write, damage: str) -> None:
    folder = write_run()
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    write_records(folder, "".join([*lines[:4], damage, *lines[5:]]))
    with pytest.raises(RunError, match=r"records\.jsonl, line 5: not a record"):
        read_run(folder)


def test_a_finished_run_without_records_is_an_error(write_run: Write) -> None:
    folder = write_run()
    (folder / "records.jsonl").unlink()
    with pytest.raises(RunError, match=r"Cannot read .*records\.jsonl: No such file"):
        read_run(folder)
    (folder / "commit.json").unlink()
    with raises(RunError, said="is missing, but the run has finished rounds."):
        read_run(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no run.json in it."),
        (b"{", "run.json is damaged: Expecting"),
        (b"[" * 100_000, "run.json is damaged: maximum recursion depth exceeded"),
        (b"\xff", "run.json is damaged: 'utf-8' codec"),
        (b"[]", "run.json is damaged: wanted an object, got list."),
        (b"{}", "run.json has no format; this fedkeep reads format 4. It is of an older fedkeep"),
        (
            b'{"format": 1}',
            "run.json has the format 1; this fedkeep reads format 4. It is of an older fedkeep",
        ),
        (b'{"format": 5}', "run.json has the format 5; this fedkeep reads format 4. Update fedkeep."),
        (b'{"format": 4}', "run.json is damaged: it has no checksum."),
        (b'{"format": 4, "seal": "x"}', "run.json is damaged or was edited: its checksum is not that of its"),
        ({}, "run.json is damaged: it lacks the run's id."),
    ],
)
def test_a_damaged_run_json_is_named(
    tmp_path: Path, content: bytes | dict[str, Any] | None, message: str
) -> None:
    if isinstance(content, dict):
        write_info(tmp_path, {"format": 4, **content})
    elif content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with raises(RunError, said=message):
        read_run(tmp_path)


def test_analyses_that_are_no_json_are_named(write_run: Write) -> None:
    folder = write_run()
    (folder / "analyses.json").write_text("{")
    with pytest.raises(RunError, match=r"analyses\.json is damaged: Expecting"):
        read_run(folder)


def test_the_round_is_the_one_that_the_run_chose(write_run: Write) -> None:
    folder = write_run()
    commit = read_commit(folder, json.loads((folder / "run.json").read_text()))
    known = replace(commit, extra={"best": {"accuracy": {"round": 4}}})
    (folder / "commit.json").write_bytes(known.to_bytes())
    run = read_run(folder)
    best = run.best_valid("accuracy")
    assert best.round == 4 != max(run.series("accuracy", "valid"), key=lambda r: r.value).round
    assert run.best_valid("loss") is None


@pytest.mark.parametrize("best", [3, {"accuracy": 4}, {"accuracy": {"value": 1.0}}])
def test_a_commit_that_says_no_rounds_is_refused(write_run: Write, best: Any) -> None:
    folder = write_run()
    commit = read_commit(folder, json.loads((folder / "run.json").read_text()))
    (folder / "commit.json").write_bytes(replace(commit, extra={"best": best}).to_bytes())
    with pytest.raises(RunError, match="which rounds were best"):
        read_run(folder)
