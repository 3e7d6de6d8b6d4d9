"""``fedkeep flower``: projects, keys, signatures and the link for Flower."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import say, show_table
from fedkeep.cli.settings import ConfigOption, SetOption, find_config, needs_flower
from fedkeep.core.errors import ConfigError

app = typer.Typer(
    name="flower",
    no_args_is_help=True,
    help="A Flower project of a configuration; keys of a deployment; signatures; the link; a server's way back.",
    epilog="Example: fedkeep flower new visits --config config.toml",
)


@app.command("new", epilog="Example: fedkeep flower new visits --config config.toml")
@needs_flower
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the project.")],
    config: ConfigOption,
    overrides: SetOption = None,
) -> None:
    """Write a Flower project that trains CONFIG: in Flower's simulation, or on machines.

    For machines CONFIG needs no [data]: each device names its own. A method's head is found on the data of CONFIG;
    without these name it: method.head.
    """
    from fedkeep.experiments.build import build_method, with_head_named
    from fedkeep.experiments.config import parse_config
    from fedkeep.experiments.toml import from_toml, to_toml
    from fedkeep.flower.project import new_project
    from fedkeep.flower.served import NO_DATA, at_the_end, federation_of, without_data

    text = without_data(Path(config), overrides or [])
    if text is None:
        found = find_config(config, overrides)
        text = with_head_named(found.text, found.data_folder(None))
    federation_of(text, config)
    new_project(folder, text)
    say(f"The project is in {folder}; its README.md says how to run it.")
    table = parse_config(to_toml({**from_toml(text), "data": NO_DATA})).method
    for line in at_the_end(build_method(table)):
        say(line)


@app.command(
    "keys", epilog="Example: fedkeep flower keys keys --host link.example.org --node clinic-a --node clinic-b"
)
@needs_flower
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of keys; what is there is kept.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or address by which nodes reach the link. May be repeated."),
    ] = None,
    node: Annotated[list[str] | None, typer.Option("--node", help="A node's name. May be repeated.")] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="How long certificates are valid.")] = 365,
) -> None:
    """Make keys and certificates: an authority, the link's, one pair for each node, and one that signs projects.

    Files that end in .key are private: take each to the one machine that uses it.
    """
    from fedkeep.flower.keys import make_keys

    make_keys(folder, hosts=host or [], nodes=node or [], days=days)
    say(
        f"The keys are in {folder}. Private ones end in .key; keep ca.key and signer.key off all other machines."
    )


@app.command("sign", epilog="Example: fedkeep flower sign visits --key keys/signer.key")
@needs_flower
def sign(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A Flower project.")],
    key: Annotated[Path, typer.Option("--key", help="The private key; devices trust its public one.")],
) -> None:
    """Sign a project, so that devices which trust the key answer it. Sign again after each change."""
    from fedkeep.flower.signed import sign_project

    sign_project(folder, key)
    say(f"{folder} is signed.")


@app.command("link", epilog="Example: fedkeep flower link keys --port 8443")
@needs_flower
def link(
    keys: Annotated[
        Path,
        typer.Argument(metavar="KEYS", help="The folder that fedkeep flower keys made, with the link's."),
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

    As flower-superlink, but its server apps say that they live before they import anything. So a busy machine does not
    start them anew, again and again.
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


@app.command("train", epilog="Example: fedkeep flower train visits --link link.example.org:8443")
@needs_flower
def train(
    project: Annotated[Path, typer.Argument(metavar="PROJECT", help="The signed project.")],
    link: Annotated[
        str, typer.Option("--link", metavar="HOST:PORT", help="Where the link is.")
    ] = "localhost:8443",
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
) -> None:
    """Train a project at the link to its end; ends with 0 if the training did. Ctrl-C stops the training.

    After any death the same command goes on after the last finished round; a training on its way is followed.
    """
    import tempfile

    from fedkeep.experiments.config import parse_overrides
    from fedkeep.flower.link import Control
    from fedkeep.flower.local import train_at

    project = project.resolve()
    given = parse_overrides(settings or [])
    if "out" in given:
        given["out"] = str(Path(given["out"]).absolute())
    ca = project.parent / "keys" / "ca.pem" if certificate is None else certificate
    if not ca.is_file():
        raise ConfigError(f"There is no certificate {ca}. Name the authority's with --certificate.")
    with tempfile.TemporaryDirectory(prefix="fedkeep-") as home:
        control = Control(Path(home), link, ca)
        train_at(control, project, given, project.with_name(f"{project.name}.training"), say)


@app.command(
    "publish", epilog="Example: fedkeep flower publish runs/visits --project visits --key keys/publisher.key"
)
@needs_flower
def publish(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The server's folder of the run.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="By default RUN.published, beside the run.")
    ] = None,
    project: Annotated[
        Path | None,
        typer.Option(
            "--project",
            metavar="DIR",
            help="The signed project of the run; by default project, beside the run.",
        ),
    ] = None,
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
) -> None:
    """Write one file of what the server has after its last round, by which devices predict, evaluate, adapt and export.

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
    )
    say(f"{out}: what the run {found.run} has after round {found.round}. On a device: --published {out.name}")


@app.command("who", epilog="Example: fedkeep flower who runs/visits --project visits")
@needs_flower
def who(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The server's folder of the run.")],
    project: Annotated[
        Path | None,
        typer.Option(
            "--project", metavar="DIR", help="The signed project; by default project, beside the run."
        ),
    ] = None,
) -> None:
    """Show a run's clients, the node to whose key each belongs, and in how many rounds each took part."""
    from fedkeep.flower.signed import NODES, node_names
    from fedkeep.remote.attendance import attendance_of

    found = attendance_of(run)
    names = node_names((run.resolve().parent / "project" if project is None else project) / NODES)
    owners = found.roster.owners
    rows = []
    for client, counts in zip(map(str, found.roster.ids), found.roster.counts, strict=True):
        key = owners.get(client, "")
        node = names.get(key, f"key {hashlib.sha256(key.encode()).hexdigest()[:8]}" if key else "any")
        asked = str(found.asked[client]) if found.asked else "not known"
        asked += ", dropped" * (client in found.dropped)
        rows.append([client, node, str(counts.get("train", 0)), str(found.taken[client]), asked])
    title = f"{run}: after {found.rounds} round{'s' * (found.rounds != 1)}"
    show_table(
        title, ["Client", "Node", "Examples", "Took part", "Was asked"], rows, 2, " ".join(found.lines())
    )


@app.command("drop", epilog="Example: fedkeep flower drop runs/visits --client south")
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
