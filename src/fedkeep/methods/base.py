"""The two records that define a method: ``Phase``, one pass of local training, and ``Method``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from fedkeep.core.describe import check_kind
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.optim import Optimizer, sgd
from fedkeep.core.params import Batch, Params
from fedkeep.methods.terms import Term, cross_entropy
from fedkeep.privacy import Chain, Link
from fedkeep.split import Split

Predict = Callable[[Net, Params, Batch], Any]
Patterns = str | tuple[str, ...] | list[str]
OPTIMIZERS = "one of fedkeep's optimisers, e.g. fedkeep.sgd(0.1)"


def forward(net: Net, params: Params, batch: Batch) -> Any:
    """Predict with the model's own ``forward``."""
    return net(params, batch)


@dataclass(frozen=True)
class EarlyStopping:
    """Stops a phase when the client's own validation loss no longer falls, and keeps the best values.

    The loss is measured after passes 1, 1 + every, 1 + 2 · every, … (federated mixture of experts, authors' code);
    the phase ends with what it had at the lowest one, a copy.

    Attributes:
        every: passes between measurements.
        patience: measurements without improvement until the phase stops.
        min_improvement: an improvement is a loss lower than the best so far by more than this.
    """

    every: int = 5
    patience: int = 10
    min_improvement: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 1 or self.patience < 1:
            raise MethodError(f"every and patience must be at least 1; got {self.every} and {self.patience}.")
        if not self.min_improvement >= 0:
            raise MethodError(f"min_improvement must be at least 0; got {self.min_improvement}.")


@dataclass(frozen=True)
class Phase:
    """One pass of local training.

    Attributes:
        loss: the term that is minimised.
        trains: ``"all"``, ``"federated"``, ``"private"``, or name patterns; everything else is frozen.
        optimizer: the local optimiser; its state is fresh at every round.
        epochs: passes over the client's examples.
        steps: if given, this many mini-batches instead of ``epochs`` passes.
        batch_size: examples a mini-batch; the last one of a pass may be smaller.
        clip_norm: if given, gradients are scaled down to this L2 norm over everything the phase trains.
        examples: ``"opted_in"``: examples whose column ``opted_in`` is true (all, where there is no such column);
            ``"all"``: every example, allowed only where nothing that is trained leaves the client.
        part: ``"support"`` or ``"query"``: one of two disjoint random halves of these examples, the same in every
            round (an odd one belongs to the query half); ``"all"``: no division.
        repeats: optimiser steps on each mini-batch.
        early_stopping: ends the phase by the client's split ``valid``; allowed only where nothing that is trained
            leaves the client.
        by_client: in centralised training, a mini-batch holds examples of one client, computed with that client's own
            private values (multi-task learning); elsewhere it always does.
    """

    loss: Term = field(default_factory=cross_entropy)
    trains: str | tuple[str, ...] = "all"
    optimizer: Optimizer = field(default_factory=sgd)
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 32
    clip_norm: float | None = None
    examples: Literal["opted_in", "all"] = "opted_in"
    part: Literal["all", "support", "query"] = "all"
    repeats: int = 1
    early_stopping: EarlyStopping | None = None
    by_client: bool = False

    def __post_init__(self) -> None:
        check_kind("loss", self.loss, Term, "a term, e.g. fedkeep.methods.terms.cross_entropy()")
        check_kind("optimizer", self.optimizer, Optimizer, OPTIMIZERS)
        if self.repeats < 1:
            raise MethodError(f"repeats must be at least 1; got {self.repeats}.")
        if self.epochs < 0 or (self.steps is not None and self.steps < 0):
            raise MethodError(f"epochs and steps must be at least 0; got {self.epochs} and {self.steps}.")
        if self.batch_size < 1:
            raise MethodError(f"batch_size must be at least 1; got {self.batch_size}.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise MethodError(f"clip_norm must be positive, or None for no clipping; got {self.clip_norm}.")
        if self.examples not in ("opted_in", "all"):
            raise MethodError(f"examples must be 'opted_in' or 'all'; got {self.examples!r}.")
        if self.part not in ("all", "support", "query"):
            raise MethodError(f"part must be 'all', 'support' or 'query'; got {self.part!r}.")

    def trained_names(self, split: Split, names: list[str]) -> list[str]:
        """Return which of ``names`` (the model's trainable parameters) this phase trains.

        Raises:
            MethodError: a pattern matches nothing.
        """
        if self.trains == "all":
            return names
        if self.trains == "private":
            return [n for n in names if split.is_private(n)]
        if self.trains == "federated":
            return [n for n in names if not split.is_private(n)]
        patterns = (self.trains,) if isinstance(self.trains, str) else self.trains
        for pattern in patterns:
            if not any(fnmatchcase(n, pattern) for n in names):
                raise MethodError(f"trains={pattern!r} matches no trainable parameter; they are {names}.")
        return [n for n in names if any(fnmatchcase(n, p) for p in patterns)]


@dataclass(frozen=True)
class Method:
    """A federated method, as a value. The defaults are FedAvg (McMahan et al., 2017).

    Attributes:
        name: for tables and records.
        split: which parameters are private.
        phases: the passes of one round of local training, in order.
        weighting: ``"examples"`` (FURL eq. 4, c_k / Σc; c_k counts the examples that train what leaves) or
            ``"uniform"`` (1 / m).
        private_scale: z of FURL eq. 6: 1 keeps the locally trained private values (eq. 7), ``"fedavg"`` moves them
            by c_k / Σ_j c_j of their change, as FedAvg on one joint model would.
        private_init: a new client's private values: a number (FURL: zeros), ``("normal", std)`` drawn from a stream
            of the client's own, or ``"model"``, the module's initial values.
        server_optimizer: applied to the mean change as a pseudo-gradient (FedOpt); ``sgd(1.0)`` is plain averaging.
        adapt: phases that personalise a client after federation; nothing of theirs is uploaded.
        predict: how the personalised model predicts.
        predict_shared: how the shared part alone predicts, given default private values; None: it can't.
        extend: adds the method's own modules to the user's model; None: nothing to add.
        stateless: every round starts from ``private_init``, not from a client's last private values; those are kept
            to judge with, never to train from.
        adapt_split: what is a client's own while it adapts, e.g. ``Split("*")`` for a fine-tuned copy of everything;
            None: what ``split`` says.
        adapt_start: gives values that a client's adaptation starts from, by name, of its own ones; it is given the
            client's whole model as it is before.
        turns: ``"phases"``: a round's phases run one after the other; ``"batches"``: they take turns on every
            mini-batch of the first one's passes.
        upload: the chain that an upload goes through, e.g. compression and noise; decoded before averaging.
        tables: embedding tables that the module names in ``lookup`` are trained and sent by the rows that the client's
            examples use: ``"exact"``, where that equals training the whole table; ``"local"``, always (KTEPS §4.2,
            Remark 3: other rows stay as received); ``"whole"``, never.
        missing_rows: a table's row that a client doesn't hold counts as ``"unchanged"``, with the client's weight, or
            the mean is over ``"owners_only"``.
        publish: what leaves the client instead of what it trained, as a function of all its trained parameters; e.g.
            copies of private values under federated names (FedFusion's extractor). None: what it trained.
    """

    name: str = "fedavg"
    split: Split = Split()
    phases: tuple[Phase, ...] = (Phase(),)
    weighting: Literal["examples", "uniform"] = "examples"
    private_scale: Literal[1, "fedavg"] = 1
    private_init: float | tuple[Literal["normal"], float] | Literal["model"] = "model"
    server_optimizer: Optimizer = sgd(1.0)
    adapt: tuple[Phase, ...] = ()
    predict: Predict = forward
    predict_shared: Predict | None = forward
    extend: Callable[[nn.Module], nn.Module] | None = None
    stateless: bool = False
    adapt_split: Split | None = None
    adapt_start: Callable[[Params], Params] | None = None
    turns: Literal["phases", "batches"] = "phases"
    upload: tuple[Link, ...] = ()
    tables: Literal["exact", "local", "whole"] = "exact"
    missing_rows: Literal["unchanged", "owners_only"] = "unchanged"
    publish: Callable[[Params], Params] | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("turns", ("phases", "batches")),
            ("tables", ("exact", "local", "whole")),
            ("missing_rows", ("unchanged", "owners_only")),
        ):
            if getattr(self, name) not in allowed:
                raise MethodError(f"{name} must be one of {list(allowed)}; got {getattr(self, name)!r}.")
        check_kind("server_optimizer", self.server_optimizer, Optimizer, OPTIMIZERS)
        if self.turns == "batches" and len({_schedule_of(p) for p in self.phases}) > 1:
            raise MethodError(
                f"The phases of {self.name!r} take turns on every mini-batch, so they must agree in epochs, steps, "
                f"batch_size, examples and part."
            )
        if self.turns == "batches" and any(p.early_stopping for p in self.phases):
            raise MethodError(f"The phases of {self.name!r} take turns, so none can stop early.")
        if not self.phases:
            raise MethodError(f"Method {self.name!r} has no phase: a round would train nothing.")
        if self.weighting not in ("examples", "uniform"):
            raise MethodError(f"weighting must be 'examples' or 'uniform'; got {self.weighting!r}.")
        if self.private_scale not in (1, "fedavg"):
            raise MethodError(f"private_scale must be 1 or 'fedavg'; got {self.private_scale!r}.")
        if self.stateless and self.private_scale != 1:
            raise MethodError("A stateless method moves no kept private value, so private_scale must be 1.")

    def check(self, module: nn.Module) -> None:
        """Check the method against a module: the split, the phases' patterns, and that no upload uses opt-out examples.

        Raises:
            SplitError, MethodError, ConfigError: with what doesn't fit.
        """
        self.split.check(module)
        if self.adapt_split is not None:
            self.adapt_split.check(module)
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        everything = {
            n
            for phase in self.phases
            if phase.examples == "all"
            for n in phase.trained_names(self.split, names)
            if self.split.is_private(n)
        }
        if self.publish is not None and (everything or any(p.early_stopping for p in self.phases)):
            raise MethodError(
                f"{self.name!r} publishes private values, so opted-out and validation examples, which train or choose "
                f"them, would influence what leaves the client. Use examples='opted_in' and no early stopping."
            )
        federated = [n for n in names if not self.split.is_private(n)]
        received = {n: p.detach() for n, p in module.named_parameters() if n in federated}
        Chain(self.upload).client_state(received)  # a link that cannot take these parameters says so now
        self.server_optimizer.check_patterns(federated)
        for phase in self.adapt:
            phase.trained_names(self.split, names)
            phase.optimizer.check_patterns(names)
        for phase in self.phases:
            trained = phase.trained_names(self.split, names)
            phase.optimizer.check_patterns(names)
            leaves = [n for n in trained if not self.split.is_private(n)]
            if phase.early_stopping and leaves:
                raise MethodError(
                    f"A phase of {self.name!r} that trains the federated {leaves[0]!r} can't stop early by a client's "
                    f"own validation examples, which would influence what leaves the client. Stop private phases alone."
                )
            if phase.examples == "all" and leaves:
                raise MethodError(
                    f"A phase of {self.name!r} trains the federated {leaves[0]!r} on all examples, so opted-out "
                    f"examples would influence what leaves the client. Use examples='opted_in', or train private "
                    f"parameters alone."
                )
            both = sorted(everything & set(trained))
            if leaves and both:
                raise MethodError(
                    f"{self.name!r} trains the private {both[0]!r} on all examples in one phase and together with the "
                    f"federated {leaves[0]!r} in another, so opted-out examples would influence what leaves the "
                    f"client. Use examples='opted_in' in both."
                )

    def leaving(self, names: list[str]) -> list[Phase]:
        """Return the phases that train something that leaves the client, given the trainable names."""
        return [
            p for p in self.phases if not all(map(self.split.is_private, p.trained_names(self.split, names)))
        ]

    def waits(self, names: Sequence[str]) -> bool:
        """Tell whether clients have models of their own only after adapting, given the trainable names.

        Rounds then train no private parameter, and what they make is judged by the shared part.
        """
        rounds, later = (
            {n for p in phases for n in p.trained_names(self.split, list(names)) if self.split.is_private(n)}
            for phases in (self.phases, self.adapt)
        )
        return bool(later) and not rounds and self.predict_shared is not None

    def but(self, **changes: Any) -> Method:
        """Return this method with some fields changed, e.g. ``furl().but(name="mine", weighting="uniform")``."""
        return replace(self, **changes)


def _schedule_of(phase: Phase) -> tuple[object, ...]:
    return (phase.epochs, phase.steps, phase.batch_size, phase.examples, phase.part)
