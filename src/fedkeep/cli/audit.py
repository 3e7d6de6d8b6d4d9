"""``fedkeep audit`` and ``fedkeep prove``: what leaves a device, and by which ways what must stay reaches it."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedkeep.cli.output import say, show_content
from fedkeep.cli.settings import ConfigArgument, DataOption, FoundConfig, SetOption, find_config
from fedkeep.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from fedkeep.audit import AuditReport
    from fedkeep.data import FederatedData
    from fedkeep.experiments.sources import ConfiguredSource
    from fedkeep.methods import Method
    from fedkeep.prove import Proof

AsJson = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, max=100, help="How many rounds to run.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Write a page there: HTML, Markdown and JSON.")
]


@dataclass(frozen=True)
class AuditRequest:
    """What a configuration asks to be looked at."""

    found: FoundConfig
    source: ConfiguredSource
    examples: FederatedData
    model: nn.Module
    method: Method

    @property
    def name(self) -> str:
        """The configuration's name."""
        return self.found.config.name or self.found.label

    @property
    def allow(self) -> tuple[str, ...]:
        """What may tell of what stays beside gradients."""
        from fedkeep.audit import PROTOCOL

        return PROTOCOL if self.found.config.audit is None else self.found.config.audit.allow

    def conclude(self, report: AuditReport | Proof, page: str, out: Path | None, as_json: bool) -> None:
        """Write and print a report; exit with 1 unless all was looked at, and nothing leaves undeclared."""
        from fedkeep.report.page import write_content

        config = self.found.config
        content = report.content(f"{config.method.kind} · {config.model.kind} · {config.data.reader}")
        written = None if out is None else write_content(content, out / page)
        if as_json:
            typer.echo(json.dumps(report.plain(), indent=2))
        else:
            show_content(content)
            if written is not None:
                say(f"Page: {written}")
        if not report.ok:
            raise typer.Exit(1)


def _asked(config: str, data: Path | None, overrides: list[str] | None) -> AuditRequest:
    """Make what a configuration names; centralised training is refused."""
    from fedkeep.experiments.build import build_method, build_model, build_source, settled

    found = find_config(config, overrides)
    if found.config.run.centralised:
        raise ConfigError(
            "Centralised training has all data in one place: nothing leaves a device. Set run.centralised = false."
        )
    folder = found.data_folder(data)
    source = build_source(found.config.data, found.config.seed, folder)
    examples = source.prepared(found.config.preparation)
    asked = settled(found.config, examples)
    return AuditRequest(
        found, source, examples, build_model(asked, examples, folder), build_method(asked.method)
    )


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
    from fedkeep.audit import audit as run_audit
    from fedkeep.audit.audit import WIRES
    from fedkeep.audit.preparation import with_preparation

    asked, wires = _asked(config, data, overrides), dict(WIRES)
    if importlib.util.find_spec("flwr") is not None:
        from fedkeep.flower.packet_records import to_bytes

        wires["Flower's"] = to_bytes
    settings, allow = asked.found.config, asked.allow
    report = run_audit(
        asked.model,
        asked.method,
        asked.examples,
        rounds=rounds,
        seed=settings.seed,
        allow=allow,
        name=asked.name,
        wires=wires,
    )
    secure = settings.method.secure is not None
    report = with_preparation(report, asked.source.shaping, settings.preparation, secure=secure, allow=allow)
    asked.conclude(report, "audit.html", out, as_json)


def prove(
    config: ConfigArgument,
    data: DataOption = None,
    overrides: SetOption = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Follow what must stay through a client's round, and say by which ways it reaches what leaves.

    CONFIG is a TOML file, a built-in name (fedkeep list shows them), or the folder of a run. Exit code 1: something
    leaves by a way that nobody has declared, or cannot be followed. A few examples of a few clients are used; nothing
    is written without --out.
    """
    from fedkeep.prove import prove as run_prove

    asked = _asked(config, data, overrides)
    seed = asked.found.config.seed
    proof = run_prove(
        asked.model, asked.method, asked.examples, seed=seed, allow=asked.allow, name=asked.name
    )
    asked.conclude(proof, "proof.html", out, as_json)
