"""What a full disk or a kill has left of the last event does not take the next one with it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from fedkeep.remote.events import Events


@pytest.mark.parametrize("before", ["", '{"kind": "late"}\n', '{"kind": "la'])
def test_events_begin_on_a_line_of_their_own(before: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(before)
    events = Events(lambda: 0.0)
    events.note("round", "one")
    events.write_to(path)
    events.note("round", "two")
    content = path.read_text()
    assert content.startswith(before)
    lines = content[len(before) :].splitlines()
    assert [json.loads(line)["text"] for line in lines if line] == ["one", "two"]
    assert len(lines) == 2 + (before[-2:] == "la")


@pytest.mark.parametrize("where", ["events.jsonl", "no folder/events.jsonl"])
def test_a_server_that_lives_long_keeps_no_event(where: str, tmp_path: Path) -> None:
    events = Events(lambda: 0.0)
    events.note("round", "one")
    assert [event.text for event in events.said] == ["one"]
    events.write_to(tmp_path / where)
    for _ in range(3):
        events.note("round", "two")
    assert events.said == []


def test_an_event_says_when_it_was_by_the_clock_on_the_wall_and_since_the_server_was_started(
    tmp_path: Path,
) -> None:
    """The transport's clock counts from when the machine was started: no log could be found to match it."""
    passed = 0.0
    events = Events(lambda: 1663.41 + passed, today=lambda: 1_700_000_000.25 + passed)
    events.write_to(tmp_path / "events.jsonl")
    events.note("round", "one")
    passed = 90.5
    events.note("round", "two")
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (first["time"], first["seconds"]) == ("2023-11-14T22:13:20.250+00:00", 0.0)
    assert (second["time"], second["seconds"]) == ("2023-11-14T22:14:50.750+00:00", 90.5)


def test_every_event_is_logged_and_the_rare_ones_as_information(caplog: pytest.LogCaptureFixture) -> None:
    events = Events(lambda: 0.0)
    with caplog.at_level(logging.DEBUG, logger="fedkeep.events"):
        events.note("refused", "Node 'x' takes no part: 100 % full.")
        events.note("again", "twice")
    assert [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "fedkeep.events"
    ] == [
        ("INFO", "Node 'x' takes no part: 100 % full."),
        ("DEBUG", "twice"),
    ]


def test_who_was_missing_from_a_round_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A device that has lost its folder of states is missing from every round; nobody would hear of it."""
    events = Events(lambda: 0.0, round=4)
    with caplog.at_level(logging.INFO, logger="fedkeep.events"):
        for client in ("ann", "bob", "ann"):
            events.note("lost", f"The order wants version 3 of what client {client!r} keeps.", client=client)
        events.note("lost", "A sum was left out.", node="7")
        events.sum_up()
        events.sum_up()
        events.note("late", "Client 'cid' did not answer.", client="cid")
        events.sum_up()
    assert [record.getMessage() for record in caplog.records if record.name == "fedkeep.events"] == [
        "Round 4: 2 clients were missing, e.g. 'ann'. The order wants version 3 of what client 'ann' keeps.",
        "Round 4: a client was missing: 'cid'. Client 'cid' did not answer.",
    ]
