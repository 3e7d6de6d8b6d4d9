"""Flower's processes on this machine: started with logs of their own, and ended whole, whatever happens."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from fedkeep.core.errors import ConfigError, RunError, installing, raising
from fedkeep.core.files import PRIVATE_MASK

MARK = "FEDKEEP_DEPLOYMENT"
"""Environment variable by which the processes of a deployment, and all that they start, are known."""
LAST_LINES = 12
HERE = ("127.0.0.1", "localhost")
"""This machine, by which programs on it know each other."""
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # which ends a process at once on Windows
WATCH = Path(__file__).with_name("watch.py")


class Processes:
    """Processes that end together when the block is left.

    Args:
        logs: the folder of their logs, ``NAME.log``.
        environment: variables beside this process's own.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self.logs, self.mark = logs, secrets.token_hex(8)
        logs.mkdir(parents=True, exist_ok=True)
        self.environment = {**os.environ, **past_proxies(), **(environment or {}), MARK: self.mark}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str | Path], **environment: str) -> None:
        """Start a command; its output goes to its log, and it ends if this process dies."""
        with open(self.logs / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, str(WATCH), "--with-parent", *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**self.environment, **environment},
                start_new_session=True,
                umask=PRIVATE_MASK,
            )

    def await_text(self, name: str, wanted: str, patience: float) -> None:
        """Wait until a text stands in a log.

        Raises:
            RunError: the process has ended, or the text did not come in time.
        """
        began = time.monotonic()
        while wanted not in self.text(name):
            if self.running[name].poll() is not None:
                raise RunError("{name} ended at once:\n{last}", name=name, last=self.last(name))
            if time.monotonic() > began + patience:
                raise RunError(
                    "{name} was not ready after {patience:g} seconds:\n{last}",
                    name=name,
                    patience=patience,
                    last=self.last(name),
                )
            time.sleep(0.1)

    def check(self) -> None:
        """Raise RunError if a process has ended."""
        for name, process in self.running.items():
            if process.poll() is not None:
                raise RunError(
                    "{name} has ended (exit code {returncode}):\n{last}",
                    name=name,
                    returncode=process.returncode,
                    last=self.last(name),
                )

    def text(self, name: str) -> str:
        """Return a log."""
        path = self.logs / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def last(self, name: str) -> str:
        """Return the last lines of a log."""
        lines = [f"  {line[:300]}" for line in self.text(name).splitlines() if line.strip()]
        return "\n".join(lines[-LAST_LINES:]) or "  (it said nothing)"

    def kill(self, name: str) -> None:
        """End a process, and the group of what it watches, at once, as a power cut would."""
        process = self.running.pop(name)
        _kill_groups(process.pid)
        _done(process)

    def stop_one(self, name: str, patience: float = 30.0) -> None:
        """Ask a process to end, and wait until it has."""
        process = self.running.pop(name)
        _signal(process.pid, signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            _kill_groups(process.pid)
        _done(process)

    def stop(self, patience: float = 8.0) -> None:
        """Ask all to end, wait a little, then end them and whatever they have started."""
        for process in reversed(self.running.values()):
            _signal(process.pid, signal.SIGTERM)
        end = time.monotonic() + patience
        for process in self.running.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill_groups(process.pid)
            _done(process)
        self.running.clear()
        while (left := marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.1)
        for process_id in left:
            _signal(process_id, KILL)


def marked(mark: str) -> list[int]:
    """Return the processes of a deployment by its mark; none where the system has no ``/proc``."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:  # it has just ended, or belongs to somebody else
            continue
    return found


def _kill_groups(watch: int) -> None:
    """Kill the groups that a watch's command and the watch itself lead; the first where the system has ``/proc``."""
    for group in [*_started_by(watch), watch]:
        _signal_group(group, KILL)


def _started_by(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            after_name = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            if int(after_name.split()[1]) == parent:
                found.append(int(entry.name))
    return found


def _done(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _signal_group(group: int, number: signal.Signals) -> None:
    if not hasattr(os, "killpg"):  # Windows
        _signal(group, number)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _signal(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def program(name: str) -> Path:
    """Return the path of a command that was installed beside this Python.

    Raises:
        ConfigError: it is not there.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(
            "There is no command {name} beside {executable}. Install Flower: {install}.",
            name=name,
            executable=sys.executable,
            install=installing("flower"),
        )
    return path


def listed(paths: Iterable[Path]) -> str:
    """Return paths as ``PATH`` lists them.

    Raises:
        ConfigError: one holds the sign between two, so that others would be taken.
    """
    for path in (found := list(map(str, paths))):
        if os.pathsep in path:
            raise ConfigError(
                "The path {path} holds a {separator!r}, which stands between two paths. Name another folder.",
                path=path,
                separator=os.pathsep,
            )
    return os.pathsep.join(found)


def search_path(commands: Path) -> str:
    """Return a ``PATH`` that has a folder of ours before Flower's own commands; raises as ``listed``."""
    return os.pathsep.join([listed([commands]), str(program("flwr").parent), os.environ.get("PATH", "")])


def past_proxies() -> dict[str, str]:
    """Return the variables by which programs of this machine talk to each other past the environment's proxies."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    names = listed if listed == "*" else ",".join([*filter(None, [listed]), *HERE])
    return {"no_proxy": names, "NO_PROXY": names}


def check_proxies() -> None:
    """Raise ConfigError if the environment names a proxy that Flower cannot speak to."""
    for scheme, proxy in urllib.request.getproxies_environment().items():
        if proxy.startswith("socks") and scheme != "no" and find_spec("socksio") is None:
            raise ConfigError(
                "The environment names a SOCKS proxy ({scheme}_proxy), for which Flower's requests need a package: "
                "pip install 'httpx[socks]'. Or take the variable out: env -u {scheme}_proxy -u "
                "{upper}_PROXY fedkeep ...",
                scheme=scheme,
                upper=scheme.upper(),
            )


def proxy_before(address: str) -> str:
    """Return the proxy through which Flower reaches ``host:port``, without its user's name; empty: none."""
    found, host = urllib.request.getproxies_environment(), address.rpartition(":")[0]
    if host in HERE or urllib.request.proxy_bypass(host):
        return ""
    return (found.get("https") or found.get("all", "")).rpartition("@")[2]


def check_port(port: int, what: str, advice: str = "Name another with --port.") -> None:
    """Raise ConfigError if somebody listens on a port of this machine already; ``advice`` says what to do."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with raising(
            ConfigError,
            "The port {port}, which {what} wants, is in use ({why}). {advice}",
            OSError,
            port=port,
            what=what,
            advice=advice,
        ):
            probe.bind(("127.0.0.1", port))


def check_reachable(address: str, patience: float = 3.0) -> None:
    """Raise ConfigError unless somebody listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError("The link's address is host:port; got {address!r}.", address=address)
    with raising(
        ConfigError,
        "There is no link at {address}: {why}. Start it first, or check the address and the firewall.",
        OSError,
        OverflowError,
        UnicodeError,
        address=address,
    ):
        socket.create_connection((host.strip("[]"), int(port)), timeout=patience).close()
