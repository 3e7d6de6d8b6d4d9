"""A party that is added by the command: its key, its folder, the project signed anew, and the run that it joins."""

import json
import time
import tomllib
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fedkeep.cli import app
from fedkeep.core.errors import ConfigError
from fedkeep.experiments.toml import to_toml
from fedkeep.flower import link as flower_link
from fedkeep.flower.link import PATIENCE, free_port
from fedkeep.flower.local_federation import federation, local_of, read_status, rounds_done, start_node
from fedkeep.flower.set_up import add_party, set_up
from fedkeep.flower.signed import CLIENTS, NODES, SIGNATURE, check_signed, node_names
from fedkeep.flower.supernode import SuperNode
from fedkeep.flower.watch import JOINED
from fedkeep.remote.attendance import attendance_of
from tests.flower.small import CONFIG
from tests.flower.test_signed import bundle

TABLE = '[clients]\nnorth = ["anna", "n-*"]\n'


def made(folder, clients=None):
    set_up(folder, CONFIG, hosts=["link.example.org"], nodes=["north"], port=9443, days=1, clients=clients)
    return folder


def test_a_party_is_added_with_all_that_it_needs_and_others_stay(tmp_path):
    folder = made(tmp_path / "visits")
    before = {path: path.read_bytes() for path in (folder / "north").iterdir()}
    signature = (folder / "project" / SIGNATURE).read_bytes()
    key = add_party(folder, "south")
    assert node_names(folder / "project" / NODES)[key] == "south"
    assert (folder / "project" / SIGNATURE).read_bytes() != signature
    check_signed(bundle(folder), [folder / "keys" / "signer.pub"])
    assert {path: path.read_bytes() for path in (folder / "north").iterdir()} == before
    link = tomllib.loads((folder / "south" / "node.toml").read_text())["link"]
    assert (link["address"], (folder / "south" / link["key"]).exists()) == ("link.example.org:9443", True)
    assert add_party(folder, "south") == key, "given again it changes nothing"


def test_where_clients_are_listed_the_new_ones_are_too(tmp_path):
    folder = made(tmp_path / "visits", TABLE)
    with pytest.raises(ConfigError, match="say whose 'south' are, with --client"):
        add_party(folder, "south")
    with pytest.raises(ConfigError, match="'anna' is listed for north and for south"):
        add_party(folder, "south", ["anna"])
    assert not (folder / "south").exists()
    add_party(folder, "south", ["s-*"])
    table = tomllib.loads((folder / "project" / CLIENTS).read_text())
    assert table == {"clients": {"north": ["anna", "n-*"], "south": ["s-*"]}}
    plain = made(tmp_path / "plain")
    with pytest.raises(ConfigError, match="Leave --client out"):
        add_party(plain, "south", ["s-*"])


def test_what_is_no_federation_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is no federation with keys"):
        add_party(tmp_path, "south")


def test_the_command_tells_the_link_and_says_what_comes(tmp_path, monkeypatch):
    folder, told = made(tmp_path / "visits"), []
    monkeypatch.setattr(flower_link.Control, "register", lambda self, key: told.append(key))
    said = CliRunner().invoke(app, ["flower", "add", str(folder), "--node", "south"])
    assert said.exit_code == 0, said.output
    assert told == [folder / "keys" / "south.pub"]
    assert "from the first round on" in said.output


@pytest.mark.slow
def test_a_node_that_is_added_joins_a_run_on_its_way_by_processes(tmp_path):
    text = CONFIG.replace("rounds = 3", "rounds = 14").replace("cohort = 4", "cohort = 6")
    whole = local_of(tmp_path, text, None, 3)
    *first, last = whole.clients
    place = replace(whole, clients={name: whole.clients[name] for name in first})
    with federation(place) as (link, _):
        status = tmp_path / "status.json"
        link.submit(tmp_path / "project", {"status": str(status), "clients": 4})
        wait(lambda: rounds_done(place.run) >= 1)
        words = ["flower", "add", str(tmp_path), "--node", last, "--link", link.address]
        said = CliRunner().invoke(app, words)
        assert said.exit_code == 0, said.output
        party = tmp_path / last
        table = tomllib.loads((party / "node.toml").read_text())
        table |= {"seed": place.seed, "data": dict(place.data)}
        table["device"] |= {"clients": list(whole.clients[last]), "folder": str(party / "states")}
        table["link"] |= {"address": link.address, "port": free_port()}
        (party / "node.toml").write_text(to_toml(table))
        start_node(link, last, SuperNode.read(party / "node.toml", party / "flower"))
        link.processes.await_text(last, JOINED, PATIENCE)
        wait(lambda: read_status(status).state in ("finished", "failed"))
    assert read_status(status).state == "finished", read_status(status).text
    found = attendance_of(place.run)
    ((since, before),) = found.roster.joined
    assert (before, len(found.roster), 1 <= since < 14) == (4, 6, True)
    assert {found.taken[client] for client in whole.clients[last]} == {14 - since}
    assert all(found.taken[c] == 14 for name in first for c in whole.clients[name])
    events = map(json.loads, (place.run / "events.jsonl").read_text().splitlines())
    assert any(f"take part from round {since + 1} on" in event["text"] for event in events)


def wait(done):
    end = time.monotonic() + 400
    while not done():
        assert time.monotonic() < end
        time.sleep(0.2)
