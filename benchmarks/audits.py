"""Claim: no built-in method lets anything leave with a built-in model but what it declares; an audit takes under 10 s.

    python -m benchmarks.audits [--methods furl,fedrep] [--models Linear] [--again]

Every method is tried with every model, each with a split of that model: its user parameters, or its head, or all below
it. What does not fit is named with the error. The verdict on a thing that left is the worst one; ``unchanged`` means
that no bit of it changes with anything that must stay on a device. Data are generated. Writes ``results/audits.json``,
whose lines name the commit that they are of, and a table, ``results/audits.md``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.faults import commit
from benchmarks.measure import RESULTS, write
from fedkeep import FederatedData, Method, Phase, data, models, sgd
from fedkeep.audit import AuditReport, audit
from fedkeep.core.errors import FedkeepError
from fedkeep.methods import METHODS, batch_norm_names
from fedkeep.methods.terms import squared_error

USERS, ROUNDS, LIMIT = 3, 2, 10.0


@dataclass(frozen=True)
class Network:
    """A model, data that it fits, and names: of user parameters, of the head, of all below it, of the classifier."""

    model: Callable[[], nn.Module]
    data: Callable[[], FederatedData]
    user: tuple[str, ...]
    head: tuple[str, ...]
    body: tuple[str, ...]
    classifier: str
    numbers: bool = False


def texts() -> FederatedData:
    """Return short texts of a few users."""
    return data.many_user_text(users=USERS, examples=16, classes=4, choices=3)


def dense() -> FederatedData:
    """Return vectors of a few users."""
    return data.toy(users=USERS, examples=16, features=3)


def ratings() -> FederatedData:
    """Return ratings of a few users."""
    draw = np.random.default_rng(0)
    owner = np.repeat(np.arange(USERS), 16)
    columns: dict[str, Any] = {
        "item": draw.integers(0, 5, len(owner)),
        "label": draw.integers(1, 6, len(owner)).astype("f4"),
    }
    split = ["train"] * 10 + ["valid"] * 3 + ["test"] * 3
    return FederatedData.from_columns(owner, columns, split * USERS, meta={"task": "regression"})


def images(channels: int, side: int) -> Callable[[], FederatedData]:
    """Return what makes images of a few users."""

    def made() -> FederatedData:
        draw = np.random.default_rng(0)
        owner = np.repeat(np.arange(USERS), 12)
        columns: dict[str, Any] = {
            "image": draw.integers(0, 256, (len(owner), channels, side, side)).astype("u1"),
            "label": draw.integers(0, 10, len(owner)),
        }
        split = ["train"] * 8 + ["valid"] * 2 + ["test"] * 2
        meta = {"task": "multiclass", "classes": 10}
        return FederatedData.from_columns(owner, columns, split * USERS, meta=meta)

    return made


def words() -> int:
    """Return the size of the texts' vocabulary."""
    from fedkeep.experiments.build import sizes_of

    return sizes_of(texts())["vocabulary"]


def linear() -> nn.Module:
    """Return the linear classifier."""
    return models.Linear(3, 3)


NETWORKS: dict[str, Network] = {
    "Linear": Network(linear, dense, ("user",), ("linear.bias",), ("linear.weight",), "linear"),
    "BagOfWords": Network(
        lambda: models.BagOfWords(words(), 4, 4, embedding_dim=5, mlp=6),
        texts,
        ("user",),
        ("mlp.*",),
        ("embedding.*",),
        "mlp",
    ),
    "DocumentModel": Network(
        lambda: models.DocumentModel(words(), 4, 4, embedding_dim=5, hidden=4, mlp=6),
        texts,
        ("user",),
        ("mlp.*",),
        ("embedding.*", "lstm.*"),
        "mlp",
    ),
    "TextClassifier": Network(
        lambda: models.TextClassifier(words(), 4, embedding_dim=5, hidden=3),
        texts,
        ("classifier.*",),
        ("classifier.*",),
        ("embedding.*", "encoder.*"),
        "classifier",
    ),
    "MatrixFactorization": Network(
        lambda: models.MatrixFactorization(5, 3),
        ratings,
        ("user", "user_bias"),
        ("item_bias.*",),
        ("item.*",),
        "item_bias",
        numbers=True,
    ),
    "CNN": Network(
        lambda: models.CNN(10, 1, 16, widths=(3, 4), hidden=(16, 8)),
        images(1, 16),
        ("out.*",),
        ("out.*",),
        ("conv*",),
        "out",
    ),
    "FashionCNN": Network(
        lambda: models.FashionCNN(10), images(1, 28), ("out.*",), ("out.*",), ("conv*",), "out"
    ),
    "CifarCNN": Network(
        lambda: models.CifarCNN(10), images(3, 32), ("out.*",), ("out.*",), ("conv*",), "out"
    ),
    "MixtureOfExperts": Network(
        lambda: models.MixtureOfExperts(linear(), linear(), models.ConfidenceGate()),
        dense,
        ("local_expert.*", "gate.*"),
        ("local_expert.*", "gate.*"),
        ("global_expert.*",),
        "gate",
    ),
    "MixtureOfExperts, Gate": Network(
        lambda: models.MixtureOfExperts(linear(), linear(), models.Gate(models.Linear(3, 1))),
        dense,
        ("local_expert.*", "gate.*"),
        ("local_expert.*", "gate.*"),
        ("global_expert.*",),
        "gate",
    ),
}


def built(kind: str, network: Network, model: nn.Module) -> Method:
    """Return a method with the model's split."""
    make = METHODS[kind]
    private = {"furl": network.user, "fedrecon": network.user, "lg_fedavg": network.body}.get(
        kind, network.head
    )
    if kind == "fedbn":
        private = tuple(batch_norm_names(model))
    wanted = inspect.signature(make).parameters
    local = Phase(optimizer=sgd(0.1), batch_size=4)
    local = local.but(loss=squared_error()) if network.numbers else local
    usual: dict[str, Any] = {
        "private": private,
        "layers": network.head,
        "classifier": network.classifier,
        "tasks": USERS,
        "local": local,
        "most_passes": 3,
    }
    if kind == "kteps_star":
        usual |= {"start": 1, "end": 3}
    return make(**{name: value for name, value in usual.items() if name in wanted})


def line(report: AuditReport, seconds: float) -> dict[str, Any]:
    """Return what the table says of an audit."""
    return {
        "ok": report.ok,
        "leaks": [str(f) for f in report.leaks],
        "verdicts": {one.label: report.verdict(one.label) for one in report.left},
        "uploads": uploads(report),
        "private": sorted({f.leaves for f in report.findings if f.source.startswith(("private", "kept"))}),
        "declared": sorted({f"{f.leaves}: {f.by}" for f in report.findings if f.by.startswith("the method")}),
        "readable": sorted(str(f) for f in report.findings if f.how.startswith("readable")),
        "notes": list(report.notes),
        "missed": list(report.missed),
        "seconds": round(report.seconds, 2),
        "cpu_seconds": round(seconds, 2),
    }


def uploads(report: AuditReport) -> str:
    """Return the worst verdict on what a client uploads or sends along, as far as it tells of what the client keeps."""
    kept = [f for f in report.findings if f.source.startswith(("private", "kept"))]
    found = {f.verdict for f in kept if f.leaves.startswith(("upload/", "sent/", "report/"))}
    return next((v for v in ("leak", "declared", "gradients") if v in found), "unchanged")


def page(table: dict[str, dict[str, Any]], found: str) -> str:
    """Return the table as Markdown."""
    names = [name for name in NETWORKS if any(name in row for row in table.values())]
    rows = [
        f"| `{kind}` | " + " | ".join(row[n].get("uploads", "–") if n in row else "" for n in names) + " |"
        for kind, row in table.items()
    ]
    lines = [
        "# What uploads tell of what clients keep",
        "",
        "`python -m benchmarks.audits` runs `fedkeep.audit` over methods and built-in models. A cell is the worst",
        "verdict on what a client uploads, or sends along, as far as it changes with its private values and kept",
        "state: *unchanged* to the bit; by *gradients* of a loss of both; otherwise, and *declared* by the method;",
        "otherwise: a *leak*. A dash: they don't fit; empty: not tried. All other verdicts stand in `audits.json`.",
        "",
        found,
        "",
        "| | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def tried(kind: str, name: str) -> dict[str, Any]:
    """Return the line of a method and a model, or why they do not fit."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    began = time.process_time()
    try:
        model = network.model()
        report = audit(model, built(kind, network, model), network.data(), rounds=ROUNDS)
    except FedkeepError as error:
        return {"does_not_fit": str(error)}
    return {**line(report, time.process_time() - began), "commit": commit()}


def written(table: dict[str, dict[str, Any]]) -> tuple[dict[str, list[str]], float]:
    """Write what is known so far; return what leaks, and the longest audit's seconds of a processor."""
    done = [(f"{k} with {n}", one) for k, row in table.items() for n, one in row.items() if "ok" in one]
    longest = max((one["cpu_seconds"] for _, one in done), default=0.0)
    count = Counter(
        "fits" if "ok" in one else "does not fit" for row in table.values() for one in row.values()
    )
    leaking = {name: one["leaks"] for name, one in done if not one["ok"]}
    pairs = f"{count['fits']} of {sum(count.values())} pairs fit, {len(leaking)} leak"
    said = f"{pairs}; the longest audit took {longest:.1f} s of a processor."
    content = {"count": count, "longest_cpu_seconds": longest, "audits": table, "commit": commit()}
    write("audits", content, page(table, said))
    return leaking, longest


def main() -> None:
    """Audit all that fits, write ``results/audits.json``, and fail if something leaks or takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--models", default=",".join(NETWORKS).replace("Experts, ", "Experts; "))
    parser.add_argument("--again", action="store_true", help="keep the other lines of results/audits.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [name.replace("; ", ", ") for name in given.models.split(",")]
    kinds = given.methods.split(",")
    known: dict[str, dict[str, Any]] = {}
    if given.again:
        old = json.loads((RESULTS / "audits.json").read_text(encoding="utf-8"))
        known = {
            kind: {name: {"commit": old["commit"], **one} for name, one in row.items()}
            for kind, row in old["audits"].items()
        }
    table: dict[str, dict[str, Any]] = {**known, **{kind: known.get(kind, {}) for kind in kinds}}
    for name in chosen:
        for kind in kinds:
            found = table[kind][name] = tried(kind, name)
            print(kind, name, found.get("does_not_fit", found.get("ok")), flush=True)
        leaking, longest = written(table)
    assert not leaking, leaking
    assert longest < LIMIT, longest


if __name__ == "__main__":
    main()
