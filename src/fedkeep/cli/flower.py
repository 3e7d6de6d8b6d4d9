"""``fedkeep flower``: projects, keys, signatures and the link for Flower; ``fedkeep deploy``: all of it on one machine."""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedkeep.cli.output import EveryOption, OnceOption, complain, fresh, looks, say, show_table
from fedkeep.cli.settings import ConfigOption, RoundOption, SetOption, find_config, is_last, needs_flower
from fedkeep.core.errors import ConfigError, RunError, did_you_mean, raising

if TYPE_CHECKING:
    from fedkeep.remote.attendance import Attendance

app = typer.Typer(
    name="flower",
    no_args_is_help=True,
    help="A federation over Flower: set it up, run its link, train, look, publish.",
    epilog="Example: fedkeep flower init visits --config visits.toml --host link.example.org --node clinic-a",
)


ProjectOption = Annotated[
    Path | None,
    typer.Option("--project", metavar="DIR", help="The signed project; by default project, beside the run."),
]
LinkOption = Annotated[str, typer.Option("--link", metavar="HOST:PORT", help="Where the link is.")]
OptionalConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="CONFIG", help="A configuration file, or the name of a shipped one."),
]


@app.command(
    "init",
    epilog="Example: fedkeep flower init visits --config visits.toml --host link.example.org --node clinic-a",
)
@needs_flower
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")],
    config: OptionalConfigOption = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="A name or address by which nodes reach the link. May be repeated; they get the first.",
        ),
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option("--node", help="A node's name, one a party. May be repeated.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The link's port.")] = 8443,
    renew: Annotated[
        list[str] | None,
        typer.Option("--renew", metavar="NODE", help="Give this node another key. May be repeated."),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="How long certificates are valid.")] = 365,
    clients: Annotated[
        Path | None,
        typer.Option(
            "--clients",
            metavar="FILE",
            help="A table [clients]: by node, names and globs of its clients. Then no node can bring another one.",
        ),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Set a federation up: DIR/project is a Flower project that trains CONFIG; with nodes it is signed, DIR/keys holds
    the owner's keys, and DIR/NODE all files of one party, its private key among them.

    Again after each change: it signs anew, and adds nodes. CONFIG needs no [data], as each device names its own. A
    method's head is found on the data of CONFIG; without these name it: method.head. Without nodes the project is for
    Flower's simulation.
    """
    from fedkeep.experiments.config import read_text
    from fedkeep.flower.set_up import KEYS, PROJECT, set_up

    text = None if config is None else _experiment(config, overrides)
    set_up(
        folder,
        text,
        hosts=host or [],
        nodes=node or [],
        renewed=renew or [],
        port=port,
        days=days,
        clients=None if clients is None else read_text(clients),
    )
    say(f"The project is in {folder / PROJECT}{', signed' if (folder / KEYS).exists() else ''}.")
    for name in [*(node or ()), *(renew or ())]:
        say(f"{folder / name} is {name}'s: take it there, and nowhere else.")
    if (folder / KEYS).exists():
        say(f"{folder / KEYS} stays here: who has signer.key decides what devices train.")


def _experiment(config: str, overrides: list[str] | None) -> str:
    """Return a configuration's text as devices get it, and say what it needs at the end."""
    from fedkeep.experiments.build import build_method, with_head_named
    from fedkeep.experiments.config import parse_config
    from fedkeep.experiments.toml import from_toml, to_toml
    from fedkeep.flower.served import NO_DATA, at_the_end, federation_of, without_data

    text = without_data(Path(config), overrides or [])
    if text is None:
        found = find_config(config, overrides)
        text = with_head_named(found.text, found.data_folder(None))
    federation_of(text, config)
    table = parse_config(to_toml({**from_toml(text), "data": NO_DATA})).method
    say(*at_the_end(build_method(table)))
    return text


@app.command("register", epilog="Example: fedkeep flower register visits/keys --link link.example.org:8443")
@needs_flower
def register(
    keys: Annotated[
        Path, typer.Argument(metavar="KEYS", help="The folder of keys that fedkeep flower init made.")
    ],
    link: LinkOption = "localhost:8443",
) -> None:
    """Tell the link the public keys of all nodes, so that they may join; those that it knows stay."""
    import tempfile

    from fedkeep.flower.link import Control
    from fedkeep.flower.signed import named_keys

    names = list(named_keys(keys))
    if not names:
        raise ConfigError(
            "{keys} holds no node's public key. Make some: fedkeep flower init DIR --node NAME.",
            keys=keys,
        )
    with tempfile.TemporaryDirectory(prefix="fedkeep-") as home:
        control = Control(Path(home), link, keys / "ca.pem")
        for name in names:
            control.register(keys / f"{name}.pub")
    say(f"The link knows {', '.join(names)}.")


@app.command("link", epilog="Example: fedkeep flower link visits/keys --port 8443")
@needs_flower
def link(
    keys: Annotated[
        Path,
        typer.Argument(metavar="KEYS", help="The folder of keys that fedkeep flower init made."),
    ],
    host: Annotated[
        str, typer.Option("--host", help="The address of this machine to listen at; by default all of them.")
    ] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port to listen at.")] = 8443,
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Keeps what the link knows: link.db.")
    ] = Path("link"),
) -> None:
    """Start the link: Flower's, with TLS, which nodes join by their keys. Ctrl-C ends it; server apps end soon after.

    As flower-superlink, but runs are started, listed and stopped on this machine alone, and server apps say that they
    live before they import anything, so a busy machine does not start them anew, again and again.
    """
    from fedkeep.core.files import PRIVATE_MASK, private_folder
    from fedkeep.flower.link import check, command, environment

    check(keys, port)
    place = folder.resolve()
    private_folder(place)
    os.umask(PRIVATE_MASK)
    say(f"The link listens at {host}:{port}, with TLS; Ctrl-C ends it.")
    sys.stdout.flush()
    words = command(keys.resolve(), host, port, place / "link.db")
    os.execve(words[0], words, {**os.environ, **environment(place / "bin")})


@app.command("train", epilog="Example: fedkeep flower train visits/project --link link.example.org:8443")
@needs_flower
def train(
    project: Annotated[Path, typer.Argument(metavar="PROJECT", help="The signed project.")],
    link: LinkOption = "localhost:8443",
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="By default keys/ca.pem beside the project."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--run-config", metavar="KEY=VALUE", help="A setting of the server app. May be repeated."
        ),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the training that is on its way.")] = False,
) -> None:
    """Train a project at the link to its end; ends with 0 if the training did. Ctrl-C leaves it going at the link.

    After any death the same command goes on after the last finished round; a training on its way is followed. --stop
    ends it; finished rounds stay.
    """
    import tempfile

    from fedkeep.experiments.config import parse_overrides, toml_value
    from fedkeep.flower.link import Control
    from fedkeep.flower.local_federation import stop_at, train_at
    from fedkeep.flower.signed import Signed

    if not (project / "pyproject.toml").is_file():
        raise ConfigError(
            "{project} is no project: it has no pyproject.toml. Name the folder that fedkeep flower init wrote, such as "
            "visits/project.",
            project=project,
        )
    where = ["--link", link, *(["--certificate", str(certificate)] if certificate else [])]
    again = shlex.join(["fedkeep", "flower", "train", str(project), *where])
    project = project.resolve()
    note = project.with_name(f"{project.name}.training")
    given = {key: toml_value(key, text) for key, text in parse_overrides(settings or []).items()}
    if "out" in given:
        given["out"] = str(Path(given["out"]).absolute())
    ca = project.parent / "keys" / "ca.pem" if certificate is None else certificate
    if not ca.is_file():
        raise ConfigError("There is no certificate {ca}. Name the authority's with --certificate.", ca=ca)
    if not stop and (signer := ca.with_name("signer.pub")).exists():
        # No device would answer, and the training would wait for them
        with raising(
            ConfigError,
            "The files of {project} are not those that were signed. Sign them: fedkeep flower init {folder}.",
            RunError,
            project=project,
            folder=project.parent,
        ):
            Signed.of(project).check([signer])
    with tempfile.TemporaryDirectory(prefix="fedkeep-") as home:
        control = Control(Path(home), link, ca)
        if stop:
            stop_at(control, project, note)
            say(f"The training is stopped. To go on after its last finished round: {again}")
            return
        try:
            with _ended_as_by_ctrl_c():
                train_at(control, project, given, note, say)
        except KeyboardInterrupt as ended:
            if not note.exists():
                raise
            complain(f"The training goes on at the link. Watch again: {again}. End it: {again} --stop")
            raise typer.Exit(130) from ended


@app.command("publish", epilog="Example: fedkeep flower publish visits/run")
@needs_flower
def publish(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The server's folder of the run.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="By default RUN.published, beside the run.")
    ] = None,
    project: ProjectOption = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", help="The key that the project names; by default keys/publisher.key beside the run."
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client", metavar="ID", help="For whom, where a method sends each client something else."
        ),
    ] = None,
    round: RoundOption = "best",
) -> None:
    """Write one file of what the server has, by which devices predict, evaluate, adapt and export.

    It is of the round that was best on valid, as after a simulation, and devices join it with what they kept then.

    It holds federated values and nothing of any client, and is signed. Any number of devices may have it.
    """
    from fedkeep.flower.publishing import ENDING
    from fedkeep.flower.publishing import publish as write

    run = run.resolve()
    out = run.with_name(f"{run.name}{ENDING}") if out is None else out
    found = write(
        run,
        out,
        project=run.parent / "project" if project is None else project,
        key=run.parent / "keys" / "publisher.key" if key is None else key,
        clients=client or (),
        last=is_last(round),
    )
    say(
        f"{out}: what the run {found.run} had after round {found.round} of {found.finished}. On a device: "
        f"--published {out.name}"
    )


@app.command("who", epilog="Example: fedkeep flower who visits/run")
@needs_flower
def who(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The server's folder of the run.")],
    project: ProjectOption = None,
) -> None:
    """Show a run's clients, the node to whose key each belongs, by which rule, and in how many rounds each took part."""
    from fedkeep.remote.attendance import attendance_of

    found = attendance_of(run)
    title = f"{run}: after {found.rounds} round{'s' * (found.rounds != 1)}"
    _show_clients(title, run, project, found, dict.fromkeys(found.dropped, "dropped"))
    say(*[found.rule, *found.lines()])


def _show_clients(
    title: str, run: Path, project: Path | None, found: Attendance, state: Mapping[str, str]
) -> None:
    names, owners = _node_names(run, project), found.roster.owners
    nobody = "none" if found.listed else "any"
    rows = []
    for client, counts in zip(map(str, found.roster.ids), found.roster.counts, strict=True):
        key = owners.get(client, "")
        node = names.get(key, f"key {hashlib.sha256(key.encode()).hexdigest()[:8]}" if key else nobody)
        asked = str(found.asked[client]) if found.asked else "not known"
        taken = str(found.taken[client])
        row = [client, node, str(counts.get("train", 0)), taken, asked]
        rows.append([*row, state.get(client, "")] if state else row)
    heads = ["Client", "Node", "Examples", "Took part", "Was asked", "Now"]
    show_table(title, heads if state else heads[:-1], rows, 2)


def _node_names(run: Path, project: Path | None) -> Mapping[str, str]:
    """Return the names of a project's nodes, by what stands for their keys."""
    from fedkeep.flower.signed import NODES, node_names

    return node_names((run.resolve().parent / "project" if project is None else project) / NODES)


@app.command("watch", epilog="Example: fedkeep flower watch visits/run --page page")
@needs_flower
def watch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The server's folder of the run, which may be on its way.")
    ],
    project: ProjectOption = None,
    every: EveryOption = 5.0,
    once: OnceOption = False,
    page: Annotated[
        Path | None,
        typer.Option("--page", metavar="DIR", help="Write the run's page there too; it refreshes itself."),
    ] = None,
) -> None:
    """Watch a run across machines: rounds, losses, bytes, ε, who is there, late or gone, faults. Ctrl-C ends it.

    It ends by itself when the training has.
    """
    from fedkeep.flower.local_federation import read_status
    from fedkeep.remote.view import lines_of, view_of
    from fedkeep.report.page import write_report

    before = 0
    for _ in looks(every, once):
        status = read_status(run.with_name(f"{run.name}.status.json"))
        ended = once or status.state in ("finished", "failed")
        try:
            view = view_of(run)
        except RunError as error:
            if once:
                raise
            say(" ".join([status.text or "The training has not begun yet.", *([str(error)] * run.exists())]))
        else:
            fresh()
            _show_clients(f"{run}: {status.state}", run, project, view.attendance, view.state)
            say(*lines_of(view))
            if page is not None and (view.done > before or ended):
                write_report([run], page, refresh=0 if ended else math.ceil(every))
                before = view.done
        if ended:
            return


@app.command("drop", epilog="Example: fedkeep flower drop visits/run --client south")
@needs_flower
def drop(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The server's folder of the run, which may be on its way.")
    ],
    client: Annotated[list[str], typer.Option("--client", metavar="ID", help="Whom; may be repeated.")],
    back: Annotated[bool, typer.Option("--back", help="Take them back.")] = False,
) -> None:
    """Drop clients that have left for good: from now on no round asks them, waits for them or counts them as missing.

    What they gave before stays in the model, and what they keep stays on their device.
    """
    from fedkeep.remote.attendance import drop as drop_from

    left = drop_from(run, client, back=back)
    say(f"Dropped from {run}: {', '.join(sorted(left)) or 'nobody'}.")


@app.command("add", epilog="Example: fedkeep flower add visits --node south --link link.example.org:8443")
@needs_flower
def add(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")],
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="The new party's node.")],
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client",
            metavar="ID",
            help="A name or glob of its clients, where the project lists clients. May be repeated.",
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN", help="The run that it joins; by default DIR/run.")
    ] = None,
    link: LinkOption = "localhost:8443",
) -> None:
    """Add a party, in the middle of a run too: its key and folder are made, the project is signed anew, and the link and
    the run learn its key. Nothing is stopped.

    Its clients take part from the next round on that begins after its node has come. Who has the same command given again
    loses nothing.
    """
    import tempfile

    from fedkeep.flower.link import Control
    from fedkeep.flower.set_up import KEYS, RUN, add_party
    from fedkeep.remote.joining import add as add_to

    key, out = add_party(folder, node, client or ()), folder / RUN if run is None else run
    joins = (out / "run.json").exists()
    if joins:
        add_to(out, key, client or ())
    with tempfile.TemporaryDirectory(prefix="fedkeep-") as home:
        Control(Path(home), link, folder / KEYS / "ca.pem").register(folder / KEYS / f"{node}.pub")
    say(f"{folder / node} is {node}'s: take it there, and nowhere else.")
    then = f"its clients join {out} once it has come" if joins else "it is there from the first round on"
    say(f"The link knows {node}; {then}.")


@app.command("move", epilog="Example: fedkeep flower move visits/run --client anna --to clinic-b")
@needs_flower
def move(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The server's folder of the run; stop it first.")
    ],
    client: Annotated[list[str], typer.Option("--client", metavar="ID", help="Whom; may be repeated.")],
    to: Annotated[
        str, typer.Option("--to", metavar="NODE", help="The node whose key they belong to from now on.")
    ],
    project: ProjectOption = None,
) -> None:
    """Let clients belong to another node, or to a node's new key; started again, the run asks that one for them.

    What a client keeps is on its old device: take a copy along (fedkeep device backup), or it begins anew there.
    """
    from fedkeep.remote.attendance import move as move_to

    keys = {name: key for key, name in _node_names(run, project).items()}
    if to not in keys:
        raise ConfigError(
            "The project knows no node {to!r}; it knows {keys}.{near} Add "
            "it: fedkeep flower init DIR --node NAME.",
            to=to,
            keys=", ".join(sorted(keys)) or "none",
            near=did_you_mean(to, keys),
        )
    move_to(run, client, keys[to])
    say(f"{', '.join(client)}: of {to} now. Give the command again that started the run.")


@app.command("roll-back", epilog="Example: fedkeep flower roll-back /var/lib/fedkeep/visits --round 40")
def roll_back(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The server's folder of the run; stop it first.")
    ],
    round: Annotated[int, typer.Option("--round", help="A finished round that the folder keeps.")],
) -> None:
    """Return a run's server to an earlier round; started again, it goes on from there.

    The folder keeps rounds if the run was started with --run-config 'keep-rounds=N'. Devices follow as far as they keep
    old versions themselves (history in their configuration), and say so where they do not.
    """
    from fedkeep.remote.roll_back import roll_back as to_round

    to_round(run, round)
    say(f"{run} is at round {round}. The same command that started the run goes on from there.")


@needs_flower
def deploy(
    local: Annotated[
        int, typer.Option("--local", metavar="N", min=1, help="How many nodes on this machine.")
    ],
    config: ConfigOption,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Its folder; by default deployments/NAME.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="The folder of real data, as for fedkeep run."),
    ] = None,
    overrides: SetOption = None,
    port: Annotated[int, typer.Option("--port", help="Of the link; by default a free one.")] = 0,
    only: Annotated[
        Literal["", "judge", "adapt"],
        typer.Option(
            "--only",
            metavar="judge|adapt",
            help="Train nothing: measure what an earlier deployment in DIR left, or let its clients adapt to it.",
        ),
    ] = "",
) -> None:
    """Try a federation out on this machine: keys, a link with TLS, N nodes, a training to its end; then all stops.

    The clients of CONFIG's data are dealt out to the nodes. Called again with the same folder it goes on where it was.
    """
    from fedkeep.flower.local_federation import federation, judged, local_of, train
    from fedkeep.report.page import write_report

    found = find_config(config, overrides)
    folder = out or Path("deployments") / found.label
    place = local_of(folder, found.text, found.data_folder(data), local, port)
    with _ended_as_by_ctrl_c(), federation(place, say) as (link, _):
        train(place, link, say, {"only": only})
    say(*judged(place.run, only))
    page = write_report([place.run], folder)
    say(f"Everything is stopped. The run: {folder / 'run'}. Its page: {page}")


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Let a request to end take the way of Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
