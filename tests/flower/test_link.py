"""What a project is told when it is started reaches its server app through Flower's own reader of settings."""

import asyncio
import importlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from flwr.common.config import parse_config_args

from fedkeep.cli import app
from fedkeep.core.errors import ConfigError, RunError
from fedkeep.flower import guard, inner
from fedkeep.flower.keys import make_keys
from fedkeep.flower.link import Control, FlowerLink, check, command, free_port
from fedkeep.flower.project import new_project
from fedkeep.flower.signed import sign_project
from tests.commands import call, succeeded
from tests.flower.small import CONFIG


@pytest.fixture
def link(tmp_path, monkeypatch):
    """Return a link that was not started, and the words that Flower's command line would get."""
    made, words = FlowerLink(tmp_path / "link", tmp_path / "keys"), []

    def flwr(*given):
        words.extend(given)
        return subprocess.CompletedProcess(given, 0, "Successfully started run 17", "")

    monkeypatch.setattr(made, "_flwr", flwr)
    return made, words


@pytest.mark.parametrize("path", ["/home/anna/x", "/home/Zoë/a b", "/home/\U0001f600/日本", "C:\\anna's"])
def test_a_setting_arrives_as_it_was_given(path, link, tmp_path):
    made, words = link
    given = {"status": path, "clients": 6, "patience": 0.5}
    assert made.submit(tmp_path, given) == "17"
    assert parse_config_args([words[words.index("--run-config") + 1]]) == given


@pytest.fixture
def project(tmp_path, monkeypatch):
    for file in ("project/pyproject.toml", "keys/ca.pem"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_settings_on_the_command_line_have_the_types_of_toml(project, monkeypatch):
    given = {}
    monkeypatch.setattr(
        "fedkeep.flower.local_federation.train_at", lambda link, project, settings, *_: given.update(settings)
    )
    words = ["clients=4", 'only="judge"', "continue-from=/srv/visits/run", 'out="june"']
    succeeded(call("flower", "train", "project", *(w for word in words for w in ("--run-config", word))))
    june = str(project / "june")
    assert given == {"clients": 4, "only": "judge", "continue-from": "/srv/visits/run", "out": june}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_the_command_reads_that_the_training_goes_on(number, project, monkeypatch):
    def begun(link, project, settings, note, say):
        note.touch()
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr("fedkeep.flower.local_federation.train_at", begun)
    words = ("flower", "train", "project", "--link", "127.0.0.1:1")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        ended = call(*words)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.exit_code == 130
    again = f"fedkeep {' '.join(words)}"
    assert f"goes on at the link. Watch again: {again}. End it: {again} --stop" in ended.stderr
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_training_is_stopped_by_its_own_command(project, monkeypatch):
    said = iter(["", "busy"])
    monkeypatch.setattr(
        Control, "state_of", lambda self, run: "running" if run == "17" else "finished:failed"
    )
    monkeypatch.setattr(Control, "stop_run", lambda self, run: next(said))
    note = project / "project.training"
    for number, told in ((None, "No training of "), (16, "No training of "), (17, ""), (17, "busy")):
        if number is not None:
            note.write_text(f'{{"flower": "{number}"}}')
        ended = call("flower", "train", "project", "--stop")
        assert told in ended.stderr
        assert ended.exit_code == (2 if told else 0)
        assert note.exists() == (number is not None and bool(told))


def test_a_path_that_flower_would_cut_is_refused(link, tmp_path):
    made, words = link
    with pytest.raises(ConfigError, match="status.*quotation.*/home/a"):
        made.submit(tmp_path, {"status": '/home/a"b'})
    assert words == []


def test_what_other_programs_read_is_utf_8_whatever_the_systems_encoding(tmp_path, monkeypatch):
    write, given = Path.write_text, {}

    def noting(path, text, encoding=None, **options):
        given[path.name] = encoding
        return write(path, text, encoding, **options)

    monkeypatch.setattr(Path, "write_text", noting)
    FlowerLink(tmp_path / "Zoë", tmp_path / "keys")
    guard.install_at_link(tmp_path / "commands")
    assert given
    assert set(given.values()) == {"utf-8"}


def test_a_links_server_apps_are_started_by_the_command_that_says_at_once_that_it_lives(tmp_path):
    found = shutil.which(
        "flwr-serverapp", path=FlowerLink(tmp_path / "a b", tmp_path / "keys").environment["PATH"]
    )
    assert found == str(tmp_path / "a b" / "flower" / "bin" / "flwr-serverapp")
    assert f"{guard.__file__} {guard.AT_LINK}" in Path(found).read_text()


def test_a_link_in_a_folder_that_would_be_taken_for_two_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pathsep", ":")
    with pytest.raises(ConfigError, match=r"The path .*a:b.* holds a ':'"):
        FlowerLink(tmp_path / "a:b", tmp_path / "keys")


def test_the_command_starts_the_link_with_that_command_first(tmp_path, monkeypatch):
    make_keys(tmp_path / "keys", hosts=["link.example.org"], nodes=[])
    started = []
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    port, folder = free_port(), tmp_path / "its own"
    told = ["flower", "link", str(tmp_path / "keys"), "--port", str(port), "--folder", str(folder)]
    app(told, standalone_mode=False)
    ((program, words, environment),) = started
    assert program == words[0]
    assert words == command(tmp_path / "keys", "0.0.0.0", port, folder / "link.db")
    found = shutil.which("flwr-serverapp", path=environment["PATH"])
    assert f"{guard.__file__} {guard.AT_LINK}" in Path(found).read_text()


def test_what_a_link_knows_is_its_owners_alone_whatever_the_system_gives_to_new_files(tmp_path):
    make_keys(tmp_path / "keys", hosts=["localhost"], nodes=[])
    told = ["--port", str(free_port()), "--host", "127.0.0.1", "--folder", str(tmp_path / "its own")]
    words = [sys.executable, "-m", "fedkeep", "flower", "link", str(tmp_path / "keys"), *told]
    database = tmp_path / "its own" / "link.db"
    with subprocess.Popen(words, umask=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as link:
        try:
            end = time.monotonic() + 60
            while (
                not database.with_name("link.db-wal").exists()
                and link.poll() is None
                and time.monotonic() < end
            ):
                time.sleep(0.05)
            there = [path for path in database.parent.iterdir() if path.name.startswith("link.db")]
            assert {path.name for path in there} == {"link.db", "link.db-wal", "link.db-shm"}
            assert {stat.S_IMODE(path.stat().st_mode) for path in there} == {0o600}, there
            assert stat.S_IMODE(database.parent.stat().st_mode) == 0o700
        finally:
            link.terminate()


@pytest.mark.parametrize("missing", ["link.key", "link.pem", "ca.pem"])
def test_a_link_without_its_keys_says_what_is_missing(missing, tmp_path):
    make_keys(tmp_path, hosts=[], nodes=[])
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / missing))):
        check(tmp_path, free_port())


@pytest.mark.parametrize("client", ["10.1.2.3", "127.0.0.1", "192.0.2.1"])
def test_another_machine_can_be_a_node_and_start_nothing(client):
    """Whoever starts a run has the link's machine run its program, and Flower asks nobody who they are."""
    flowers = importlib.import_module(inner.LINK).create_app()
    transport = httpx.ASGITransport(
        guard.closed_to_others(flowers), raise_app_exceptions=False, client=(client, 9)
    )
    paths = set(flowers.openapi()["paths"])
    assert {"/v1/control/start-run", "/v1/control/stop-run", "/v1/fleet/pull-messages"} <= paths

    async def statuses() -> dict[str, int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://192.0.2.1:8443") as other:
            return {path: (await other.post(path, content=b"")).status_code for path in paths}

    refused = {path for path, status in asyncio.run(statuses()).items() if status == 403}
    open_to_nodes = {path for path in paths if path.startswith(guard.OF_NODES)}
    assert refused == (paths - open_to_nodes if client == "10.1.2.3" else set())


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Flower's way to its database
def test_the_link_that_is_started_is_the_one_that_is_closed_to_others(tmp_path, monkeypatch):
    served = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **_: served.append(app))
    monkeypatch.setattr(sys, "argv", command(tmp_path, "127.0.0.1", free_port(), tmp_path / "link.db")[2:])
    monkeypatch.setattr(guard, "closed_to_others", lambda app: ("closed", app))
    make_keys(tmp_path, hosts=["localhost"], nodes=[])
    flowers = importlib.import_module(inner.LINK)
    monkeypatch.setattr(flowers, "create_app", flowers.create_app)  # is put back
    guard.main()
    assert [kind for kind, _ in served] == ["closed"]


def test_a_command_on_another_machine_is_told_where_to_run(tmp_path, monkeypatch):
    said = "Client error '403 Forbidden' for url 'https://link.example.org:8443/v1/control/start-run'"
    made = FlowerLink(tmp_path / "link", tmp_path / "keys")
    monkeypatch.setattr(made, "_flwr", lambda *_: subprocess.CompletedProcess((), 1, "", said))
    with pytest.raises(RunError, match="its own machine alone"):
        made.submit(tmp_path, {})


def test_a_project_that_was_changed_after_it_was_signed_is_not_sent(tmp_path):
    """No device would answer, and the training would wait for them."""
    make_keys(tmp_path / "keys", hosts=["localhost"], nodes=["a"])
    new_project(tmp_path / "project", CONFIG)
    sign_project(tmp_path / "project", tmp_path / "keys" / "signer.key")
    config = tmp_path / "project" / "config.toml"
    config.write_text(config.read_text() + "\n")
    result = call("flower", "train", tmp_path / "project", "--link", "localhost:1")
    assert result.exit_code == 2
    assert f"fedkeep flower init {tmp_path}" in result.output
