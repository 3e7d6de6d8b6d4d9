"""Every test example's result at the round that was best on ``valid``, in memory and in a run's folder.

A folder has them as ``examples-ROUND.safetensors``, which ``commit.json`` names with its checksum: 21 bytes for each
example of ``test`` and ``valid``, and 9 for each further model; 29 and 16 for a binary task, 28 and 16 for regression,
24 and 12 for a ranking. Where ``run.metrics`` asks for metrics of classes, a task of several classes has 4 more, and 4
for each model. For each client there are 12 bytes and its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.files import load_verified
from fedkeep.core.params import Params
from fedkeep.core.run_files import Commit, read_commit, read_info
from fedkeep.tasks import KINDS, Kind

Model = Literal["own", "shared", "default", "adapted", "local"]
"""``own``: a client's model with what it keeps; ``shared``: the shared part alone; ``default``: a new client's model,
before it adapts; ``adapted`` and ``local``: with values that ``Device.adapt`` left; ``local`` is a reference."""

MODELS: tuple[Model, ...] = get_args(Model)
"""All of `Model`, in the order in which they are judged."""
SHARED_COLUMNS = {"client": torch.int32, "row": torch.int64}
OPTIONAL = {"label": torch.uint8, "class": torch.int32, "place": torch.int32}
VALID, ROSTER = "valid:", "roster:"
"""What stands before a name in the file: of validation examples, and of what is known of clients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """A model's result of each example of a task.

    Attributes:
        client: (examples,) int32, the index of the example's client in the data.
        row: (examples,) int64, the example's row in the data.
        loss: (examples,) float64, cross-entropy in nats, or squared error.
        score: (examples,) float64, the positive class's score (binary), or predicted − true (regression); uint8, right
            or not (multiclass); int32, the right candidate's rank from 1 (ranking).
        label: (examples,) uint8, binary only.
        place: (examples,) int32, of an example with several labels the number of the one that a result is of.
        true, predicted: (examples,) int32, the label's class and the most probable one, below 0 where there is none;
            multiclass only, and None where ``run.metrics`` asked for nothing that wants them.
    """

    client: np.ndarray
    row: np.ndarray
    loss: np.ndarray
    score: np.ndarray
    label: np.ndarray | None = None
    true: np.ndarray | None = None
    predicted: np.ndarray | None = None
    place: np.ndarray | None = None

    @property
    def classes(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(examples,) labels and predicted classes, below 0 where there is none; None where they are not known."""
        if not self.kind.has_classes:
            return None
        if self.label is not None:
            return self.label.astype(np.int32), (self.score > 0).astype(np.int32)
        return None if self.true is None or self.predicted is None else (self.true, self.predicted)

    @cached_property
    def kind(self) -> Kind:
        """The first kind of task whose results are kept in this form: of tokens it is that of classes."""
        label, place = self.label is not None, self.place is not None
        kinds = (k for k in KINDS.values() if (k.kept_label, k.kept_place) == (label, place))
        return next(k for k in kinds if self.score.dtype == k.kept_score)

    @property
    def right(self) -> np.ndarray:
        """(examples,) bool, whether the most probable class is the label; of a ranking, whether it is in the first ten.

        Raises:
            ConfigError: the task is a regression.
        """
        if self.kind.right is None:
            raise ConfigError(f"A {self.kind.name} has errors, not right or wrong answers; see score.")
        label = np.zeros(0) if self.label is None else self.label
        return self.kind.right(self.score, label).astype(bool)


@dataclass(frozen=True, eq=False)
class Roster:
    """The clients that were judged.

    Attributes:
        client: (clients,) int32, their indices in the data, ascending.
        trained: (clients,) int64, their numbers of training examples.
        ids: their ids.
    """

    client: np.ndarray
    trained: np.ndarray
    ids: tuple[str, ...]

    def to_tensors(self) -> Params:
        """Return what the file holds."""
        text = np.frombuffer("\n".join(self.ids).encode(), np.uint8).copy()
        return {
            "client": torch.from_numpy(self.client),
            "trained": torch.from_numpy(self.trained),
            "ids": torch.from_numpy(text),
        }

    @classmethod
    def of(cls, tensors: Params) -> Roster | None:
        """Return what ``to_tensors`` made; None where the tensors are something else."""
        kinds = {"client": torch.int32, "trained": torch.int64, "ids": torch.uint8}
        if {n: t.dtype for n, t in tensors.items()} != kinds or any(t.dim() != 1 for t in tensors.values()):
            return None
        client, trained = tensors["client"].numpy(), tensors["trained"].numpy()
        try:
            ids = tuple(tensors["ids"].numpy().tobytes().decode().split("\n"))
        except UnicodeDecodeError:
            return None
        rising = (np.diff(client) > 0).all() and (client >= 0).all() and (trained >= 0).all()
        return cls(client, trained, ids) if rising and len(client) == len(trained) == len(ids) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """The results of a run's test examples.

    Attributes:
        round: the round that was best on ``valid``, after which they were measured.
        tensors: columns by name, each (examples,): ``client``, ``row``, ``label`` and, for each model, ``own/loss`` and
            ``own/score``; the name of a task stands before them where there are several.
        valid: the same of the validation examples; empty where there are none.
        roster: the clients; None where a run of an older fedkeep kept no more than test examples.
    """

    round: int
    tensors: Params
    valid: Params = field(default_factory=dict)
    roster: Roster | None = None

    def __call__(
        self, model: Model = "own", task: str | None = None, split: Literal["test", "valid"] = "test"
    ) -> Results:
        """Return a model's results; name the task where there are several.

        Raises:
            ConfigError: there are none.
        """
        before, tensors = before_task(task), self.valid if split == "valid" else self.tensors
        if f"{before}{model}/loss" not in tensors:
            raise ConfigError(
                f"There are no results of {model!r}{f' in the task {task!r}' if task else ''}; there are "
                f"{[n.removesuffix('/loss') for n in tensors if n.endswith('/loss')]}."
            )
        label, place, true, predicted = (
            None if (found := tensors.get(before + name)) is None else found.numpy()
            for name in ("label", "place", "class", f"{model}/class")
        )
        return Results(
            client=tensors[f"{before}client"].numpy(),
            row=tensors[f"{before}row"].numpy(),
            loss=tensors[f"{before}{model}/loss"].numpy(),
            score=tensors[f"{before}{model}/score"].numpy(),
            label=label,
            true=true,
            predicted=predicted,
            place=place,
        )

    @cached_property
    def tasks(self) -> tuple[str | None, ...]:
        """The names of tasks; one None where the data have one task without a name."""
        found = sorted(n.removesuffix("client") for n in self.tensors if n.split("/")[-1] == "client")
        return tuple(name.removesuffix("/") or None for name in found)

    def models(self, task: str | None = None) -> tuple[Model, ...]:
        """Return the models that have results in a task."""
        return tuple(m for m in MODELS if f"{before_task(task)}{m}/loss" in self.tensors)

    def to_tensors(self) -> Params:
        """Return what the file holds."""
        valid = {VALID + name: value for name, value in self.valid.items()}
        roster = {} if self.roster is None else self.roster.to_tensors()
        return {**self.tensors, **valid, **{ROSTER + name: value for name, value in roster.items()}}

    @classmethod
    def checked(cls, path: Path, round: int, tensors: Params) -> Examples:
        """Return what a file holds.

        Raises:
            RunError: it is not what ``to_tensors`` makes.
        """
        parts: dict[str, Params] = {"": {}, VALID: {}, ROSTER: {}}
        for name, value in tensors.items():
            before = next((b for b in (VALID, ROSTER) if name.startswith(b)), "")
            parts[before][name.removeprefix(before)] = value
        test, valid, known = parts.values()
        roster = Roster.of(known)
        fault = _fault(test) if test else "no task"
        fault = (
            fault or (valid and _fault(valid)) or (known and _fault_of_roster(roster, (test, valid))) or ""
        )
        if fault:
            raise RunError(
                f"{path} does not hold the results of examples: {fault}. Restore the run from a copy."
            )
        return cls(round=round, tensors=test, valid=valid, roster=roster)


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


def before_task(task: str | None) -> str:
    """Return what stands before the names of a task's columns."""
    return "" if task is None else f"{task}/"


def _fault_of_roster(roster: Roster | None, parts: Sequence[Params]) -> str:
    if roster is None:
        return "the clients are not listed as they should be"
    judged = [
        value.numpy() for part in parts for name, value in part.items() if name.split("/")[-1] == "client"
    ]
    unknown = sorted(set(np.concatenate(judged).tolist()) - set(roster.client.tolist()))
    return f"the client {unknown[0]} is not listed" if unknown else ""


def _fault(tensors: Params) -> str:
    tasks = {name.removesuffix("client") for name in tensors if name.split("/")[-1] == "client"}
    known: set[str] = set()
    for before in sorted(tasks):
        columns: dict[str, tuple[torch.dtype, ...]] = {
            before + name: (kind,)
            for name, kind in (SHARED_COLUMNS | OPTIONAL).items()
            if name in SHARED_COLUMNS or before + name in tensors
        }
        scores = _scores(f"{before}label" in tensors, f"{before}place" in tensors)
        for model in (m for m in MODELS if f"{before}{m}/loss" in tensors):
            columns[f"{before}{model}/loss"] = (torch.float64,)
            columns[f"{before}{model}/score"] = scores
            if f"{before}class" in tensors:
                columns[f"{before}{model}/class"] = (torch.int32,)
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


def _scores(label: bool, place: bool) -> tuple[torch.dtype, ...]:
    """Return the types of scores of tasks whose results are kept in this form."""
    kinds = [k.kept_score for k in KINDS.values() if (k.kept_label, k.kept_place) == (label, place)]
    return tuple(torch.from_numpy(np.zeros(0, kind)).dtype for kind in kinds)
