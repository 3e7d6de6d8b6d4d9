"""Without a link: what deploy does when the server app dies in silence or is stopped, and what it tells of judging."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.experiments.run_directory import locked
from fedkeep.flower import local_federation
from fedkeep.flower.link import _said
from fedkeep.flower.local_federation import (
    EndedError,
    Local,
    ServerStatus,
    local_of,
    train,
    train_at,
    write_status,
)
from tests.flower.small import CONFIG


class Processes:
    logs = "logs"

    def check(self):
        pass


class Link:
    processes = Processes()

    def __init__(self, states):
        self.states, self.stopped, self.given = iter(states), [], []
        self.starts = lambda status: None

    def submit(self, project, settings):
        self.given.append(settings)
        self.starts(Path(settings["status"]))
        return str(16 + len(self.given))

    def state_of(self, run):
        found = next(self.states)
        if isinstance(found, BaseException):
            raise found
        return found

    def stop_run(self, run):
        self.stopped.append(run)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(local_federation, "SILENT", 0.0)
    monkeypatch.setattr(local_federation, "LOOK", 0.01)
    return Local(folder=tmp_path, config_text=CONFIG, data={}, clients={"node-1": ["a"]})


def test_a_server_app_that_ended_without_a_word_is_told_and_its_run_stopped(place):
    link = Link(["running", "finished:failed"])
    with pytest.raises(RunError, match=r"ended without a word"):
        train(place, link)
    assert link.stopped == ["17"]


def test_a_link_that_died_is_told_in_words(place, monkeypatch):
    link = Link([RunError("The link does not say how the run is: it said nothing")])
    monkeypatch.setattr(local_federation, "AWAY", 0.0)
    with pytest.raises(RunError, match=r"it said nothing Give the same"):
        train(place, link)


def test_what_flower_says_in_json_is_said_in_words():
    answer = '{ "success": false, "error-message": "Using SuperLink\\n  \\"local\\" is away" }'
    assert _said(SimpleNamespace(stdout=answer, stderr="")) == 'Using SuperLink "local" is away'
    assert _said(SimpleNamespace(stdout="╭─ Error ─╮\n│ no link │\n╰─╯", stderr="")) == "no link"


def test_who_stops_it_stops_the_run_too(place):
    link = Link([KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        train(place, link)
    assert link.stopped == ["17"]


def told(folder, link):
    said = []
    train_at(link, folder / "project", {"out": str(folder / "run")}, folder / "project.training", said.append)
    return said


@pytest.mark.usefixtures("place")
def test_a_server_app_that_died_is_started_again_while_rounds_finish(tmp_path, monkeypatch):
    rounds = iter([0, 0, 2, 2, 2, 2])
    monkeypatch.setattr(local_federation, "rounds_done", lambda run: next(rounds))
    link = Link(["finished:failed"])
    link.starts = lambda status: (
        len(link.given) == 2 and write_status(status, ServerStatus("finished", "Done."))
    )
    said = told(tmp_path, link)
    assert len(link.given) == 2
    assert said[-1] == f"Done. The run: {tmp_path / 'run'}"
    assert not (tmp_path / "project.training").exists()


@pytest.mark.usefixtures("place")
def test_an_error_of_the_server_app_ends_the_command_and_a_death_before_any_round_too(tmp_path):
    link = Link([])
    link.starts = lambda status: write_status(status, ServerStatus("failed", "method.kind: unknown."))
    with pytest.raises(RunError, match="method.kind: unknown"):
        told(tmp_path, link)
    with pytest.raises(EndedError):
        told(tmp_path, Link(["finished:failed", "running", "finished:failed"]))


@pytest.mark.usefixtures("place")
def test_a_training_on_its_way_is_followed_and_not_started_twice(tmp_path):
    about = {"flower": "17", "settings": {"out": str(tmp_path / "run")}}
    (tmp_path / "project.training").write_text(json.dumps(about))
    link = Link(["running", RunError("busy"), "finished:completed"])
    assert "on its way" in told(tmp_path, link)[0]
    assert link.given == []


@pytest.mark.usefixtures("place")
def test_a_training_goes_on_when_its_follower_ends(tmp_path):
    link = Link([KeyboardInterrupt(), "running", "finished:completed"])
    with pytest.raises(KeyboardInterrupt):
        told(tmp_path, link)
    assert link.stopped == []
    assert "on its way" in told(tmp_path, link)[0]
    assert len(link.given) == 1


@pytest.mark.usefixtures("place")
def test_a_training_that_is_stopped_elsewhere_is_not_started_again(tmp_path, monkeypatch):
    rounds = iter([0, 0, 2, 2])
    monkeypatch.setattr(local_federation, "rounds_done", lambda run: next(rounds))
    link = Link(["finished:stopped"])
    with pytest.raises(RunError, match="was stopped"):
        told(tmp_path, link)
    assert len(link.given) == 1


@pytest.mark.usefixtures("place")
def test_a_training_with_other_settings_is_not_taken_for_the_one_on_its_way(tmp_path):
    about = {"flower": "17", "settings": {"out": "elsewhere"}}
    (tmp_path / "project.training").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="out=elsewhere"):
        told(tmp_path, Link(["running"]))


def test_a_folder_that_another_process_deploys_in_is_refused_and_left_as_it_is(place):
    """Two links with one database, and two nodes with one key, kept both from training for minutes."""
    held = locked(place.folder)
    with (
        pytest.raises(RunError, match=r"is in use by another"),
        local_federation.federation(place),
    ):
        pass
    held.release()
    assert [path.name for path in place.folder.iterdir()] == ["lock"]


def test_nodes_divide_data_by_the_seed_of_the_experiment(tmp_path):
    """A division that follows from the seed must be the same on each node."""
    place = local_of(tmp_path, CONFIG.replace("seed = 3", "seed = 19"), None, 2)
    place.prepare()
    assert place.seed == 19
    assert "seed = 19" in place.node("node-1", "127.0.0.1:1").config.read_text()


def test_what_judging_found_is_told_also_where_it_is_no_number(tmp_path):
    about = {"round": 1, "split": "test", "client": None, "metric": "auc", "n": 6}
    found = [{**about, "value": None}, {**about, "value": 0.75}, {**about, "value": 0.5, "client": "a"}]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    assert local_federation.judged(tmp_path, "") == []
    assert local_federation.judged(tmp_path, "judge") == [
        "Round 1, test: auc not defined (6 examples).",
        "Round 1, test: auc 0.75 (6 examples).",
    ]
