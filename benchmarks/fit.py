"""Claim: every method that has a meaning there trains any classifier, and the rest say in one sentence what to do.

    python -m benchmarks.fit [--out results/fit.json] [--only MODEL] [--again]

Each of the methods, made without any argument, on classifiers as strangers bring them: small ones, in plain PyTorch,
with no part named for fedkeep; where ``torchvision`` and ``transformers`` can be imported, theirs too, else their rows
say that they were skipped. Two rounds, three clients, sixteen examples each. A cell holds ``trained``, the loss and the
seconds, or the error's class and its sentence. Cells that the file has from this commit are not run again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import RESULTS, processor
from fedkeep import FederatedData, simulate
from fedkeep.core.errors import FedkeepError
from fedkeep.experiments.environment import environment
from fedkeep.methods import METHODS
from tests.strangers.modules import CLIENTS, PHOTO, STRANGERS, Stranger, vision

FIT = {
    **{name: STRANGERS[name] for name in list(STRANGERS)[:22]},
    "torchvision's MobileNetV3": Stranger(vision("mobilenet v3"), PHOTO),
}
"""Those that are classifiers without anything odd about them."""


def cell(make: Callable[[], nn.Module], data: FederatedData, name: str) -> dict[str, Any]:
    """Return what became of a method on a model."""
    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            centralised = name == "asp_mtl"
            run = simulate(
                make(),
                METHODS[name](),
                data,
                rounds=2,
                cohort=CLIENTS,
                centralised=centralised,
                engine="auto" if centralised else "sequential",
                progress=False,
            )
            run.evaluate("test")
    except FedkeepError as error:
        return {"result": "refused", "kind": type(error).__name__, "why": str(error)}
    except Exception as error:  # noqa: BLE001 - what a stranger would see
        return {"result": "failed", "kind": type(error).__name__, "why": str(error)[:300]}
    loss = [r.value for r in run.history if r.metric == "loss" and r.split == "train"]
    return {"result": "trained", "loss": loss[-1], "seconds": round(time.perf_counter() - start, 2)}


def main() -> None:
    """Fill the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "fit.json")
    parser.add_argument("--only", help="the models whose name has this text")
    parser.add_argument("--methods", nargs="*", help="these methods alone")
    parser.add_argument("--again", action="store_true", help="run cells again that the file has")
    given = parser.parse_args()
    torch.set_num_threads(1)
    about = {"command": "python -m benchmarks.fit", "processor": processor(), **environment()}
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    if found.get("about", {}).get("commit") != about["commit"]:
        found = {}
    found["about"] = about
    rows = found.setdefault("cells", {})
    for model, stranger in FIT.items():
        make, read = stranger.make, stranger.read
        if given.only and given.only not in model:
            continue
        try:
            make()
        except ImportError as error:
            rows[model] = {"skipped": str(error)}
            continue
        if "skipped" in rows.get(model, {}):
            del rows[model]
        data = read()
        for name in given.methods or METHODS:
            if given.again or name not in rows.get(model, {}):
                rows.setdefault(model, {})[name] = cell(make, data, name)
                given.out.write_text(json.dumps(found, indent=1) + "\n")
    run = [each for row in rows.values() if "skipped" not in row for each in row.values()]
    count = {kind: sum(each["result"] == kind for each in run) for kind in ("trained", "refused", "failed")}
    found["summary"] = count | {
        "cells": len(run),
        "skipped": [m for m, row in rows.items() if "skipped" in row],
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    for model, row in rows.items():
        if "skipped" in row:
            print(f"{model}: skipped ({row['skipped']})")
            continue
        others = [f"{n} ({each['kind']})" for n, each in row.items() if each["result"] != "trained"]
        print(f"{model}: {len(row) - len(others)} of {len(row)}; not: {', '.join(others)}")
    print(count)


if __name__ == "__main__":
    main()
