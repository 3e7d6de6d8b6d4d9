"""Requests, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedkeep.experiments.reproductions import Request
from fedkeep.version import NUMERICS
from fedkeep_papers.kit.results import Row, read_results
from fedkeep_papers.kteps.cells import Numbers


def read_numbers(path: Path) -> Numbers:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content.pop("numerics") == NUMERICS
    return Numbers(**content)


def request(data: Path | None, out: Path, **changes: Any) -> Request:
    return Request(data=data, out=out, progress=False, **{"scale": "full", "seeds": [0], **changes})


def rows(out: Path, name: str) -> dict[tuple[str, str], Row]:
    """Return the rows of the scenes whose data are there."""
    found = read_results(out / f"{name}.json")
    return {(r.method, r.metric): r for r in found if not r.scene.endswith("no data here")}
