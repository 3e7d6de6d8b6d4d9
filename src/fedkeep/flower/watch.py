"""Starts a process of Flower's, ends it with its parent, and says in one line why a node could not join.

It is run as a file and knows Python's own library alone, so that the process that watches holds no torch:
``python watch.py [--with-parent] COMMAND …``. With ``--with-parent`` the command is ended when standard input closes,
which it does even if the parent is killed. On Linux the command is ended, too, if this process is killed.

The command leads a process group. When it has ended, or is to end, so do the processes that it has started: Flower's
look whether their parent is there, and take one that nobody has waited for to be.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import TextIO

WRONG_USE = 2
MOST = 50  # lines that are remembered
GRACE = 5.0  # seconds for the last lines to come
LINK = "flower-superlink"
JOINED = "SuperNode ID:"
TAKEN = "The node has joined. It waits for what it is asked, which fedkeep device watch NODE.toml shows in another terminal.\n"
NOT_NOW = "Failed to activate SuperNode"
"""What Flower 1.41 says of a key that it does not know, and of one whose node is taken to be there: after a node was
killed that lasts for a minute."""
UNSIGNED = "Invalid SuperNode authentication"
"""What a link answers to a signature that is not right, or not of this time; Flower's node ends, with 0, and says nothing."""
NO_LINK = "Failed to initialize the connection to the SuperLink."
"""What Flower 1.41 says of any other answer of a link; the next line is the answer."""
GIVES_UP = ("Giving up reconnection", "SSL/TLS handshake error detected")
"""What Flower 1.41 says when a connection was damaged (a changed byte in TLS): its node does not end, and is gone."""
AGAIN, PATIENCE = 5.0, 80.0  # seconds between tries to join, and until it is given up
KEY = (
    "the link does not take this node's key. Register it there (fedkeep flower register), and give each node a key of "
    "its own; or a node with this key still runs, such as one of a copy of this folder on another machine: end it. One "
    "that was killed counts as running for up to a minute"
)
AUTHORITY = "the link's certificate is not signed by the authority that this node trusts (link.certificate)"
REASONS = {
    NOT_NOW: KEY,
    UNSIGNED: "the link does not take this node's signature: is its clock right?",
    "CERTIFICATE_VERIFY_FAILED": AUTHORITY,
    "certificate verify failed": AUTHORITY,
    "address already in use": "its port is in use. Name another (link.port)",
}
"""What Flower 1.41 writes, and what that means; the first that is found is told."""
NEWS = "\x1b[92mINFO"  # how a line of it begins, with its colour or without


GROUPS = hasattr(os, "killpg")  # Windows has none: there the command alone is ended
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1


def tell(text: str, where: TextIO | None = None) -> None:
    """Write a text to standard output; a disk that is full, or a reader that is gone, costs the text alone.

    A node whose words nobody takes would soon wait for ever to say the next ones.
    """
    where = where or sys.stdout
    with contextlib.suppress(OSError):
        where.write(text)
        where.flush()


def end_with(parent: int) -> None:
    """Have Linux end this process when its parent is gone, however that ended."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # gone already
            os._exit(WRONG_USE)


class WatchedCommand:
    """A command that runs; a node is started again while that helps."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command, self.ended = list(command), threading.Event()
        # A link is not started again: its server app has ended, too.
        self.link = LINK in map(os.path.basename, command)
        self.process: subprocess.Popen[str] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def run(self) -> int:
        """Return 0 once the command was asked to end, or 2 where its node could not join.

        A node that has joined once is started again whenever it ends: Flower's gives up where a connection is damaged.
        """
        began, joined = time.monotonic(), False
        while True:
            said = self._once()
            joined = joined or JOINED in said
            if self.ended.is_set():
                return 0
            left = began + PATIENCE - time.monotonic()
            if self.link or (not joined and (NOT_NOW not in said or left < 0)):
                what = "the link ended" if self.link else "the node could not join"
                tell(f"Error: {what}: {reason(said)}.\n", sys.stderr)
                return WRONG_USE
            why = (
                f"The node ended: {reason(said)}" if joined else f"Not yet: {KEY}. Giving up in {left:.0f} s"
            )
            tell(f"{why}. It is started again.\n")
            if self.ended.wait(AGAIN):
                return 0

    def _once(self) -> str:
        process = self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0 if GROUPS else None,
            preexec_fn=None if LIBC is None else functools.partial(end_with, os.getpid()),
        )
        if self.ended.is_set():  # since it was asked last
            signal_all(process, signal.SIGTERM)
        said: list[str] = []
        reader = threading.Thread(target=self._pass_on, args=(process, said), daemon=True)
        reader.start()
        process.wait()  # not the end of its output: what it has started may outlive it
        end_group(process)
        reader.join(GRACE)
        return "".join(said)

    def _pass_on(self, process: subprocess.Popen[str], said: list[str]) -> None:
        for line in process.stdout or ():
            tell(line)
            if JOINED in line:
                tell(TAKEN)
            joined = any(JOINED in one for one in said)
            if joined and any(
                words in line for words in GIVES_UP
            ):  # Flower's process stays, and serves no more
                signal_all(process, signal.SIGTERM)
                threading.Timer(GRACE, process.kill).start()
            said.append(line)
            if len(said) > MOST:
                del said[next(k for k, one in enumerate(said) if JOINED not in one)]

    def end_with_parent(self) -> None:
        """End the command when standard input closes."""

        def wait() -> None:
            while os.read(0, 1024):
                pass
            self._end(signal.SIGTERM, None)

        threading.Thread(target=wait, daemon=True).start()

    def _end(self, number: int, _: FrameType | None) -> None:
        self.ended.set()
        if self.process is not None and self.process.returncode is None:
            signal_all(self.process, signal.SIGTERM)


def signal_all(process: subprocess.Popen[str], number: int) -> bool:
    """Signal a command and what it has started, with 0 nothing; return whether there was anybody to signal."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses where all have just ended
        if GROUPS:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        return GROUPS
    return False


def end_group(process: subprocess.Popen[str]) -> None:
    """End what a command that has ended has left, and wait for it."""
    for number, patience in ((signal.SIGTERM, GRACE), (KILL, 1.0)):
        end = time.monotonic() + patience
        there = signal_all(process, number)
        while there and time.monotonic() < end:
            time.sleep(0.05)
            _reap(process.pid)
            there = signal_all(process, 0)
        if not there:
            return


def _reap(group: int) -> None:
    """Wait for those of a group that are ours now: in a container this process may be the first, to which all fall."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def reason(said: str) -> str:
    """Return why, from what Flower wrote; else the last line that is no mere news."""
    for words, meaning in REASONS.items():
        if words in said:
            return meaning
    lines = [line.strip() for line in said.splitlines() if line.strip() and "INFO" not in line[: len(NEWS)]]
    if NO_LINK in lines[:-1]:
        return lines[lines.index(NO_LINK) + 1]
    return lines[-1] if lines else "it did not say why"


def main(words: Sequence[str]) -> int:
    """Watch a command."""
    with_parent = words[:1] == ["--with-parent"]
    watch = WatchedCommand(words[1:] if with_parent else words)
    if with_parent:
        watch.end_with_parent()
    return watch.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
