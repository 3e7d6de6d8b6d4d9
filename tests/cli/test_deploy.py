"""``deploy``, ``flower`` and ``device run``: what is wrong is one clear line, exit code 2, and nothing is left running."""

import socket
import tomllib

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.flower.keys import make_keys
from fedkeep.flower.local_federation import local_of
from fedkeep.flower.served import federation_of
from fedkeep.flower.signed import node_names
from fedkeep.remote.node_config import read_node_config
from tests.cli.conftest import TOY
from tests.commands import succeeded
from tests.tiny import files

NODE = """[data]
reader = "toy"
users = 2
examples = 12

[device]
owner = "a"
folder = "states"

[link]
address = "127.0.0.1:1"
certificate = "keys/ca.pem"
key = "keys/a.key"
trusted = ["keys/signer.pub"]
port = 39471
"""


def refused(result, said):
    """Assert that a command ended with 2 and one line that says something."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert said in lines[0]


def test_more_nodes_than_clients_are_refused(fedkeep, tmp_path):
    refused(
        fedkeep("deploy", "--local", "7", "--config", "toy.toml"),
        "There are 6 clients; wanted 1 to as many nodes",
    )
    assert not (tmp_path / "deployments").exists()


def test_a_port_in_use_is_refused_before_anything_starts(fedkeep, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = fedkeep("deploy", "--local", "2", "--config", "toy.toml", "--port", str(port))
    refused(done, f"The port {port}, which the link wants, is in use")
    assert not (tmp_path / "deployments" / "toy" / "logs" / "link.log").exists()


def test_another_experiment_in_the_folder_is_refused(fedkeep, tmp_path):
    (tmp_path / "place" / "project").mkdir(parents=True)
    (tmp_path / "place" / "project" / "config.toml").write_text("seed = 9\n")
    refused(
        fedkeep("deploy", "--local", "2", "--config", "toy.toml", "--out", "place"),
        "place holds another experiment",
    )


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 2)])
def test_a_folder_whose_clients_live_on_other_nodes_is_refused(before, now, tmp_path):
    """They would have begun anew there, or been lost from the run."""
    place = local_of(tmp_path / "place", TOY, None, before)
    for _ in range(2):  # the same once more goes on
        place.prepare()
        for name in place.clients:
            place.node(name, "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"place holds a deployment in"):
        local_of(tmp_path / "place", TOY, None, now).prepare()


def test_a_table_of_rounds_that_is_wrong_is_refused(fedkeep, tmp_path):
    (tmp_path / "rounds.toml").write_text(TOY + "[rounds]\nminimun = 3\n")
    result = fedkeep("deploy", "--local", "2", "--config", "rounds.toml")
    assert result.exit_code == 2
    assert "rounds.minimun: unknown key. Did you mean rounds.minimum?" in result.stderr


def test_one_command_makes_project_keys_and_a_folder_for_each_party(fedkeep, tmp_path):
    succeeded(
        fedkeep("flower", "init", "f", "--config", "toy.toml", "--host", "link.example.org", "--node", "a")
    )
    assert set(files(tmp_path / "f" / "a")) == {
        "node.toml",
        "a.key",
        "ca.pem",
        "signer.pub",
        "experiment.toml",
        "README.md",
        "fedkeep-node.service",
        "compose.yaml",
    }
    keys = set(files(tmp_path / "f" / "keys"))
    assert {"a.pub", "ca.key", "link.key", "signer.key", "publisher.key"} <= keys
    assert "a.key" not in keys
    for path in (tmp_path / "f" / "a").iterdir():
        assert path.stat().st_mode & 0o077 == 0
    node = tmp_path / "f" / "a" / "node.toml"
    assert read_node_config(node).link["address"] == "link.example.org:8443"
    node.write_text(node.read_text().replace("data.csv", "mine.csv"))
    signature, key = (
        (tmp_path / "f" / name).read_bytes() for name in ("project/fedkeep-signature.json", "a/a.key")
    )
    (tmp_path / "toy.toml").write_text(TOY.replace("rounds = 2", "rounds = 3"))
    succeeded(fedkeep("flower", "init", "f", "--config", "toy.toml", "--node", "b"))
    assert (tmp_path / "f" / "project" / "fedkeep-signature.json").read_bytes() != signature
    assert (tmp_path / "f" / "a" / "a.key").read_bytes() == key
    assert "mine.csv" in node.read_text()
    assert (tmp_path / "f" / "b" / "experiment.toml").read_bytes() == (
        tmp_path / "f" / "project" / "config.toml"
    ).read_bytes()


def test_a_party_is_told_the_columns_of_the_owners_table(fedkeep, tmp_path):
    columns = 'user = "who"\nlabel = "y"\nfeatures = ["a"]\n[data.kinds]\na = "number"\n'
    data = f'[data]\nreader = "table"\npath = "/home/me/all.csv"\n{columns}'
    (tmp_path / "mine.toml").write_text(
        TOY.replace('[data]\nreader = "toy"\nusers = 6\nexamples = 12\n', data)
    )
    succeeded(fedkeep("flower", "init", "f", "--config", "mine.toml", "--node", "a"))
    told = tomllib.loads((tmp_path / "f" / "a" / "node.toml").read_text())["data"]
    assert told == tomllib.loads(data)["data"] | {"path": "data.csv"}


def test_a_nodes_key_is_renewed_and_the_others_stay(fedkeep, tmp_path):
    fedkeep("flower", "init", "f", "--config", "toy.toml", "--node", "a", "--node", "b")
    nodes = tmp_path / "f" / "project" / "nodes.json"
    before, known = [(tmp_path / "f" / n / f"{n}.key").read_bytes() for n in "ab"], node_names(nodes)
    succeeded(fedkeep("flower", "init", "f", "--renew", "a"))
    after = [(tmp_path / "f" / n / f"{n}.key").read_bytes() for n in "ab"]
    assert (after[0] == before[0], after[1] == before[1]) == (False, True)
    now = node_names(nodes)
    assert sorted(now.values()) == ["a", "b"]
    assert [now.get(key) for key, name in known.items() if name == "a"] == [None]
    refused(fedkeep("flower", "init", "f", "--renew", "c"), "no key of a node 'c'")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["f"], "f holds no project yet"),
        (["f", "--config", "toy.toml", "--node", "link"], "A node's name is letters"),
        (["f", "--config", "toy.toml", "--node", "keys"], "'keys'"),
        ([".", "--config", "toy.toml"], "not an empty folder"),
    ],
)
def test_a_federation_that_cannot_be_set_up_says_why(fedkeep, words, said):
    refused(fedkeep("flower", "init", *words), said)


def test_a_project_needs_no_data_as_devices_name_their_own(fedkeep, tmp_path):
    text = TOY.replace('[data]\nreader = "toy"\nusers = 6\nexamples = 12\n', "")
    assert "data" not in text
    (tmp_path / "server.toml").write_text(text)
    assert fedkeep("flower", "init", "one", "--config", "server.toml").exit_code == 0
    assert (tmp_path / "one" / "project" / "config.toml").read_text() == text
    done = succeeded(fedkeep("flower", "init", "two", "--config", "server.toml", "--set", "run.rounds=7"))
    assert federation_of((tmp_path / "two" / "project" / "config.toml").read_text()).rounds == 7
    assert "device adapt" not in done.stdout
    (tmp_path / "tuned.toml").write_text(text.replace('kind = "furl"', 'kind = "fine_tuned"'))
    tuned = fedkeep("flower", "init", "tuned", "--config", "tuned.toml")
    assert "device adapt" in tuned.stdout, tuned.output
    (tmp_path / "wrong.toml").write_text(text + "hold_out = 0.5\n")
    refused(
        fedkeep("flower", "init", "three", "--config", "wrong.toml"), "run.hold_out: a run across machines"
    )
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("", ""), "There is no link at 127.0.0.1:1"),
        (("users = 2", "users = 0"), "users"),
        (('"keys/a.key"', '"keys/b.key"'), "there is no key"),
        (("[link]", "[lnk]"), "lnk: unknown key"),
        (('reader = "toy"', 'reader = "tiy"'), "there is no reader 'tiy'"),
        (('owner = "a"\n', ""), "device.owner: missing"),
    ],
)
def test_a_device_that_cannot_run_says_why(change, said, fedkeep, tmp_path):
    make_keys(tmp_path / "keys", hosts=["127.0.0.1"], nodes=["a"])
    (tmp_path / "node.toml").write_text(NODE.replace(*change))
    done = fedkeep("device", "run", "node.toml")
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.output
