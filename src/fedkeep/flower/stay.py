"""A device's processes stay: each message is served by a fork of one that has imported everything.

Flower's node starts a SuperExec, and that a process for each message; to import torch takes such a process seconds. Here
SuperExec itself imports what messages need and forks: the child serves its message and ends, so nothing of one message is
left to the next, and one that crashes ends neither the node nor SuperExec. SuperExec is a fork of the node, so that both
hold Flower's modules once; torch is its own, as the node has no use for it. Both look for work often while there is some,
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
from functools import partial
from importlib import import_module
from pathlib import Path

from filelock import Timeout

from fedkeep.core.locks import take_lock
from fedkeep.flower import inner

SOON, PART = 0.2, 10
"""Seconds between two looks at least, and the part of the time since something happened last that they grow to."""
SHARED = "flwr.supernode.cli"
"""What a node and its SuperExec need."""
WARM = (
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


def forked(do: Callable[[], None]) -> int:
    """Do something in a child of this process, which ends then, whatever happens; return the child's number."""
    _flush()
    if child := os.fork():
        return child
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        inner.leave_exit_handlers()
        do()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            tell(end.code)
        else:
            code = end.code or 0
    except BaseException:  # noqa: BLE001  nothing of the parent's may go on in the child
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        os._exit(code)


def ended(child: int) -> int | None:
    """Return the exit code of a child, negative for a signal; None while it runs. It is told once."""
    done, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


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
        self.running.add(forked(lambda: self._serve(words, quiet=self.DEVNULL in (stdout, stderr))))

    def reap(self) -> None:
        """Take leave of children that have ended, and tell of one that was killed."""
        for child in list(self.running):
            if (code := ended(child)) is None:
                continue
            self.running.remove(child)
            if code < 0:
                tell(f"The process of a message was ended by signal {-code}; the node goes on.")

    def _serve(self, words: Sequence[str], *, quiet: bool) -> None:
        if quiet:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        sys.argv = list(words)
        self.serve(words)


def run_exec(serve: Callable[[Sequence[str]], None], given: int) -> None:
    """Be a SuperExec that has imported what messages need, and forks for each.

    Args:
        serve: does what a message's command does.
        given: a pipe by which the words of its own command come.
    """
    for name in WARM:
        import_module(name)
    import_module(
        "fedkeep.remote.fingerprint"
    ).code()  # of what runs: files may be another version's by the next message
    gc.collect()
    gc.freeze()  # children share what is there, as collecting would write to it
    with open(given, "rb") as pipe:
        told = pipe.read()
    if not told:
        return  # its node has ended
    sys.argv = json.loads(told)
    pace = Pace()
    forks = Forks(serve, pace)
    pace.each = forks.reap
    inner.replace(inner.EXEC, "time", pace)
    inner.replace(inner.LAUNCH, "subprocess", forks)
    inner.run_exec()


class StartedExec:
    """Stands in for ``subprocess`` where a node starts its SuperExec: ours is there already, and looked after.

    It imports what messages need while the node joins its link, and is told the words of its command when Flower has them.

    Args:
        run: is SuperExec, in a child of this process; it is called with the pipe by which the words come.
    """

    def __init__(self, run: Callable[[int], None]) -> None:
        reading, self.writing = os.pipe()
        self.child: int | None = forked(lambda: self._begin(run, reading))
        os.close(reading)

    def Popen(self, words: Sequence[str]) -> None:  # noqa: N802  Flower's word
        """Let SuperExec begin."""
        with contextlib.suppress(BrokenPipeError), open(self.writing, "wb") as pipe:
            pipe.write(json.dumps(words).encode())  # ``check`` tells of one that has ended

    def check(self) -> None:
        """Ask this node to end where its SuperExec has: it would take messages, and answer none."""
        if self.child is not None and (code := ended(self.child)) is not None:
            tell(f"The process that serves messages has ended (exit code {code}), and so does this node.")
            self.child = None
            signal.raise_signal(signal.SIGTERM)

    def _begin(self, run: Callable[[int], None], reading: int) -> None:
        os.close(self.writing)  # so that the pipe ends with the node
        run(reading)


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


def run_node(words: Sequence[str], serve: Callable[[Sequence[str]], None]) -> None:
    """Be a node that is looked after.

    Args:
        words: of Flower's command.
        serve: does what a message's command does, in a process of its own.
    """
    import_module(SHARED)
    inner.ask_again_after(inner.AGAIN_AFTER)
    gc.freeze()
    started = StartedExec(partial(run_exec, serve))  # before anything else: what it inherits, it would hold
    home = Path(os.environ["FLWR_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    try:
        lock = take_lock(home / LOCK, PATIENCE)  # noqa: F841  held while this process runs
    except Timeout:
        sys.exit(f"Another node of the folder {home} runs on this machine; end it first.")
    except OSError as error:
        sys.exit(f"Cannot lock {home}: {error.strerror}.")
    joined = Joined(home, words[words.index("--superlink") + 1])
    inner.replace(inner.NODE, "subprocess", started)
    inner.replace(inner.NODE, "time", Pace(started.check))
    inner.replace(inner.NODE_LINK, "FleetHttpClient", inner.announcing(joined.before, joined.note))
    inner.run_node()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a log on a disk that is full
            stream.flush()


def tell(text: str) -> None:
    """Say something in the log, if it can be written."""
    with contextlib.suppress(OSError):  # a log on a disk that is full
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
