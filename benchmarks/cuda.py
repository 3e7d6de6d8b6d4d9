"""Claim: on a GPU no model of a user's own is slower one client after the other than a plain CUDA loop.

    python -m benchmarks.cuda [--turns N] [--only NAME ...] [--no-workloads]

First W1 to W4, as ``benchmarks.speed --device cuda``. Then the models of ``own_clock`` are trained round by round by a
plain loop, its data on the GPU from the start, and by fedkeep with ``auto``, with one client after the other, and with
clients in lanes of one program; each contender has a process of its own, and all take turns. Told are each turn's ratios
as quartiles. The claim: ``sequential`` is no slower than the plain loop on any model, ``auto`` is three times as fast or
faster on ten, and W1 is twenty times as fast with 160 clients a round (a claim of ``speed``). Without a GPU the command
says so and measures nothing; ``--device cpu`` shows that everything runs.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch

from benchmarks import speed
from benchmarks.measure import RESULTS, write
from benchmarks.more_cases import ALL, cohorts
from benchmarks.own_clock import PLAIN, WARM_UP, parser_of, quartiles, serve
from benchmarks.processes import ROOT, ContenderError, Process
from fedkeep.experiments.environment import environment

WAYS = ("auto", "sequential", "vectorised")
FAST, HOW_MANY = 3.0, 10


def measured(name: str, contenders: dict[str, Process], turns: int) -> dict[str, Any]:
    """Return how many times as fast as the plain loop each way is."""
    for each in contenders.values():
        each.ask(make=name)
    case, refused, engine = ALL[name], dict[str, str](), ""
    seconds: dict[str, list[float]] = {who: [] for who in contenders}
    for turn, clients in enumerate(cohorts(len(case.data()), case.cohort, turns + WARM_UP)):
        names = [who for who in contenders if who not in refused]
        for who in names if turn % 2 else reversed(names):
            answer = contenders[who].ask(turn=turn, clients=clients)
            if "refused" in answer:
                refused[who] = answer["refused"]
            elif turn >= WARM_UP:
                seconds[who].append(answer["seconds"])
            engine = answer.get("engine", engine) if who == "auto" else engine
    plain = seconds[PLAIN[0]]
    over = {
        who: quartiles([a / b for a, b in zip(plain, own, strict=True)])
        for who, own in seconds.items()
        if who in WAYS and who not in refused
    }
    return {
        "model": name,
        "cohort": case.cohort,
        "turns": turns,
        "engine": engine,
        "seconds": {who: statistics.median(v) for who, v in seconds.items() if v},
        "over_plain": over,
        "refused": refused,
        "commit": environment()["commit"],
    }


def page(rows: list[dict[str, Any]], machine: str) -> str:
    """Return the rows as a table."""
    lines = [
        "# Users' own models on a GPU",
        "",
        "Made by `python -m benchmarks.cuda`: how many times as fast as a plain CUDA loop, medians of turns, in",
        f"brackets the quartiles. {machine}.",
        "",
        f"| model | auto took | {' | '.join(WAYS)} |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        told = [told_of(row["over_plain"].get(who)) for who in WAYS]
        lines.append(f"| {row['model']} | {row['engine']} | {' | '.join(told)} |")
    return "\n".join([*lines, ""])


def told_of(ratios: list[float] | None) -> str:
    """Return a median and its quartiles; a dash where a way refuses the model."""
    return "–" if ratios is None else f"{ratios[1]:.2f} ({ratios[0]:.2f}, {ratios[2]:.2f})"


def check(rows: list[dict[str, Any]]) -> None:
    """Fail if the claim fails, with all that is wrong."""
    slow = [r for r in rows if r["over_plain"]["sequential"][2] < 1]
    wrong = [f"{r['model']}: sequential {r['over_plain']['sequential'][1]:.2f}; claimed 1" for r in slow]
    fast = sum(row["over_plain"]["auto"][1] >= FAST for row in rows)
    if fast < HOW_MANY:
        wrong.append(f"{fast} models are {FAST:g} x or faster; claimed {HOW_MANY}")
    assert not wrong, "; ".join(wrong)


def main() -> None:
    """Measure, write ``results/own-models-cuda.json``, and fail if the claim fails."""
    parser = parser_of(__doc__)
    parser.add_argument("--no-workloads", action="store_true", help="leave out W1 to W4")
    parser.add_argument(
        "--device", default="cuda", help="cpu: to see that it runs; writes into runs/benchmarks"
    )
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.device)
        return
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here. Run it where there is one, or see that it runs with --device cpu.")
    failed = False if options.no_workloads else speed.main(["--device", options.device])
    machine = speed.machine(options.device)
    contenders = {
        who: Process(
            sys.executable,
            ("--serve", who, "--device", options.device),
            None,
            600,
            module="benchmarks.cuda",
        )
        for who in (PLAIN[0], *WAYS)
    }
    folder, rows = RESULTS if options.device != "cpu" else ROOT / "runs" / "benchmarks", []
    try:
        for name in options.only or ALL:
            try:
                ALL[name].module()
                rows.append(measured(name, contenders, options.turns))
            except ModuleNotFoundError as missing:
                print(f"{name}: left out, there is no {missing.name}")
                continue
            except ContenderError as error:
                print(f"{name}: left out: {error}")
                break
            print(json.dumps(rows[-1]), flush=True)
            write(
                "own-models-cuda", {"seed": 0, "machine": machine, "rows": rows}, page(rows, machine), folder
            )
    finally:
        for each in contenders.values():
            each.close()
    check(rows)
    sys.exit(failed)


if __name__ == "__main__":
    main()
