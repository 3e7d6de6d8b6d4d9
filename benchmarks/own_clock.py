"""Claim: no model of a user's own is slower under ``auto`` than the better of two plain PyTorch loops, by the clock.

    python -m benchmarks.own_clock [--turns N] [--only NAME ...] [--minutes M] [--install-peers]

29 models (``more_cases.ALL``) are trained round by round by a plain loop with one thread and with two, by fedkeep as
``simulate`` runs it (engine ``auto``) and with each engine by name, and by two independent plain loops with one thread,
each with half of the clients: the ceiling. Ten models are also trained by pfl, with one thread and with two, and by
Flower's simulation with two actors, where their environments are (``peers.py``). Each contender has a process of its
own, all take turns in one run, and the order is reversed at every other turn. Told are seconds by the clock and of
processor time (of the process and its workers), each turn's ratios as quartiles, and whether ``auto`` chose an engine
within 10 % of the best one. The claim: for every model the upper quartile over the better plain loop is at least 1.0,
the median of all models is at least 1.5, each is at least 0.9 of the ceiling, and no other library is faster. Rows of
this commit that the file has are not measured again; with ``--minutes`` no row begins later. A model whose package is
not there is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import RESULTS, write
from benchmarks.more_cases import ALL, PEERED, cohorts
from benchmarks.own_models import Ours, Plain
from benchmarks.peers import PACKAGES, install, python_of
from benchmarks.processes import ROOT, ContenderError, Process
from benchmarks.workloads import OWN
from fedkeep.core.allocator import tune_allocator
from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.environment import environment
from fedkeep.experiments.simulate import ENGINES

FILE, WARM_UP, CLOSE = RESULTS / "own-clock.json", 2, 1.1
PLAIN, HALVES = ("plain, 1 thread", "plain, 2 threads"), ("half 0", "half 1")
THREADS = {"plain, 1 thread": 1, "half 0": 1, "half 1": 1}
PEERS = {"pfl, 1 thread": ("pfl", 1), "pfl, 2 threads": ("pfl", 2), "flower, 2 actors": ("flower", 1)}
"""Other libraries' ways: the environment, and its threads."""


def serve(who: str, device: str = "cpu") -> None:
    """Train what standard input asks for, a line of JSON each, and answer with the seconds by the clock."""
    answers, sys.stdout = sys.stdout, sys.stderr
    run: Plain | Ours | None = None
    if who not in (*PLAIN, *HALVES):
        tune_allocator()
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked, answer = json.loads(line), dict[str, Any]()
        if "make" in asked:
            if isinstance(run, Ours):
                run.engine.close()
            run = None
            run = made(who, asked["make"], device)
        elif isinstance(run, Plain | Ours):
            try:
                began = time.perf_counter()
                run.round(asked["turn"], asked["clients"])
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                answer["seconds"] = time.perf_counter() - began
                answer["engine"] = "plain" if isinstance(run, Plain) else run.engine.name
            except FedkeepError as error:
                answer["refused"] = str(error)
        print(json.dumps(answer), file=answers, flush=True)
    if isinstance(run, Ours):
        run.engine.close()


def made(who: str, name: str, device: str = "cpu") -> Plain | Ours:
    """Return a contender."""
    case = ALL[name]
    federation = case.data()
    torch.manual_seed(0)
    if who in (*PLAIN, *HALVES):
        return Plain(case, case.module(), federation, device)
    ours = Ours(case, case.module(), federation, accelerate=True, workers=None, device=device)
    if who != "auto":
        ours.engine = ours.rounds.device.engine = ENGINES[who]()
    return ours


def peers_of(name: str, folder: Path) -> dict[str, Process]:
    """Start the other libraries' processes for a model, where their environments are."""
    wanted = PEERS if name in PEERED else {}
    case, found = ALL[name], dict[str, Process]()
    for who, (peer, threads) in wanted.items():
        if not (python := python_of(peer, folder)).exists():
            continue
        given = (peer, "--workload", OWN + name, "--cohort", str(case.cohort), "--threads", str(threads))
        try:
            found[who] = Process(str(python), given, threads, 600, peer == "flower")
        except ContenderError as error:
            print(f"{name}: {who} is left out: {error}")
    return found


def measured(name: str, ours: dict[str, Process], turns: int, peers: dict[str, Process]) -> dict[str, Any]:
    """Return what rounds of each contender take."""
    for each in ours.values():
        each.ask(make=name)
    case, refused, contenders = ALL[name], dict[str, str](), {**ours, **peers}
    clock: dict[str, list[float]] = {n: [] for n in (*contenders, "ceiling")}
    cpu: dict[str, list[float]] = {n: [] for n in contenders}
    engine = ""
    for turn, clients in enumerate(cohorts(len(case.data()), case.cohort, turns + WARM_UP)):
        names = [n for n in contenders if n not in refused and n != HALVES[1]]
        for who in names if turn % 2 else reversed(names):
            before = contenders[who].cpu_seconds()
            if who == HALVES[0]:
                answer = {"seconds": both(contenders, turn, clients)}
            else:
                answer = contenders[who].ask(turn=turn, clients=clients)
            if "refused" in answer:
                refused[who] = answer["refused"]
            elif turn >= WARM_UP:
                clock["ceiling" if who == HALVES[0] else who].append(answer["seconds"])
                cpu[who].append(contenders[who].cpu_seconds() - before)
            engine = answer["engine"] if who == "auto" and "engine" in answer else engine
    better = np.minimum(clock[PLAIN[0]], clock[PLAIN[1]])
    told = {n: statistics.median(v) for n, v in clock.items() if v}
    best = min(told[n] for n in ENGINES if n in told)
    return {
        "model": name,
        "cohort": case.cohort,
        "turns": turns,
        "engine": engine,
        "seconds": told,
        "cpu_seconds": {n: statistics.fmean(v) for n, v in cpu.items() if v and n not in HALVES},
        "over_peers": {n: quartiles(np.array(clock[n]) / np.array(clock["auto"])) for n in peers},
        "over_better_plain": quartiles(better / np.array(clock["auto"])),
        "ceiling_over_better_plain": quartiles(better / np.array(clock["ceiling"])),
        "of_ceiling": quartiles(np.array(clock["ceiling"]) / np.array(clock["auto"])),
        "chosen_over_best_engine": min(told["auto"], told.get(engine, told["auto"])) / best,
        "refused": refused,
        "load": round(os.getloadavg()[0], 1),
        "commit": environment()["commit"],
    }


def both(contenders: dict[str, Process], turn: int, clients: list[int]) -> float:
    """Return the seconds of two plain loops side by side, each with half of the clients."""
    for k, name in enumerate(HALVES):
        contenders[name].send(turn=turn, clients=clients[k::2])
    return float(max(contenders[name].answer()["seconds"] for name in HALVES))


def quartiles(ratios: np.ndarray | list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return [float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75))]


def page(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = [
        "# Users' own models, by the clock",
        "",
        "Made by `python -m benchmarks.own_clock`: medians of turns, in brackets the quartiles. The ceiling is two",
        "independent plain loops, each with half of the clients. Of pfl, which runs in one process, the faster number",
        "of threads is taken; Flower's simulation has two actors.",
        "",
        "| model | auto took | over the better plain loop | of the ceiling | processor time | best engine | pfl | Flower |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, mid, high = row["over_better_plain"]
        cpu = row["cpu_seconds"][PLAIN[0]] / max(row["cpu_seconds"]["auto"], 1e-9)
        lines.append(
            f"| {row['model']} | {row['engine']} | {mid:.2f} ({low:.2f}, {high:.2f}) | {row['of_ceiling'][1]:.2f} | "
            f"{cpu:.2f} | {row['chosen_over_best_engine']:.2f} | {over(row, 'pfl')} | {over(row, 'flower')} |"
        )
    middle = statistics.median(row["over_better_plain"][1] for row in rows)
    right = sum(row["chosen_over_best_engine"] <= CLOSE for row in rows)
    return "\n".join([*lines, f"| median; right | | {middle:.2f} | | | {right} of {len(rows)} | | |", ""])


def over(row: dict[str, Any], peer: str) -> str:
    """Return how many times as fast as another library ``auto`` is; nothing where that was not measured."""
    found = [ratios[1] for who, ratios in row["over_peers"].items() if PEERS[who][0] == peer]
    return f"{min(found):.1f}" if found else ""


def check(rows: list[dict[str, Any]]) -> None:
    """Fail if the claim fails, with all that is wrong."""
    middle = statistics.median(row["over_better_plain"][1] for row in rows)
    wrong = [] if middle >= 1.5 else [f"the median is {middle:.2f} x; claimed 1.5"]
    for row in rows:
        if (high := row["over_better_plain"][2]) < 1:
            wrong.append(f"{row['model']}: an upper quartile of {high:.2f}; claimed 1")
        if (share := row["of_ceiling"][1]) < 0.9:
            wrong.append(f"{row['model']}: {share:.2f} of the ceiling; claimed 0.9")
        for who, ratios in row["over_peers"].items():
            if ratios[1] < 1:
                wrong.append(f"{row['model']}: {ratios[1]:.2f} x {who}; claimed 1")
    assert not wrong, "; ".join(wrong)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark of these models."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=ALL)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure, write ``results/own-clock.json``, and fail if the claim fails."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="where environments are")
    parser.add_argument("--install-peers", action="store_true", help="make the environments that are missing")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    for peer in PACKAGES if options.install_peers else ():
        if problem := install(peer, options.peers):
            print(f"{peer} is left out, its environment could not be made: {problem}")
    began, here = time.monotonic(), environment()["commit"]
    known = {r["model"]: r for r in json.loads(FILE.read_text("utf-8"))["rows"]} if FILE.exists() else {}
    known = {name: row for name, row in known.items() if row["commit"] == here}
    names = [n for n in options.only or ALL if n not in known or known[n]["turns"] < options.turns]
    contenders = {
        who: Process(sys.executable, ("--serve", who), THREADS.get(who), 600, module="benchmarks.own_clock")
        for who in (*PLAIN, "auto", *ENGINES, *HALVES)
    }
    try:
        for name in names:
            if time.monotonic() - began > 60 * options.minutes:
                print(f"{name}: no time is left")
                break
            try:
                ALL[name].module()
            except ModuleNotFoundError as missing:
                print(f"{name}: left out, there is no {missing.name}")
                continue
            peers = peers_of(name, options.peers)
            try:
                known[name] = measured(name, contenders, options.turns, peers)
            except ContenderError as error:
                print(f"{name}: left out: {error}")
                break
            finally:
                for each in peers.values():
                    each.close()
            print(json.dumps(known[name]), flush=True)
            rows = [known[n] for n in ALL if n in known]
            write(FILE.stem, {"seed": 0, "rows": rows}, page(rows))
    finally:
        for each in contenders.values():
            each.close()
    check([known[n] for n in ALL if n in known])


if __name__ == "__main__":
    main()
