"""``fedkeep check``: would a configuration run, and is its split sound?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fedkeep.cli.output import complain, say, show_table
from fedkeep.cli.settings import ConfigArgument, DataOption, SetOption, find_config
from fedkeep.report.wording import size

if TYPE_CHECKING:
    from fedkeep.methods import Method
    from fedkeep.split import CheckReport

SHOWN = 40


def check(config: ConfigArgument, data: DataOption = None, overrides: SetOption = None) -> None:
    """Print what is private, federated and frozen, probe FURL's three constraints on a few real users, and warn of
    parameters that cannot move, of a model that mixes a batch's examples, and of one whose head(features(…)) is not
    its forward. Refuses what a run would refuse before its first round.

    CONFIG is a TOML file, a built-in name (fedkeep list shows them), or the folder of a run.
    """
    from fedkeep.data import Ragged, text_statistics
    from fedkeep.data.alike import oddities
    from fedkeep.engines.rehearsal import first_batches, first_values, losses, model_warnings
    from fedkeep.experiments.build import ahead_of, build_data, simulation_of
    from fedkeep.nn.accelerate import swaps_of
    from fedkeep.split import check_split
    from fedkeep.split.probe import EQUATIONS

    found = find_config(config, overrides)
    folder = found.data_folder(data)
    examples = build_data(found.config, folder)
    simulation = simulation_of(found.config, examples, folder)
    method, net, module = simulation.method, simulation.net, simulation.net.module
    batches = first_batches(examples, net, whose=found.config.run.centralised)
    start, terms = first_values(net, method, found.config.seed), losses(net, method, examples)
    reports = [
        check_split(module, method.split, batches, loss=loss, seed=found.config.seed, start=start, trains=())
        for loss in terms
    ]
    show_split(
        found.config.name or found.label,
        method,
        reports[0],
        None if found.config.run.centralised else simulation.conductor.sampler.cohort,
    )
    if line := str(swaps_of(module)):
        say(f"Layers {line}.")
    if line := simulation.head:
        say(f"{line[0].upper()}{line[1:]}.")
    if isinstance(examples.columns.get("text"), Ragged) and len(examples) <= SHOWN:
        texts = [
            [
                s.client,
                *(f"{n:,}" for n in (s.train, s.valid, s.test)),
                f"{s.mean_words:.0f}",
                f"{s.different_words:,}",
            ]
            for s in text_statistics(examples)
        ]
        show_table("Texts", ["Client", "Train", "Valid", "Test", "Tokens a text", "Different tokens"], texts)
    say(f"A run takes {ahead_of(simulation, found.config)}.")
    for text in model_warnings(
        method, net, examples, found.config.seed, whose=found.config.run.centralised, given=True
    ):
        complain(f"Warning: {text}")
    for text in oddities(examples):
        complain(f"Warning: {text}")
    violations = dict.fromkeys(str(v) for report in reports for v in report.violations)
    complain(*violations)
    if violations:
        raise typer.Exit(1)
    for number in dict.fromkeys(n for report in reports for n in report.probed):
        say(f"✓ equation ({number}) holds: {EQUATIONS[number]}")
    if not reports[0].probed:
        why = (
            "nothing is private"
            if not method.split.private
            else "fewer than two users have training examples"
        )
        say(f"✓ patterns match, nothing is tied across the halves. No equation was probed: {why}.")


def show_split(name: str, method: Method, report: CheckReport, cohort: int | None) -> None:
    """Print the split's table with shapes and bytes, and the traffic of a round."""
    rows = []
    total = {"federated": 0, "private": 0, "frozen": 0}
    for row in report.table:
        nbytes = int(str(row["bytes"]))
        total[str(row["half"])] += nbytes
        shape = " × ".join(str(n) for n in row["shape"]) or "scalar"  # type: ignore[attr-defined]
        rows.append([str(row["name"]), str(row["half"]), str(row["kind"]), shape, size(nbytes)])
    shown = {half: nbytes for half, nbytes in total.items() if nbytes or half != "frozen"}
    rows += [[f"all {half}", half, "", "", size(nbytes)] for half, nbytes in shown.items()]
    if cohort is None:
        note = "Centralised training: all users' data and private values are in one place; nothing is sent."
    else:
        one = total["federated"]
        note = (
            f"A round sends {size(one)} down and {size(one)} up for each user ({cohort} users: {size(cohort * one)} "
            f"each way). The {size(total['private'])} of private values never leave a user's device."
        )
    show_table(
        f"{name}: the split of {method.name}", ["Parameter", "Half", "Kind", "Shape", "Bytes"], rows, 3, note
    )
