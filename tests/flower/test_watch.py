from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedkeep.flower import guard, watch
from fedkeep.flower.link import command as link_command


@pytest.mark.parametrize("words", watch.GIVES_UP)
def test_a_node_whose_connection_was_damaged_is_started_again(words: str, quick: str) -> None:
    node = f"import time; print('{watch.JOINED} 1'); print('ERROR: {words}.', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, quick, "--with-parent", sys.executable, "-c", node],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [f"{watch.JOINED} 1\n", watch.TAKEN]
        assert any("It is started again." in line for line in process.stdout)
        process.stdin.close()
        assert process.wait(watch.AGAIN + 10) == 0


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "it did not say why"),
        ("INFO:     Finished server process [1]", "it did not say why"),
        ("no such thing\n\x1b[92mINFO \x1b[0m:      SuperNode terminated gracefully.", "no such thing"),
        (f"{watch.NO_LINK}\nteapot\nSee 305.html\nINFO:     Shutting down", "teapot"),
        (watch.NO_LINK, watch.NO_LINK.rstrip(".")),
        (f"{watch.UNSIGNED}\nINFO:     Shutting down", watch.REASONS[watch.UNSIGNED]),
    ],
)
def test_a_node_that_ends_before_it_has_joined_ends_with_2_and_says_why(
    words: str, said: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, watch.__file__, sys.executable, "-c", f"print({words!r}); raise SystemExit({code})"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == watch.WRONG_USE
    assert done.stderr.rstrip(".\n") == f"Error: the node could not join: {said}"


@pytest.mark.parametrize("ready", ["", f"{watch.JOINED} 1; "])
def test_a_link_that_ends_is_told_as_a_link_and_is_not_started_again(ready: str, tmp_path: Path) -> None:
    """It was a node that could not join; and one whose log had a node's words was begun anew, without its server app."""
    command = link_command(tmp_path, "127.0.0.1", 1, tmp_path / "link.db")
    file = tmp_path / "stands_for_guard.py"
    file.write_text(f"print({ready!r} + 'no space left'); raise SystemExit(1)\n")
    words = [sys.executable, watch.__file__, *(str(file) if w == guard.__file__ else w for w in command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == watch.WRONG_USE
    assert done.stderr == f"Error: the link ended: {ready}no space left.\n"


def test_a_node_that_waits_to_be_started_again_is_not_started_once_its_parent_is_gone(
    tmp_path: Path, quick: str
) -> None:
    starts = tmp_path / "starts"
    node = f"open({str(starts)!r}, 'a').write('x'); print('{watch.JOINED} 1', flush=True)"
    with subprocess.Popen(
        [sys.executable, quick, "--with-parent", sys.executable, "-c", node],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert any("It is started again." in line for line in process.stdout)
        process.stdin.close()
        assert process.wait(watch.AGAIN + 10) == 0
    assert starts.read_text() == "x"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_node_goes_on_where_the_disk_of_its_log_is_full(tmp_path: Path) -> None:
    """What nobody takes from a pipe stops who writes into it, for good, at 64 KiB or less."""
    code = f"print('x' * 500_000, flush=True); open({str(tmp_path / 'went on')!r}, 'w')"
    with open("/dev/full", "w") as full:
        watched = [sys.executable, watch.__file__, sys.executable, "-c", code]
        done = subprocess.run(
            watched, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (tmp_path / "went on").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends a process with its parent")
def test_what_it_watches_ends_when_it_is_killed() -> None:
    """An orphan would hold the node's key and port, and go on answering."""
    code = f"import os, time; print('{watch.JOINED}', os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, watch.__file__, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        node = Path("/proc", process.stdout.readline().split()[-1])
        process.kill()
        process.wait()
    end = time.monotonic() + 10
    while node.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not node.exists()


# Starts a process that ends by itself after ten minutes alone, as Flower's SuperExec starts apps; and waits, or ends.
STARTS = """
import subprocess, sys, time
if {deaf!r}:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what it starts inherits that
app = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
print({joined!r}, app.pid, flush=True)
time.sleep({seconds})
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="without process groups the command alone is ended")
@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_what_the_node_has_started_ends_with_it(told: bool, deaf: bool, quick: str) -> None:
    """Else a node that is started again has the old one's apps beside it, and one that was ended leaves them."""
    code = STARTS.format(joined=watch.JOINED, seconds=600 if told and not deaf else 1, deaf=deaf)
    with subprocess.Popen(
        [sys.executable, quick, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        joined, *more = [process.stdout.readline() for _ in range(1 if told else 3)]
        process.terminate()
        assert process.wait(60) == 0
    assert told or (more[0] == watch.TAKEN and "It is started again." in more[1])
    app = int(joined.split()[-1])
    end = time.monotonic() + 10
    while _there(app) and time.monotonic() < end:  # whoever it fell to has to wait for it
        time.sleep(0.1)
    assert not _there(app)


def _there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("libc", [None, object()])
def test_only_linux_is_asked_to_end_what_it_watches(libc: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses every function that would run before the command."""
    given: dict[str, Any] = {}

    def popen(command: list[str], **options: Any) -> None:
        given.update(options)
        raise OSError

    monkeypatch.setattr(watch, "LIBC", libc)
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(watch.signal, "signal", lambda *_: None)
    with pytest.raises(OSError, match=r"^$"):
        watch.WatchedCommand(["x"]).run()
    assert (given["preexec_fn"] is None) == (libc is None)
