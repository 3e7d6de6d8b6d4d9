import os
import re
import signal
import subprocess
import sys
import time

import pytest

from fedkeep.core.errors import ConfigError, RunError, installing
from fedkeep.flower import processes
from fedkeep.flower.processes import WATCH, Processes, marked, program
from fedkeep.flower.watch import reason

SLEEP = [sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(60)"]
# Starts a process of its own session and ends: as Flower's link does with its SuperExec.
DETACHED = [
    sys.executable,
    "-c",
    """import subprocess, sys, time
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)
print('ready', flush=True)
time.sleep(60)""",
]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)",
]


def await_none(mark):
    """Wait until the system has ended all that was killed."""
    end = time.monotonic() + 5
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert marked(mark) == []


@pytest.mark.parametrize(
    "command", [SLEEP, *(pytest.param(one, marks=pytest.mark.slow) for one in (DETACHED, DEAF))]
)
def test_nothing_is_left_when_the_block_is_left(command, tmp_path):
    with Processes(tmp_path) as processes:
        processes.start("one", command)
        processes.await_text("one", "ready", 20)
        assert len(marked(processes.mark)) >= 2
    await_none(processes.mark)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has /proc")
def test_a_process_that_is_killed_has_no_time_for_anything(tmp_path):
    last = tmp_path / "last"
    code = (
        "import pathlib, signal, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), pathlib.Path({str(last)!r}).touch()))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)"
    )
    with Processes(tmp_path) as processes:
        processes.start("one", [sys.executable, "-c", code])
        processes.await_text("one", "ready", 20)
        processes.kill("one")
        await_none(processes.mark)
    assert not last.exists()


def test_a_process_ends_when_its_parent_is_killed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from fedkeep.flower.processes import Processes\n"
        f"p = Processes(Path({str(tmp_path)!r})); p.start('one', {SLEEP!r}); p.await_text('one', 'ready', 20)\n"
        "print(p.mark, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    mark = parent.stdout.readline().strip()
    assert len(marked(mark)) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 10
    while marked(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert marked(mark) == []


def test_a_process_that_ends_at_once_says_its_last_words(tmp_path):
    with Processes(tmp_path) as processes:
        processes.start("one", [sys.executable, "-c", "print('no such thing')"])
        with pytest.raises(RunError, match="one ended at once:\n  no such thing"):
            processes.await_text("one", "ready", 20)
        with pytest.raises(RunError, match=r"one has ended \(exit code 2\)"):
            processes.check()


def test_a_process_that_is_not_ready_in_time_is_named(tmp_path):
    with Processes(tmp_path) as processes:
        processes.start("one", SLEEP)
        with pytest.raises(RunError, match="one was not ready after 0.3 seconds"):
            processes.await_text("one", "never", 0.3)


def test_a_command_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match=rf"There is no command.*{re.escape(installing('flower'))}"):
        program("flower-nothing")


def watched(words):
    """Run a command that says something and fails, as a node; return its exit code and what it said at last."""
    code = f"import sys; print({words!r}); sys.exit(3)"
    done = subprocess.run(
        [sys.executable, str(WATCH), sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_a_node_that_could_not_join_ends_with_2_and_one_line():
    code, said = watched("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    assert code == 2
    assert said == (
        "Error: the node could not join: the link's certificate is not signed by the authority that this node trusts "
        "(link.certificate).\n"
    )


def test_a_node_that_ends_is_not_waited_for_by_what_it_has_started():
    """SuperExec keeps the node's output open, and ends once the node is no more."""
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(15)']); "
        "print('address already in use', flush=True); sys.exit(3)"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(WATCH), sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "Error: the node could not join: its port is in use. Name another (link.port).\n"
    assert time.monotonic() < began + 12


def test_a_node_that_had_joined_is_started_again_until_it_is_told_to_end(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(processes, "WATCH", quick)
    code = "import sys; print('SuperNode ID: 7'); print('bad record mac'); sys.exit(3)"
    with Processes(tmp_path) as started:
        started.start("one", [sys.executable, "-c", code])
        started.await_text("one", "The node ended: bad record mac. It is started again.\nSuperNode ID: 7", 30)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Failed to activate SuperNode.", "the link does not take this node's key"),
        ("[Errno 98] address already in use", "its port is in use"),
        ("something\nquite new\n\n", "quite new"),
        ("", "it did not say why"),
    ],
)
def test_what_flower_says_is_put_plainly(said, why):
    assert reason(said).startswith(why)
