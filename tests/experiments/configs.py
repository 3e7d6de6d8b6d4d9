"""A configuration of few words, and what it can be filled with: texts of two shops, images of four clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.data import ImageSet, majority
from fedkeep.experiments.config import Config


def config(**tables: Any) -> Config:
    content: dict[str, Any] = {
        "data": {"reader": "toy"},
        "model": {"kind": "linear"},
        "method": {"kind": "furl"},
        "run": {"rounds": 2, "cohort": 2},
    }
    return Config.model_validate(content | tables)


REVIEWS = {"reader": "reviews", "folder": "shops"}
CLASSIFIER = {"kind": "text_classifier", "embedding_dim": 2, "hidden": 3, "word_vectors": "vectors.txt"}


def shops(path: Path, vectors: str = "good 1 2\nnew 3 4\n") -> Path:
    (path / "shops").mkdir(exist_ok=True)
    for name in ("a", "b"):
        for part in ("train", "test"):
            text = "text,label\ngood tea,1\nbad tea,0\ngood,1\n,0\n"
            (path / "shops" / f"{name}.{part}.csv").write_text(text)
    (path / "vectors.txt").write_text(vectors)
    return path


PICTURES = majority(
    ImageSet(np.zeros((80, 3, 32, 32), np.uint8), np.arange(80) % 4, 60, ["a", "b", "c", "d"]), 2, 0.5, 20, 8
)
