"""Machines of their own on this one, for tests: network namespaces on a bridge, each with a host name and folder.

Needs root, and the command ``ip`` (Debian's ``iproute2``). A machine sees the folder ``/srv`` as its own.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

BRIDGE, NETWORK = "fedkeep0", "10.87.0"


def reason():
    """Return why there can be no machines here, or an empty text."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [command for command in ("ip", "unshare") if not shutil.which(command)]
    if missing or os.geteuid() != 0:
        return "needs root, and the commands ip (iproute2) and unshare"
    made = subprocess.run(["ip", "netns", "add", "fedkeep-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "fedkeep-try"], capture_output=True, check=False)
    return "network namespaces cannot be made here" if made.returncode else ""


class Hosts:
    """Machines that reach each other by name, until the block is left.

    Args:
        folder: keeps every machine's ``/srv``.
        names: by machine, the name by which the others reach it.
        environment: of every command.
    """

    def __init__(self, folder, names, environment):
        self.folder, self.names, self.environment = folder, names, environment
        self.running = []

    def __enter__(self):
        self.clear()
        table = "127.0.0.1 localhost\n"
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("link", "set", BRIDGE, "up")
        for number, (machine, name) in enumerate(self.names.items()):
            space, wire = f"fedkeep-{machine}", f"fk{number}"
            _ip("netns", "add", space)
            _ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", wire, "master", BRIDGE, "up")
            _ip("-n", space, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")
            table += f"{NETWORK}.{number + 1} {name}\n"
            (self.folder / machine).mkdir(exist_ok=True)
        (self.folder / "hosts").write_text(table)
        return self

    def __exit__(self, *_):
        for process in reversed(self.running):
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        self.clear()

    def clear(self):
        """Take all networks away, those of a test that was killed too."""
        for number, machine in enumerate(self.names):
            for gone in (["netns", "del", f"fedkeep-{machine}"], ["link", "del", f"fk{number}"]):
                subprocess.run(["ip", *gone], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)

    def command(self, machine, words):
        """Return the command that runs some words on a machine, in its folder ``/srv``."""
        mounts = (
            f"mount --bind {shlex.quote(str(self.folder / machine))} /srv && "
            f"mount --bind {shlex.quote(str(self.folder / 'hosts'))} /etc/hosts && cd /srv && exec {words}"
        )
        return ["ip", "netns", "exec", f"fedkeep-{machine}", "unshare", "-m", "sh", "-c", mounts]

    def run(self, machine, words, timeout=1200):
        """Run a command to its end; return what it printed and its exit code."""
        done = subprocess.run(
            self.command(machine, words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            timeout=timeout,
            check=False,
        )
        return done.stdout, done.returncode

    def start(self, machine, words, ready, timeout=180):
        """Start a command, and wait until what it has printed is enough (a function of it); return that."""
        log = self.folder / f"{machine}-{len(self.running)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                self.command(machine, words),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
            )
        self.running.append(process)
        end = time.monotonic() + timeout
        while not ready(said := log.read_text()):
            if process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{words}: {said}")
            time.sleep(0.2)
        return said


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
