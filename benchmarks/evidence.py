"""Claim: of leaky modules and methods each is caught by the audit or the proof, none is proved, and harmless ones pass.

    python -m benchmarks.evidence [--sample 20]

Every case of ``tests.evidence.table`` is tried. Writes ``results/evidence.json``: verdicts, counts, the
names of leaky ones that are proved, and of harmless ones that are not.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.measure import write
from fedkeep.audit import audit
from fedkeep.core.errors import FedkeepError
from fedkeep.prove import prove
from tests.evidence.table import HARMLESS, LEAKY, Case

PROVED = 0.8
"""The least share of harmless cases that must be proved."""


def judged(make: Callable[[], Case], *, leaky: bool = False) -> dict[str, Any]:
    """Return what proof and audit say of a case; a leaky one that is not proved is caught, and not audited too.

    One that fedkeep itself refuses is caught.
    """
    began, found = time.process_time(), dict[str, Any](proof=False, audit=None)
    try:
        found["proof"] = prove(*make()).ok
        if found["proof"] or not leaky:
            found["audit"] = audit(*make(), rounds=2).ok
    except FedkeepError as error:
        found["refused"] = type(error).__name__
    return {**found, "seconds": round(time.process_time() - began, 2)}


def counted(leaky: Mapping[str, Any], harmless: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts that the claim is about."""
    return {
        "leaky": len(leaky),
        "caught": sum(not (one["audit"] and one["proof"]) for one in leaky.values()),
        "pass both": [name for name, one in leaky.items() if one["audit"] and one["proof"]],
        "proved, and caught by the audit alone": [
            name for name, one in leaky.items() if one["proof"] and not one["audit"]
        ],
        "harmless": len(harmless),
        "proved": sum(one["proof"] for one in harmless.values()),
        "not proved": [name for name, one in harmless.items() if not one["proof"]],
        "false leaks": [name for name, one in harmless.items() if one["audit"] is not True],
    }


def main() -> None:
    """Judge all, or a sample; write the counts, and fail if the claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="how many of each kind; 0: all")
    given = parser.parse_args()
    draw, found = random.Random(0), []  # noqa: S311
    for table in (LEAKY, HARMLESS):
        names = draw.sample(list(table), given.sample) if given.sample else list(table)
        verdicts = {}
        for name in names:
            verdicts[name] = judged(table[name], leaky=table is LEAKY)
            print(f"{name}: {verdicts[name]}", flush=True)
        found.append(verdicts)
    leaky, harmless = found
    counts = counted(leaky, harmless)
    if not given.sample:
        write("evidence", {**counts, "leaky ones": leaky, "harmless ones": harmless})
    assert not counts["pass both"], counts
    assert not counts["false leaks"], counts
    assert counts["proved"] >= PROVED * counts["harmless"], counts


if __name__ == "__main__":
    main()
