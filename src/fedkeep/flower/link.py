"""A link and its nodes on this machine: the commands of the documentation, run by us, with TLS and authentication."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.experiments.toml import to_toml
from fedkeep.flower import guard
from fedkeep.flower.keys import check_certificate
from fedkeep.flower.processes import Processes, check_port, check_proxies, past_proxies, program, search_path

READY = "Uvicorn running"
PATIENCE = 180.0  # seconds for a process to be ready; a busy machine needs tens


class Control:
    """Starts runs at a link, and asks after them, by Flower's own commands.

    Args:
        home: a folder for Flower's settings.
        address: where the link is reached.
        certificate: of the authority that speaks for it.
    """

    def __init__(self, home: Path, address: str, certificate: Path) -> None:
        connection = {
            "address": address,
            "root-certificates": str(certificate.resolve()),
            "insecure": False,
        }
        home.mkdir(parents=True, exist_ok=True)
        settings = to_toml({"superlink": {"default": "local", "local": connection}})
        (home / "config.toml").write_text(settings, encoding="utf-8")
        self.environment = {**environment(home / "bin"), "FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1"}

    def submit(self, project: Path, settings: Mapping[str, str | int | float]) -> str:
        """Start a run of a project; return Flower's number of it.

        Raises:
            ConfigError: a setting holds a quotation mark.
            RunError: the link refuses.
        """
        for key, value in settings.items():
            if '"' in str(value):
                raise ConfigError(
                    "{key} holds no quotation mark, for Flower's sake; got {value}.", key=key, value=value
                )
        words = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items())
        done = self._flwr("run", str(project), "local", *(["--run-config", words] if words else []))
        found = re.search(r"Successfully started run (\d+)", done.stdout)
        if done.returncode or found is None:
            raise RunError("The link does not start the run: {said}", said=_said(done))
        return found.group(1)

    def state_of(self, run: str) -> str:
        """Return what Flower says of a run, e.g. ``running`` or ``finished:failed``, and why."""
        done = self._flwr("list", "--run-id", run, "local", "--format", "json")
        found = re.search(r'"status": *"([^"]*)"', done.stdout)
        if done.returncode or found is None:
            raise RunError("The link does not say how the run is: {said}", said=_said(done))
        return found.group(1)

    def stop_run(self, run: str) -> str:
        """Ask the link to stop a run; return why it does not, empty if it does."""
        done = self._flwr("stop", run, "local")
        return _said(done) if done.returncode else ""

    def register(self, key: Path) -> None:
        """Tell the link a node's public key; one that it knows already is fine.

        Raises:
            RunError: the link refuses.
        """
        done = self._flwr("supernode", "register", str(key), "local")
        if done.returncode and "already in use" not in done.stdout + done.stderr:
            raise RunError("The link does not take the key {key}: {said}", key=key.name, said=_said(done))

    def _flwr(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program("flwr")), *words],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )


class FlowerLink(Control):
    """A link on loopback and what belongs to it.

    Args:
        folder: keeps the link's database, Flower's settings and all logs.
        keys: a folder of :func:`fedkeep.flower.keys.make_keys`.
        port: of the link; 0 takes a free one.
    """

    def __init__(self, folder: Path, keys: Path, *, port: int = 0) -> None:
        self.folder, self.keys = folder.resolve(), keys.resolve()
        self.port = port or free_port()
        super().__init__(self.folder / "flower", self.address, self.keys / "ca.pem")
        self.processes = Processes(self.folder / "logs", self.environment)

    @property
    def address(self) -> str:
        """Where the link is reached."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the link and wait until it takes requests.

        Raises:
            ConfigError: the port is in use, or the link's certificate is not valid now.
            RunError: the link did not start.
        """
        check(self.keys, self.port)
        log = self.folder / "logs" / "link.log"
        log.unlink(missing_ok=True)  # a link that was here before said the same words
        self.processes.start("link", command(self.keys, "127.0.0.1", self.port, self.folder / "link.db"))
        self.processes.await_text("link", READY, PATIENCE)


def command(keys: Path, host: str, port: int, database: Path) -> list[str]:
    """Return the command that starts a link with TLS, which nodes join by their keys."""
    return [
        *guard.started_by(guard.LINK),
        "--host",
        host,
        "--port",
        str(port),
        "--ssl-ca-certfile",
        str(keys / "ca.pem"),
        "--ssl-certfile",
        str(keys / "link.pem"),
        "--ssl-keyfile",
        str(keys / "link.key"),
        "--enable-supernode-auth",
        "--database",
        str(database),
        "--disable-runtime-dependency-installation",
    ]


def environment(commands: Path) -> dict[str, str]:
    """Return what a link's environment has beside the system's, and write what starts server apps into a folder."""
    path = search_path(commands)
    guard.install_at_link(commands)
    return {
        **past_proxies(),
        "FLWR_HOME": os.environ.get("FLWR_HOME") or str(commands.parent / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": path,
    }


def check(keys: Path, port: int) -> None:
    """Look at what a link needs before it is started.

    Raises:
        ConfigError: the port is in use, the key is missing, or a certificate is missing or not valid now; or the environment's proxy is none that
            Flower can speak to.
    """
    check_proxies()
    check_port(port, "the link")
    check_certificate(keys / "link.pem")
    check_certificate(keys / "ca.pem")
    if not (keys / "link.key").is_file():
        raise ConfigError(
            "There is no key {key}. Make keys with fedkeep flower init DIR --host HOST, or name their folder.",
            key=keys / "link.key",
        )


def free_port() -> int:
    """Return a port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """Return what Flower's command line wrote, without the frame that it draws around errors, or JSON."""
    said = done.stdout + done.stderr
    if "403 Forbidden" in said:  # guard.closed_to_others
        return "it takes this from its own machine alone; run the command there, or through ssh -L"
    if "Connection to the SuperLink is unavailable" in said:
        return "nobody answers at its address; a link listens some seconds after its start"
    if found := re.search(r'"error-message": *("(?:[^"\\]|\\.)*")', done.stdout):
        return " ".join(str(json.loads(found.group(1))).split())[-300:]
    boxed = [
        line.strip(" │") for line in (done.stdout + done.stderr).splitlines() if not line.startswith("╭")
    ]
    return " ".join(line for line in boxed if line.strip("╰─╯"))[-300:] or "it said nothing"
