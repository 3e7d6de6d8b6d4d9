"""A contender's process as the driver sees it: requests and answers, processor time and memory of its whole tree."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ContenderError(Exception):
    """A contender could not be started, died, or took too long."""


class Process:
    """A running contender.

    Args:
        python: the interpreter of its environment.
        arguments: of ``python -m MODULE``.
        threads: of one of its computing processes; None: as many as torch takes by itself.
        patience: seconds to wait for an answer.
        restless: it uses the processor while it waits (Ray's daemons do, some percent of a core), so it is held
            between its turns.
        module: what is run; its first line says that it is there.

    Raises:
        ContenderError: it could not be prepared.
    """

    def __init__(
        self,
        python: str,
        arguments: Sequence[str],
        threads: int | None,
        patience: float,
        restless: bool = False,
        module: str = "benchmarks.contenders",
    ) -> None:
        settings = {n: v for n, v in os.environ.items() if n not in THREADS}
        settings |= dict.fromkeys(THREADS, str(threads)) if threads else {}
        self.patience, self.restless = patience, restless
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in close)
        self.process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=ROOT,
            env=settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        try:
            self.answer()
            self._signal(signal.SIGSTOP)
        except ContenderError:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            ContenderError: the process died or took too long.
        """
        self._signal(signal.SIGCONT)
        self.send(**request)
        answer = self.answer()
        self._signal(signal.SIGSTOP)
        return answer

    def send(self, **request: Any) -> None:
        """Send a request, whose ``answer`` is read later."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise ContenderError(self._reason()) from error

    def close(self) -> None:
        """Let the process end; end its whole session if it doesn't."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def cpu_seconds(self) -> float:
        """Return the processor time that the tree has used so far."""
        ticks = 0
        for pid in self._tree():
            fields = _read(pid, "stat").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # own and waited-for children's, user and system
        return ticks / TICK

    def forget_peaks(self) -> None:
        """Set the peaks of memory back to what is in use now."""
        for pid in self._tree():
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")

    def peak_mb(self) -> float:
        """Return the peak memory of the tree in MB; pages that its processes share count once.

        That is, of each process: its share of anonymous memory now, and how far its peak was above what it has now; of
        files (the same libraries) and shared memory: the largest amount that one process has mapped.
        """
        own, mapped, shared = 0, [0], [0]
        for pid in self._tree():
            status, parts = sizes_of(pid, "status"), sizes_of(pid, "smaps_rollup")
            own += parts.get("Pss_Anon", 0) + max(0, status.get("VmHWM", 0) - status.get("VmRSS", 0))
            mapped.append(status.get("RssFile", 0))
            shared.append(status.get("RssShmem", 0))
        return (own + max(mapped) + max(shared)) / 1024

    def _signal(self, which: signal.Signals) -> None:
        for pid in self._tree() if self.restless else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)

    def _tree(self) -> list[int]:
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (fields := _read(int(entry.name), "stat").rpartition(")")[2].split()):
                parents[int(entry.name)] = int(fields[1])
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def answer(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        began = time.monotonic()
        while time.monotonic() - began < self.patience:
            if select.select([self.process.stdout], [], [], 1.0)[0]:
                line = self.process.stdout.readline()
                if not line:
                    raise ContenderError(self._reason())
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise ContenderError(f"no answer within {self.patience:g} s")

    def _reason(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it ended without a word"


def _read(pid: int, name: str) -> str:
    """Return a file of /proc; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def sizes_of(pid: int, name: str) -> dict[str, int]:
    """Return the sizes in KiB that a file of /proc lists of a process."""
    lines = (line.split() for line in _read(pid, name).splitlines() if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) for words in lines}


def own_python() -> str:
    """Return the interpreter that has fedkeep."""
    return sys.executable
