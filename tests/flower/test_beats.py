"""A process that a node has started for a message tells it at once that it lives, and ends where it is not wanted.

Flower 1.41 starts another process after 30 seconds without a sign of life, and on a busy device to import Flower alone
takes longer: each new process made the device busier, and none came to its message.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
from fedkeep.flower.link import free_port

ALIVE, NOT_KNOWN = (200, b"\x08\x01"), (401, b"")
NOT_WANTED = "The node does not wait for this process any more: it ends.\n"
# A device on which it takes ten minutes to import Flower.
START = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("guard", {guard!r})
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
guard.EVERY = 0.2
sys.argv = ["guard.py", "flwr-clientapp", "--insecure", "--runtime-api-address", {address!r}, "--token", "secret"]
guard.main()
"""


@contextmanager
def node(*answers: tuple[int, bytes]) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Yield the address of a node that answers so, the last again and again, and what it has heard."""
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
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", heard
        server.shutdown()


def slow_start(address: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "flwr").mkdir()
    (folder / "flwr" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    code = START.format(guard=guard.__file__, address=address)
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stderr=subprocess.PIPE, text=True, env={"PYTHONPATH": str(folder)}
    )  # fmt: skip


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
