"""A process that a node or a link has started tells it at once that it lives, and ends where it is not wanted.

Flower 1.41 starts another process after 30 seconds without a sign of life, and on a busy device to import Flower alone
takes longer: each new process made the device busier, and none came to its message.
"""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import uvicorn
from flwr.proto.task_pb2 import TaskStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.date import now
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory

from fedkeep.flower import guard
from fedkeep.flower.keys import make_keys
from fedkeep.flower.link import FlowerLink, free_port
from fedkeep.flower.local_federation import Local, read_status
from tests.engines.workers.rounds import gone

ALIVE, NOT_KNOWN = (200, b"\x08\x01"), (401, b"")
NOT_WANTED = "Nobody waits for this process any more: it ends.\n"
# A machine on which it takes ten minutes to import Flower.
START = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("guard", {guard!r})
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
guard.EVERY = 0.2
sys.argv = ["guard.py", *{words!r}, "--runtime-api-address", {address!r}, "--token", "secret"]
guard.main()
"""
AT_LINK = ("--at-link", "--insecure")
# In every process that Python starts with this folder on its path: to import Flower's command takes longer than allowed.
SLOW = """
import sys
if "flwr-serverapp" in " ".join(sys.orig_argv) or "--at-link" in sys.orig_argv:
    import time
    class Slow:
        def find_spec(self, name, *_):
            if name == "flwr.superlink.cli":
                time.sleep(40)
    sys.meta_path.insert(0, Slow())
"""


@contextmanager
def node(
    *answers: tuple[int, bytes], keys: Path | None = None
) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Yield the address of a node that answers so, the last again and again, and what it has heard.

    With a folder of keys it speaks TLS, as a link does.
    """
    heard: list[tuple[str, str | None]] = []

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, body = answers[min(len(heard), len(answers) - 1)]
            heard.append((self.path, self.headers["flwr-task-token"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        if keys is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(keys / "link.pem", keys / "link.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", heard
        server.shutdown()


def slow_start(address: str, folder: Path, words: Sequence[str] = AT_LINK) -> subprocess.Popen[str]:
    (folder / "flwr").mkdir()
    (folder / "flwr" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    code = START.format(guard=guard.__file__, address=address, words=list(words))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(folder)},
    )


@pytest.mark.parametrize(
    ("answers", "beats"),
    [
        ([NOT_KNOWN], 1),  # another process was started in its place
        ([ALIVE, ALIVE, NOT_KNOWN], 3),
        ([ALIVE, (503, b"busy"), ALIVE, (200, b"")], 4),  # success = false: the task has ended
    ],
)
def test_a_process_says_that_it_lives_before_it_imports_flower_and_ends_where_it_is_not_wanted(
    answers: list[tuple[int, bytes]], beats: int, tmp_path: Path
) -> None:
    with node(*answers) as (address, heard), slow_start(address, tmp_path) as process:
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said) == (1, NOT_WANTED)
    assert heard == [("/v1/runtime/send-task-heartbeat", "secret")] * beats


def test_a_server_app_tells_its_link_by_tls_before_it_imports_flower_and_ends_where_it_is_not_wanted(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, hosts=[], nodes=[])
    words = ["--at-link", "--root-certificates", str(keys / "ca.pem")]
    with (
        node(ALIVE, NOT_KNOWN, keys=keys) as (address, heard),
        slow_start(address, tmp_path, words) as process,
    ):
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said) == (1, NOT_WANTED)
    assert heard == [("/v1/runtime/send-task-heartbeat", "secret")] * 2


def test_a_server_app_lives_by_flowers_own_signs_from_the_first_one_on(tmp_path: Path) -> None:
    """Flower's ends the app in order, and says how it ended. What has not come yet of an answer is asked for again soon."""
    code = """
import runpy, sys, time
import flwr.superlink.cli as cli
import flwr.superlink.runtime
from flwr.supercore.inflatable.inflatable_utils import pull_objects

def serve():
    runtime = sys.modules["flwr.superlink.runtime.run_serverapp"]
    print(runtime.make_task_heartbeat_fn_http(None).__name__, flush=True)
    print(pull_objects.__kwdefaults__["initial_backoff"])
    time.sleep(1.0)
    print("goes on")

cli.flwr_serverapp = serve
"""
    start = START.replace("import importlib.util, sys", code + "import importlib.util")
    with node(ALIVE, NOT_KNOWN) as (address, heard):
        code = start.format(guard=guard.__file__, address=address, words=["--at-link", "--insecure"])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "fn\n0.1\ngoes on\n"), done.stderr
    assert len(heard) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs a new parent for a process whose own is gone")
def test_a_server_app_that_waits_for_a_lock_ends_soon_after_its_link() -> None:
    """Flower's main thread waits so while others hold its lock, and try to reach the link that is gone."""
    code = """
import os, sys, threading
import flwr.superlink.cli as cli
from fedkeep.flower import guard

def serve():
    lock = threading.Lock()
    lock.acquire()
    print(os.getpid(), flush=True)
    lock.acquire(timeout=120)

cli.flwr_serverapp, guard.LAST = serve, 0.5
sys.argv = ["guard", "--at-link"]
guard.main()
"""
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen([sys.executable, "-c", starts], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        app = int(parent.stdout.readline())
        assert Path(f"/proc/{app}").exists()
        parent.kill()
    assert gone([app], 20)


def test_no_token_goes_to_a_link_of_another_authority(tmp_path: Path) -> None:
    for name in ("ours", "others"):
        make_keys(tmp_path / name, hosts=[], nodes=[])
    trusted = ssl.create_default_context(cafile=tmp_path / "ours" / "ca.pem")
    with node(ALIVE, keys=tmp_path / "others") as (address, heard):
        assert guard.wanted(address, "secret", trusted)  # nobody has said that it is not
    assert heard == []


@pytest.mark.slow
def test_a_link_waits_for_a_server_app_whose_import_takes_longer_than_flower_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a sign of life Flower starts another one after 30 seconds, and again, and none comes to its run."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "slow"), *sys.path]))
    text = "[model]\nkind = 'mlp'\n"
    local = Local(folder=tmp_path / "all", config_text=text, data={}, clients={})
    local.prepare()
    link, began = FlowerLink(local.folder, local.folder / "keys"), time.monotonic()
    with link.processes:
        link.start()
        run = link.submit(local.folder / "project", {"status": str(local.status)})
        while read_status(local.status).state == "starting":
            assert time.monotonic() < began + 200, link.state_of(run)
            time.sleep(0.5)
    assert read_status(local.status).state == "running"


def test_a_process_ends_when_its_node_is_gone(tmp_path: Path) -> None:
    """Flower looks whether its parent is there, and takes one that nobody has waited for to be."""
    with slow_start(f"127.0.0.1:{free_port()}", tmp_path) as process:
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, said) == (1, NOT_WANTED)


def test_a_node_that_does_not_answer_in_time_is_told_again() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as deaf:  # it listens, and serves nobody
        before, guard.EVERY = guard.EVERY, 0.2
        try:
            assert guard.wanted(f"127.0.0.1:{deaf.server_port}", "secret")
        finally:
            guard.EVERY = before


@pytest.mark.parametrize("beats", [True, False])
def test_flowers_node_waits_for_a_process_that_beats(beats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 31 seconds without a beat the task is given to another process, and the first one is not known any more."""
    passed = 0.0
    monkeypatch.setattr(in_memory_corestate, "now", lambda: now() + timedelta(seconds=passed))
    factory = NodeStateFactory(ObjectStoreFactory())
    state = factory.state()
    state.set_node_id(1)
    task = state.create_task(task_type=TaskType.CLIENT_APP, run_id=1, fab_hash="x")
    assert task is not None
    token = state.claim_task(task)
    assert token is not None
    with flowers_node(factory) as address:
        passed = 29.0
        assert not beats or guard.wanted(address, token)
        passed = 31.0
        assert guard.wanted(address, token) is beats
        passed = 29.0 + 61.0
        assert guard.wanted(address, token) is beats
        assert not guard.wanted(address, "another")
    status: TaskStatus = state.get_tasks(task_ids=[task])[0].status
    assert status.status == ("starting" if beats else "pending")


@contextmanager
def flowers_node(factory: NodeStateFactory) -> Iterator[str]:
    port = free_port()
    config = uvicorn.Config(create_app(factory), host="127.0.0.1", port=port, log_level="error", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    yield f"127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
