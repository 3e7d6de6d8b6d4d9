"""``fedkeep device``: this machine as a node of a federation, and what it keeps."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedkeep.cli.models import (
    JsonOption,
    ModelOfOption,
    RowsOption,
    SharedOption,
    TableOption,
    UserOption,
    check_asked,
    write_predictions,
)
from fedkeep.cli.output import EveryOption, OnceOption, complain, fresh, looks, metrics_table, say, show_table
from fedkeep.cli.results import show_clients
from fedkeep.cli.settings import YesOption, ask, needs_flower
from fedkeep.core.errors import BusyError, ConfigError, StoreError, did_you_mean, raising
from fedkeep.report.wording import size

if TYPE_CHECKING:
    from fedkeep.remote.device_file import DeviceFile, LogLine
    from fedkeep.remote.node_config import OwnDevice
    from fedkeep.remote.published import Models
    from fedkeep.store.version_file import Version

PATIENCE = 5.0
NOTES = 3
NOTHING = "No message has been served yet."
BEYOND = (
    "Backups and snapshots are beyond fedkeep, and so is what a disk still has in blocks that were freed."
)

device = typer.Typer(
    name="device",
    no_args_is_help=True,
    help="This machine as a device of a federation: take part, adapt, predict, show what is kept, forget it.",
    epilog="Example: fedkeep device status node.toml",
)

PlaceArgument = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="The folder of private states, or the device's configuration file."),
]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="ID", help="The run's id. [default: all, or the only one]")
]


@device.command(epilog="Example: fedkeep device status states --client ann")
def status(
    place: PlaceArgument,
    client: Annotated[
        str | None, typer.Option("--client", metavar="ID", help="Show this client alone.")
    ] = None,
    run: RunOption = None,
) -> None:
    """Show what is kept, for whom, of which run, and since which round; rounds count from 1, as in records."""
    from fedkeep.data.ids import as_id

    folder, damaged, shown = _folder(place), False, False
    client = None if client is None else as_id(client)
    for name in _runs(folder, run):
        try:
            _check_whole(folder, name)
            with _opened(folder, name) as file:
                shown |= _show(file, client)
        except StoreError as error:
            complain(f"Error: {error}")
            damaged = True
    if damaged:
        raise typer.Exit(2)
    if client is not None and not shown:
        raise _nothing_of(client, folder)


def _nothing_of(client: str, folder: Path, near: str = "") -> ConfigError:
    return ConfigError(
        "{folder} keeps nothing of client {client!r}.{near}", folder=folder, client=client, near=near
    )


def _show(file: DeviceFile, client: str | None) -> bool:
    by_client: dict[str, list[Version]] = {
        name: file.versions(name) for name in sorted(file.clients()) if client in (None, name)
    }
    if client is not None and not by_client:
        return False
    parts, adapted = file.parts(), file.adapted()
    rows = []
    for name, versions in by_client.items():
        last = max((v for v in versions if v.accepted), key=lambda v: v.number, default=None)
        staged = [v for v in versions if not v.accepted]
        for version in versions:
            file.values(version)  # raises if it is damaged
        if name in adapted:
            file.adapted_values(adapted[name])
        rows.append(
            [
                name,
                "none" if last is None else _of_round(last),
                ", ".join(f"round {v.round + 1}" for v in staged) or "none",
                f"{len(versions)}",
                size(len(versions) * file.format.bytes),
                f"{len(parts.get(name, ()))}",
                f"round {adapted[name].round}" if name in adapted else "no",
            ]
        )
    about = file.about
    began = f", begun from what run {about.began_from} left" if about.began_from else ""
    values = ", ".join(str(column[0]) for column in about.columns) or "nothing"
    on_disk = sum(path.stat().st_size for path in file.path.parent.glob(f"{file.path.name}*"))
    show_table(
        f"Run {file.run} of {about.owner}{began}",
        ["Client", "Accepted", "Awaits the server's word", "Versions", "Bytes", "Examples", "Adapted"],
        rows,
        3,
        f"Each version holds {values}. Of each of these examples a hash and its part are kept. The file takes "
        f"{size(on_disk)} of the disk.",
    )
    return True


def _of_round(version: Version) -> str:
    return f"version {version.version}, round {version.round + 1}" if version.version else "as it began"


NodeArgument = Annotated[Path, typer.Argument(metavar="NODE.toml", help="The device's configuration.")]


@device.command(epilog="Example: fedkeep device terms node.toml")
def terms(config: NodeArgument) -> None:
    """Show what this device's owner has agreed to, and how much of it each run has asked for so far."""
    from fedkeep.remote.device_file import Counts
    from fedkeep.remote.device_tally import Limits
    from fedkeep.remote.node_config import read_node_config

    own = read_node_config(config).device
    say(*_own_terms(own))
    folder = config.parent / own.folder
    for name in _whole(folder, _runs(folder, None)) if folder.is_dir() else ():
        with _opened(folder, name) as file:
            limits, counts = Limits(**file.about.agreed.get("limits", {})), file.counts()
            experiment = file.about.agreed["hello"]["experiment"] if file.about.agreed else ""
        rows = [
            [
                client,
                *(
                    f"{n} of {'any' if most is None else most}"
                    for n, most in zip(found, astuple(limits), strict=True)
                ),
            ]
            for client, found in sorted(counts.items())
        ]
        heads = [kind.capitalize() for kind in Counts._fields]
        say(f"\nRun {name}, as it was agreed on:\n")
        say(textwrap.indent(_what_decides(experiment), "  "))
        show_table(f"Run {name}: so far", ["Client", *heads], rows or [["none", "", "", ""]], 3)


def _what_decides(experiment: str) -> str:
    """Return what of an experiment decides how a device trains and what leaves it, as TOML."""
    from fedkeep.experiments.toml import from_toml, to_toml

    table = from_toml(experiment)
    run = {
        key: value for key, value in table.get("run", {}).items() if key != "rounds"
    }  # these are the limits
    kept: dict[str, Any] = {key: table[key] for key in ("model", "method", "privacy") if key in table}
    kept |= {"run": run} if run else {}
    none = "" if "privacy" in kept else "# no [privacy]: updates leave without noise\n"
    return to_toml(kept) + none


def _own_terms(own: OwnDevice) -> Iterator[str]:
    """Yield what an owner's settings mean, in plain words."""
    yield (
        "It trains what a trusted key has signed. An update of the shared parameters leaves"
        + (", in secure sums alone." if own.secure else ".")
    )
    yield "Before the first round it tells " + (
        "names of its columns and features, and how many clients it has; all else of its data leaves in secure sums alone."
        if own.secure
        else "a summary of its data; of words those that "
        f"{own.clients_a_word} of its clients have. fedkeep prepare shows it."
    )
    told = {
        "sums": "sums over its clients' examples",
        "clients": "a sum for each client",
        "examples": "a result for each example",
    }
    if own.least_examples > 1:
        yield f"Of judging leave sums, each of {own.least_examples} examples or more, differences between sums too."
    else:
        yield f"Of judging leaves {told[own.leaves]}."
    yield f"Examples that opted out are {'judged too' if own.judge_opted_out else 'never judged'}."
    yield f"Models that clients have adapted are {'judged for the server' if own.judge_adapted else 'never judged for it'}."
    limits = {kind: getattr(own, kind) for kind in ("trainings", "judgings", "adaptations")}
    some = ", ".join(f"{most} {kind}" for kind, most in limits.items() if most is not None)
    yield (
        f"A client does at most {some} in a run."
        if some
        else "A client does as much as the signed project says."
    )


@device.command(epilog="Example: fedkeep device check node.toml")
@needs_flower
def check(
    config: NodeArgument,
    experiment: Annotated[
        Path | None,
        typer.Option(
            "--experiment",
            metavar="FILE",
            help="The experiment that the device is to take part in. [default: experiment.toml beside NODE.toml]",
        ),
    ] = None,
) -> None:
    """Look at what this device needs before it takes part: data, states, model, terms, keys, port, clock and link.

    Nothing leaves. Exit code 1 if something is to be mended; its line says how.
    """
    from fedkeep.flower.node_check import findings

    faults = 0
    for one in findings(config, experiment):
        say(f"{'✓' if one.good else '✗'} {one.what}: {one.found}")
        faults += not one.good
    if faults:
        raise typer.Exit(1)
    say(f"All is well: fedkeep device run {config}")


@device.command(epilog="Example: fedkeep device log node.toml")
def log(place: PlaceArgument, run: RunOption = None) -> None:
    """Show each message that this device has served: when, what it was asked, and what left."""
    from fedkeep.remote.view import served

    folder, empty = _asked_folder(place), True
    for name in _served_runs(folder, run):
        with _opened(folder, name) as file:
            for one in map(served, file.log()):
                say(f"{one.when}  run {name[:8]}, {one.round}: asked {one.asked}; left: {one.left}.")
                empty = False
    if empty:
        say(NOTHING)


@device.command(epilog="Example: fedkeep device watch node.toml")
def watch(
    place: PlaceArgument, run: RunOption = None, every: EveryOption = 5.0, once: OnceOption = False
) -> None:
    """Watch what this device was asked, what it gave, and how its clients' models do. Ctrl-C ends it.

    Models are judged on the clients' own examples, each time that the server asks, and the numbers are shown here also
    where they do not leave. After the training: fedkeep device evaluate.
    """
    from fedkeep.remote.view import MESSAGES, scores, served

    folder = _asked_folder(place)
    logs: dict[str, list[LogLine]] = {}
    for _ in looks(every, once):
        runs, busy = _served_runs(folder, run), set[str]()
        for name in runs:
            try:
                with _opened(folder, name) as file:
                    logs[name] = file.log()
            except BusyError:
                busy.add(name)
        fresh()
        if not runs:
            say(NOTHING)
        for name in runs:
            lines = logs.get(name, [])
            left = sum(line.bytes or 0 for line in lines)
            now = "; it is busy with one now" if name in busy else ""
            title = f"Run {name}: {len(lines)} messages were served, {size(left)} left{now}"
            show_table(
                title, ["When", "Round", "Asked", "Left"], [served(one) for one in lines[-MESSAGES:]], 4
            )
            heads, rows = scores(lines)
            if rows:
                show_table("How its clients' models do here, all clients together", heads, rows)


def _asked_folder(place: Path) -> Path:
    """Return the folder of private states, which may not be there before the first round."""
    from fedkeep.remote.node_config import states_folder

    return states_folder(place) if place.is_file() else _folder(place)


def _served_runs(folder: Path, run: str | None) -> Sequence[str]:
    from fedkeep.remote.device_file import runs_in

    if run is None and not folder.is_dir():
        return ()
    return _whole(folder, runs_in(folder) if run is None else _runs(folder, run))


PublishedOption = Annotated[
    Path | None,
    typer.Option(
        "--published",
        metavar="FILE",
        help="What fedkeep flower publish has written. It is kept for later. [default: what was given last]",
    ),
]
ClientsOption = Annotated[
    list[str] | None,
    typer.Option("--client", metavar="ID", help="Whose; may be repeated. [default: all of this device]"),
]
AdaptedOption = Annotated[
    bool,
    typer.Option(
        "--adapted", help="What clients adapted to last, where rounds have trained their own values too."
    ),
]


@device.command(epilog="Example: fedkeep device adapt node.toml --published run.published")
@needs_flower
def adapt(
    config: NodeArgument,
    published: PublishedOption = None,
    client: ClientsOption = None,
    run: RunOption = None,
) -> None:
    """Let clients adapt to what the server published, on all of their training examples; nothing leaves.

    A client that took part in no round may adapt too. The result is kept on this device.
    """
    from fedkeep.flower.publishing import models_of

    models = models_of(config, published, run)
    done = models.adapt(client)
    _tell_missing(models)
    names = ", ".join(done[:3]) + (", …" if len(done) > 3 else "")
    say(f"{len(done)} clients have adapted to round {models.published.round}: {names}.")


@device.command(epilog="Example: fedkeep device evaluate node.toml --published run.published")
@needs_flower
def evaluate(
    config: NodeArgument,
    published: PublishedOption = None,
    client: ClientsOption = None,
    run: RunOption = None,
    split: Annotated[
        Literal["train", "valid", "test"],
        typer.Option("--split", help="On which of each client's own examples."),
    ] = "test",
    adapted: AdaptedOption = False,
) -> None:
    """Measure each client's own model on this device, on all of its own examples; nothing leaves."""
    from fedkeep.flower.publishing import models_of

    models = models_of(config, published, run)
    chosen = models.of(client, adapted=adapted)
    metrics_table(
        f"Round {models.published.round} of the run {models.published.run}", {split: chosen.evaluate(split)}
    )
    if len(chosen.clients) > 1:
        show_clients(chosen, split)
    _tell_missing(models)


@device.command(epilog="Example: fedkeep device predict node.toml --data new.csv --out predicted.csv")
@needs_flower
def predict(
    config: NodeArgument,
    data: RowsOption,
    published: PublishedOption = None,
    client: ModelOfOption = None,
    user: UserOption = None,
    shared: SharedOption = False,
    adapted: AdaptedOption = False,
    run: RunOption = None,
    out: TableOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the rows of a table by the models of this device's clients, as fedkeep predict does after a simulation.

    Each row is predicted by the model of the client that its column of users names; on a device of one client, or with
    --client, by that one.
    """
    from fedkeep.flower.publishing import models_of

    check_asked(client, user, shared, out)
    models = models_of(config, published, run)
    _tell_missing(models)
    found = models.predict(data, client=client, user=user, shared=shared, adapted=adapted)
    write_predictions(found, out, as_json)


@device.command(epilog="Example: fedkeep device serve node.toml --token-file token")
@needs_flower
def serve(
    config: NodeArgument,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="Holds the token. [default: one is made and shown]"
        ),
    ] = None,
    published: PublishedOption = None,
    client: ClientsOption = None,
    shared: SharedOption = False,
    adapted: AdaptedOption = False,
    run: RunOption = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 9095,
    host: Annotated[
        str, typer.Option("--host", help="An address of this machine; others than loopback's have no TLS.")
    ] = "127.0.0.1",
) -> None:
    """Answer programs of this machine over HTTP by its clients' models, as fedkeep device predict does.

    POST /predict with Authorization: Bearer TOKEN and JSON, {"rows": [{"age": 41, ...}]}; the page / is there to try it.
    """
    import secrets

    from fedkeep.flower.publishing import models_of
    from fedkeep.remote import web

    token = secrets.token_urlsafe(24) if token_file is None else _token(token_file)
    models = models_of(config, published, run)
    _tell_missing(models)
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends it, the models' folder is removed
        signal.signal(number, signal.default_int_handler)
    with models.opened(client, adapted=adapted) as exported:
        only = client[0] if client is not None and len(client) == 1 else models.only
        with web.serve(exported, token, port=port, host=host, only=only, shared=shared) as server:
            name = f"[{host}]" if ":" in host else host
            say(f"Round {models.published.round} of the run {models.published.run}. Ctrl-C ends it.")
            say(f"http://{name}:{server.server_port}/" + (f"#{token}" if token_file is None else ""))
            sys.stdout.flush()
            with suppress(KeyboardInterrupt):
                server.serve_forever()


def _token(path: Path) -> str:
    with raising(
        ConfigError,
        "There is no token in {path}. Write one there, for its owner alone: (umask 077; openssl rand -hex "
        "24 > {path})",
        OSError,
        UnicodeDecodeError,
        path=path,
    ):
        return path.read_text(encoding="utf-8").strip()


def _tell_missing(models: Models) -> None:
    """Say which clients have no model here, and whose is not surely of the round that was published."""
    for client, fault in models.unfit.items():
        complain(f"Client {client!r} is left out: {fault}")
    notes = list(models.notes.values())
    complain(*notes[:NOTES])
    if len(notes) > NOTES:
        complain(f"So it is with {len(notes) - NOTES} more clients.")


@device.command(epilog="Example: fedkeep device export node.toml --published run.published --out models")
@needs_flower
def export(
    config: NodeArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder.")],
    published: PublishedOption = None,
    client: ClientsOption = None,
    run: RunOption = None,
    adapted: AdaptedOption = False,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write ONNX files too, each compared with torch's numbers.")
    ] = False,
    peft: Annotated[
        bool, typer.Option("--peft", help="Write each client's adapter too, in a folder that peft reads.")
    ] = False,
) -> None:
    """Write clients' whole models into a folder that fedkeep predict and fedkeep.load_model read, as fedkeep export does.

    Values that nothing has trained are not written as if they were.
    """
    from fedkeep.flower.publishing import models_of

    models = models_of(config, published, run)
    ids = models.export(out, client, adapted=adapted, onnx=onnx, peft=peft)
    _tell_missing(models)
    say(
        f"{out}: {len(ids)} model{'s' if len(ids) > 1 else ''} of {models.run.method.name}, after round "
        f"{models.run.round}. They hold private values: keep the folder safe."
    )
    say(f"Load one: fedkeep.load_model({str(out)!r}, {ids[0]!r})")


@device.command(epilog="Example: fedkeep device backup node.toml --out /mnt/backup/visits")
def backup(
    place: PlaceArgument,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where to; an older copy of a run is replaced.")
    ],
    run: RunOption = None,
) -> None:
    """Copy what this device keeps, while it takes part too: a file a run, each whole, for its owner alone.

    To restore, stop the device, put RUN.db back into its folder, and say on_missing = "older" under [device]: clients go
    on from what they were then. Encrypt the place: the copy holds private values.
    """
    from fedkeep.remote.device_file import file_of

    folder = _folder(place)
    if out.exists() and (not out.is_dir() or out.samefile(folder)):
        raise ConfigError(
            "{out} is no other folder than that of the states, or a file. Name another.", out=out
        )
    for name in _runs(folder, run):
        _check_whole(folder, name)
        to = file_of(out, name)
        with _opened(folder, name) as file:
            file.copy_to(to)
            say(f"{to}: run {name}, {len(file.clients())} clients, {size(to.stat().st_size)}.")


@device.command(epilog="Example: fedkeep device forget states --client ann")
def forget(
    place: PlaceArgument,
    client: Annotated[
        list[str] | None,
        typer.Option("--client", metavar="ID", help="Forget this client alone. May be repeated."),
    ] = None,
    run: RunOption = None,
    yes: YesOption = False,
) -> None:
    """Remove private states for good: of all clients, or of some; of all runs, or of one.

    What is removed is overwritten with zeros in the file, and the log is emptied. A server that goes on with such a
    run is told that the client's state is missing.
    """
    from fedkeep.data.ids import as_id
    from fedkeep.remote.device_file import file_of, forget_rest, remove

    folder, clients = _folder(place), set(map(as_id, client or ()))
    runs = _runs(folder, run)
    if clients:
        _check_known(folder, runs, clients)
    what = f"clients {', '.join(sorted(clients))}" if clients else "all clients"
    question = f"Forget what {folder} keeps of {what} in {len(runs)} run{'s' * (len(runs) != 1)} for good?"
    ask(question, "Forgetting is for good.", yes)
    rest = ""
    for name in runs:
        if not clients:
            for path in remove(file_of(folder, name), PATIENCE):
                say(f"Run {name}: {path.name} is removed.")
            continue
        if name not in _whole(folder, runs):
            forget_rest(file_of(folder, name), clients, PATIENCE)
            say(f"Run {name}: what was left of {what} is removed.")
            continue
        with _opened(folder, name) as file:
            gone = file.forget(clients)
            say(
                f"Run {name}: {gone} version{'s' * (gone != 1)} of {what} removed, {len(file.versions())} left."
            )
            if any(map(file.about.has_begun, clients)):
                rest = " else"
                say(f"Run {name}: a hash of each id stays, so that none of them begins anew by itself.")
    say(f"Nothing{rest} of {what} is left in {folder}{' of ' + run if run else ''}. {BEYOND}")


def _folder(place: Path) -> Path:
    from fedkeep.remote.node_config import states_folder

    folder = states_folder(place) if place.is_file() else place
    if not folder.is_dir():
        raise ConfigError(
            "There is no folder of private states {folder}. Name it, or the device's configuration file.",
            folder=folder,
        )
    return folder


def _runs(folder: Path, run: str | None) -> Sequence[str]:
    from fedkeep.remote.device_file import runs_in

    runs = runs_in(folder)
    if run is None and runs:
        return runs
    if run in runs:
        return [run]
    if not runs:
        raise ConfigError("{folder} keeps no private states.", folder=folder)
    raise ConfigError(
        "{folder} keeps nothing of the run {run!r}; it keeps {runs}.{near}",
        folder=folder,
        run=run,
        runs=", ".join(runs),
        near=did_you_mean(str(run), runs),
    )


def _whole(folder: Path, runs: Sequence[str]) -> list[str]:
    """Return the runs whose file is there."""
    from fedkeep.remote.device_file import file_of

    return [name for name in runs if file_of(folder, name).exists()]


def _check_whole(folder: Path, run: str) -> None:
    """Raise StoreError if a run's file is gone, and other files of it are there."""
    from fedkeep.remote.device_file import file_of, files_of

    if run not in _whole(folder, [run]):
        left = ", ".join(path.name for path in files_of(file_of(folder, run)))
        raise StoreError(
            "The file of the run {run!r} is gone, and {left} is left of it. Restore the file from a copy, or forget "
            "the run.",
            run=run,
            left=left,
        )


def _opened(folder: Path, run: str) -> closing[DeviceFile]:
    from fedkeep.remote.device_file import DeviceFile, file_of

    return closing(DeviceFile(file_of(folder, run), None, PATIENCE))


def _clients(folder: Path, runs: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for name in _whole(folder, runs):
        with _opened(folder, name) as file:
            found |= file.clients()
    return found


def _check_known(folder: Path, runs: Sequence[str], clients: set[str]) -> None:
    from fedkeep.remote.device_file import file_of, sum_of

    known = _clients(folder, runs)
    summing = {c for c in clients for name in runs if sum_of(file_of(folder, name), c).exists()}
    for client in sorted(clients - known - summing):
        raise _nothing_of(client, folder, did_you_mean(client, known))


@device.command("run", epilog="Example: fedkeep device run node.toml")
@needs_flower
def run(
    config: Annotated[Path, typer.Argument(metavar="NODE.toml", help="The device's own configuration.")],
) -> None:
    """Take part in a federation: wait for orders, train on this device's data, keep what is private here.

    The ClientApp that runs is the installed fedkeep's. Code that a project brings is not even unpacked, and a project
    that no trusted key has signed (link.trusted) is refused.
    """
    from fedkeep.core.files import PRIVATE_MASK
    from fedkeep.flower.processes import WATCH
    from fedkeep.flower.supernode import SuperNode
    from fedkeep.remote.node_config import build_node, states_folder

    node = build_node(config)
    supernode = SuperNode.read(config, states_folder(config) / "flower")
    supernode.check()
    say(
        f"{len(node.clients)} clients, e.g. {node.clients[0]}. Joining {supernode.link.address}; Ctrl-C ends it."
    )
    sys.stdout.flush()
    os.umask(PRIVATE_MASK)
    command = [sys.executable, str(WATCH), *supernode.command()]
    os.execve(sys.executable, command, supernode.environment())
