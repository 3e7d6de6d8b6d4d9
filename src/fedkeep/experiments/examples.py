"""Every test example's result at the round that was best on ``valid``, in memory and in a run's folder.

A folder has them as ``examples-ROUND.safetensors``, which ``commit.json`` names with its checksum: 21 bytes for each
test example, and 9 for each further model; 29 and 16 for a binary task, 28 and 16 for regression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.files import load_verified
from fedkeep.core.params import Params
from fedkeep.core.run_files import Commit, read_commit, read_info
from fedkeep.engines import MODELS, Judged, Model

SHARED_COLUMNS = {"client": torch.int32, "row": torch.int64, "label": torch.uint8}


@dataclass(frozen=True, kw_only=True)
class Results:
    """A model's result of each example of a task.

    Attributes:
        client: (examples,) int32, the index of the example's client in the data.
        row: (examples,) int64, the example's row in the data.
        loss: (examples,) float64, cross-entropy in nats, or squared error.
        score: (examples,) float64, the positive class's score (binary), or predicted − true (regression); uint8, right
            or not (multiclass).
        label: (examples,) uint8, binary only.
    """

    client: np.ndarray
    row: np.ndarray
    loss: np.ndarray
    score: np.ndarray
    label: np.ndarray | None = None

    @property
    def right(self) -> np.ndarray:
        """(examples,) bool, whether the most probable class is the label.

        Raises:
            ConfigError: the task is a regression.
        """
        if self.label is not None:
            found: np.ndarray = (self.score > 0) == (self.label > 0)
            return found
        if self.score.dtype != np.uint8:
            raise ConfigError("A regression has errors, not right or wrong answers; see score.")
        return self.score.astype(bool)


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The results of a run's test examples.

    Attributes:
        round: the round that was best on ``valid``, after which they were measured.
        tensors: columns by name, each (examples,): ``client``, ``row``, ``label`` and, for each model, ``own/loss`` and
            ``own/score``; the name of a task stands before them where there are several.
    """

    round: int
    tensors: Params

    @classmethod
    def of(cls, round: int, judged: Sequence[Judged]) -> Examples | None:
        """Return what was judged, as it is kept; None where the device's policy lets no example's result leave."""
        tensors = Params()
        for one in judged:
            if not one.examples:
                return None
            before = _before(one.task.name)
            first = one.examples[0]
            columns = {"client": first.client.astype(np.int32), "row": first.row.astype(np.int64)}
            if one.task.kind == "binary":
                columns["label"] = (first.label > 0).astype(np.uint8)
            kind = np.uint8 if one.task.kind == "multiclass" else np.float64
            for model, found in zip(one.models, one.examples, strict=True):
                columns |= {
                    f"{model}/loss": found.loss.astype(np.float64),
                    f"{model}/score": found.score.astype(kind),
                }
            tensors |= {before + name: torch.from_numpy(column) for name, column in columns.items()}
        return cls(round=round, tensors=tensors)

    def __call__(self, model: Model = "own", task: str | None = None) -> Results:
        """Return a model's results; name the task where there are several.

        Raises:
            ConfigError: there are none.
        """
        before = _before(task)
        if f"{before}{model}/loss" not in self.tensors:
            raise ConfigError(
                f"There are no results of {model!r}{f' in the task {task!r}' if task else ''}; there are "
                f"{[n.removesuffix('/loss') for n in self.tensors if n.endswith('/loss')]}."
            )
        label = self.tensors.get(f"{before}label")
        return Results(
            client=self.tensors[f"{before}client"].numpy(), row=self.tensors[f"{before}row"].numpy(),
            loss=self.tensors[f"{before}{model}/loss"].numpy(), score=self.tensors[f"{before}{model}/score"].numpy(),
            label=None if label is None else label.numpy(),
        )  # fmt: skip

    @classmethod
    def checked(cls, path: Path, round: int, tensors: Params) -> Examples:
        """Return what a file holds.

        Raises:
            RunError: it is not what ``of`` makes.
        """
        fault = "no task" if not tensors else _fault(tensors)
        if fault:
            raise RunError(
                f"{path} does not hold the results of examples: {fault}. Restore the run from a copy."
            )
        return cls(round=round, tensors=tensors)


def read_examples(folder: Path, last: Commit | None = None) -> Examples | None:
    """Return the results of test examples that a run's folder keeps; None where nothing was evaluated.

    Args:
        folder: the run's folder.
        last: its last commit, where that was read already.

    Raises:
        RunError: there is no run, or something is damaged.
    """
    last = read_commit(folder, read_info(folder)) if last is None else last
    if not last.examples:
        return None
    path = folder / last.examples
    return Examples.checked(path, last.examples_round, load_verified(path, last.examples_sha256))


def _before(task: str | None) -> str:
    return "" if task is None else f"{task}/"


def _fault(tensors: Params) -> str:
    tasks = {name.removesuffix("client") for name in tensors if name.split("/")[-1] == "client"}
    known: set[str] = set()
    for before in sorted(tasks):
        shared = {f"{before}{name}": kind for name, kind in SHARED_COLUMNS.items()}
        columns: dict[str, tuple[torch.dtype, ...]] = {
            n: (kind,) for n, kind in shared.items() if n in tensors or not n.endswith("label")
        }
        for model in (m for m in MODELS if f"{before}{m}/loss" in tensors):
            columns[f"{before}{model}/loss"] = (torch.float64,)
            columns[f"{before}{model}/score"] = (torch.float64, torch.uint8)
        size = tensors[f"{before}client"].numel()
        for name, kinds in columns.items():
            if name not in tensors:
                return f"{name!r} is missing"
            if tensors[name].shape != (size,) or tensors[name].dtype not in kinds:
                return (
                    f"{name!r} has the shape {tuple(tensors[name].shape)} and the type {tensors[name].dtype}"
                )
        if not any(name.endswith("/loss") for name in columns):
            return f"there is no model beside {before + 'client'!r}"
        if size and min(int(tensors[f"{before}{n}"].min()) for n in ("client", "row")) < 0:
            return "a client or a row is negative"
        known |= columns.keys()
    rest = sorted(tensors.keys() - known)
    return f"unknown {rest}" if rest else ""
