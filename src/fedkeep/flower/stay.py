"""A device's processes stay: each message is served by a fork of one that has imported everything.

Flower's node starts a SuperExec, and that a process for each message; to import torch takes such a process seconds. Here
SuperExec itself imports what messages need and forks: the child serves its message and ends, so nothing of one message is
left to the next, and one that crashes ends neither the node nor SuperExec. Both look for work often while there is some,
and as seldom as Flower where there has been none for a while.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from filelock import Timeout

from fedkeep.core.locks import take_lock
from fedkeep.flower import inner

SOON, PART = 0.2, 10
"""Seconds between two looks at least, and the part of the time since something happened last that they grow to."""
WARM = (
    "flwr.supernode.cli",
    inner.CLIENT,
    "fedkeep.flower.client_app",
    "fedkeep.flower.served",
    "fedkeep.flower.signed",
)
"""What every message needs."""
LOCK, JOINED = "node.lock", "joined.json"
PATIENCE = 10.0
"""Seconds for an earlier process of this node to end."""


class Pace:
    """Stands in for ``time`` in a loop that looks for work: at first it waits shortly, then ever longer.

    Args:
        each: is called at each wait.
    """

    def __init__(self, each: Callable[[], None] = lambda: None) -> None:
        self.each, self._kind, self._since = each, 0.0, time.monotonic()

    def busy(self) -> None:
        """Wait shortly again: something has happened."""
        self._since = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait, at most as long as Flower does; another length means that it waits for something else."""
        self.each()
        if seconds != self._kind:
            self._kind = seconds
            self.busy()
        time.sleep(self.pause(seconds, time.monotonic() - self._since))

    @staticmethod
    def pause(most: float, silent: float) -> float:
        """Return the seconds until the next look, where nothing has happened for ``silent`` seconds."""
        return min(most, max(SOON, silent / PART))


class Forks:
    """Stands in for ``subprocess`` where SuperExec starts commands: a child of this process does what one would.

    Args:
        serve: does what the command does, from its words; it is called in the child.
        pace: of SuperExec.
    """

    DEVNULL = subprocess.DEVNULL

    def __init__(self, serve: Callable[[Sequence[str]], None], pace: Pace) -> None:
        self.serve, self.pace, self.running = serve, pace, set[int]()

    def Popen(  # noqa: N802  Flower's word
        self, words: Sequence[str], stdout: int | None = None, stderr: int | None = None
    ) -> None:
        """Begin to serve a message."""
        self.pace.busy()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a log on a disk that is full
                stream.flush()
        if child := os.fork():
            self.running.add(child)
            return
        self._serve(words, quiet=self.DEVNULL in (stdout, stderr))

    def reap(self) -> None:
        """Take leave of children that have ended, and tell of one that was killed."""
        for child in list(self.running):
            done, status = os.waitpid(child, os.WNOHANG)
            if not done:
                continue
            self.running.remove(child)
            if (code := os.waitstatus_to_exitcode(status)) < 0:
                _tell(f"The process of a message was ended by signal {-code}; the node goes on.")

    def _serve(self, words: Sequence[str], *, quiet: bool) -> NoReturn:
        """Serve a message in the child, which ends here whatever happens."""
        code = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            inner.leave_exit_handlers()
            if quiet:
                for stream in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            sys.argv = list(words)
            self.serve(words)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001  nothing of the parent's may go on in the child
            sys.excepthook(*sys.exc_info())
        finally:
            for text in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # a log on a disk that is full
                    text.flush()
            os._exit(code)


def run_exec(serve: Callable[[Sequence[str]], None]) -> None:
    """Be a SuperExec that has imported what messages need, and forks for each; its words come by standard input."""
    for name in WARM:
        import_module(name)
    import_module(
        "fedkeep.remote.fingerprint"
    ).code()  # of what runs: files may be another version's by the next message
    gc.collect()
    gc.freeze()  # children share what is there, as collecting would write to it
    if not (told := sys.stdin.read()):
        return  # its node has ended
    sys.argv += json.loads(told)
    pace = Pace()
    forks = Forks(serve, pace)
    pace.each = forks.reap
    inner.replace(inner.EXEC, "time", pace)
    inner.replace(inner.LAUNCH, "subprocess", forks)
    inner.run_exec()


class Started:
    """Stands in for ``subprocess`` where a node starts its SuperExec: ours is there already, and looked after.

    It imports what messages need while the node still imports Flower, and is told the words of its command then.

    Args:
        command: what starts ours.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.process: subprocess.Popen[bytes] | None = subprocess.Popen(command, stdin=subprocess.PIPE)

    def Popen(self, words: Sequence[str]) -> None:  # noqa: N802  Flower's word
        """Let SuperExec begin."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.process.stdin as given:
                given.write(json.dumps(words[1:]).encode())  # ``check`` tells of one that has ended

    def check(self) -> None:
        """Ask this node to end where its SuperExec has: it would take messages, and answer none."""
        if self.process is not None and (code := self.process.poll()) is not None:
            _tell(f"The process that serves messages has ended (exit code {code}), and so does this node.")
            self.process = None
            signal.raise_signal(signal.SIGTERM)


class Joined:
    """Remembers under which number a link knows this node, so that one that is started again is there at once.

    A link takes a node that was killed to be there for a minute. A node says that it is gone only where an earlier process
    of this folder, on this machine, was there and is not any more; a copy of the folder on another one has to wait.

    Args:
        folder: of Flower's settings on this device.
        address: of the link.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.path = folder / JOINED
        self.where = {"link": address, "machine": f"{platform.node()} {uuid.getnode():x}"}

    def before(self) -> int | None:
        """Return the number that an earlier process of this node had; None where there was none."""
        try:
            told = json.loads(self.path.read_bytes())
            number = int(told.pop("node"))
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return None
        return number if told == self.where else None

    def note(self, number: int) -> None:
        """Remember a number. Nothing is imported for it: the node's own process holds no torch."""
        beside = self.path.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk costs the next start its minute
            beside.write_text(json.dumps({**self.where, "node": number}), encoding="utf-8")
            beside.replace(self.path)


def run_node(words: Sequence[str], command: Sequence[str]) -> None:
    """Be a node that is looked after.

    Args:
        words: of Flower's command.
        command: what starts its SuperExec.
    """
    home = Path(os.environ["FLWR_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    try:
        lock = take_lock(home / LOCK, PATIENCE)  # noqa: F841  held while this process runs
    except Timeout:
        sys.exit(f"Another node of the folder {home} runs on this machine; end it first.")
    except OSError as error:
        sys.exit(f"Cannot lock {home}: {error.strerror}.")
    joined = Joined(home, words[words.index("--superlink") + 1])
    started = Started(command)
    inner.replace(inner.NODE, "subprocess", started)
    inner.replace(inner.NODE, "time", Pace(started.check))
    inner.replace(inner.NODE_LINK, "FleetHttpClient", inner.announcing(joined.before, joined.note))
    inner.run_node()


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # a log on a disk that is full
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
