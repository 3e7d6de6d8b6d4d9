"""What runs reached: ``fedkeep evaluate`` judges one again, ``worth`` compares two, ``report`` shows them, ``budget`` says what privacy they spent."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from fedkeep.cli.output import metrics_table, say, show_table, warn_of_unfinished
from fedkeep.cli.settings import DataOption, DeviceOption, MetricOption, RoundOption, RunArgument, at_round
from fedkeep.core.errors import ConfigError, DataError, check_choice
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.report.wording import metric_name, number

if TYPE_CHECKING:
    import pyarrow as pa

    from fedkeep.experiments.run import Run, Stage
    from fedkeep.privacy.accounting import Accountant
    from fedkeep.privacy.budget_ledger import BudgetLedger


def evaluate(
    run: RunArgument,
    split: Annotated[str, typer.Option("--split", help="train, valid or test.")] = "test",
    stage: Annotated[
        str,
        typer.Option(
            "--stage",
            help="own: what users predict with. before: without a last step of the method's own. shared: the shared part.",
        ),
    ] = "own",
    per_client: Annotated[bool, typer.Option("--per-client", help="Show every user too.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write every user's result there; .parquet or .csv."),
    ] = None,
    new: Annotated[
        Path | None,
        typer.Option(
            "--new",
            metavar="FILE",
            help="Judge the users of this file, on all of its rows, as fedkeep personalize --new has fitted them.",
        ),
    ] = None,
    round: RoundOption = "best",
    data: DataOption = None,
    device: DeviceOption = "cpu",
) -> None:
    """Judge every user's model, as it predicts, at the run's best round. RUN is the folder that fedkeep run wrote."""
    from fedkeep.data import SPLITS
    from fedkeep.experiments.load import load_run

    check_choice("--split wants", split, SPLITS, DataError)
    if out is not None and (out.suffix not in (".parquet", ".csv") or not out.parent.is_dir()):
        raise ConfigError(
            "--out wants a file that ends in .parquet or .csv, in a folder that is there; got {out}.",
            out=out,
        )
    loaded = at_round(load_run(run, data_folder=data, device=device), round)
    warn_of_unfinished([run])
    if new is not None:
        loaded, split = of_file(loaded, run, new), "test"
    metrics = loaded.evaluate(split, stage=cast("Stage", stage))
    metrics_table(f"{run}: after {loaded.moment}{_marked(stage)}", {split: metrics})
    if per_client:
        show_clients(loaded, split, cast("Stage", stage))
    if out is not None:
        write_frame(loaded.clients_frame(split, stage=cast("Stage", stage)), out)


def of_file(run: Run, folder: Path, file: Path, split: Literal["train", "test"] = "test") -> Run:
    """Return a run on a file's rows, all of them of a split, whose clients are the file's users.

    Raises:
        ConfigError: one of them has no values of its own yet.
    """
    import numpy as np

    from fedkeep.data.ids import SomeIds
    from fedkeep.experiments.load import rows_of_run

    rows = rows_of_run(folder, run.data, file)
    start, end = rows.offsets[:-1], rows.offsets[1:]
    middle = end if split == "train" else start
    rows.bounds = np.stack([start, middle, middle, end], 1)
    found = run.on(rows)
    if lacking := [client for client in found.held_out if client not in found.fitted]:
        raise ConfigError(
            "{name!r} of {file} has no values of its own yet. Fit them first: fedkeep personalize {folder} --new FILE"
            "{of_others}.",
            name=lacking[0],
            file=file,
            folder=folder,
            of_others="" if split == "train" else ", of other rows",
        )
    found.clients = SomeIds(rows.ids, np.arange(len(rows)))
    return found


def write_frame(frame: pa.Table, out: Path) -> None:
    """Write a table of pyarrow as Parquet or CSV, by the file's ending; all of it or nothing."""
    from fedkeep.core.files import write_whole
    from fedkeep.report.text_tables import to_csv

    if out.suffix == ".csv":
        write_whole(out, to_csv(frame.to_pylist()).encode())
        return
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(frame, sink)
    write_whole(out, sink.getvalue())


def _marked(stage: str) -> str:
    return {"own": "", "before": ", before the method's last step"}.get(stage, ", the shared part alone")


def show_clients(run: Run, split: str, stage: Stage = "own") -> None:
    """Print a table with a row for every user."""
    frame = run.clients_frame(split, stage=stage)
    names = frame.column_names[2:]
    rows = [
        [row["client"], f"{row['examples']:,}", *(number(row[name], name) for name in names)]
        for row in frame.to_pylist()
    ]
    show_table(f"Users, on {split}", ["User", "Examples", *map(metric_name, names)], rows)


def worth(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders of runs; those that differ in their seed only are one model."
        ),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(
            "--against", metavar="RUN", help="A reference's run, of the same seed. May be repeated."
        ),
    ] = None,
    metric: MetricOption = None,
    references: Annotated[
        bool,
        typer.Option(
            "--references",
            help="Compare with each user's most frequent training label too, of a ranking with what all users took "
            "most often; reads the data.",
        ),
    ] = False,
    data: DataOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every user's gain.")] = False,
) -> None:
    """Say what personalisation was worth, and who gains and who loses, from the runs' test examples.

    References are the shared part alone, where the runs kept it (run.evaluate_shared), and --against; without --against
    those of RUN... that are fedavg, local or fine_tuned.
    """
    from fedkeep.experiments.worth import worth_of
    from fedkeep.report.page import finite
    from fedkeep.report.worth_page import limits, plain, sentences, tenths, worth_table

    if files := [one for one in against or () if one.is_file()]:
        raise ConfigError(
            "--against wants the folder of another run; {file} is a file. To make one: fedkeep run CONFIG --set "
            "method.kind=local --out OTHER (or fedavg, fine_tuned), then fedkeep worth {run} --against OTHER.",
            file=files[0],
            run=runs[0],
        )
    found = worth_of(runs, against or (), metric, references=references, data_folder=data)
    warn_of_unfinished(dict.fromkeys([*runs, *(against or ())]))
    if as_json:
        typer.echo(
            json.dumps(finite([plain(c) for c in found]), ensure_ascii=False, indent=1, allow_nan=False)
        )
        return
    for comparison in found:
        say(f"{comparison.title}:")
        for sentence in (*sentences(comparison), *tenths(comparison), *limits(comparison.found)):
            say(f"  {sentence}")
        say("")
    shown = worth_table(found)
    show_table("All comparisons", shown.columns, shown.rows, left=shown.left, note=shown.note)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, compared on one page.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Where to write report.html, .md and .json; by default the run's folder, for several runs ./report.",
        ),
    ] = None,
    title: Annotated[
        str, typer.Option("--title", help="The heading; made from the runs' names by default.")
    ] = "",
) -> None:
    """Write one page with tables, curves and maps of one run or several (RUN...); it opens offline."""
    from fedkeep.report.page import write_report

    folder = out or (runs[0] if len(runs) == 1 else Path("report"))
    say(f"Page: {write_report(runs, folder, title)}")


def budget(
    run: RunArgument,
    delta: Annotated[float | None, typer.Option("--delta", help="Another δ than the run's.")] = None,
    accountant: Annotated[
        str | None, typer.Option("--accountant", help="Another accountant than the run's: pld or rdp.")
    ] = None,
) -> None:
    """Print ε of all rounds that a run was charged for, what is left of its budget, and what ε rests on.

    RUN is the folder that fedkeep run wrote, of a configuration with a table [privacy].
    """
    from fedkeep.privacy.budget_ledger import FILE, BudgetLedger, marks

    if accountant is not None:
        check_choice("--accountant must be", accountant, list(WORDS))
    info = read_info(run)
    ledger = BudgetLedger.read(run / FILE, info["run"], marks(info, read_commit(run, info).extra))
    terms, shown = ledger.terms, ledger.terms.delta if delta is None else delta
    if delta is not None and not 0 < delta * terms.clients < 1:
        raise ConfigError(
            "--delta must lie between 0 and 1 / N = {share:.3g} for N = {clients:,} clients; got "
            "{delta:g}. A larger one would allow to publish a client.",
            share=1 / terms.clients,
            clients=terms.clients,
            delta=delta,
        )
    by = cast("Accountant", accountant or terms.accountant)
    rows = [
        [f"ε by {WORDS[by]} ({by})", f"{ledger.spent(delta, by):.4f}"],
        ["δ", f"{shown:g}"],
        ["Rounds charged", str(len(ledger.rounds))],
        *([["and in the runs that it continues", str(before)]] if (before := ledger.before) else []),
        ["of these run again after a stop", str(ledger.repeated)],
        [
            "Clients in a round, on average",
            f"{terms.cohort:g} of {terms.clients:,} (rate {terms.release.rate:.4g})",
        ],
        ["Noise multiplier", f"{terms.release.noise:g}"],
    ]
    if terms.budget is not None:
        rows.append(["Budget", f"ε = {terms.budget:g} at δ = {terms.delta:g}, by {terms.accountant}"])
        rows.append(["Rounds that still fit", rounds_left(ledger)])
    show_table(f"{run}: what its rounds have spent", ["", ""], rows)
    for line in ledger.assumptions():
        say(f"· {line}")


WORDS: dict[Accountant, str] = {"pld": "privacy loss distributions", "rdp": "Rényi differential privacy"}
MOST = 1000
"""Rounds that are tried, at most, to say how many still fit."""


def rounds_left(ledger: BudgetLedger) -> str:
    """Return how many more rounds fit, as text."""
    left = ledger.room(MOST)
    return str(left) if left < MOST else f"{MOST} or more"
