"""Claim: a proof takes under 10 s of a processor. What it says of every method with a small model is in the table.

    python -m benchmarks.proofs [--methods furl,fedrep] [--again]

Methods and models are the audits' (``benchmarks.audits``): the first model of the list that a method fits. Writes
``results/proofs.json`` and a table, ``results/proofs.md``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import Any

import torch

from benchmarks.audits import NETWORKS, built
from benchmarks.faults import commit
from benchmarks.measure import RESULTS, write
from fedkeep.core.errors import FedkeepError
from fedkeep.methods import METHODS
from fedkeep.prove import Proof, prove
from fedkeep.prove.proof_findings import VERDICTS, claims, paths

LIMIT = 10.0
FIRST = ("Linear", "TextClassifier", "CNN", "MixtureOfExperts")


def line(proof: Proof, seconds: float, model: str) -> dict[str, Any]:
    """Return what the table says of a proof."""
    return {
        "model": model,
        "ok": proof.ok,
        "cpu_seconds": round(seconds, 2),
        "verdicts": {i.leaves: i.verdict for i in proof.items},
        "by": {i.leaves: i.by for i in proof.items if i.by},
        "paths": paths(proof.items),
        "claims": claims(proof),
        "notes": proof.notes,
        "storages": proof.storages,
        "unknown": sorted({why for i in proof.items if i.verdict == "unknown" for why in i.path}),
        "falsified": {i.leaves: i.falsifier for i in proof.items},
    }


def tried(kind: str) -> dict[str, Any]:
    """Return the line of a method with the first model that it fits."""
    said = ""
    for name in dict.fromkeys((*FIRST, *NETWORKS)):
        network = NETWORKS[name]
        torch.manual_seed(0)
        began = time.process_time()
        try:
            model = network.model()
            proof = prove(model, built(kind, network, model), network.data(), name=kind)
        except FedkeepError as error:
            said = str(error)
            continue
        return line(proof, time.process_time() - began, name)
    return {"does_not_fit": said}


def page(table: dict[str, dict[str, Any]], found: str) -> str:
    """Return the table as Markdown."""
    lines = [
        "# By which ways what must stay reaches what leaves",
        "",
        "`python -m benchmarks.proofs` runs `fedkeep.prove` over all methods, each with the first built-in model that",
        "it fits. Numbers are of things that leave. All else stands in `proofs.json`.",
        "",
        found,
        "",
        f"| method | model | {' | '.join(VERDICTS)} | undeclared or unknown because of |",
        "|---" * (len(VERDICTS) + 3) + "|",
    ]
    for kind, one in table.items():
        if "does_not_fit" in one:
            lines.append(f"| `{kind}` | – |{' |' * len(VERDICTS)} {one['does_not_fit']} |")
            continue
        count = Counter(one["verdicts"].values())
        why = "; ".join([*one["unknown"], *(path.partition(" → ")[0] for path in one["paths"])][:3])
        lines.append(f"| `{kind}` | {one['model']} | {' | '.join(str(count[v]) for v in VERDICTS)} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prove all that fits, write ``results/proofs.json``, and fail if a proof takes too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--again", action="store_true", help="keep the other lines of results/proofs.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads((RESULTS / "proofs.json").read_text(encoding="utf-8"))["proofs"] if given.again else {}
    table: dict[str, dict[str, Any]] = known
    for kind in given.methods.split(","):
        table[kind] = tried(kind)
        print(kind, table[kind].get("does_not_fit", table[kind].get("ok")), flush=True)
    done = {kind: one for kind, one in table.items() if "ok" in one}
    longest = max(one["cpu_seconds"] for one in done.values())
    sums = Counter(v for one in done.values() for v in one["verdicts"].values())
    whole = sum(one["ok"] for one in done.values())
    found = (
        f"Of {len(done)} methods all is proved of {whole}. Of {sum(sums.values())} things that leave "
        f"{', '.join(f'{sums[v]} are {v}' for v in VERDICTS)}. The longest proof took {longest:.1f} s of a processor, "
        f"of which 2 to 3 s are PyTorch's own imports."
    )
    write(
        "proofs",
        {"count": sums, "longest_cpu_seconds": longest, "proofs": table, "commit": commit()},
        page(table, found),
    )
    print(found)
    assert longest < LIMIT, longest


if __name__ == "__main__":
    main()
