"""Losses of a ranking's questions: the right item against others, all that stand in the question or some drawn anew.

``terms.cross_entropy()`` on a question is the softmax over all its candidates; ``Drawn`` around it the sampled softmax.
Training knows which candidate is the right one by the column ``label``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.hook_checks import check_count
from fedkeep.methods.labels import label_of, output_of
from fedkeep.methods.terms import Around, Term, cross_entropy, example_mean


@dataclass(frozen=True)
class Pointwise(Term):
    """−[log σ(s_r) + Σ_o log(1 − σ(s_o))] / candidates: is each the right one, yes or no? The mean over questions.

    Source: X. He et al., Neural Collaborative Filtering, WWW 2017 (arXiv:1708.05031), eq. 7.
    """

    reads_parameters = False  # it sees the model's output alone

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        scores, label = _asked(net, params, batch)
        wanted = torch.zeros_like(scores).scatter(1, label[:, None], 1.0)
        values = nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        return example_mean(values.mean(1), batch.get("weight"))


@dataclass(frozen=True)
class BPR(Term):
    """−log σ(s_r − s_o), the mean over the other candidates o, then over questions.

    Source: S. Rendle et al., BPR: Bayesian Personalized Ranking from Implicit Feedback, UAI 2009, without its penalty.
    """

    reads_parameters = False  # it sees the model's output alone

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        scores, label = _asked(net, params, batch)
        values = nn.functional.softplus(scores - scores.gather(1, label[:, None]))
        others = values.scatter(1, label[:, None], 0.0).sum(1) / (scores.shape[1] - 1)
        return example_mean(others, batch.get("weight"))


@dataclass(frozen=True)
class Drawn(Around):
    """A term of the right candidate and ``against`` of the others, drawn anew for each mini-batch, with repetition.

    The model is given the right item first, and scores it and those drawn alone. Where gradients are off, as for
    validation losses, all candidates stay. Draws come from torch's generator, which a local run seeds; so the engine
    ``vectorised`` refuses it.

    Attributes:
        term: the term, of the columns ``column`` and ``label``.
        against: how many of the others.
        column: of the candidates, shape (B, candidates).
    """

    term: Term = field(default_factory=cross_entropy)
    against: int = 4
    column: str = "item"

    def __post_init__(self) -> None:
        check_count(1, against=self.against)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        item = batch.get(self.column)
        if item is None or item.dim() != 2 or item.shape[1] < 2:
            raise MethodError(
                "Drawn wants a ranking's questions: a column {column!r} of the shape (examples, candidates); got "
                "{got} among {there}. leave_one_out makes them of ratings.",
                column=self.column,
                got="none" if item is None else tuple(item.shape),
                there=sorted(batch),
            )
        if torch.is_grad_enabled():
            label = label_of(batch, "label")[:, None]
            other = torch.randint(item.shape[1] - 1, (len(item), self.against), device=item.device)
            places = torch.cat([label, other + (other >= label)], 1)
            batch = {**batch, self.column: item.gather(1, places), "label": torch.zeros_like(label[:, 0])}
        return self.term(net, params, batch, received)


def pointwise() -> Term:
    """Return the binary cross-entropy of a question's candidates: 1 for the right one, 0 for the others."""
    return Pointwise()


def bpr() -> Term:
    """Return Bayesian personalised ranking: the right candidate's score above each other's."""
    return BPR()


def drawn(term: Term | None = None, against: int = 4) -> Term:
    """Return a term of the right candidate and some others, drawn anew; of the cross-entropy: the sampled softmax."""
    return Drawn(cross_entropy() if term is None else term, against)


def _asked(net: Net, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return scores, (B, candidates), and the right ones' places, (B,)."""
    scores, label = output_of(net(params, batch), None), label_of(batch, "label")
    if (
        scores.dim() != 2
        or scores.shape[1] < 2
        or label.shape != scores.shape[:1]
        or label.is_floating_point()
    ):
        raise MethodError(
            "A loss of a ranking's candidates wants scores of the shape (B, candidates) and the place of the right one "
            "for each, (B,); got scores of {scores} and labels of {shape}, {dtype}. "
            "Make questions of ratings by leave_one_out.",
            scores=tuple(scores.shape),
            shape=tuple(label.shape),
            dtype=label.dtype,
        )
    return scores, label
