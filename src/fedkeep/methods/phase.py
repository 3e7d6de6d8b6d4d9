"""``Phase``: one pass of local training, and when it stops early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, get_args

from fedkeep.core.arguments import telling_arguments
from fedkeep.core.describe import check_kind
from fedkeep.core.errors import MethodError, check_choice, check_range, check_whole
from fedkeep.core.optim import Optimizer
from fedkeep.methods.hook_checks import check_count
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.split import Split

Patterns = str | tuple[str, ...] | list[str]
Use = Literal["opted_in", "support", "query", "all"]
OPTIMIZERS = "one of fedkeep's optimisers, e.g. fedkeep.sgd(0.1)"
OF_OPTIMIZER = {
    "lr": "optimizer=fedkeep.sgd({got})",
    "learning_rate": "optimizer=fedkeep.sgd({got})",
    "momentum": "optimizer=fedkeep.sgd(0.1, momentum={got})",
    "weight_decay": "optimizer=fedkeep.sgd(0.1, weight_decay={got})",
}
"""How a phase is given what belongs to its optimiser."""


class Changeable:
    """A frozen value of which others are made that differ in some fields."""

    def but(self, **changes: Any) -> Self:
        """Return this with some fields changed, e.g. ``local.but(trains="private", epochs=10)``."""
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stops a phase when the client's own validation loss no longer falls, and keeps the best values.

    The loss is measured after passes 1, 1 + every, 1 + 2 · every, … (federated mixture of experts, authors' code);
    the phase ends with what it had at the lowest one, a copy.

    Attributes:
        every: passes between measurements.
        patience: measurements without improvement until the phase stops.
        min_improvement: an improvement is a loss lower than the best so far by more than this.
        required: whether a client without a validation example is an error; else nothing stops it, and it takes all
            passes.
    """

    every: int = 5
    patience: int = 10
    min_improvement: float = 0.0
    required: bool = True

    def __post_init__(self) -> None:
        check_count(1, every=self.every, patience=self.patience)
        check_range("[0, inf]", MethodError, min_improvement=self.min_improvement)


class UsualSize(int):
    """A size of mini-batches that nobody named: the usual one for the model takes its place."""


@telling_arguments(OF_OPTIMIZER)
@dataclass(frozen=True, kw_only=True)
class Phase:
    """One pass of local training.

    A rate and a size of mini-batches that nobody names are those that are usual for the model (``methods.usual``).

    Attributes:
        loss: the term that is minimised.
        trains: ``"all"``, ``"federated"``, ``"private"``, or name patterns; everything else stays as it is.
        optimizer: the local optimiser; its state is fresh at every round.
        epochs: passes over the client's examples.
        steps: if given, this many mini-batches instead of ``epochs`` passes.
        batch_size: examples a mini-batch; the last one of a pass may be smaller.
        merge_single: a last mini-batch of one example joins the one before it, as batch normalisation cannot train on
            one example. A client that has only one is an error still. None: where the model has batch normalisation.
        clip_norm: if given, gradients are scaled down to this L2 norm.
        clip_over: the norm is over ``"all"`` that the phase trains, or over its ``"halves"``, federated and private
            each by itself. Over all, a large private gradient makes the federated one smaller, so its size leaves the
            client with the upload.
        examples: ``"opted_in"``: examples whose column ``opted_in`` is true (all, where there is no such column);
            ``"support"`` or ``"query"``: one of two disjoint random halves of these, the same in every round (an odd
            one belongs to the query half); ``"all"``: every example, allowed only where nothing that is trained leaves
            the client.
        early_stopping: ends the phase by the client's examples ``valid``, opted-out ones too where ``examples`` is
            ``"all"``; allowed only where nothing that is trained leaves the client. A federated phase that reads what
            it ends with tells something of these examples.
    """

    loss: Term = field(default_factory=cross_entropy)
    trains: str | tuple[str, ...] = "all"
    optimizer: Optimizer = field(default_factory=Optimizer)
    epochs: int = 1
    steps: int | None = None
    batch_size: int = UsualSize(32)
    merge_single: bool | None = None
    clip_norm: float | None = None
    clip_over: Literal["all", "halves"] = "all"
    examples: Use = "opted_in"
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        check_kind("loss", self.loss, Term, "a term, e.g. fedkeep.methods.terms.cross_entropy()")
        check_kind("optimizer", self.optimizer, Optimizer, OPTIMIZERS)
        if not (isinstance(self.trains, str | tuple | list) and all(isinstance(p, str) for p in self.trains)):
            raise MethodError(
                "trains must be patterns of names, 'head.*' for one; got {trains!r}.", trains=self.trains
            )
        check_count(0, epochs=self.epochs, steps=self.steps)
        check_whole({"batch_size": self.batch_size}, MethodError)
        check_count(1, batch_size=self.batch_size)
        check_range("(0, inf]", MethodError, clip_norm=self.clip_norm)
        check_choice("clip_over must be", self.clip_over, ("all", "halves"), MethodError)
        check_choice("examples must be", self.examples, get_args(Use), MethodError)

    def but(self, **changes: Any) -> Phase:
        """Return this phase with some fields changed, e.g. ``local.but(trains="private", epochs=10)``.

        Where passes are asked for by ``epochs``, a number of ``steps`` that this phase has is dropped.
        """
        passes: dict[str, Any] = {"steps": None} if "epochs" in changes else {}
        return replace(self, **(passes | changes))

    @property
    def schedule(self) -> tuple[object, ...]:
        """What phases must agree in to take turns on the same mini-batches."""
        return (
            self.epochs if self.steps is None else 0,
            self.steps,
            self.batch_size,
            self.merge_single,
            self.examples,
        )

    def trained_names(self, split: Split, names: list[str]) -> list[str]:
        """Return which of ``names`` (the model's trainable parameters) this phase trains; what is frozen, it does not.

        Raises:
            MethodError: a pattern matches nothing.
        """
        names = [n for n in names if not (split.frozen and split.is_frozen(n))]
        if self.trains == "all":
            return names
        stay = split.private_names(names)
        if self.trains == "private":
            return stay
        if self.trains == "federated":
            return [n for n in names if n not in stay]
        return matching("trains", (self.trains,) if isinstance(self.trains, str) else self.trains, names)


telling = telling_arguments(
    {
        name: f"local=fedkeep.Phase({form})"
        for name, form in ({one.name: f"{one.name}={{got}}" for one in fields(Phase)} | OF_OPTIMIZER).items()
    }
)
"""Decorates what makes a method: an argument that belongs to its phase, or to the phase's optimiser, is told how it is written."""


def matching(what: str, patterns: Sequence[str], names: list[str]) -> list[str]:
    """Return which of ``names`` any of the patterns matches, in their order.

    Raises:
        MethodError: a pattern matches nothing; ``what`` says what it was given as.
    """
    for pattern in patterns:
        if not any(fnmatchcase(n, pattern) for n in names):
            raise MethodError(
                "{what}={pattern!r} matches no trainable parameter; they are {names}.",
                what=what,
                pattern=pattern,
                names=names,
            )
    return [n for n in names if any(fnmatchcase(n, p) for p in patterns)]
