"""Flower's simulation trains as ``sequential`` does, to the bit; also on two Ray nodes, and after an actor's death."""

import json
import subprocess
import sys

import pytest

from tests.documents import ROOT

ASK = """
import json
from benchmarks.flower_conformance import trained
print(json.dumps(trained({where!r}, [("furl", "float32"), ("scaffold", "float32")], 2)))
"""


KILL = """
import os, signal, threading, time, uuid
from pathlib import Path

mark = os.environ["FEDKEEP_TEST"] = uuid.uuid4().hex  # what Ray starts inherits it: nobody else's actor is killed

def kill_an_actor():
    while True:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes()
                ours = mark.encode() in (process / "environ").read_bytes()
            except OSError:
                continue
            if ours and words.startswith(b"ray::ClientAppActor"):
                time.sleep(2)
                os.kill(int(process.name), signal.SIGKILL)
                return
        time.sleep(0.1)

threading.Thread(target=kill_an_actor, daemon=True).start()
"""


def check(code):
    """Run code that trains two rows in a process of its own; return what it wrote."""
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [(row.get("case"), row.get("server"), row.get("private")) for row in rows] == [
        ("furl", True, True),
        ("scaffold", True, True),
    ], rows
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("where", ["ray", "cluster"])
def test_a_simulation_with_several_clients_an_actor_equals_sequential(where):
    check(ASK.format(where=where))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the actor in /proc")
def test_nothing_is_lost_with_an_actor():
    assert "ActorDiedError" in check(KILL + ASK.format(where="ray"))
