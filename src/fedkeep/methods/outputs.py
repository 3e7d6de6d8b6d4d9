"""Terms and predictions of models with several outputs: another method of the model than ``forward``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.features import Known
from fedkeep.methods.labels import class_of
from fedkeep.methods.terms import Around, CrossEntropy, Sum, Term, example_mean


@dataclass(frozen=True)
class OnOutput(Around):
    """A term of what another method of the model returns.

    Attributes:
        output: the method, e.g. ``global_logits``.
        term: the term.
    """

    output: str
    term: Term

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        return self.term(Known(net, self.output), params, batch, received)


@dataclass(frozen=True)
class NegativeLogLikelihood(Term):
    """−net(batch)[label] of log-probabilities as they are, not normalised; the mean over examples.

    Attributes:
        label: the column that holds the class, 0-based.
    """

    label: str = "label"

    reads_parameters = False  # it sees the model's output alone

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        chosen = net(params, batch).gather(1, class_of(batch, self.label).unsqueeze(1)).squeeze(1)
        return example_mean(-chosen, batch.get("weight"))


@dataclass(frozen=True)
class PredictOutput:
    """Predict with another method of the model than ``forward``.

    Attributes:
        output: the method.
    """

    output: str

    def __call__(self, net: Net, params: Params, batch: Batch) -> Any:
        """Return the model's output."""
        return net.call(self.output, params, batch)


def as_likelihood(term: Term) -> Term:
    """Return a loss whose cross-entropies take log-probabilities as they are.

    Raises:
        MethodError: one of them is of several outputs, of smoothed labels, or of weighted classes.
    """
    if isinstance(term, CrossEntropy):
        if term.task is not None:
            raise MethodError("mix='logprob' mixes one output; the loss names a task. Use mix='probability'.")
        if term.smoothing:
            raise MethodError("mix='logprob' knows no label smoothing. Use mix='probability'.")
        if term.class_weights is not None:
            raise MethodError("mix='logprob' knows no class weights. Use mix='probability'.")
        return NegativeLogLikelihood(term.label)
    if isinstance(term, Sum):
        return Sum(tuple(map(as_likelihood, term.terms)))
    inner = getattr(term, "term", None)  # a term around another one: scaled, of augmented images
    return replace(term, term=as_likelihood(inner)) if isinstance(inner, Term) else term  # type: ignore[call-arg]
