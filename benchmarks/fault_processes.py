"""For the campaign of faults on real processes: what is done to them, and when."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fault_proxy import Proxy
from fedkeep.core.errors import RunError
from fedkeep.flower.keys import make_keys
from fedkeep.flower.link import PATIENCE, FlowerLink
from fedkeep.flower.local_federation import Local, read_status, rounds_done, start_node
from fedkeep.flower.processes import WATCH, marked
from fedkeep.flower.project import new_project
from fedkeep.flower.signed import sign_project
from fedkeep.flower.supernode import SuperNode
from fedkeep.flower.watch import JOINED

LONGEST = 600.0  # seconds until a round counts as stuck
NODE = "guard.py flower-supernode"  # in the words of a node, of its SuperExec, which is a fork of it, and of that one's forks
SHIFTED = """
import datetime, runpy, sys
from flwr.supernode import node_auth_http_interceptor as signing
now = signing.now
signing.now = lambda: now() + datetime.timedelta(seconds={seconds})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

THIEF = "thief"  # nodes' names begin so


class StuckError(Exception):
    """The run does not go on."""


class Harm:
    """One training, and what is done to its processes.

    Args:
        place: the federation.
        link: its link, running.
        nodes: its nodes, running; they are restarted behind wires that can be cut.
        draw: all that is random.
    """

    def __init__(
        self, place: Local, link: FlowerLink, nodes: Mapping[str, SuperNode], draw: random.Random
    ) -> None:
        self.place, self.link, self.draw = place, link, draw
        self.proxies = {name: Proxy(link.port) for name in nodes}
        self.nodes: dict[str, SuperNode] = {}
        self.submitted = self.thieves = 0

    def begin(self) -> None:
        """Put wires that can be cut between nodes and link, and start the training."""
        for name, proxy in self.proxies.items():
            self.link.processes.stop_one(name)
            self.nodes[name] = self.place.node(name, f"127.0.0.1:{proxy.port}")
            self._start(name)
        self._submit()

    def end(self) -> None:
        """Let go of the wires."""
        for proxy in self.proxies.values():
            proxy.close()

    def await_round(self, number: int) -> None:
        """Wait until so many rounds are finished.

        Raises:
            StuckError: none was finished in a long time.
        """
        last, since = rounds_done(self.place.run), time.monotonic()
        while (done := rounds_done(self.place.run)) < number:
            if done != last:
                last, since = done, time.monotonic()
            if time.monotonic() > since + LONGEST:
                raise StuckError(f"round {number} was not finished in {LONGEST:g} s; {self._last()}")
            if read_status(self._status).state == "failed":
                raise StuckError(read_status(self._status).text)
            time.sleep(0.2)

    def await_end(self, rounds: int) -> None:
        """Wait for the end of the training, and until the nodes have heard of the last round."""
        self.await_round(rounds)
        end = time.monotonic() + LONGEST
        while (status := read_status(self._status)).state != "finished":
            if time.monotonic() > end or status.state == "failed":
                raise StuckError(f"the server app did not end: {status.text}; {self._last()}")
            time.sleep(0.2)

    def do(self, kind: str) -> dict[str, Any]:
        """Do something at a random instant of a round, and wait until a round is finished after it."""
        delay = self.draw.random() * 5
        time.sleep(delay)
        before, began = rounds_done(self.place.run), time.monotonic()
        what = KINDS[kind](self)
        if before < rounds_done(self.place.run) + 1:
            self.await_round(before + 1)
        return {
            "after_round": before,
            "delay": round(delay, 2),
            "what": what,
            "seconds": round(time.monotonic() - began, 1),
        }

    def kill_client_app(self) -> str:
        """End the process that serves a message, a little after it began."""
        end, found = time.monotonic() + 120, list[int]()
        while not found and time.monotonic() < end:
            found = [p for p in marked(self.link.processes.mark) if part_of(p) == "message"]
            time.sleep(0.005)
        time.sleep(self.draw.random() * 0.5)
        alive = [process for process in found if part_of(process)]
        for process in alive[:1]:
            os.kill(process, signal.SIGKILL)
        return f"{min(1, len(alive))} of {len(found)} client apps"

    def kill_node(self) -> str:
        """End a node and all that it started, and start it again."""
        name = self._node()
        self.link.processes.kill(name)
        time.sleep(self.draw.random() * 5)
        self._start(name)
        return name

    def kill_server_app(self) -> str:
        """End the server app, and start another."""
        process = read_status(self._status).process
        if process:
            os.kill(process, signal.SIGKILL)
        self._submit()
        return f"process {process}"

    def kill_link(self) -> str:
        """End the link, and with it the server app; start both again."""
        self.link.processes.kill("link")
        process, end = read_status(self._status).process, time.monotonic() + 30
        while process and Path(f"/proc/{process}").exists() and time.monotonic() < end:
            time.sleep(0.1)
        self.link.start()
        self._submit()
        return "link"

    def cut(self) -> str:
        """Cut a node's wire for a while."""
        name, seconds = self._node(), self.draw.random() * 20
        self.proxies[name].cut(seconds)
        return f"{name} for {seconds:.1f} s"

    def delay(self) -> str:
        """Let all that a node says and hears take longer for a while."""
        name, seconds = self._node(), 0.2 + self.draw.random()
        self.proxies[name].delay = seconds
        threading.Timer(30, setattr, (self.proxies[name], "delay", 0.0)).start()
        return f"{name} by {seconds:.2f} s a piece"

    def corrupt(self) -> str:
        """Change a byte of some of what a node says and hears."""
        name, pieces = self._node(), self.draw.randrange(1, 6)
        self.proxies[name].corrupt = pieces
        return f"{name}, {pieces} pieces"

    def full_disk(self) -> str:
        """Let no file grow that a node's SuperExec or its forks write, until the server has heard of it."""
        name = self._node()
        folder = f"FLWR_HOME={self.nodes[name].home}"
        alive = marked(self.link.processes.mark)
        ours = [p for p in alive if part_of(p) in ("exec", "message") and folder in words_of(p, "environ")]

        def limit(most: int) -> None:
            for process in ours:
                with contextlib.suppress(ProcessLookupError):  # a fork whose message was served
                    resource.prlimit(process, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

        return self._until_told(name, lambda: limit(0), lambda: limit(resource.RLIM_INFINITY))

    def damage_state(self) -> str:
        """Change bytes of a node's private states, until the server has heard of it."""
        name = self._node()
        path = self._state(name)
        place = self.draw.randrange(100, path.stat().st_size - 100)
        right = path.read_bytes()[place : place + 64]
        wrong = bytes(byte ^ 0xFF for byte in right)

        def put(old: bytes, new: bytes) -> None:
            with path.open("r+b") as file:
                file.seek(place)
                if file.read(64) == old:  # else the file has been written since
                    file.seek(place)
                    file.write(new)

        told = self._until_told(name, lambda: put(right, wrong), lambda: put(wrong, right), may_pass=True)
        return f"{told}, bytes {place} to {place + 64}"

    def remove_state(self) -> str:
        """Take a node's private states away, until the server has heard of it."""
        name = self._node()
        path = self._state(name)
        away = path.with_suffix(".away")
        return self._until_told(name, lambda: path.rename(away), lambda: away.rename(path))

    def foreign_state(self) -> str:
        """Give a node the private states of another, until the server has heard of it."""
        name = self._node()
        other = next(one for one in self.nodes if one != name)
        path, away = self._state(name), self._state(name).with_suffix(".away")
        foreign = self._state(other).read_bytes()

        def swap() -> None:
            path.rename(away)
            path.write_bytes(foreign)

        return self._until_told(name, swap, lambda: away.replace(path))

    def jump_clock(self) -> str:
        """Let a node come back with a clock that is wrong; the link refuses it. Then set the clock."""
        name, seconds = self._node(), self.draw.choice([-86400, -400, 60, 86400])
        self.link.processes.kill(name)
        node = self.nodes[name]
        python, safe, *words = node.command()
        shifted = [python, safe, "-c", SHIFTED.format(seconds=seconds), *words]
        (self.link.processes.logs / f"{name}.log").unlink(missing_ok=True)
        self.link.processes.start(name, shifted, **node.environment())
        try:
            self.link.processes.await_text(name, JOINED, PATIENCE)
            told = "taken"
        except RunError as error:
            told = str(error)
        if "clock" not in told:
            raise StuckError(f"{name} is {seconds} s off, and nobody was told: {told}")
        self.link.processes.kill(name)
        self._start(name)
        return f"{name} by {datetime.timedelta(seconds=seconds)}: {told.splitlines()[-1].strip()[:120]}"

    def impostor(self) -> str:
        """Let a node with a new key claim the clients of another, with that one's experiment: of each key it is told once."""
        victim, self.thieves = self._node(), self.thieves + 1
        name = f"{THIEF}-{self.thieves}"
        make_keys(self.link.keys, hosts=[], nodes=[name])
        self.link.register(self.link.keys / f"{name}.pub")
        place = replace(self.place, clients={name: self.place.clients[victim]})
        node = place.node(name, self.link.address)
        try:
            return self._until_told(
                name,
                lambda: start_node(self.link, name, node),
                lambda: self.link.processes.kill(name),
                words="belongs to another key",
            )
        finally:
            shutil.rmtree(self.place.folder / "nodes" / name, ignore_errors=True)

    def foreign_project(self) -> str:
        """Submit a project that a key has signed which no node trusts, with the experiment of this run."""
        folder = self.place.folder / f"foreign-{len(list(self.place.folder.glob('foreign-*')))}"
        status = folder / "status.json"
        make_keys(folder / "keys", hosts=[], nodes=[])
        new_project(folder / "project", self.place.config_text, "foreign", out=folder / "run")
        sign_project(folder / "project", folder / "keys" / "signer.key")
        number = self.link.submit(folder / "project", {"status": str(status), "patience": LONGEST})
        try:
            end = time.monotonic() + LONGEST
            while time.monotonic() < end:
                said = read_status(status).text
                if "no key that it trusts has signed" in said:
                    return said[:200]
                if (folder / "run").exists():
                    raise StuckError("a project that nobody trusts has begun to train")
                time.sleep(0.2)
        finally:
            self.link.stop_run(number)
        raise StuckError(f"no node has refused a foreign project: {read_status(status).text}")

    def _until_told(
        self,
        name: str,
        harm: Callable[[], object],
        mend: Callable[[], object],
        may_pass: bool = False,
        words: str = "",
    ) -> str:
        before = rounds_done(self.place.run)
        told, events = len(self._events()), self.place.run / "events.jsonl"
        harm()
        try:
            end = time.monotonic() + LONGEST
            while time.monotonic() < end:
                new = [e for e in self._events()[told:] if e["kind"] in ("lost", "refused", "broken")]
                new = [e for e in new if words in e["text"]]
                if new:
                    return f"{name}: {new[0]['text'][:160]}"
                if may_pass and rounds_done(self.place.run) > before + 1:
                    return f"{name}: free bytes, nothing to notice"
                time.sleep(0.2)
        finally:
            mend()
        raise StuckError(f"{name}: nobody was told, see {events}")

    def _events(self) -> list[dict[str, Any]]:
        path = self.place.run / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _state(self, name: str) -> Path:
        return next((self.place.folder / "nodes" / name / "state").glob("*.db"))

    def _node(self) -> str:
        return self.draw.choice(sorted(self.nodes))

    def _start(self, name: str) -> None:
        start_node(self.link, name, self.nodes[name])
        self.link.processes.await_text(name, JOINED, PATIENCE)

    @property
    def _status(self) -> Path:
        return self.place.folder / f"status-{self.submitted}.json"

    def _submit(self) -> None:
        self.submitted += 1
        settings = {"status": str(self._status), "clients": sum(map(len, self.place.clients.values()))}
        self.link.submit(self.place.folder / "project", settings)

    def _last(self) -> str:
        return "; ".join(event["text"][:120] for event in self._events()[-3:])


def words_of(process: int, of: str = "cmdline") -> str:
    """Return what ``/proc`` says of a process, its words by spaces; empty where it has ended."""
    try:
        return Path(f"/proc/{process}/{of}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def part_of(process: int) -> str:
    """Return what a process is of a node: ``node``, ``exec`` for its SuperExec, ``message`` for what serves one; empty otherwise."""
    parts, forks = ("", "node", "exec", "message"), 0
    while NODE in (words := words_of(process)) and WATCH.name not in words:
        process, forks = _parent(process), forks + 1
    return parts[min(forks, len(parts) - 1)]


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


KINDS: dict[str, Callable[[Harm], str]] = {
    "kill client app": Harm.kill_client_app,
    "kill node": Harm.kill_node,
    "kill server app": Harm.kill_server_app,
    "kill link": Harm.kill_link,
    "cut": Harm.cut,
    "delay": Harm.delay,
    "corrupt": Harm.corrupt,
    "full disk": Harm.full_disk,
    "damaged state": Harm.damage_state,
    "removed state": Harm.remove_state,
    "foreign state": Harm.foreign_state,
    "clock jump": Harm.jump_clock,
    "impostor": Harm.impostor,
    "foreign project": Harm.foreign_project,
}
