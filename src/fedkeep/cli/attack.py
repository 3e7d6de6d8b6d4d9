"""``fedkeep attack``: what uploads and models are worth to an attacker."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import note, say, show_table, warn_of_unfinished
from fedkeep.cli.settings import DataOption, SetOption, find_config
from fedkeep.core.errors import ConfigError, raising
from fedkeep.report.attacks import TITLES


def attack(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG|RUN", help="A TOML file, a built-in name, or the folder of a run."),
    ],
    attacks: Annotated[
        str,
        typer.Option("--attacks", help=f"Which, with commas between: {', '.join(TITLES)}. By default all."),
    ] = "",
    epsilons: Annotated[
        str,
        typer.Option(
            "--epsilons", help="ε of a whole run, with commas between; 'none': no differential privacy."
        ),
    ] = "1,8",
    clients: Annotated[int, typer.Option("--clients", help="At most so many are attacked.")] = 40,
    shadows: Annotated[int, typer.Option("--shadows", help="Models that membership is measured on.")] = 8,
    batch: Annotated[
        int, typer.Option("--batch", help="Texts in the one step that words are read from.")
    ] = 4,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write a page there: attacks.html, .md and .json."),
    ] = None,
    data: DataOption = None,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what uploads and models are worth to an attacker: who a client is, what it has, what it was trained on.

    Each attack is run against FedAvg of everything, the configuration's split, the split with differential privacy, and
    with secure sums. Of CONFIG both are trained; of a RUN the split is taken as it is. An attack that finds nothing may
    be a weak one.
    """
    from fedkeep.experiments.attack import AttackRequest
    from fedkeep.experiments.attack import attack as measure
    from fedkeep.experiments.load import load_run
    from fedkeep.report.attacks import content, plain, sentences, table
    from fedkeep.report.page import finite, write_content

    found = find_config(config, overrides)
    if found.folder is not None and overrides:
        raise ConfigError(
            "A run is attacked as it is: leave --set out, or name the configuration instead of the run."
        )
    asked = AttackRequest(
        attacks=tuple(attacks.split(",")) if attacks else tuple(TITLES),
        epsilons=_numbers(epsilons),
        clients=clients,
        shadows=shadows,
        batch=batch,
    )
    folder = found.data_folder(data)
    run = None if found.folder is None else load_run(found.folder, data_folder=folder).last
    if found.folder is not None:
        warn_of_unfinished([found.folder])
    result = measure(found.config, asked, run=run, folder=folder, say=note)
    findings = result.findings
    name = found.config.name or found.label
    if as_json:
        typer.echo(json.dumps(finite(plain(findings)), ensure_ascii=False, indent=1, allow_nan=False))
    else:
        shown = table(findings)
        show_table(f"{name}: what attackers find", shown.columns, shown.rows, left=shown.left)
        say(*result.settings)
        for heading, lines in zip(("Worth", "Not worth"), sentences(findings), strict=True):
            for line in lines:
                say(f"{heading}: {line}")
    if out is not None:  # last, so that what was found is shown where it cannot be written
        threats = [(TITLES[key], _threat(key)) for key in asked.attacks]
        lead = f"{found.config.method.kind} · {found.config.model.kind} · {found.config.data.reader}"
        page = write_content(content(name, lead, findings, threats, result.settings), out / "attacks.html")
        if not as_json:
            say(f"Page: {page}")


def _numbers(text: str) -> tuple[float, ...]:
    if text == "none":
        return ()
    with raising(
        ConfigError,
        "--epsilons wants numbers with commas between, e.g. 1,8, or none; got {text!r}.",
        ValueError,
        text=text,
    ):
        return tuple(float(part) for part in text.split(","))


def _threat(key: str) -> str:
    """Return the threat model of an attack: its docstring, without the first sentence and the arguments."""
    from fedkeep.experiments.attack import FUNCTIONS

    parts = inspect.cleandoc(FUNCTIONS[key].__doc__ or "").replace("``", "").split("\n\n")[1:]
    return " ".join(part.replace("\n", " ") for part in parts if not part.startswith(("Args:", "Returns:")))
