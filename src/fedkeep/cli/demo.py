"""``fedkeep demo``: train FURL on generated text and show what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedkeep.cli.output import note, say, show_table
from fedkeep.report.wording import difference, duration, number

ENOUGH = 0.02


def demo(
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="A new folder; by default runs/demo, runs/demo-2, …"),
    ] = None,
) -> None:
    """Train with and without private user vectors on generated text: a table and a page in about a minute."""
    import torch

    from fedkeep.experiments.demo import demo_folder, run_demo
    from fedkeep.report.page import write_report

    folder = demo_folder(out)
    torch.set_num_threads(1)  # tensors this small only lose time over several threads
    found = run_demo(folder, say=note)
    rows = [
        [r.method, number(r.accuracy, "accuracy"), number(r.best, "accuracy"), duration(r.seconds)]
        for r in found.rows.values()
    ]
    show_table(
        "Generated text of many users: the label depends on text and user",
        ["Method", "Test accuracy", "Best possible", "Time"],
        rows,
        note="Best possible: expected, with all probabilities known (for Global FL: not the user); "
        "the drawn test examples may give a point more.",
    )
    say(f"Personalized FL is {_apart(found.gain)} Global FL and {_apart(-found.lacking)} the best possible.")
    if not found.lacking <= ENOUGH:
        say("It has not come near enough; train longer: fedkeep run demo/personalized-fl --set run.epochs=40")
    page = write_report([r.folder for r in found.rows.values()], folder, title="fedkeep demo")
    say(f"Page: {page.resolve()}")


def _apart(gap: float) -> str:
    points = difference(abs(gap), "accuracy").lstrip("+")
    return f"{points} {'above' if gap > 0 else 'below'}"
