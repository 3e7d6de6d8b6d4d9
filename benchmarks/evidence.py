"""Claim: of leaky modules and methods each is caught by the audit or the proof, none is proved, and harmless ones pass.

    python -m benchmarks.evidence [--sample 20] [--again "loss: *"]

Every case of ``tests.evidence.table`` is tried, or with ``--again`` those whose names match, beside the other lines of
``results/evidence.json``. Each line names the commit that it is of. Writes ``results/evidence.json``: verdicts, counts,
the names of leaky ones that are proved, and of harmless ones that are not. Cases that stand outside of the table are
tried too: each with the reason why, and counted strictly.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.faults import commit
from benchmarks.measure import RESULTS, write
from fedkeep.audit import audit
from fedkeep.core.errors import FedkeepError
from fedkeep.prove import prove
from tests.evidence.table import AS_DECLARED, HARMLESS, LEAKY, OUTSIDE, Case

PROVED = 0.8
"""The least share of harmless cases that must be proved."""


def judged(make: Callable[[], Case], *, leaky: bool = False) -> dict[str, Any]:
    """Return what proof and audit say of a case; a leaky one that is not proved is caught, and not audited too.

    One that fedkeep itself refuses is caught. What an audit could not look at is neither a catch nor a false leak.
    """
    began, found = time.process_time(), dict[str, Any](proof=False, audit=None)
    try:
        found["proof"] = prove(*make()).ok
        if found["proof"] or not leaky:
            found["audit"] = not audit(*make(), rounds=2).leaks
    except FedkeepError as error:
        found["refused"] = type(error).__name__
    return {**found, "seconds": round(time.process_time() - began, 2), "commit": commit()}


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


def strictly(leaky: Mapping[str, Any], outside: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts with the cases outside of the table, as leaky ones."""
    passed = counted({**leaky, **outside}, {})["pass both"]
    return {
        "leaky": len(leaky) + len(outside),
        "pass both": passed,
        "why they stand outside": {name: AS_DECLARED[name] for name in outside},
    }


def main() -> None:
    """Judge all, or a sample; write the counts, and fail if the claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="how many of each kind; 0: all")
    parser.add_argument(
        "--again", default="", help="a pattern: try these, and keep the other lines of the file"
    )
    given = parser.parse_args()
    draw, found = random.Random(0), []  # noqa: S311
    old = json.loads((RESULTS / "evidence.json").read_text(encoding="utf-8")) if given.again else {}
    for key, table in (("leaky ones", LEAKY), ("harmless ones", HARMLESS), ("outside the table", OUTSIDE)):
        names = draw.sample(list(table), min(given.sample, len(table))) if given.sample else list(table)
        known = {
            name: {"commit": old["environment"]["commit"], **one} for name, one in old.get(key, {}).items()
        }
        verdicts = {}
        for name in names:
            if given.again and name in known and not fnmatchcase(name, given.again):
                verdicts[name] = known[name]
                continue
            verdicts[name] = judged(table[name], leaky=table is not HARMLESS)
            print(f"{name}: {verdicts[name]}", flush=True)
        found.append(verdicts)
    leaky, harmless, outside = found
    counts = counted(leaky, harmless)
    if not given.sample:
        content = {**counts, "counted strictly": strictly(leaky, outside), "commit": commit()}
        lines = {"leaky ones": leaky, "harmless ones": harmless, "outside the table": outside}
        write("evidence", {**content, **lines})
    assert not counts["pass both"], counts
    assert not counts["false leaks"], counts
    assert counts["proved"] >= PROVED * counts["harmless"], counts


if __name__ == "__main__":
    main()
