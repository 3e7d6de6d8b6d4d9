"""Which clients live at which node, as the signed project lists it."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedkeep.cli import app
from fedkeep.core.errors import ConfigError
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.flower import client_app as nodes
from fedkeep.flower import server_app
from fedkeep.flower.grid import GridTransport
from fedkeep.flower.keys import make_keys
from fedkeep.flower.project import new_project
from fedkeep.flower.served import federation_of
from fedkeep.flower.set_up import set_up
from fedkeep.flower.signed import (
    CLIENTS,
    NODES,
    Signed,
    check_signed,
    clients_by_node,
    listed_in,
    node_names,
    sign_project,
)
from fedkeep.remote.attendance import attendance_of, move
from fedkeep.remote.client_ledger import Listed
from fedkeep.remote.served_run import serve_run
from tests.flower.small import CONFIG
from tests.flower.test_apps import federation
from tests.flower.test_signed import bundle, changed

TABLE = '[clients]\nnorth = ["anna", "n-*"]\nsouth = ["ben"]\n'


@pytest.fixture(autouse=True)
def _no_nodes():
    nodes._configured.cache_clear()
    yield
    nodes._configured.cache_clear()


def made(folder, clients=None):
    set_up(folder, CONFIG, hosts=[], nodes=["north", "south"], port=8443, days=1, clients=clients)
    return folder / "project"


def test_the_list_is_signed_with_the_project_and_names_nodes_by_their_keys(tmp_path):
    project = made(tmp_path / "visits", TABLE)
    names = node_names(project / NODES)
    by_name = {names[key]: list(globs) for key, globs in listed_in(project, names).clients.items()}
    assert by_name == {"north": ["anna", "n-*"], "south": ["ben"]}
    trusted = [tmp_path / "visits" / "keys" / "signer.pub"]
    assert CLIENTS in check_signed(bundle(project.parent), trusted)
    with pytest.raises(Exception, match="no key that it trusts has signed"):
        check_signed(changed(bundle(project.parent), **{CLIENTS: TABLE.replace("ben", "anna")}), trusted)
    assert CLIENTS not in Signed.of(project).contents, "a published file tells nobody's clients"


def test_init_keeps_the_list_until_another_is_given(tmp_path):
    project = made(tmp_path / "visits", TABLE)
    made(tmp_path / "visits")
    assert (project / CLIENTS).read_text() == TABLE
    made(tmp_path / "visits", TABLE.replace("ben", "bea"))
    assert "bea" in (project / CLIENTS).read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "one table \\[clients\\]"),
        ("[nodes]\nnorth = ['a']", "got nodes"),
        ("[clients]\nnorht = ['a']", "clients.norht.*known are north, south.*north"),
        ("[clients]\nnorth = 'a'", "clients.north: wanted a list"),
        ("[clients]\nnorth = ['a', 3]", "clients.north: wanted a list"),
        ("[clients]\nnorth = ['a']\nsouth = ['b', 'a']", "'a' is listed for north and for south"),
        ("[clients", "no valid TOML"),
    ],
)
def test_a_list_that_is_wrong_is_refused_and_the_old_one_stays(text, said, tmp_path):
    project = made(tmp_path / "visits", TABLE)
    with pytest.raises(ConfigError, match=said):
        made(tmp_path / "visits", text)
    assert (project / CLIENTS).read_text() == TABLE
    with pytest.raises(ConfigError, match=said):
        clients_by_node(text, ["north", "south"])


def test_a_list_that_was_put_there_by_hand_is_checked_as_it_is_signed(tmp_path):
    make_keys(tmp_path / "keys", hosts=["localhost"], nodes=["a"])
    new_project(tmp_path / "project", CONFIG)
    (tmp_path / "project" / CLIENTS).write_text(TABLE)
    with pytest.raises(ConfigError, match="clients.north: no node of that name has a key; known are a"):
        sign_project(tmp_path / "project", tmp_path / "keys" / "signer.key")


def test_the_server_app_hands_the_list_on(tmp_path, monkeypatch):
    project, found = made(tmp_path / "visits", TABLE), {}
    monkeypatch.syspath_prepend(project)
    monkeypatch.setattr(server_app, "serve_run", lambda federation, *_, **__: found.update(f=federation))
    settings = server_app.settings_of(
        {
            "config": "config.toml",
            "out": str(tmp_path / "run"),
            "status": "",
            "clients": 0,
            "limit": 0,
            "patience": 1.0,
            "only": "",
            "keep-rounds": 0,
            "continue-from": "",
            "on-change": "refuse",
        }
    )
    server_app._serve(None, settings, print)
    assert found["f"].listed == listed_in(project, node_names(project / NODES))


def trained(folder, listed, impostor):
    """Train with two nodes, the first of which claims a client of the second; return the run and what was said."""
    place, grid = federation(folder, CONFIG)
    thief, victim = place.clients
    stolen = place.clients[victim][0]
    if impostor:
        config = folder / "nodes" / thief / "node.toml"
        text = config.read_text()
        mine = json.dumps(list(place.clients[thief]))[1:-1]
        assert mine in text.replace("'", '"')
        config.write_text(text.replace("'", '"').replace(mine, f'{mine}, "{stolen}"'))
    keys = {(b"key %d" % (7 + k)).hex(): name for k, name in enumerate(place.clients)}
    list_of = Listed({key: place.clients[name] for key, name in keys.items()}) if listed else None
    run = replace(federation_of(CONFIG), clients=6, listed=list_of)
    serve_run(run, GridTransport(grid, names=keys), place.run, progress=False, poll=0.01)
    return place.run, stolen, thief


def test_an_impostor_that_is_there_first_changes_no_bit_and_is_named(tmp_path):
    honest, _, _ = trained(tmp_path / "honest", listed=True, impostor=False)
    nodes._configured.cache_clear()
    run, stolen, thief = trained(tmp_path / "impostor", listed=True, impostor=True)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["kind"] == "refused"]
    assert (told["node"], told["client"]) == (thief, stolen)
    expected, found = (read_commit(folder, read_info(folder)) for folder in (honest, run))
    assert (found.round, found.server_sha256) == (3, expected.server_sha256)


def test_who_says_which_rule_holds_and_move_follows_the_list(tmp_path):
    run, stolen, _ = trained(tmp_path / "listed", listed=True, impostor=False)
    said = CliRunner().invoke(app, ["flower", "who", str(run)]).output
    assert "signed project lists them (clients.toml)" in said
    with pytest.raises(ConfigError, match="flower init DIR --clients"):
        move(run, [stolen], "00")
    nodes._configured.cache_clear()
    first, stolen, _ = trained(tmp_path / "first", listed=False, impostor=False)
    assert attendance_of(first).rule == "A client belongs to the key that first brought it."
    move(first, [stolen], "00")
    assert attendance_of(first).roster.owners[stolen] == "00"
