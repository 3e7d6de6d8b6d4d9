"""Tiny generated reviews, and a table that was made of them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.experiments.reproductions import reproduce
from fedkeep_papers.kteps import book
from fedkeep_papers.kteps.cells import CellJob
from fedkeep_papers.kteps.fdu_mtl import DOMAINS
from tests.papers.kteps.runs import request

WORDS = ("man", "good", "bad", "book", "film", *(f"w{n}" for n in range(300)))
TINY = (
    ("run.rounds", "2"),
    ("method.epochs", "1"),
    ("model.hidden", "3"),
    ("personalization.steps", "4"),
    ("personalization.every", "2"),
)
READY = ["kteps/indiv", "kteps/fedavg", "kteps/kteps", "kteps/kteps-star", "kteps/kteps-star-own-words"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data: 16 domains of short reviews, two in training and test, and vectors of their words."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    lines = []
    for domain in DOMAINS:
        for split, count in (("train", 10), ("test", 5)):
            for n in range(count):
                text = " ".join(["man", ("bad", "good")[n % 2], *rng.choice(WORDS, 4)])
                if (domain, split) == ("books", "test") and n < 2:
                    text = json.loads(lines[-10])["text"]
                lines.append(json.dumps({"domain": domain, "split": split, "label": n % 2, "text": text}))
    (folder / "fdu_mtl").mkdir()
    (folder / "fdu_mtl" / "fdu_mtl.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (folder / "word_vectors").mkdir()
    vectors = rng.standard_normal((len(WORDS), 200)).astype(np.float16)
    np.savez(folder / "word_vectors" / "word_vectors_200d.npz", words=np.asarray(WORDS, "S"), vectors=vectors)
    return folder


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = replace(book.SCENES[0], scales=dict.fromkeys(("quick", "medium", "full"), TINY))
    monkeypatch.setattr(book, "SCENES", (scene, *book.SCENES[1:]))
    monkeypatch.setattr(book, "builtin_names", lambda: READY)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the cells that are computed, in order."""
    names: list[str] = []

    whole = CellJob.__call__

    def counted(task: CellJob, **how: Any) -> None:
        names.append(task.cell.name)
        whole(task, **how)

    monkeypatch.setattr(CellJob, "__call__", counted)
    return names


@pytest.fixture(scope="session")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results with the cells of Table 3, two seeds each."""
    out = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        tiny.__wrapped__(patch)  # type: ignore[attr-defined]
        reproduce("kteps-table3", request(data, out, seeds=[0, 1]))
    return out
