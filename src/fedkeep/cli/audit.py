"""``fedkeep audit``: what leaves a device, tensor by tensor, and what it tells of what must stay."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedkeep.cli.output import complain, say, show_table
from fedkeep.cli.settings import ConfigArgument, DataOption, SetOption, find_config
from fedkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from fedkeep.audit import AuditReport

AsJson = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=100, help="How many rounds to run.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Write a page there: audit.html, .md and .json.")
]


def audit(
    config: ConfigArgument,
    data: DataOption = None,
    overrides: SetOption = None,
    rounds: Rounds = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run a few rounds with canaries in all that must stay on a device, and look at every byte that leaves it.

    CONFIG is a TOML file, a built-in name (fedkeep list shows them), or the folder of a run. Exit code 1: something
    leaves that nobody has declared, or could not be looked at. A few examples of a few clients are used; nothing is
    written without --out.
    """
    from fedkeep.audit import PROTOCOL
    from fedkeep.audit import audit as run_audit
    from fedkeep.audit.audit import WIRES
    from fedkeep.audit.preparation import with_preparation
    from fedkeep.audit.report import content
    from fedkeep.experiments.build import build_method, build_model, build_source, settled
    from fedkeep.report.page import write_content

    found = find_config(config, overrides)
    if found.config.run.centralised:
        raise ConfigError(
            "Centralised training has all data in one place: nothing leaves a device. Set run.centralised = false."
        )
    folder = found.data_folder(data)
    source = build_source(found.config.data, found.config.seed, folder)
    examples = source.prepared(found.config.preparation)
    method = build_method(settled(found.config, examples).method)
    model = build_model(found.config, examples, folder)
    allow = PROTOCOL if found.config.audit is None else found.config.audit.allow
    name, wires = found.config.name or found.label, dict(WIRES)
    if importlib.util.find_spec("flwr") is not None:
        from fedkeep.flower.array_records import to_bytes

        wires["Flower's"] = to_bytes
    report = run_audit(
        model, method, examples, rounds=rounds, seed=found.config.seed, allow=allow, name=name, wires=wires
    )
    secure = found.config.method.secure is not None
    report = with_preparation(report, source.shaping, found.config.preparation, secure=secure, allow=allow)
    if out is not None:
        lead = f"{found.config.method.kind} · {found.config.model.kind} · {found.config.data.reader}"
        page = write_content(content(report, lead), out / "audit.html")
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=2))
    else:
        show(report, differentially_private=found.config.privacy is not None)
        if out is not None:
            say(f"Page: {page}")
    if not report.ok:
        raise typer.Exit(1)


def show(report: AuditReport, *, differentially_private: bool = False) -> None:
    """Print a report."""
    from fedkeep.audit.report import not_covered, remarks, table

    made = table(report)
    show_table(made.title, made.columns, made.rows, made.left, made.note)
    said, wrong = remarks(report, differentially_private=differentially_private)
    for line in said:
        say(line)
    scope = not_covered()
    show_table(scope.title, scope.columns, scope.rows, scope.left)
    for line in wrong:
        complain(line)
