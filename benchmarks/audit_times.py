"""Claim: an audit and a proof of a built-in configuration take at most 1.5 times as long as in an older tree.

    python -m benchmarks.audit_times --against CLONE [--methods furl,fedrep] [--turns 3] [--what audit,prove] [--fresh]

``CLONE`` is another checkout, with its kernels built. The two trees take turns, each in a process of its own, whose
seconds of a processor are counted after a first audit and proof, or with ``--fresh`` in a new process for each. Methods
and models are those of ``benchmarks.proofs``: the first model that a method fits in the older tree. A ratio is that of the medians. Writes
``results/audit-times.json``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

LIMIT, HERE = 1.5, Path(__file__).resolve().parent.parent


def served() -> None:
    """Answer lines ``audit KIND [MODEL]`` and ``prove KIND [MODEL]`` with seconds and the model; ``-``: it fits none."""
    import torch

    from benchmarks.audits import NETWORKS, ROUNDS, built
    from benchmarks.proofs import FIRST
    from fedkeep.audit import audit
    from fedkeep.core.errors import FedkeepError
    from fedkeep.prove import prove

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        what, kind, *names = line.strip().split("\t")
        for name in names or dict.fromkeys((*FIRST, *NETWORKS)):
            network = NETWORKS[name]
            torch.manual_seed(0)
            try:
                model = network.model()
                method, data = built(kind, network, model), network.data()
                began = time.process_time()
                if what == "prove":
                    prove(model, method, data, name=kind)
                else:
                    audit(model, method, data, rounds=ROUNDS)
            except FedkeepError:
                continue
            print(time.process_time() - began, name, sep="\t", flush=True)
            break
        else:
            print("-", flush=True)


class Tree:
    """A checkout whose audits and proofs are timed."""

    def __init__(self, root: Path, *, fresh: bool) -> None:
        self.root, self.fresh = root.resolve(), fresh
        self._worker: subprocess.Popen[str] | None = None

    def seconds(self, what: str, kind: str, *model: str) -> tuple[float, str] | None:
        """Return the seconds of an audit or a proof, and the model; None: the method does not fit it, or fits none."""
        if self._worker is None or self.fresh:
            self.close()
            path = os.pathsep.join(map(str, (self.root / "src", self.root / "papers" / "src", self.root)))
            self._worker = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).resolve()), "--worker"],
                cwd=self.root,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first in () if self.fresh else ("audit", "prove"):
                self._ask(first, "fedavg")
        return self._ask(what, kind, *model)

    def _ask(self, *words: str) -> tuple[float, str] | None:
        assert self._worker is not None
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        print(*words, sep="\t", file=self._worker.stdin, flush=True)
        seconds, _, name = self._worker.stdout.readline().strip().partition("\t")
        if not seconds:
            raise RuntimeError(f"{words} broke down in {self.root}.")
        return None if seconds == "-" else (float(seconds), name)

    def close(self) -> None:
        """Let the process end."""
        if self._worker is not None and self._worker.stdin is not None:
            self._worker.stdin.close()
            self._worker.wait()


def compared(here: Tree, there: Tree, what: str, kind: str, turns: int) -> dict[str, Any] | None:
    """Return the median seconds in both trees, and their ratio; None: the method fits no model."""
    done: list[tuple[float, float]] = []
    for _ in range(turns):
        if (old := there.seconds(what, kind)) is None or (new := here.seconds(what, kind, old[1])) is None:
            return None
        done.append((new[0], old[0]))
    now, before = map(statistics.median, zip(*done, strict=True))
    return {
        "model": old[1],
        "cpu_seconds": round(now, 3),
        "before": round(before, 3),
        "ratio": round(now / before, 2),
    }


def main() -> None:
    """Time audits and proofs in two trees, write ``results/audit-times.json``, and fail if one takes too long."""
    from benchmarks.faults import commit
    from benchmarks.measure import write
    from fedkeep.methods import METHODS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, required=True)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--what", default="audit,prove")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="a new process for each audit and proof")
    given = parser.parse_args()
    here, there = (Tree(root, fresh=given.fresh) for root in (HERE, given.against))
    rows: dict[str, dict[str, dict[str, Any] | None]] = {}
    for what in given.what.split(","):
        for kind in given.methods.split(","):
            one = compared(here, there, what, kind, given.turns)
            rows.setdefault(what, {})[kind] = one
            print(what, kind, one, flush=True)
    for tree in (here, there):
        tree.close()
    ratios = {w: {k: float(one["ratio"]) for k, one in row.items() if one} for w, row in rows.items()}
    old = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=given.against, capture_output=True, text=True, check=True
    )
    content: dict[str, Any] = {
        "against": old.stdout.strip(),
        "commit": commit(),
        "fresh": given.fresh,
        "turns": given.turns,
        "median": {w: statistics.median(r.values()) for w, r in ratios.items()},
        "above": {w: {k: x for k, x in r.items() if x > LIMIT} for w, r in ratios.items()},
        "times": rows,
    }
    write("audit-times-fresh" if given.fresh else "audit-times", content)
    assert not any(content["above"].values()), content["above"]


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        served()
    else:
        main()
