import email.utils
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.flower import guard
from fedkeep.flower.keys import make_keys
from fedkeep.flower.link import FlowerLink, free_port
from fedkeep.flower.local_federation import Local
from fedkeep.flower.processes import WATCH, check_port, check_reachable
from fedkeep.flower.supernode import SuperNode, check_clock

NODE = """[link]
address = "{address}"
certificate = "keys/ca.pem"
key = "keys/a.key"
trusted = ["keys/signer.pub"]
port = {port}
"""


@pytest.fixture
def node(tmp_path):
    """Return a function that writes a node's configuration, with all keys, and reads it."""
    make_keys(tmp_path / "keys", hosts=["127.0.0.1"], nodes=["a"])

    def made(address="127.0.0.1:1", change=("", "")):
        path = tmp_path / "node.toml"
        path.write_text(NODE.format(address=address, port=free_port()).replace(*change))
        return SuperNode.read(path, tmp_path / "flower")

    return made


@pytest.fixture
def link(tmp_path):
    """Return the address of something that speaks TLS as the link does, by the keys of the folder that is given."""
    servers = []

    def started(keys, refuses=404):
        class Health(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()

            def do_POST(self):  # whatever a node asks, also whether it may join
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(refuses)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Health)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "link.pem", keys / "link.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_address[1]}"

    yield started
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_node_whose_link_is_there_may_start(node, link, tmp_path):
    node(link(tmp_path / "keys")).check()


def test_a_proxy_of_the_environment_stands_before_no_program_of_this_machine(
    node, link, tmp_path, monkeypatch
):
    monkeypatch.setenv("https_proxy", "http://anna:secret@127.0.0.1:1")
    made = node(link(tmp_path / "keys"))
    made.check()
    for environment in (made.environment(), FlowerLink(tmp_path / "link", tmp_path / "keys").environment):
        assert {"127.0.0.1", "localhost"} <= set(environment["no_proxy"].split(","))
    with pytest.raises(ConfigError, match=r"proxy 127\.0\.0\.1:1 of the environment.*no_proxy") as error:
        node("link.example.org:8443").check()
    assert "secret" not in str(error.value)
    monkeypatch.setenv("no_proxy", "example.org")  # as the message says
    with pytest.raises(ConfigError, match=r"There is no link at link\.example\.org"):
        node("link.example.org:8443").check()


@pytest.mark.skipif(find_spec("socksio") is not None, reason="then Flower can speak to it")
def test_a_proxy_that_flower_cannot_speak_to_is_named(node, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"all_proxy.*httpx\[socks\]"):
        node().check()


def test_the_command_names_paths_as_a_whole_and_trusted_keys_go_by_the_environment(node, tmp_path):
    made = node("link.example.org:8443")
    words = made.command()
    assert words[words.index("--superlink") + 1] == "link.example.org:8443"
    assert words[words.index("--auth-supernode-private-key") + 1] == str(tmp_path / "keys" / "a.key")
    assert words[words.index("--root-certificates") + 1] == str(tmp_path / "keys" / "ca.pem")
    assert words[words.index("--port") + 1] == str(made.link.port)
    assert words[words.index("--node-config") + 1] == f"fedkeep-node='{tmp_path / 'node.toml'}'"
    assert "--insecure" not in words
    environment = made.environment()
    assert environment[guard.TRUSTED] == str(tmp_path / "keys" / "signer.pub")


def test_every_trusted_key_is_named(node, tmp_path):
    made = node(change=('["keys/signer.pub"]', '["keys/signer.pub", "other.pub"]'))
    trusted = [str(tmp_path / "keys" / "signer.pub"), str(tmp_path / "other.pub")]
    assert made.environment()[guard.TRUSTED].split(os.pathsep) == trusted


def test_a_path_that_flower_would_cut_is_refused(node, tmp_path):
    made = replace(node(), config=tmp_path / "anna's.toml")
    with pytest.raises(ConfigError, match="holds no quotation mark.*anna's.toml"):
        made.environment()


def test_a_path_that_would_be_taken_for_two_is_refused(node, monkeypatch):
    """Another file's key would be trusted."""
    monkeypatch.setattr(os, "pathsep", ":")
    made = node(change=("keys/signer.pub", "a:b/signer.pub"))
    with pytest.raises(ConfigError, match=r"The path .*a:b.* holds a ':', .* Name another folder\."):
        made.environment()
    assert not made.home.exists()


def test_a_link_of_another_authority_is_refused(node, link, tmp_path):
    make_keys(tmp_path / "others", hosts=["127.0.0.1"], nodes=[])
    with pytest.raises(ConfigError, match="is not the one that.*ca.pem.*CERTIFICATE_VERIFY_FAILED"):
        node(link(tmp_path / "others")).check()


def test_a_link_that_is_not_there_is_named(node):
    with pytest.raises(ConfigError, match="There is no link at.*127.0.0.1.*1"):
        node().check()
    with pytest.raises(ConfigError, match="The link's address is host:port; got 'link'"):
        check_reachable("link")
    with pytest.raises(ConfigError, match="The link's address is host:port; got 'https://link:8443'"):
        check_reachable("https://link:8443")


def test_a_port_in_use_is_named(node):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"The port {port}, which the link wants, is in use"):
            check_port(port, "the link")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("a.key", "none.key"), "link.key: there is no key .*none.key: No such file"),
        (("a.key", "signer.key"), "link.key: .*signer.key is no key on a NIST curve"),
        (("a.key", "a.pub"), "link.key: .*a.pub is no private key in OpenSSH's form"),
        (("ca.pem", "a.pub"), "a.pub is no certificate"),
        (("signer.pub", "none.pub"), "link.trusted: There is no key .*none.pub: No such file"),
        (("signer.pub", "ca.pem"), "link.trusted: .*ca.pem is no public key in OpenSSH's form"),
        (("signer.pub", "a.pub"), "link.trusted: .*a.pub is no Ed25519 key; a device trusts the signer.pub"),
        (('["keys/signer.pub"]', "[]"), "link.trusted: wanted a list of at least 1"),
        (('certificate = "keys/ca.pem"\n', ""), "link.certificate: missing"),
        (("port = ", "prot = "), "link.prot: unknown key. Did you mean link.port"),
        (("[link]", "[lnk]"), "link.address: missing"),
        (("[link]", "[link"), "is no valid TOML"),
    ],
)
def test_what_is_wrong_is_named_before_anything_starts(change, said, node):
    with pytest.raises(ConfigError, match=said):
        node(change=change).check()


@pytest.mark.parametrize("ahead", [-304, -1, 0, 4])
def test_a_clock_that_flower_takes_is_taken(ahead):
    check_clock(email.utils.formatdate(1_800_000_000, usegmt=True), 1_800_000_000 + ahead)


@pytest.mark.parametrize(
    ("ahead", "said"),
    [(60, "60 seconds ahead of"), (-400, "400 seconds behind"), (86400, "86400 seconds ahead")],
)
def test_a_clock_that_is_wrong_is_told(ahead, said):
    with pytest.raises(ConfigError, match=f"{said}.*Set the clock"):
        check_clock(email.utils.formatdate(1_800_000_000, usegmt=True), 1_800_000_000 + ahead)


@pytest.mark.parametrize(
    ("refuses", "clock"), [(401, True), pytest.param(418, False, marks=pytest.mark.slow)]
)
def test_a_node_is_told_why_a_link_refuses_it_and_asked_for_its_clock_where_that_is_why(
    refuses, clock, node, link, tmp_path
):
    """Flower's own node, whose clock went wrong after it was looked at; by itself it ends with 0 and no word."""
    made = node(link(tmp_path / "keys", refuses))
    made.check()
    done = subprocess.run(
        [sys.executable, str(WATCH), *made.command()],
        capture_output=True,
        text=True,
        env={**made.environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert done.stderr.startswith("Error: the node could not join: ")
    assert ("clock" in done.stderr, str(refuses) in done.stderr) == (clock, not clock), done


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "said"), [(600, "ahead of"), (-600, "behind")])
def test_a_device_whose_clock_is_wrong_is_told_before_it_joins_a_real_link(seconds, said, tmp_path):
    """The command as a device's owner runs it, its clock moved; exit code 2, one line, and nothing is left running."""
    (tmp_path / "visits.csv").write_text("user,text,label\n" + "a,pain,x\na,rash,y\n" * 10)
    data = {"reader": "table", "path": str(tmp_path / "visits.csv")}
    local = Local(folder=tmp_path / "all", config_text="seed = 0\n", data=data, clients={"one": ["a"]})
    local.prepare()
    link = FlowerLink(local.folder, local.folder / "keys")
    code = (
        f"import time; real = time.time; time.time = lambda: real() + {seconds};"
        "from fedkeep.cli import main; main()"
    )
    with link.processes:
        link.start()
        link.register(link.keys / "one.pub")
        node = local.node("one", link.address)
        done = subprocess.run(
            [sys.executable, "-c", code, "device", "run", str(node.config)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
    assert done.returncode == 2
    assert re.fullmatch(
        rf"Error: This machine's clock is \d+ seconds {said} the link's; .*Set the clock.*\n",
        done.stderr,
        re.DOTALL,
    )
    assert not (node.home / "bin").exists()
