"""A whole federation on this machine: keys, a link, nodes, one training to its end, and everything stopped again."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fedkeep.core.errors import ConfigError, RunError, raising
from fedkeep.core.files import write_whole
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.experiments.build import with_head_named
from fedkeep.experiments.config import Config, parse_config
from fedkeep.experiments.run_directory import locked
from fedkeep.experiments.sources import build_source, located, reader_named
from fedkeep.experiments.toml import from_toml, to_toml
from fedkeep.flower.keys import make_keys
from fedkeep.flower.link import PATIENCE, Control, FlowerLink, free_port
from fedkeep.flower.project import new_project
from fedkeep.flower.served import federation_of
from fedkeep.flower.signed import sign_project
from fedkeep.flower.supernode import SuperNode
from fedkeep.flower.watch import JOINED
from fedkeep.remote.served_run import FOUND, Only

TROUBLE = ("refused", "lost", "broken", "late", "left", "round", "waiting")
AGAIN = "Give the same command again: it goes on after the last finished round."
START = 300.0  # seconds until all nodes have answered, on a machine that is busy too
LOOK = 0.5  # seconds between two looks at how far the run is
AWAY = 60.0  # seconds for which a link may not answer
SILENT = 20.0  # seconds between two questions to Flower whether the server app still runs
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Local:
    """What a federation on this machine consists of.

    Attributes:
        folder: keeps all of it: keys, project, nodes, logs, and the server's run.
        config_text: the experiment.
        data: the table ``[data]`` of every node.
        seed: of divisions that it leaves to a seed.
        clients: by node, the clients that live there.
        port: of the link; 0 takes a free one.
    """

    folder: Path
    config_text: str
    data: Mapping[str, Any]
    clients: Mapping[str, Sequence[str]]
    seed: int = 0
    port: int = 0

    @property
    def run(self) -> Path:
        """The folder of the server's run."""
        return self.folder / "run"

    @property
    def status(self) -> Path:
        """The file in which the server app says how it is."""
        return self.folder / "status.json"

    def prepare(self) -> None:
        """Write keys and project; the keys of an earlier try are kept.

        Raises:
            ConfigError: the folder holds another experiment, or its clients live on other nodes.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / "project" / "config.toml"
        if kept.exists() and kept.read_text(encoding="utf-8") != self.config_text:
            raise ConfigError(
                "{folder} holds another experiment. Name another folder with --out.", folder=self.folder
            )
        for path in sorted((self.folder / "nodes").glob("*/node.toml")):
            clients, name = from_toml(path.read_text(encoding="utf-8"))["device"]["clients"], path.parent.name
            if clients != list(self.clients.get(name, ())):
                raise ConfigError(
                    "{folder} holds a deployment in which {name} has {count} other clients, whose states "
                    "are there. Deploy to as many nodes as then, or name another folder with --out.",
                    folder=self.folder,
                    name=name,
                    count=len(clients),
                )
        make_keys(self.folder / "keys", hosts=[], nodes=list(self.clients))
        shutil.rmtree(self.folder / "project", ignore_errors=True)
        new_project(self.folder / "project", self.config_text, "local", out=self.run)
        sign_project(self.folder / "project", self.folder / "keys" / "signer.key")

    def node(self, name: str, link: str) -> SuperNode:
        """Return a node, its configuration written."""
        home, keys = self.folder / "nodes" / name, self.folder / "keys"
        home.mkdir(parents=True, exist_ok=True)
        device = {
            "folder": str((home / "state").resolve()),
            "owner": name,
            "clients": list(self.clients[name]),
        }
        table = {
            "seed": self.seed,
            "device": device,
            "link": {
                "address": link,
                "certificate": str((keys / "ca.pem").resolve()),
                "port": free_port(),
                "key": str((keys / f"{name}.key").resolve()),
                "trusted": [str((keys / "signer.pub").resolve())],
            },
            "data": dict(self.data),
        }
        (home / "node.toml").write_text(to_toml(table), encoding="utf-8")
        return SuperNode.read(home / "node.toml", home / "flower")


@contextmanager
def federation(
    local: Local, say: Say = lambda text: None
) -> Iterator[tuple[FlowerLink, dict[str, SuperNode]]]:
    """Start a link and all nodes; whatever happens, all of them are stopped at the end.

    Raises:
        ConfigError, RunError: something did not start, or another process has the folder; says what and why.
    """
    local.folder.mkdir(parents=True, exist_ok=True)
    with locked(local.folder), _started(local, say) as started:
        yield started


@contextmanager
def _started(local: Local, say: Say) -> Iterator[tuple[FlowerLink, dict[str, SuperNode]]]:
    local.prepare()
    link = FlowerLink(local.folder, local.folder / "keys", port=local.port)
    with link.processes:
        link.start()
        say(f"The link is at {link.address}, with TLS.")
        nodes = {}
        for name in local.clients:
            link.register(link.keys / f"{name}.pub")
            nodes[name] = local.node(name, link.address)
            start_node(link, name, nodes[name])
        for name in nodes:
            link.processes.await_text(name, JOINED, PATIENCE)
        say(f"{len(nodes)} nodes have joined by their keys: {', '.join(nodes)}.")
        yield link, nodes


def start_node(link: FlowerLink, name: str, node: SuperNode) -> None:
    """Start a node beside its link."""
    (link.processes.logs / f"{name}.log").unlink(missing_ok=True)
    link.processes.start(name, node.command(), **node.environment())


def train(
    local: Local,
    link: FlowerLink,
    say: Say = lambda text: None,
    settings: Mapping[str, str | int | float] = {},
) -> None:
    """Run the project to its end, and tell each round.

    Raises:
        RunError: the server app ended with an error, or a process died; says why.
    """
    local.status.unlink(missing_ok=True)
    clients = sum(map(len, local.clients.values()))
    given: dict[str, str | int | float] = {"status": str(local.status), "clients": clients, "patience": START}
    run = link.submit(local.folder / "project", {**given, **settings})
    try:
        follow(link, run, local.run, local.status, say, link.processes.check)
    except BaseException as error:  # Ctrl-C too
        link.stop_run(run)
        if isinstance(error, EndedError):
            raise EndedError("{why} {again}", why=error, again=AGAIN) from error
        raise


def follow(
    link: Control,
    number: str,
    run: Path,
    status: Path,
    say: Say = lambda text: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait for a training's end, and tell each round.

    Args:
        link: where it runs.
        number: Flower's, of the training.
        run: the server's folder of it, if it is on this machine.
        status: where its server app says how it is, if that is on this machine.
        say: tells people.
        check: raises where something else has died.

    Raises:
        EndedError: its server app ended without a word.
        RunError: it ended with an error, or the link does not answer for ``AWAY`` seconds; says why.
    """
    done, told, last = -1, len(troubles(run)), ""
    asked = answered = time.monotonic()
    while True:
        found = read_status(status)
        if (round := rounds_done(run)) != done and found.state != "failed":
            done = round
            say(f"Rounds finished: {done}." if done else "Waiting for the first round.")
        for text in troubles(run)[told:]:
            say(text)
            told += 1
        if found.state == "running" and found.text != last and not (run / "events.jsonl").exists():
            last = found.text
            say(last)
        if found.state == "finished":
            return
        if found.state == "failed":
            raise RunError(found.text)
        check()
        if time.monotonic() > asked + SILENT:
            state, asked = "", time.monotonic()
            try:
                state, answered = link.state_of(number), time.monotonic()
            except RunError as error:
                if time.monotonic() > answered + AWAY:
                    raise RunError("{why} {again}", why=error, again=AGAIN) from error
            if state == "finished:completed" and not status.exists():  # it is on another machine
                return
            if state == "finished:stopped":
                raise RunError("The training was stopped. {again}", again=AGAIN)
            if state.startswith("finished") and read_status(status).state not in ("finished", "failed"):
                raise EndedError(
                    "The server app ended without a word ({state}); the link's log says more.", state=state
                )
        time.sleep(LOOK)


class EndedError(RunError):
    """A server app ended without a word: it was killed, or its machine died."""


def train_at(
    link: Control,
    project: Path,
    settings: Mapping[str, str | int | float],
    note: Path,
    say: Say = lambda text: None,
) -> None:
    """Train a signed project at a link to its end, and tell each round; one that is on its way is followed.

    A server app that died is started again, as long as it finishes rounds in between. A training that was begun goes on
    at the link when a KeyboardInterrupt ends this; ``note`` is there then.

    Args:
        link: where.
        project: the signed one.
        settings: of the server app, beside those in the project.
        note: keeps Flower's number of the training, so that the same command finds it again.
        say: tells people.

    Raises:
        ConfigError: the project is none, or a training with other settings is on its way.
        RunError: the training ended with an error; says why.
    """
    run = Path(str(settings.get("out") or _out_of(project)))
    status = run.with_name(f"{run.name}.status.json")
    number = _on_its_way(link, note)
    if number:
        begun = json.loads(note.read_bytes()).get("settings", {})
        if settings and settings != begun:
            raise ConfigError(
                "A training with other settings is on its way: {begun}. Wait for its end, or end it: "
                "fedkeep flower train {project} --stop.",
                project=project,
                begun=", ".join(f"{key}={value}" for key, value in begun.items()) or "none",
            )
        say("The training is on its way; it is followed.")
    while True:
        before = rounds_done(run)
        if not number:
            for old in (status, note):
                old.unlink(missing_ok=True)
            number = link.submit(project, {**settings, "status": str(status)})
            write_whole(note, json.dumps({"flower": number, "settings": dict(settings)}).encode())
        try:
            follow(link, number, run, status, say)
            break
        except EndedError as error:
            if rounds_done(run) == before:
                raise EndedError("{why} {again}", why=error, again=AGAIN) from error
            say(f"{error} It is started again.")
            number = ""
    note.unlink(missing_ok=True)
    say(f"{read_status(status).text or 'It is finished.'} The run: {run}")


def stop_at(link: Control, project: Path, note: Path) -> None:
    """Stop a project's training at a link, which ``train_at`` has noted.

    Raises:
        ConfigError: none is on its way.
        RunError: the link does not answer, or does not stop it.
    """
    number = _noted(note)
    if not number or link.state_of(number).startswith("finished"):
        raise ConfigError("No training of {project} is on its way.", project=project)
    if fault := link.stop_run(number):
        raise RunError("The link does not stop the training: {fault}", fault=fault)
    note.unlink(missing_ok=True)


def _noted(note: Path) -> str:
    """Return Flower's number of the training that was begun last; empty: none is known."""
    try:
        return str(json.loads(note.read_bytes())["flower"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def _on_its_way(link: Control, note: Path) -> str:
    """Return Flower's number of a training that has not ended; empty: there is none."""
    number = _noted(note)
    with suppress(RunError):  # a link that is gone says so when it is to start it
        if number and not link.state_of(number).startswith("finished"):
            return number
    return ""


def _out_of(project: Path) -> str:
    path = project / "pyproject.toml"
    with raising(
        ConfigError,
        "{project} is no project of fedkeep flower: {why}.",
        OSError,
        KeyError,
        TypeError,
        project=project,
    ):
        return str(from_toml(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]["out"])


def troubles(run: Path) -> list[str]:
    """Return what a run's events say of nodes and clients that are not as they should be."""
    try:
        lines = (run / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [event["text"] for event in map(_event, lines) if event["kind"] in TROUBLE]


def _event(line: str) -> dict[str, str]:
    """Return an event's kind and text, empty where a full disk or a kill has cut its line short."""
    try:
        event = json.loads(line)
        return {"kind": str(event["kind"]), "text": str(event["text"])}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"kind": "", "text": ""}


def rounds_done(run: Path) -> int:
    """Return how many rounds a run has finished; 0 where it has not begun."""
    try:
        return read_commit(run, read_info(run)).round
    except RunError:
        return 0


def judged(run: Path, only: Only) -> list[str]:
    """Return what a run's last judging or adapting without training found, a line each; nothing after training."""
    if not only or not (run / FOUND[only]).exists():
        return []
    lines = (run / FOUND[only]).read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [
        f"Round {one['round']}, {one['split']}: {one['metric']} {_number(one['value'])} ({one['n']} examples)."
        for one in found
        if one["client"] is None
    ]


def _number(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.4g}"


def local_of(folder: Path, text: str, data_folder: Path | None, nodes: int, port: int = 0) -> Local:
    """Return a federation of a configuration, its clients dealt out to nodes.

    Raises:
        ConfigError, DataError: the configuration is wrong, or a fault in the data.
    """
    federation_of(text)
    text = with_head_named(text, data_folder)
    config = parse_config(text)
    ids = [str(client) for client in build_source(config.data, config.seed, data_folder).ids]
    return Local(
        folder=folder.resolve(),
        config_text=text,
        data=located_data(config, data_folder),
        clients=share_out(ids, nodes),
        seed=config.seed,
        port=port,
    )


def located_data(config: Config, folder: Path | None) -> dict[str, Any]:
    """Return the table ``[data]``, its path looked up in the folder of data, so that it can be read from anywhere."""
    table = config.data.model_dump(exclude_unset=True)
    reader = reader_named(config.data.reader)
    if reader.argument is not None and (place := table.get(reader.argument, reader.place)) is not None:
        table[reader.argument] = str(located(f"The reader {config.data.reader!r}", place, folder).resolve())
    return table


def share_out(clients: Sequence[str], nodes: int) -> dict[str, list[str]]:
    """Return which clients live on which node, in turn: ``node-1``, ``node-2``, …

    Raises:
        ConfigError: there are fewer clients than nodes.
    """
    if not 1 <= nodes <= len(clients):
        raise ConfigError(
            "There are {count} clients; wanted 1 to as many nodes, got --local {nodes}.",
            count=len(clients),
            nodes=nodes,
        )
    return {f"node-{k + 1}": list(clients[k::nodes]) for k in range(nodes)}


State = Literal["starting", "running", "finished", "failed"]


@dataclass(frozen=True)
class ServerStatus:
    """What the server app says.

    Attributes:
        state: whether it goes on.
        text: for people: the last round, or the error.
        process: its number on this machine; 0: not known.
    """

    state: State = "starting"
    text: str = ""
    process: int = 0


def write_status(path: Path | None, status: ServerStatus) -> None:
    """Write a status; None: nobody wants to know. A disk that is full costs the status alone."""
    if path is None:
        return
    try:
        write_whole(path, json.dumps(asdict(status)).encode())
    except RunError:
        return


def read_status(path: Path) -> ServerStatus:
    """Return what was written last; a file that is not there yet says ``starting``."""
    try:
        found = json.loads(path.read_bytes())
        return ServerStatus(**found)
    except (FileNotFoundError, ValueError, TypeError):
        return ServerStatus()
