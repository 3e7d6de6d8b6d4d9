"""For the campaign of faults in run folders: its small runs, how an action ends, and runs that are killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import Config
from fedkeep.store.sqlite import FILE as STORE
from fedkeep.store.versions import NONCE_BITS

ROUNDS = 6
PATIENCE = 20
ENGINES = ("sequential", "workers", "vectorised", "centralised")


SHORT_LOG = 9 * 4096
"""Bytes after which the log of private states is moved into their file here."""


class Hung(BaseException):
    """A call took longer than ``PATIENCE`` seconds."""


def short_log() -> contextlib.AbstractContextManager[Any]:
    """Let the private states' log be moved into their file now and then, as it is in long runs."""
    return patch("fedkeep.store.database.LOG_BYTES", SHORT_LOG)


def config(kind: str, seed: int = 0, rounds: int = ROUNDS) -> Config:
    """Return a small run: private vectors with server momentum, none at all, or centralised training with Adam."""
    method: dict[str, Any] = {
        "kind": "fedavg" if kind == "federated" else "furl",
        "optimizer": {"kind": "adam" if kind == "centralised" else "sgd", "learning_rate": 0.1},
    }
    if kind == "private":
        method |= {
            "private_init": ["normal", 0.5],
            "server_optimizer": {"kind": "adam", "learning_rate": 0.1},
        }
    return Config.model_validate(
        {
            "name": "small",
            "seed": seed,
            "data": {"reader": "toy", "users": 9, "seed": 1},
            "model": {"kind": "linear"},
            "method": method,
            "run": {
                "rounds": rounds,
                "cohort": 2,
                "evaluate_every": 2,
                "centralised": kind == "centralised",
                "engine": "sequential",
            },
            "personalization": {"steps": 2, "every": 1},
        }
    )


def ended(action: Callable[[], bool]) -> str:
    """Return how an action ended: ``right`` (True), ``silent`` (False), ``refused``, ``crashed`` or ``hung``."""

    def late(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        return "right" if action() else "silent"
    except FedkeepError:
        return "refused"
    except Hung:
        return "hung"
    except BaseException as error:  # noqa: BLE001  (whatever it is, the campaign counts it and goes on)
        print(f"crashed: {type(error).__name__}: {error}", file=sys.stderr)
        return "crashed"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def counted(name: str, ends: Counter[str]) -> dict[str, Any]:
    """Return the line of a class."""
    return {
        "name": name,
        "tried": ends.total(),
        "silent": ends["silent"],
        "crashed": ends["crashed"],
        "hung": ends["hung"],
        "refused": ends["refused"],
        "right": ends["right"],
    }


def kills(folder: Path, tried: int, seed: int) -> dict[str, Any]:
    """Return how runs ended that were killed at a random instant and resumed to their end."""
    draw = random.Random(seed)  # noqa: S311
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.fault_runs"])
    intact = {}
    for engine in ENGINES:
        began = time.monotonic()
        killed_run(engine, str(folder / engine))
        intact[engine] = (lasting(folder / engine), time.monotonic() - began)
    ends: Counter[str] = Counter()
    for number in range(tried):
        engine = ENGINES[number % len(ENGINES)]
        out = folder / f"{engine}-{number}"
        expected, seconds = intact[engine]
        for _ in range(draw.randint(1, 3)):
            child = context.Process(target=killed_run, args=(engine, str(out)))
            child.start()
            until = time.monotonic() + PATIENCE
            while not (out / "run.json").exists() and child.is_alive() and time.monotonic() < until:
                time.sleep(0.001)
            child.join(draw.uniform(0, seconds))
            child.kill()
            child.join()

        def goes_on(engine: str = engine, out: Path = out, expected: Any = expected) -> bool:
            killed_run(engine, str(out))
            found = lasting(out)
            names = [n for n in sorted({*found, *expected}) if found.get(n) != expected.get(n)]
            if names:
                print(f"silent: {engine}, killed: {', '.join(names)} differ", file=sys.stderr)
            return not names

        ends[ended(goes_on)] += 1
        shutil.rmtree(out)
    return counted("kill -9, then resume", ends)


def killed_run(engine: str, out: str) -> None:
    """Run or go on; for the kills, in a process of its own."""
    torch.set_num_threads(1)
    made = config("centralised" if engine == "centralised" else "private", rounds=ROUNDS)
    made = made.model_copy(
        update={
            "run": replace(made.run, engine="sequential" if engine == "centralised" else engine),
            "personalization": None,
        }
    )
    with short_log(), patch("fedkeep.experiments.run_directory.new_run_id", lambda: "0" * 32):
        resume = (Path(out) / "run.json").exists()
        run_config(
            made, out=Path(out), resume=resume, progress=False, workers=2 if engine == "workers" else None
        )


def lasting(folder: Path) -> dict[str, bytes]:
    """Return all of a run's folder but times; of the private states what is kept, whichever pages hold it."""
    left_out = ("run.json", "timings.jsonl", "ledger.jsonl", "lock", "commit.json", "config.toml", STORE)
    found = {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in left_out and p.suffix != ".part"
    }
    with contextlib.closing(sqlite3.connect(folder / "private" / STORE)) as sql:
        rows = sql.execute("SELECT client, attempt, row FROM kept ORDER BY client, attempt").fetchall()
        found[STORE] = repr([(client, attempt >> NONCE_BITS, row) for client, attempt, row in rows]).encode()
    commit = json.loads((folder / "commit.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in commit.items() if key not in ("timings", "ledger", "seal")}
    kept["best"] = {key: value for key, value in commit["best"].items() if key != "ledger"}
    return found | {"commit.json": json.dumps(kept).encode()}
