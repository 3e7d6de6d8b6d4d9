"""What a run is asked for, wherever its clients are: the arguments of ``simulate``, the table ``[run]``, a federation."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import ConfigError, check_choice, check_range, check_whole
from fedkeep.engines.round import Sampling
from fedkeep.methods.usual import Usual

OnNonfinite = Literal["stop", "skip"]
EPOCHS, STEPS = 30, 600
"""Passes over the training data where nobody says how many; where a client takes fewer steps in these than the second, as
many passes as so many steps need, but no more than are usual for the model (``methods.usual``)."""
Counts = Literal["always", "where set", "never"]
"""Whether results depend on a setting, so that it is of a run's identity: a run does not go on with another value.

``"where set"``: it is named there unless it has its default, so that runs from before it was there are of the same identity.
"""
ALWAYS: Mapping[str, Counts] = {"counts": "always"}
WHERE_SET: Mapping[str, Counts] = {"counts": "where set"}
NEVER: Mapping[str, Counts] = {"counts": "never"}
LEAST = {"rounds": 0, "cohort": 1, "workers": 1, "evaluate_every": 0, "min_clients": 0}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run, each said once; a table ``[run]`` of a configuration makes it.

    The mark of each says whether results depend on it (``Counts``).

    Attributes:
        rounds: how many rounds; or give ``epochs``.
        epochs: passes over the training data, instead of ``rounds``; more than none are at least one round. Without
            either 30, and where clients take fewer than 600 steps in these, as many as 600 steps take, at most 90. Of
            models of words, on real machines, whose server does not know how many examples a client has, and under
            differential privacy 30.
        cohort: clients a round (all of them, where there are fewer).
        sampling: ``"shuffled"`` (every client once an epoch), ``"independent"`` draws, or ``"poisson"`` (each client
            by a coin of its own, ``cohort`` of them on average).
        centralised: train centrally, as the control of an experiment: each round is one pass over all clients'
            examples together, and private values are rows of tables. ``cohort``, ``engine`` and ``workers`` are not
            used.
        engine: ``"auto"`` (the fastest of the following here), ``"sequential"`` (one client after the other),
            ``"workers"`` (clients side by side in processes of one thread each), or ``"vectorised"`` (clients side by
            side as one tensor program, for a GPU or small clients). All give the same result.
        workers: how many processes at most, for ``"workers"`` and ``"auto"``; by default the physical cores that this
            process may use. The result doesn't depend on it.
        device: e.g. ``"cpu"`` or ``"cuda"``.
        accelerate: run the model's own LSTM, GRU, large linear layers and convolutions on fedkeep's kernels where that
            gives the same; see ``fedkeep.accelerate``.
        evaluate_every: rounds between evaluations on ``valid`` and ``test``; by default once an epoch. The last
            round is always evaluated. 0: never.
        evaluate_shared: evaluate the shared part alone on ``test`` too, as the split ``test/shared``.
        evaluate_adapted: at each evaluation that is the best on ``valid`` so far, adapt every client as the method says
            (e.g. fine-tuning) and evaluate that on ``test`` too, as the split ``test/adapted``. Nothing is uploaded.
        hold_out: fraction of clients kept out of federation, drawn by the seed, or their ids; for cold-start
            measurements.
        on_nonfinite: ``"stop"`` with an error if a client's training becomes NaN or its upload is malformed, or
            ``"skip"`` that client's round. Centralised training has no client to skip, so it always stops.
        min_clients: how many clients of a cohort must take part; with fewer the run stops with an error.
        trackers: where every record is sent once its round is committed: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``,
            ``"package.module:Class"``, or a tracker (``fedkeep.trackers.Tracker``).
        metrics: measured beside the usual ones where labels are classes: ``"balanced_accuracy"``, ``"macro_f1"``,
            ``"mean_iou"`` (``fedkeep.metrics``); over all examples, as mean over clients, and for each client.

    Raises:
        ConfigError: a value that no run has.
    """

    rounds: int | None = field(default=None, metadata=ALWAYS)
    epochs: float | None = field(default=None, metadata=NEVER)  # rounds say it
    cohort: int = field(default=10, metadata=ALWAYS)
    sampling: Sampling = field(default="shuffled", metadata=ALWAYS)
    centralised: bool = field(default=False, metadata=ALWAYS)
    engine: str = field(default="auto", metadata=NEVER)
    workers: int | None = field(default=None, metadata=NEVER)
    device: str = field(default="cpu", metadata=NEVER)
    accelerate: bool = field(default=True, metadata=NEVER)
    evaluate_every: int | None = field(default=None, metadata=ALWAYS)
    evaluate_shared: bool = field(default=False, metadata=WHERE_SET)
    evaluate_adapted: bool = field(default=False, metadata=WHERE_SET)
    hold_out: float | tuple[str | int, ...] = field(default=0.0, metadata=ALWAYS)
    on_nonfinite: OnNonfinite = field(default="stop", metadata=ALWAYS)
    min_clients: int = field(default=1, metadata=ALWAYS)
    trackers: Sequence[Any] = field(default=(), metadata=NEVER)
    metrics: Sequence[str] | None = field(default=None, metadata=WHERE_SET)

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in LEAST if getattr(self, name) is not None}
        check_whole(numbers)
        for name, number in numbers.items():
            check_range(f"[{LEAST[name]}, inf]", **{name: number})
            object.__setattr__(self, name, operator.index(number))
        check_range("[0, inf)", epochs=self.epochs)
        if self.rounds is not None and self.epochs is not None:
            raise ConfigError(
                "Got rounds={rounds!r} and epochs={epochs!r}. Give one of them.",
                rounds=self.rounds,
                epochs=self.epochs,
            )
        if isinstance(self.hold_out, list | tuple):
            object.__setattr__(self, "hold_out", tuple(self.hold_out))
        elif isinstance(self.hold_out, str) or not 0 <= self.hold_out < 1:
            raise ConfigError(
                "hold_out must be a fraction in [0, 1), or a list of clients' ids; got {hold_out!r}.",
                hold_out=self.hold_out,
            )
        for name, names in (("trackers", self.trackers), ("metrics", self.metrics)):
            if isinstance(names, str):
                raise ConfigError(
                    "{name} must be a list of names; got one, {names!r}. Put it into a list: [{names!r}].",
                    name=name,
                    names=names,
                )
            object.__setattr__(self, name, None if names is None else tuple(names))
        if self.centralised and (self.engine not in ("auto", "sequential") or self.workers not in (None, 1)):
            raise ConfigError(
                "Centralised training has no clients side by side: leave out engine={engine!r} and workers={workers}.",
                engine=self.engine,
                workers=self.workers,
            )
        check_choice("sampling must be", self.sampling, get_args(Sampling))
        check_choice("on_nonfinite must be", self.on_nonfinite, get_args(OnNonfinite))

    def identity(self, **decided: Any) -> dict[str, Any]:
        """Return the settings that results depend on, by name.

        Args:
            decided: what stands in the place of those that say it in another way, or not.
        """
        values = {one: decided.get(one.name, getattr(self, one.name)) for one in fields(RunSettings)}
        return {
            one.name: value
            for one, value in values.items()
            if one.metadata["counts"] == "always"
            or (one.metadata["counts"] == "where set" and value != one.default)
        }

    @classmethod
    def of(cls, identity: Mapping[str, Any], **others: Any) -> Self:
        """Return the settings that an identity names, with those of which it knows nothing."""
        counting = [one.name for one in fields(RunSettings) if one.metadata["counts"] != "never"]
        return cls(**{name: identity[name] for name in counting if name in identity}, **others)

    @property
    def passes(self) -> float | None:
        """Passes over the training data; None where rounds are given."""
        return EPOCHS if self.rounds is None and self.epochs is None else self.epochs

    def length(self, rounds_per_epoch: int) -> int:
        """Return the number of rounds that ``rounds`` or ``epochs`` asks for."""
        if self.rounds is not None:
            return self.rounds
        return max(1, round(self.passes * rounds_per_epoch)) if self.passes else 0

    def decided(self, counts: NDArray[np.int64], usual: Usual) -> Self:
        """Return settings that say how many epochs, where these say neither epochs nor rounds.

        Args:
            counts: how many examples each client trains on, (clients,).
            usual: what trains the model's kind.
        """
        if self.rounds is not None or self.epochs is not None or not len(counts):
            return self
        steps = float(np.mean(np.ceil(counts / usual.batch_size)))
        return replace(self, epochs=float(min(usual.most_epochs, max(EPOCHS, math.ceil(STEPS / steps)))))
