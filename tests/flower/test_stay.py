"""A device's processes stay: forks for messages, looks that become rarer, and a node that is there again at once."""

import json
import re
import subprocess
import sys

import httpx
import pytest
from filelock import FileLock
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedkeep.flower import inner, stay
from fedkeep.flower.stay import Joined, Pace

# A SuperExec that is given messages, one of which kills its process and one of which raises.
FORKS = """
import os, signal, sys, time
from fedkeep.flower.stay import Forks, Pace

seen = []

def serve(words):
    seen.append(words[1])
    print(words[1], len(seen), sys.argv[1] == words[1], flush=True)
    if words[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if words[1] == "broken":
        raise ValueError("of the child alone")
    if words[1] == "left":
        sys.exit(3)

forks = Forks(serve, Pace())
for word in ("first", "killed", "broken", "left", "last"):
    forks.Popen(["flwr-clientapp", word])
    while forks.running:
        forks.reap()
        time.sleep(0.01)
forks.Popen(["flwr-clientapp", "quiet"], stdout=forks.DEVNULL, stderr=forks.DEVNULL)
while forks.running:
    forks.reap()
print("the parent", seen)
"""


def test_each_message_has_a_process_of_its_own_and_none_ends_the_one_that_stays():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *(f"{word} 1 True" for word in ("first", "killed", "broken", "left", "last")),
        "the parent []",
    ]
    assert done.stderr.count("was ended by signal 9; the node goes on") == 1
    assert done.stderr.count("ValueError: of the child alone") == 1


FULL = """
import os, sys, time
from fedkeep.flower.stay import Forks, Pace

class Full:
    def flush(self):
        raise OSError(28, "No space left on device")

forks = Forks(lambda words: os.write(2, b"served"), Pace())
sys.stdout = Full()
forks.Popen(["flwr-clientapp", "one"])
while forks.running:
    forks.reap()
    time.sleep(0.01)
sys.stdout = None
"""


def test_a_log_on_a_full_disk_keeps_no_message_from_being_served():
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "served")


def test_a_childs_end_does_nothing_that_is_the_parents():
    """Flower closes its connections at exit, and asks its servers to stop."""
    ends = """
import sys
from flwr.supercore.exit.exit_handler import add_exit_handler
from flwr.supercore.exit import flwr_exit
from fedkeep.flower.stay import Forks, Pace
add_exit_handler(lambda: print("closed", flush=True))
forks = Forks(lambda words: flwr_exit(0), Pace())
forks.Popen(["flwr-clientapp"])
while forks.running:
    forks.reap()
"""
    done = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, check=False)
    assert (done.returncode, "closed" in done.stdout + done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    ("most", "silent", "wanted"),
    [(3.0, 0.0, 0.2), (3.0, 2.0, 0.2), (3.0, 10.0, 1.0), (3.0, 600.0, 3.0), (0.1, 0.0, 0.1)],
)
def test_looks_become_rarer_the_longer_nothing_has_happened(most, silent, wanted):
    assert Pace.pause(most, silent) == pytest.approx(wanted)


def test_looks_are_frequent_again_when_something_has_happened_or_something_else_is_awaited(monkeypatch):
    now, slept, looks = [100.0], [], []
    monkeypatch.setattr(stay.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stay.time, "sleep", slept.append)
    pace = Pace(lambda: looks.append(now[0]))
    for now[0], wait in ((100.0, 3.0), (120.0, 3.0), (120.0, 0.5), (123.0, 0.5), (124.0, 3.0)):
        pace.sleep(wait)
    now[0] = 144.0
    pace.busy()
    pace.sleep(3.0)
    assert slept == pytest.approx([0.2, 2.0, 0.2, 0.3, 0.2, 0.2])
    assert len(looks) == 6


def node(code: str) -> subprocess.CompletedProcess[str]:
    """Run what a node does with its SuperExec, which is a fork, in a process that has no other threads."""
    begin = "import json, os, signal, sys, time\nfrom fedkeep.flower import inner, stay\nfrom fedkeep.flower.stay import StartedExec\n"
    return subprocess.run(
        [sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_node_whose_superexec_has_ended_ends_too():
    done = node("""
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
started = StartedExec(lambda given: sys.exit(len(json.loads(open(given, "rb").read()))))
started.check()  # it is there before Flower asks for it, and waits for its words
print(len(heard))
started.Popen(["flower-superexec", "--insecure", "--x"])
while started.child is not None:
    started.check()
    time.sleep(0.01)
started.check()
print(heard == [signal.SIGTERM])
""")
    assert done.stdout.split() == ["0", "True"], done.stderr
    assert done.stderr.count("has ended (exit code 3)") == 1


class Link:
    """What a link does, in place of Flower's client of it."""

    def __init__(self, monkeypatch, fails=False):
        self.heard = []

        def deactivate(client, request):
            self.heard.append(("gone", request.node_id))
            if fails:
                raise httpx.HTTPStatusError("offline", request=None, response=None)

        def activate(client, request):
            self.heard.append(("here", request.heartbeat_interval))
            return ActivateNodeResponse(node_id=7)

        monkeypatch.setattr(FleetHttpClient, "DeactivateNode", deactivate)
        monkeypatch.setattr(FleetHttpClient, "ActivateNode", activate)

    def join(self, joined):
        made = inner.announcing(joined.before, joined.note)
        return made.ActivateNode(made.__new__(made), ActivateNodeRequest(heartbeat_interval=30)).node_id


@pytest.mark.parametrize("fails", [False, True])
def test_a_node_that_is_started_again_says_first_that_the_earlier_one_is_gone(fails, tmp_path, monkeypatch):
    link = Link(monkeypatch, fails)
    assert link.join(Joined(tmp_path, "link:1")) == 7
    assert link.join(Joined(tmp_path, "link:1")) == 7
    assert link.heard == [("here", 30), ("gone", 7), ("here", 30)]


def test_a_node_that_a_link_refused_says_so_again_once_it_is_taken(tmp_path, monkeypatch):
    """As one that was killed and started again with a wrong clock: else it waits a minute when the clock is set."""
    link = Link(monkeypatch, fails=True)
    assert link.join(Joined(tmp_path, "link:1")) == 7
    activate = FleetHttpClient.ActivateNode

    def refuse(client, request):
        raise httpx.HTTPStatusError("refused", request=None, response=httpx.Response(401))

    monkeypatch.setattr(FleetHttpClient, "ActivateNode", refuse)
    with pytest.raises(httpx.HTTPStatusError):
        link.join(Joined(tmp_path, "link:1"))
    monkeypatch.setattr(FleetHttpClient, "ActivateNode", activate)
    link.join(Joined(tmp_path, "link:1"))
    assert link.heard == [("here", 30), ("gone", 7), ("gone", 7), ("here", 30)]


def test_what_is_gone_is_said_by_the_same_machine_to_the_same_link_alone(tmp_path, monkeypatch):
    Joined(tmp_path, "link:1").note(7)
    assert Joined(tmp_path, "link:1").before() == 7
    assert Joined(tmp_path, "link:2").before() is None
    monkeypatch.setattr(stay.platform, "node", lambda: "another")
    assert Joined(tmp_path, "link:1").before() is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"node": "x"}', json.dumps({"node": 7})])
def test_a_note_that_is_damaged_is_none(content, tmp_path):
    (tmp_path / stay.JOINED).write_text(content)
    assert Joined(tmp_path, "link:1").before() is None


def test_a_superexec_that_has_ended_before_it_is_asked_for_is_told_of():
    done = node("""
signal.signal(signal.SIGTERM, lambda number, frame: print("asked to end"))
started = StartedExec(lambda given: sys.exit(4))
os.waitid(os.P_PID, started.child, os.WEXITED | os.WNOWAIT)
started.Popen(["flower-superexec", "x" * 100_000])
started.check()
""")
    assert (done.returncode, done.stdout) == (0, "asked to end\n")
    assert "has ended (exit code 4)" in done.stderr


def test_a_superexec_whose_node_has_ended_ends_too():
    """Its pipe ends with the node, so it must hold no end of its own that is written to."""
    done = node("""
inner.run_exec = lambda: print("begins")
started = StartedExec(lambda given: stay.run_exec(print, given))
os.close(started.writing)
print(os.waitpid(started.child, 0)[1])
""")
    assert done.stdout == "0\n", done.stderr


def test_a_folder_has_one_node(tmp_path):
    code = f"""
stay.PATIENCE, stay.run_exec = 0.1, lambda serve, given: None
os.environ["FLWR_HOME"] = {str(tmp_path)!r}
stay.run_node(["--superlink", "link:1"], print)
"""
    with FileLock(tmp_path / stay.LOCK):
        done = node(code)
    assert done.returncode == 1
    assert re.search(r"Another node .* runs", done.stderr), done.stderr


def test_what_messages_need_is_imported_before_the_first_comes_and_it_tells_of_the_code_that_runs():
    """So a fork begins at once: to import torch takes seconds. What was installed since is not what a device tells of."""
    code = """
import sys
from pathlib import Path
from fedkeep.flower import inner, stay
inner.replace = lambda *_: None
read = []

def message():
    print(*sorted(sys.modules))
    from fedkeep.remote import fingerprint
    before, Path.read_bytes = Path.read_bytes, lambda path: read.append(path) or b""
    told = fingerprint.code()
    Path.read_bytes = before
    print(len(read), told == fingerprint.code.__wrapped__())

inner.run_exec = message
stay.run_exec(print, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input="[1]", capture_output=True, text=True, check=True
    )
    modules, told = done.stdout.splitlines()
    assert {"torch", "fedkeep.remote.node", "fedkeep.flower.client_app", inner.CLIENT} <= set(modules.split())
    assert told == "0 True"


def test_a_nodes_own_process_holds_no_torch(tmp_path):
    """It stays beside the one that does: both together are to be small."""
    done = node(f"""
os.environ["FLWR_HOME"] = {str(tmp_path)!r}
inner.replace = lambda *_: None
inner.run_node = lambda: stay.Joined(stay.Path({str(tmp_path)!r}), "link:1").note(7)
stay.run_exec = lambda serve, given: None
stay.run_node(["--superlink", "link:1"], print)
print("torch" in sys.modules, stay.Joined(stay.Path({str(tmp_path)!r}), "link:1").before())
""")
    assert done.stdout == "False 7\n", done.stderr
