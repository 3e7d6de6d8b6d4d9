"""Results of the mixture of experts' cells, and what they depend on; a file holds all ways of one run of FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep_papers.kit.cells import Slot
from fedkeep_papers.moe.scene import Adapting, Federation, Scene
from fedkeep_papers.moe.variants import Variant


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

    def name(self, variant: Variant) -> str:
        """Return the name of the run that a variant's result is of, which others share: its file's."""
        return self.file(Path(), variant).stem

    def slot(self, folder: Path, variant: Variant, source: Mapping[str, str]) -> Slot[Result]:
        """Return where a variant's result is kept, given the sha256 of the images' files."""
        return Slot(
            kind=Result,
            file=self.file(folder, variant),
            settings=self.settings(variant),
            source=source,
            shared=True,
        )

    def settings(self, variant: Variant) -> dict[str, Any]:
        """Return all that a variant's result depends on, as plain data."""
        scene = self.scene.settings()
        if not variant.needs_federation:
            del scene["q"]
            scene.pop("by", None)
        return {
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
    """

    valid: tuple[float, ...]
    test: tuple[float, ...]
    balanced: tuple[float, ...] = ()
    stopped: tuple[tuple[int, ...], ...] = ()
    seconds: float = 0.0

    def mean(self, split: str) -> float:
        """Return the mean over clients; NaN without images."""
        values = getattr(self, split)
        return float(np.mean(values)) if values else float("nan")
