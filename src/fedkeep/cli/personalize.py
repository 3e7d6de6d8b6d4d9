"""``fedkeep personalize``: fit private parameters of users who took no part in federation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedkeep.cli.output import say, show_table, warn_of_unfinished
from fedkeep.cli.settings import DataOption, DeviceOption, RunArgument
from fedkeep.core.errors import ConfigError
from fedkeep.report.wording import MISSING, count, interval, metric_name, number

if TYPE_CHECKING:
    from fedkeep.experiments.run import Run

K = "0,1,2,5,10,20,50,all"


def personalize(
    run: RunArgument,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client", metavar="ID", help="A user; by default all that were held out. May be repeated."
        ),
    ] = None,
    k: Annotated[
        str | None, typer.Option("--k", help=f"Numbers of own examples to fit on. [default: {K}]")
    ] = None,
    everyone: Annotated[
        bool,
        typer.Option(
            "--all", help="Adapt every client on all of its examples, e.g. a mixture's own experts and gates."
        ),
    ] = False,
    new: Annotated[
        Path | None,
        typer.Option(
            "--new",
            metavar="FILE",
            help="Fit the users of this file, in the format of the run's own data, for good.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="With --all: processes side by side.")] = 1,
    data: DataOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Fit only private parameters on own examples: the federated part is frozen, nothing is uploaded.

    RUN is the folder that fedkeep run wrote. Without --client, all users that it held out of federation are measured on
    k of their examples. With --client these are measured, and what they fit to all of their examples is kept in RUN, so
    that evaluate, export and predict know them; with --all so for every client, those who took part from what they kept.
    """
    from fedkeep.data.ids import as_id
    from fedkeep.experiments.load import load_run

    if everyone and (client or k is not None):
        raise ConfigError("--all adapts every client on all of its examples; leave out --client and --k.")
    if new is not None and (client or everyone or k is not None):
        raise ConfigError("--new fits every user of the file; leave out --client, --all and --k.")
    if workers > 1 and not everyone:
        raise ConfigError("--workers goes with --all.")
    ks = parse_k(k or K)
    loaded = load_run(run, data_folder=data, device=device)
    warn_of_unfinished([run])
    if new is not None:
        _new(loaded, run, new)
    elif everyone:
        _everyone(loaded, run, workers)
    elif client:
        _named(loaded, list(dict.fromkeys(map(as_id, client))), ks, asked=k is not None)
    else:
        _held_out(loaded, run, ks, asked=k is not None)


def parse_k(text: str) -> list[int | None]:
    """Return ``"0,5,all"`` as ``[0, 5, None]``.

    Raises:
        ConfigError: something else stands there.
    """
    ks: list[int | None] = []
    for word in (w.strip() for w in text.split(",")):
        if word != "all" and not re.fullmatch("[0-9]{1,18}", word):
            raise ConfigError(
                "--k wants whole numbers and 'all' between commas, e.g. 0,5,all; got {word!r}.",
                word=word,
            )
        ks.append(None if word == "all" else int(word))
    return ks


def _new(run: Run, folder: Path, file: Path) -> None:
    from fedkeep.experiments.load import rows_of_run

    rows = rows_of_run(folder, run.data, file)
    known = [c for c in map(str, rows.ids) if run.data.ids.position(c) >= 0]
    run.fit(rows=rows)
    clients = list(map(str, rows.ids))
    if run.method.adapt.phases:
        say(
            f"Kept in {run.folder}: what {_users(clients)} of {file} fitted to all of their {count(rows.examples, 'example')}."
        )
    else:
        say(
            f"{run.method.name!r} adapts nothing to users, so nothing was fitted: to {_users(clients)} of {file} it gives the "
            f"model that everybody new has. {run.folder} knows them now."
        )
    if known and run.method.adapt.phases:
        say(f"{_users(known)} of them took part in the run, and began with what was kept there.")
    say(f"Export them: fedkeep export {folder} --client {clients[0]} --out DIR")


def _everyone(run: Run, folder: Path, workers: int) -> None:
    from fedkeep.experiments.analyses import adapted_form, write_analyses

    clients = list(run.data.ids)
    analysis = adapted_form(run.fit(clients, workers=workers), clients)
    metric = str(analysis["metric"])
    rows = [
        [str(cell) if i == 0 else number(cell, metric) for i, cell in enumerate(row)]
        for row in analysis["rows"]
    ]
    show_table(
        f"{metric_name(metric)} of {len(clients)} clients before and after adapting",
        analysis["columns"],
        rows,
        note="Nothing was uploaded.",
    )
    write_analyses(folder, {"adapted_clients": analysis})
    say(f"Kept for the report: fedkeep report {folder}")


def _held_out(run: Run, folder: Path, ks: list[int | None], *, asked: bool) -> None:
    from fedkeep.experiments.analyses import cold_start_form, falls_in_words, write_analyses
    from fedkeep.experiments.personalize.cold_start import DEFAULT_K, cold_start

    if not len(run.held_out):
        raise ConfigError(
            "No user was held out of {folder}. Name users with --client ID, or train with --set run.hold_out=0.1.",
            folder=folder,
        )
    if asked:
        _say_of_few(run, run.held_out, ks)
    found = cold_start(run, ks=ks)
    per_user = found.user_metric
    rows = [
        [
            "all" if k is None else str(k),
            number(mean, per_user),
            number(std, per_user),
            number(pooled, found.metric),
            number(frequent, per_user),
            MISSING if change is None else interval(change.mean, change.low, change.high, per_user),
        ]
        for k, mean, std, pooled, frequent, change in zip(
            found.k, found.mean, found.std, found.pooled, found.frequent, found.changes, strict=True
        )
    ]
    show_table(
        f"{found.clients} users held out of federation, on their test examples",
        [
            "Own examples",
            f"{metric_name(per_user)}, mean over users",
            "Deviation",
            f"{metric_name(found.metric)}, all examples",
            "Most frequent label",
            "Change from the k before (95 %)",
        ],
        rows,
        note=f"Only private parameters were fitted; nothing was uploaded. {falls_in_words(found)} The most "
        "frequent label is that of the same k examples; labels that tie count by their mean.",
    )
    if tuple(ks) == DEFAULT_K:
        write_analyses(folder, {"cold_start": cold_start_form(found)})
        say(f"Kept for the report: fedkeep report {folder}")


def _named(run: Run, clients: list[str], ks: list[int | None], *, asked: bool) -> None:
    from fedkeep.experiments.personalize import adapt_clients
    from fedkeep.tasks import tasks_in

    metric = tasks_in(run.data.meta)[0].headline
    if asked:
        _say_of_few(run, clients, ks)
    found = [adapt_clients(run, clients, begin="default", examples=k, progress=False) for k in ks]
    rows = []
    for name in clients:
        own = (one.judge(("adapted",), clients=[name])[0].metrics("adapted").get(metric) for one in found)
        has = run.data.count(run.data.index(name), "train")
        rows.append([name, f"{has:,}", *(number(value, metric) for value in own)])
    heads = ["k = all" if k is None else f"k = {k}" for k in ks]
    show_table(
        f"{metric_name(metric)} on the user's test examples after fitting on k of its own",
        ["User", "Has", *heads],
        rows,
        note="Only private parameters were fitted; nothing was uploaded.",
    )
    run.fit(clients)
    say(f"Kept in {run.folder}: what {_users(clients)} fitted to all of their examples.")


def _say_of_few(run: Run, clients: Sequence[str], ks: list[int | None]) -> None:
    """Say which numbers of examples no user has."""
    most = int(run.data.counts("train")[[run.data.index(c) for c in clients]].max())
    if more := [k for k in ks if k is not None and k > most]:
        say(f"No user has more than {most:,} examples to fit on, so k = {more[0]:,} is all of them.")


def _users(clients: list[str]) -> str:
    return clients[0] if len(clients) == 1 else f"{len(clients)} users"
