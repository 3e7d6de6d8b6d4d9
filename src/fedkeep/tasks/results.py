"""Every test example's result at the round that was best on ``valid``, in memory and in a run's folder.

A folder has them as ``examples-ROUND.safetensors``, which ``commit.json`` names with its checksum: 21 bytes for each
example of ``test`` and ``valid``, and 9 for each further model; 29 and 16 for a binary task, 28 and 16 for regression,
24 and 12 for a ranking. Where ``run.metrics`` asks for metrics of classes, a task of several classes has 4 more, and 4
for each model. For each client there are 12 bytes and its id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

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
VALID, ROSTER, KIND = "valid:", "roster:", "kind:"
"""What stands before a name in the file: of validation examples, of what is known of clients, and of tasks' kinds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """A model's result of each example of a task.

    Attributes:
        kind: of the task.
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

    kind: Kind
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

    @property
    def right(self) -> np.ndarray:
        """(examples,) bool, whether the most probable class is the label; of a ranking, whether it is in the first ten.

        Raises:
            ConfigError: the task is a regression.
        """
        if self.kind.right is None:
            raise ConfigError(
                "A {name} has errors, not right or wrong answers; see score.",
                name=self.kind.name,
            )
        label = np.zeros(0) if self.label is None else self.label
        return self.kind.right(self.score, label).astype(bool)


@dataclass(frozen=True, eq=False)
class JudgedClients:
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
        return {
            "client": torch.from_numpy(self.client),
            "trained": torch.from_numpy(self.trained),
            "ids": _bytes("\n".join(self.ids)),
        }

    @classmethod
    def of(cls, tensors: Params) -> JudgedClients | None:
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
class ExampleResults:
    """The results of a run's test examples.

    Attributes:
        round: the round that was best on ``valid``, after which they were measured.
        tensors: columns by name, each (examples,): ``client``, ``row``, ``label`` and, for each model, ``own/loss`` and
            ``own/score``; the name of a task stands before them where there are several.
        kinds: of each task by its name, None where the data have one task without a name.
        valid: the same of the validation examples; empty where there are none.
        roster: the clients; None where devices do not tell how much they train on.
    """

    round: int
    tensors: Params
    kinds: Mapping[str | None, Kind]
    valid: Params = field(default_factory=dict)
    roster: JudgedClients | None = None

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
                "There are no results of {model!r}{where}; there are {tensors}.",
                model=model,
                where=f" in the task {task!r}" if task else "",
                tensors=[n.removesuffix("/loss") for n in tensors if n.endswith("/loss")],
            )
        label, place, true, predicted = (
            None if (found := tensors.get(before + name)) is None else found.numpy()
            for name in ("label", "place", "class", f"{model}/class")
        )
        return Results(
            kind=self.kinds[task],
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
        return tuple(sorted(self.kinds, key=before_task))

    def models(self, task: str | None = None) -> tuple[Model, ...]:
        """Return the models that have results in a task."""
        return tuple(m for m in MODELS if f"{before_task(task)}{m}/loss" in self.tensors)

    def to_tensors(self) -> Params:
        """Return what the file holds."""
        valid = {VALID + name: value for name, value in self.valid.items()}
        roster = {} if self.roster is None else self.roster.to_tensors()
        kinds = {KIND + (name or ""): _bytes(kind.name) for name, kind in self.kinds.items()}
        return {**self.tensors, **kinds, **valid, **{ROSTER + name: value for name, value in roster.items()}}

    @classmethod
    def checked(cls, path: Path, round: int, tensors: Params) -> ExampleResults:
        """Return what a file holds.

        Raises:
            RunError: it is not what ``to_tensors`` makes.
        """
        parts: dict[str, Params] = {"": {}, VALID: {}, ROSTER: {}, KIND: {}}
        for name, value in tensors.items():
            before = next((b for b in (VALID, ROSTER, KIND) if name.startswith(b)), "")
            parts[before][name.removeprefix(before)] = value
        test, valid, known, told = parts.values()
        roster = JudgedClients.of(known)
        names = {name: value.numpy().tobytes().decode(errors="replace") for name, value in told.items()}
        kinds = {name or None: KINDS[kind] for name, kind in names.items() if kind in KINDS}
        fault = "" if test and told and len(kinds) == len(told) else "no task of a known kind"
        fault = (
            fault
            or _fault(test, kinds)
            or (valid and _fault(valid, kinds))
            or (known and _fault_of_roster(roster, (test, valid)))
            or ""
        )
        if fault:
            raise RunError(
                "{file} does not hold the results of examples: {fault}. Restore the run from a copy.",
                file=path,
                fault=fault,
            )
        return cls(round=round, tensors=test, kinds=kinds, valid=valid, roster=roster)


def read_examples(folder: Path, last: Commit | None = None) -> ExampleResults | None:
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
    return ExampleResults.checked(path, last.examples_round, load_verified(path, last.examples_sha256))


def _bytes(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def before_task(task: str | None) -> str:
    """Return what stands before the names of a task's columns."""
    return "" if task is None else f"{task}/"


def _fault_of_roster(roster: JudgedClients | None, parts: Sequence[Params]) -> str:
    if roster is None:
        return "the clients are not listed as they should be"
    judged = [
        value.numpy() for part in parts for name, value in part.items() if name.split("/")[-1] == "client"
    ]
    unknown = sorted(set(np.concatenate(judged).tolist()) - set(roster.client.tolist()))
    return f"the client {unknown[0]} is not listed" if unknown else ""


def _fault(tensors: Params, kinds: Mapping[str | None, Kind]) -> str:
    known: set[str] = set()
    for task, kind in sorted(kinds.items(), key=lambda pair: before_task(pair[0])):
        before = before_task(task)
        columns = {before + name: dtype for name, dtype in SHARED_COLUMNS.items()}
        asked = {"label": kind.kept_label, "place": kind.several, "class": f"{before}class" in tensors}
        columns |= {before + name: dtype for name, dtype in OPTIONAL.items() if asked[name]}
        score = torch.from_numpy(np.zeros(0, kind.kept_score)).dtype
        models = [m for m in MODELS if f"{before}{m}/loss" in tensors]
        for model in models:
            columns |= {f"{before}{model}/loss": torch.float64, f"{before}{model}/score": score}
            if asked["class"]:
                columns[f"{before}{model}/class"] = torch.int32
        for name, dtype in columns.items():
            if name not in tensors:
                return f"{name!r} is missing"
            shape, got = tensors[name].shape, tensors[name].dtype
            if shape != (tensors[f"{before}client"].numel(),) or got != dtype:
                return f"{name!r} has the shape {tuple(shape)} and the type {got}"
        if not models:
            return f"there is no model beside {before + 'client'!r}"
        if (torch.stack([tensors[f"{before}{n}"].long() for n in ("client", "row")]) < 0).any():
            return "a client or a row is negative"
        known |= columns.keys()
    rest = sorted(tensors.keys() - known)
    return f"unknown {rest}" if rest else ""
