"""Both apps with a grid in one process: every message in Flower's form, real devices with their own configurations."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedkeep.core.errors import ConfigError, StoreError
from fedkeep.core.files import load_verified
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.experiments import progress
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.flower import client_app as nodes
from fedkeep.flower import server_app
from fedkeep.flower.client_app import NODE_CONFIG, serve
from fedkeep.flower.grid import GridTransport
from fedkeep.flower.local_federation import local_of, read_status, rounds_done
from fedkeep.flower.packet_records import from_records, to_records
from fedkeep.flower.served import federation_of
from fedkeep.remote import Packet
from fedkeep.remote.device_file import DeviceFile
from fedkeep.remote.roll_back import kept_rounds
from fedkeep.remote.served_run import serve_run
from tests.flower.loopback import Loopback, context
from tests.flower.small import CONFIG, SECURE


@pytest.fixture(autouse=True)
def _no_nodes():
    nodes._configured.cache_clear()
    nodes._simulated.cache_clear()
    yield
    progress._ELSEWHERE.clear()


def federation(folder, text=CONFIG, count=2):
    """Return a place with its nodes' configurations written, and a grid that reaches them."""
    place = local_of(folder, text, None, count)
    (folder / "keys").mkdir(parents=True)
    for name in place.clients:
        place.node(name, "127.0.0.1:1")
    contexts = [
        context(7 + k, **{NODE_CONFIG: str(folder / "nodes" / name / "node.toml")})
        for k, name in enumerate(place.clients)
    ]
    return place, Loopback(serve, contexts)


@pytest.mark.parametrize("text", [CONFIG, SECURE], ids=["plain", "secure sums"])
def test_a_run_over_flowers_wire_equals_a_simulation_to_the_bit(text, tmp_path):
    place, grid = federation(tmp_path / "place", text)
    serve_run(
        replace(federation_of(text), clients=6), GridTransport(grid), place.run, progress=False, poll=0.01
    )
    expected = run_config(
        parse_config(text, "", {"run.engine": "sequential"}), out=tmp_path / "simulation"
    ).last
    commit = read_commit(place.run, read_info(place.run))
    server = load_verified(place.run / commit.server, commit.server_sha256)
    assert commit.round == expected.round == 3
    for name, value in expected.server.items():
        assert torch.equal(server[f"params/{name}"], value), name
    compared = 0
    for name in place.clients:
        file = DeviceFile(next((place.folder / "nodes" / name / "state").glob("*.db")), name)
        for client in place.clients[name]:
            kept = [version for version in file.versions(client) if version.accepted]
            own = expected.private.read([expected.data.index(client)])
            for key, value in file.values(max(kept, key=lambda v: v.version)).items() if kept else ():
                assert torch.equal(value, own[key][0]), client
                compared += 1
        file.close()
    assert compared >= 4


def test_the_seed_of_batches_is_the_only_thing_of_the_servers_data_that_a_device_is_told(tmp_path):
    told = federation_of(CONFIG).text
    assert "many_user_text" not in told
    assert "rounds = 3" not in told
    assert parse_config(told).data.reader == "devices"


def test_devices_are_told_whether_layers_are_swapped():
    for text, wanted in ((CONFIG, True), (f"{CONFIG}accelerate = false\n", False)):
        assert parse_config(federation_of(text).text).run.accelerate is wanted


def project(tmp_path, monkeypatch, text=CONFIG, **settings):
    (tmp_path / "config.toml").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    given = {
        "config": "config.toml",
        "out": str(tmp_path / "run"),
        "devices": str(tmp_path / "devices"),
        "status": str(tmp_path / "status.json"),
        "clients": 6,
        "limit": 0,
        "only": "",
        "patience": 60.0,
        "keep-rounds": 0,
        "continue-from": "",
        "on-change": "refuse",
        **settings,
    }
    made = context(1)
    made.run_config.update(given)
    return made


def test_the_server_app_says_how_it_is_and_goes_on_by_itself(tmp_path, monkeypatch):
    _, grid = federation(tmp_path / "place")
    made = project(tmp_path, monkeypatch)
    monkeypatch.setattr(server_app, "serve_run", lambda *a, **k: serve_run(*a, **{**k, "poll": 0.01}))
    server_app.main(grid, made)
    assert (read_status(tmp_path / "status.json").state, rounds_done(tmp_path / "run")) == ("finished", 3)
    before = (tmp_path / "run" / "commit.json").read_bytes()
    server_app.main(grid, made)
    assert (tmp_path / "run" / "commit.json").read_bytes() == before


def test_the_server_app_says_in_flowers_log_how_far_it_is_and_what_judging_found(
    tmp_path, monkeypatch, caplog
):
    _, grid = federation(tmp_path / "place")
    monkeypatch.setattr(server_app, "serve_run", lambda *a, **k: serve_run(*a, **{**k, "poll": 0.01}))
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with caplog.at_level("INFO", "flwr"):
        server_app.main(grid, project(tmp_path, monkeypatch))
        assert "small: 0 of 3 rounds are finished." in caplog.messages
        assert caplog.messages[-1] == f"The training is finished. The run: {tmp_path / 'run'}"
        before = (tmp_path / "run" / "commit.json").read_bytes()
        caplog.clear()
        server_app.main(grid, project(tmp_path, monkeypatch, only="judge"))
    found = [json.loads(line) for line in (tmp_path / "run" / "judged.jsonl").read_text().splitlines()]
    told = [m for m in caplog.messages if m.startswith("Round 2, test: accuracy ")]
    value = next(r["value"] for r in found if (r["split"], r["metric"]) == ("test", "accuracy"))
    assert told == [f"Round 2, test: accuracy {value:.4g} ({found[-1]['n']} examples)."]
    assert (tmp_path / "run" / "commit.json").read_bytes() == before


def test_the_server_app_keeps_rounds_and_continues_an_older_run(tmp_path, monkeypatch):
    _, grid = federation(tmp_path / "place")
    monkeypatch.setattr(server_app, "serve_run", lambda *a, **k: serve_run(*a, **{**k, "poll": 0.01}))
    server_app.main(grid, project(tmp_path, monkeypatch, **{"keep-rounds": 1}))
    assert kept_rounds(tmp_path / "run") == [2, 3]
    newer = {"out": str(tmp_path / "new"), "continue-from": str(tmp_path / "run"), "on-change": "never"}
    with pytest.raises(ConfigError, match="on-change.*'refuse'.*'anew'.*'never'"):
        server_app.main(grid, project(tmp_path, monkeypatch, **newer))
    server_app.main(grid, project(tmp_path, monkeypatch, **{**newer, "on-change": "anew"}))
    infos = [read_info(tmp_path / name) for name in ("run", "new")]
    assert infos[1]["began_from"]["run"] == infos[0]["run"]
    assert rounds_done(tmp_path / "new") == 3


def test_an_order_beyond_the_limit_ends_the_server_app_with_one_line(tmp_path, monkeypatch):
    _, grid = federation(tmp_path / "place")
    made = project(tmp_path, monkeypatch, limit=1000)
    with pytest.raises(ConfigError, match=r"A message of [\d,]+ bytes to.*1,000"):
        server_app.main(grid, made)
    status = read_status(tmp_path / "status.json")
    assert status.state == "failed"
    assert "beyond the limit of 1,000 bytes. Put fewer clients on a node" in status.text


def test_in_a_simulation_each_node_has_its_share_of_the_experiments_clients(tmp_path, monkeypatch):
    made = project(tmp_path, monkeypatch)
    found = []
    for number in range(2):
        here = context(7 + number, **{"partition-id": number, "num-partitions": 2})
        here.run_config.update(made.run_config)
        found.append(nodes.node_of(here))
    assert len({Path(node.folder) for node in found}) == len({node.terms.owner for node in found}) == 2
    assert [node.clients for node in found] == [
        ["user-0", "user-2", "user-4"],
        ["user-1", "user-3", "user-5"],
    ]


def test_a_simulation_does_not_go_on_with_another_number_of_nodes(tmp_path, monkeypatch):
    """Most clients would be on a node that has nothing of theirs, and missing from every round."""
    made = project(tmp_path, monkeypatch)

    def contexts(count):
        for number in range(count):
            here = context(7 + number, **{"partition-id": number, "num-partitions": count})
            here.run_config.update(made.run_config)
            yield here

    grid = GridTransport(Loopback(serve, list(contexts(2))))
    text = CONFIG.replace("rounds = 3", "rounds = 1")
    serve_run(replace(federation_of(text), clients=6), grid, tmp_path / "run", progress=False, poll=0.01)
    for number, here in enumerate(contexts(3)):
        node = nodes.node_of(here)
        said = f"belongs to 'supernode {number} of 2', and this device to 'supernode {number} of 3'"
        for path in [next(node.folder.glob("*.db"))] if number < 2 else []:
            with pytest.raises(StoreError, match=said):
                DeviceFile(path, node.terms.owner)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "This node has no configuration. Start it with fedkeep device run NODE.toml"),
        ({NODE_CONFIG: "/none/node.toml"}, "Its configuration cannot be used. Its own log says more."),
    ],
)
def test_a_node_that_cannot_serve_says_why(config, said):
    grid = Loopback(serve, [context(7, **config)])
    carrier = GridTransport(grid)
    (reply,) = carrier.receive(carrier.send([("7", Packet({"kind": "hello"}))]))
    assert reply.packet.header["kind"] == "refused"
    assert said in reply.packet.header["reason"]


def test_a_malformed_message_is_answered_by_a_reason():
    message = to_records([Packet({"kind": "hello"})])[0]
    message["own/0"]["content"] = b"no packet"
    from flwr.app import Message

    Loopback(serve, [context(7)])
    reply = serve(Message(message, 7, "query"), context(7))
    assert json.loads(json.dumps(from_records(reply.content).header))["kind"] == "refused"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[rounds]\ndeadlin = 3\n", "rounds.deadlin: unknown key. Did you mean rounds.deadline?"),
        (
            '[rounds]\ndeadline = "x"\n',
            "rounds.deadline: wanted a number; got 'x'",
        ),
        ("[rounds]\nminimum = -1\n", "rounds.minimum: wanted at least 0; got -1"),
        ("[personalization]\nsteps = 20\n", "personalization: not across machines"),
        ("[ranking]\nks = [10]\n", "ranking: not across machines"),
        ("sampling = 'poisson'\n", "'poisson' across machines goes with a table .privacy. alone"),
    ],
)
def test_a_servers_configuration_that_is_wrong_says_where(text, said):
    with pytest.raises(ConfigError, match=said.replace("?", ".")):
        federation_of(CONFIG + text)


def test_the_policy_of_rounds_is_that_of_the_configuration():
    made = federation_of(CONFIG + '[rounds]\nminimum = 4\ndeadline = 60.0\nclients = 5\nmode = "buffered"\n')
    assert (made.policy.minimum, made.policy.deadline, made.policy.mode, made.clients) == (
        4,
        60.0,
        "buffered",
        5,
    )


def test_two_runs_over_one_link_do_not_meet(tmp_path):
    place, grid = federation(tmp_path / "place")
    texts = {
        name: CONFIG.replace("batch_size = 8", f"batch_size = {size}").replace("rounds = 3", "rounds = 1")
        for name, size in (("one", 8), ("two", 4))
    }
    for name, text in texts.items():
        made = replace(federation_of(text), clients=6)
        serve_run(made, GridTransport(grid), tmp_path / name, progress=False, poll=0.01)
    for name, text in texts.items():
        expected = run_config(
            parse_config(text, "", {"run.engine": "sequential"}), out=tmp_path / f"{name}-simulated"
        ).last
        commit = read_commit(tmp_path / name, read_info(tmp_path / name))
        found = load_verified(tmp_path / name / commit.server, commit.server_sha256)
        assert all(torch.equal(found[f"params/{n}"], value) for n, value in expected.server.items())
    for name in place.clients:
        assert len(list((place.folder / "nodes" / name / "state").glob("*.db"))) == 2


@pytest.mark.parametrize("one_key", [True, False])
def test_a_client_that_stands_on_two_nodes_ends_the_run_with_one_line(one_key, tmp_path):
    """With two keys it is the first one's; the run waits for the clients that are lacking, and says why they are."""
    place, grid = federation(tmp_path / "place")
    if one_key:
        grid.keys = dict.fromkeys(grid.contexts, b"one key")
    path = place.folder / "nodes" / "node-2" / "node.toml"
    path.write_text(path.read_text().replace('"user-1"', '"user-0"'))
    said = "is declared on two nodes, .7. and .8." if one_key else "Node .8. claims client .user-0."
    with pytest.raises(ConfigError, match=said) as error:
        serve_run(
            replace(federation_of(CONFIG), clients=6),
            GridTransport(grid),
            place.run,
            progress=False,
            poll=0.01,
            patience=1.0,
        )
    assert ("\n" in str(error.value)) == (not one_key)
    assert not place.run.exists()


TABLE = """[data]
reader = "table"
path = "secret-place/notes.csv"

[device]
owner = "ann"
folder = "states"
"""


@pytest.mark.parametrize(
    ("old", "new", "said", "kept"),
    [
        (",train", ",secret since March", "Its data cannot be used", "got 'secret since March'"),
        ("ann,", "\x07 secret bob,", "Its data cannot be used", "secret bob"),
        ("notes.csv", "no.csv", "Its data cannot be used", "secret-place/no.csv, which does not exist"),
        ('"table"', '"secret"', "Its configuration cannot be used", "there is no reader 'secret'"),
        ('"states"', "secret", "Its configuration cannot be used", "node.toml is no valid TOML"),
        ("", "KeyError", "It has failed with KeyError", "a secret cell"),
    ],
    ids=["split", "client", "no file", "reader", "no TOML", "no error of ours"],
)
def test_of_a_device_that_cannot_be_built_the_server_hears_nothing_but_that(
    old, new, said, kept, tmp_path, monkeypatch, capsys
):
    rows = "user,text,label,split\n" + "ann,hello,a,train\nann,world,b,train\n"
    (tmp_path / "secret-place").mkdir()
    (tmp_path / "secret-place" / "notes.csv").write_text(rows.replace(old, new) if old else rows)
    (tmp_path / "node.toml").write_text(TABLE.replace(old, new) if old else TABLE)
    if new == "KeyError":  # as a reader of the device's own may raise it

        def build(path, tell):
            raise KeyError("a secret cell")

        monkeypatch.setattr(nodes, "build_node", build)
    grid = Loopback(serve, [context(7, **{NODE_CONFIG: str(tmp_path / "node.toml")})])
    carrier = GridTransport(grid)
    (reply,) = carrier.receive(carrier.send([("7", Packet({"kind": "hello", "run": "r"}))]))
    assert reply.packet.header["reason"].startswith(said), reply
    assert reply.packet.header["reason"].endswith("Its own log says more.")
    assert reply.packet.header["run"] == "r"
    assert not any(b"secret" in content for content in grid.carried.values())
    assert kept in capsys.readouterr().out
