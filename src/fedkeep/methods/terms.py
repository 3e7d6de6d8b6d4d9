"""Terms: the summands of a loss, pure functions ``(net, params, batch, received) -> scalar``.

Terms add and scale: ``cross_entropy() + 0.01 * l2_penalty("user")``. A term is weighted per example by the batch's
column ``weight`` where there is one, so that padding (weight 0) changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, check_choice, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.class_weights import NO_LABEL, checked_weights, class_weighted_mean
from fedkeep.methods.labels import label_of, output_of
from fedkeep.tasks import KINDS, Kind, of_classes
from fedkeep.tasks.multi_label import check_labels
from fedkeep.tasks.multiclass import check_classes
from fedkeep.tasks.regression import check_regression


@dataclass(frozen=True)
class Term:
    """A summand of a loss; subclasses are frozen values with ``__call__``.

    What a class states as ``reads_parameters`` and ``pull`` holds for its own ``__call__``, or, where it has none yet,
    for that of its direct heirs. A class that replaces ``__call__`` states them anew; else they are not known.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for name in ("reads_parameters", "pull"):
            if not _stated(cls, name):
                setattr(cls, name, vars(Term)[name])

    @property
    def reads_parameters(self) -> bool | None:
        """Tell whether the term looks at parameters other than through the model's output; None: it is traced.

        A row of an embedding table that no example looks up then may have a gradient, so that tables are trained whole.
        """
        return None

    @property
    def reads_received(self) -> bool:
        """Tell whether the term compares parameters with the received ones.

        Running the model with the received parameters does not count as comparing. A federated row that no example of
        a client looks up equals the received one, so it has no gradient; a row that an earlier
        mini-batch moved has one.
        """
        return False

    @property
    def pull(self) -> float | None:
        """λ of a comparison ½ λ ‖w − w^t‖² over the trainable federated parameters.

        0: the term makes no such comparison. None: it makes one of another form. With a number, rows of a table are
        updated when they are next looked up, as the steps that they missed are known in closed form.
        """
        return None if self.reads_received else 0.0

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        """Return the term's value, a scalar.

        Args:
            net: the model as a function.
            params: all parameters of this client, as they are now.
            batch: columns by name, first axis examples.
            received: the federated parameters as the server sent them; no gradient flows into them.
        """
        raise TypeError(f"{type(self).__name__} is no term: it lacks __call__.")

    def __add__(self, other: Term) -> Term:
        return TermSum((self, other))

    def __rmul__(self, factor: float) -> Term:
        return Scaled(float(factor), self)


def _stated(cls: type[Term], name: str) -> bool:
    """Tell whether what a class has as ``name`` is of the ``__call__`` that it has; a field is of each value."""
    by = next(each for each in cls.__mro__ if name in vars(each))
    replaced = [each for each in cls.__mro__[: cls.__mro__.index(by)] if "__call__" in vars(each)]
    return len(replaced) <= (by.__call__ is Term.__call__) or name in getattr(cls, "__dataclass_fields__", ())


class Around(Term):
    """A term made of another one, its field ``loss`` or ``term``: it reads what that one reads."""

    @property
    def inner(self) -> Term:
        """The other one."""
        found: Term = self.loss if hasattr(self, "loss") else self.term  # type: ignore[attr-defined]
        return found

    @property
    def reads_parameters(self) -> bool | None:
        """As the other one."""
        return self.inner.reads_parameters

    @property
    def reads_received(self) -> bool:
        """As the other one."""
        return self.inner.reads_received


@dataclass(frozen=True)
class TermSum(Term):
    """The sum of two or more terms."""

    terms: tuple[Term, ...] = ()

    @property
    def reads_parameters(self) -> bool | None:
        """True if one of the terms does."""
        each = {term.reads_parameters for term in self.terms}
        return True if True in each else None if None in each else False

    @property
    def reads_received(self) -> bool:
        """True if one of the terms does."""
        return any(term.reads_received for term in self.terms)

    @property
    def pull(self) -> float | None:
        """The sum of the terms'."""
        pulls = [term.pull for term in self.terms]
        known = [p for p in pulls if p is not None]
        return sum(known) if len(known) == len(pulls) else None

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        values = [term(net, params, batch, received) for term in self.terms]
        return torch.stack(values).sum()


@dataclass(frozen=True)
class Scaled(Around):
    """A term times a constant."""

    factor: float = 1.0
    term: Term = Term()

    @property
    def pull(self) -> float | None:
        """The term's, times the constant."""
        return None if self.term.pull is None else self.factor * self.term.pull

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        return self.factor * self.term(net, params, batch, received)


def dot(slopes: Params, params: Params) -> Tensor:
    """Return Σ ⟨slope, parameter⟩ over the names of ``slopes``, a scalar."""
    return torch.stack([(slopes[n] * params[n]).sum() for n in sorted(slopes)]).sum()


def unit(x: Tensor, dim: int) -> Tensor:
    """Return x / ‖x‖ along a dimension; zeros stay zeros, also in float16, whose least normal number is 6e-5."""
    return nn.functional.normalize(x, dim=dim, eps=max(1e-12, torch.finfo(x.dtype).tiny))


def example_mean(values: Tensor, weight: Tensor | None, keep: Tensor | None = None) -> Tensor:
    """Return the weighted mean of per-example values, shape (examples,); 0 where no weight is left.

    ``keep`` marks the examples that count at all, e.g. those with a label for this task.
    """
    if weight is None and keep is None:
        return values.mean()
    w = torch.ones_like(values) if weight is None else weight.to(values.dtype)
    if keep is not None:
        w = w * keep
        values = torch.where(keep, values, 0.0)
    return (w * values).sum() / w.sum().clamp_min(torch.finfo(values.dtype).tiny)


@dataclass(frozen=True)
class CrossEntropy(Term):
    """−log softmax(net(batch))[label], the mean over examples (KTEPS eq. 5).

    With a label for each token, (B, T), the model gives logits (B, T, classes); with one for each pixel, (B, H, W), it gives
    (B, classes, H, W). The mean is then over the tokens or pixels of the mini-batch whose label is not negative.

    Attributes:
        label: the column that holds the class, 0-based; negative: this example has no label for this task.
        task: the key of the output, for a model that returns a dict of logits (one per task).
        smoothing: the share of the label that is spread evenly over all classes (label smoothing), in [0, 1).
        class_weights: a weight for each class; the mean is then weighted by those of the labels.
    """

    label: str = "label"
    task: str | None = None
    smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_range("[0, 1)", MethodError, smoothing=self.smoothing)
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", checked_weights(self.class_weights))

    reads_parameters = False  # it sees the model's output alone

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        logits = output_of(net(params, batch), self.task)
        label = label_of(batch, self.label)
        if label.is_floating_point():
            raise MethodError(
                "Cross-entropy wants classes, but the column {label!r} holds {dtype}. For numbers as "
                "labels take the loss squared_error.",
                label=self.label,
                dtype=label.dtype,
            )
        weight, tokens = batch.get("weight"), label.dim() > 1
        if tokens:
            kind = of_classes(label.dim())
            kind.check_output(logits, label)
            logits = kind.classes_last(logits)
            each = (-1, *[1] * (label.dim() - 1))
            weight = None if weight is None else weight.reshape(each).expand_as(label).flatten()
            logits, label = logits.flatten(0, -2), label.flatten()
        check_classes(logits)
        keep = None if self.task is None and not tokens else label >= 0
        if self.class_weights is not None:
            return class_weighted_mean(logits, label, self.class_weights, self.smoothing, weight, keep)
        if keep is None:
            if weight is None:
                return self._of(logits, label, "mean")
            return example_mean(self._of(logits, label, "none"), weight)
        values = self._of(logits, label.clamp_min(0), "none")
        return example_mean(values, weight, keep)

    def _of(self, logits: Tensor, label: Tensor, reduction: str) -> Tensor:
        return nn.functional.cross_entropy(
            logits, label, ignore_index=NO_LABEL, reduction=reduction, label_smoothing=self.smoothing
        )


@dataclass(frozen=True)
class SquaredError(Term):
    """(net(batch) − label)², the mean over an example's outputs where it has several, then over examples.

    Attributes:
        label: the column that holds the target, a float.
        task: the key of the output, for a model that returns a dict.
    """

    label: str = "label"
    task: str | None = None

    reads_parameters = False  # it sees the model's output alone

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        out = output_of(net(params, batch), self.task)
        label = label_of(batch, self.label).to(torch.promote_types(out.dtype, torch.float32))
        check_regression(out, label)
        keep = None if self.task is None else ~torch.isnan(label)
        values = (out - label.nan_to_num()) ** 2 if keep is not None else (out - label) ** 2
        if label.dim() > 1:
            values = values.flatten(1).mean(1)
            keep = None if keep is None else keep.flatten(1).all(1)
        return example_mean(values, batch.get("weight"), keep)


@dataclass(frozen=True)
class BinaryCrossEntropy(Term):
    """−y log σ(z) − (1 − y) log(1 − σ(z)), the mean over an example's labels, then over examples.

    Attributes:
        label: the column that holds a row of 0 and 1 for each example; below 0: it has no labels for this task.
        task: the key of the output, for a model that returns a dict.
    """

    label: str = "label"
    task: str | None = None

    reads_parameters = False  # it sees the model's output alone

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        logits = output_of(net(params, batch), self.task)
        label = label_of(batch, self.label)
        check_labels(logits, label)
        keep = None if self.task is None else (label >= 0).flatten(1).all(1)
        wanted = label.clamp_min(0).to(logits.dtype)
        values = nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        return example_mean(values.flatten(1).mean(1), batch.get("weight"), keep)


@dataclass(frozen=True)
class TaskLoss(Term):
    """The loss that a kind of task is judged by, the mean over labels; of several labels of an example each counts.

    Attributes:
        kind: of the task.
        label: the column of labels; in one of several tasks NaN, or below 0 where labels are whole, is none.
        task: the key of the output, for a model that returns a dict.
    """

    kind: Kind
    label: str = "label"
    task: str | None = None

    reads_parameters = False  # it sees the model's output alone

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        out = output_of(net(params, batch), self.task)
        label = label_of(batch, self.label)
        self.kind.check_output(out, label)
        weight, each = batch.get("weight"), (-1, *[1] * (label.dim() - 1))
        weight = None if weight is None else weight.reshape(each).expand_as(label).flatten()
        out, label = self.kind.classes_last(out).flatten(0, label.dim() - 1), label.flatten()
        keep = None
        if self.task is not None or self.kind.ignored is not None:
            keep = label >= 0 if self.kind.whole else ~torch.isnan(label)
            label = label.clamp_min(0) if self.kind.whole else label.nan_to_num()
        return example_mean(self.kind.judge(out, label)[0], weight, keep)


@dataclass(frozen=True)
class L2Penalty(Term):
    """½ Σ ‖w‖² over the client's own parameters that a pattern names.

    In split training these are one user's own values, which FURL's equation 1 allows; a penalty on the matrix of all
    users' values is what it forbids.
    """

    pattern: str = "*"

    reads_parameters = True  # it is of the values themselves

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        chosen = [
            v for name, v in params.items() if fnmatchcase(name, self.pattern) and v.is_floating_point()
        ]
        if not chosen:
            raise MethodError(
                "The penalty's pattern {pattern!r} matches no parameter; they are {there}.",
                pattern=self.pattern,
                there=list(params),
            )
        return 0.5 * torch.stack([(v**2).sum() for v in chosen]).sum()


def cross_entropy(
    label: str = "label",
    task: str | None = None,
    smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> Term:
    """Return the cross-entropy of the logits against the column ``label``.

    Args:
        label, task, smoothing: as of ``CrossEntropy``.
        class_weights: a number of at least 0 for each class, as torch's ``weight``: the sum of weighted losses is
            divided by the sum of the labels' weights. A mini-batch whose labels all weigh 0 has the loss 0, not NaN.
    """
    return CrossEntropy(label, task, float(smoothing), class_weights)  # type: ignore[arg-type]


def squared_error(label: str = "label", task: str | None = None) -> Term:
    """Return the squared error against the column ``label``."""
    return SquaredError(label, task)


def binary_cross_entropy(label: str = "label", task: str | None = None) -> Term:
    """Return the cross-entropy of each of several labels, yes or no, against the column ``label``."""
    return BinaryCrossEntropy(label, task)


def named(loss: str, label: str = "label", task: str | None = None) -> Term:
    """Return the loss of a kind of task, by its name in configurations (``Kind.loss``).

    Args:
        loss: e.g. ``"squared_error"``.
        label: the column of labels.
        task: the key of the output, for a model that returns a dict.

    Raises:
        MethodError: no kind of task has a loss of this name.
    """
    known = {
        "cross_entropy": cross_entropy,
        "squared_error": squared_error,
        "binary_cross_entropy": binary_cross_entropy,
    }
    kinds = {kind.loss: kind for kind in KINDS.values()}
    check_choice("Wanted the loss", loss, list(kinds), MethodError)
    return known[loss](label, task) if loss in known else TaskLoss(kinds[loss], label, task)


def l2_penalty(pattern: str) -> Term:
    """Return ½‖·‖² of the client's own parameters that ``pattern`` names."""
    return L2Penalty(pattern)


def multi_task(terms: Mapping[str, Term], weights: Mapping[str, float] | None = None) -> Term:
    """Return Σ_τ ω_τ L_τ over tasks that share the private user vector (methods after FURL §6).

    Args:
        terms: a loss per task, e.g. ``{"channel": cross_entropy("channel", task="channel")}``.
        weights: ω_τ by task; 1 where not given.
    """
    unknown = set(weights or {}) - set(terms)
    if unknown or not terms:
        raise MethodError(
            "Weights are given for {unknown}, but the tasks are {terms}.",
            unknown=sorted(unknown),
            terms=sorted(terms),
        )
    return TermSum(tuple(Scaled(float((weights or {}).get(name, 1.0)), term) for name, term in terms.items()))
