"""Results of the mixture of experts' cells: small JSON files, found again by the settings they were made with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import RunError
from fedkeep.core.files import write_whole
from fedkeep_papers.moe.scene import Adapting, Federation, Scene
from fedkeep_papers.moe.variants import Variant

VERSION = 1  # raised when the same settings would give other numbers
SPLITS = ("valid", "test", "balanced")


@dataclass(frozen=True)
class Cell:
    """One run of FedAvg, and the ways that clients adapt from it."""

    scene: Scene
    federation: Federation
    adapting: Adapting

    def file(self, folder: Path, variant: Variant) -> Path:
        """Return the file of a variant's result; local training has one for all who opt out and all federations."""
        if not variant.needs_federation:
            return folder / f"{self.scene.base}-s{self.scene.seed}{self.adapting.slug}-local.json"
        return folder / f"{self.scene.slug}-{self.federation.slug}{self.adapting.slug}.json"

    def settings(self, variant: Variant) -> dict[str, Any]:
        """Return all that a variant's result depends on, as plain data."""
        scene = asdict(self.scene)
        if not variant.needs_federation:
            del scene["q"]
        return {
            "version": VERSION,
            "scene": scene,
            "federation": asdict(self.federation) if variant.needs_federation else None,
            "adapting": asdict(self.adapting) if variant.kind != "fedavg" else None,
            "variant": variant.settings(),
        }


@dataclass(frozen=True)
class Result:
    """Each client's accuracy, a fraction.

    Attributes:
        valid, test: on its own validation and test images.
        balanced: on images of all classes alike that nobody drew; empty where there are none.
        stopped: the passes that early stopping kept, by client and phase.
        seconds: how long adapting took.
        commit: the source that was run.
    """

    valid: tuple[float, ...]
    test: tuple[float, ...]
    balanced: tuple[float, ...] = ()
    stopped: tuple[tuple[int, ...], ...] = ()
    seconds: float = 0.0
    commit: str = ""

    def mean(self, split: str) -> float:
        """Return the mean over clients; NaN without images."""
        values = getattr(self, split)
        return float(np.mean(values)) if values else float("nan")


def read_result(cell: Cell, variant: Variant, folder: Path) -> Result | None:
    """Return a variant's result if it is there for the same settings.

    Raises:
        RunError: the file is damaged.
    """
    settings = cell.settings(variant)
    for entry in _entries(cell.file(folder, variant)):
        if entry["settings"] == settings:
            found = {n: entry[n] for n in ("valid", "test", "balanced", "seconds", "commit")}
            lists = {n: tuple(found[n]) for n in SPLITS}
            return Result(**{**found, **lists, "stopped": tuple(map(tuple, entry["stopped"]))})
    return None


def write_result(cell: Cell, variant: Variant, result: Result, folder: Path) -> None:
    """Add a variant's result to its file; a crash on the way leaves the older file."""
    path, settings = cell.file(folder, variant), cell.settings(variant)
    entries = [e for e in _entries(path) if e["settings"] != settings]
    entries.append({"name": variant.name, **asdict(result), "settings": settings})
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(entry, ensure_ascii=False, allow_nan=False) for entry in entries)
    write_whole(path, f"[\n{lines}\n]\n".encode())


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        names = {"settings", "seconds", "commit", "stopped", *SPLITS}
        if not all(names <= entry.keys() for entry in entries):
            raise ValueError(f"an entry lacks one of {', '.join(sorted(names))}")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f"The results {path} are damaged: {error}. Restore or delete the file.") from error
    return list(entries)
