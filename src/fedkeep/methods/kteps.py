"""KTEPS: a shared and a private branch that learn different features, the private one taught by the shared one.

Source: Li et al., Preliminary Steps Towards Federated Sentiment Classification, arXiv 2107.11956, §4, eq. 6–9 and
algorithm 1.
One round: (1) all clients download the model and the projection P_s; (2) each joins them with its own projection P_p
and classifier C_p, kept from its last participation; (3) with a = P_s(h̄) and b = P_p(h̄) it trains everything jointly
on L = L(C_s(a)) + L(C_p(b)) + λ1 HSIC(a, b) + λ2 L_kt; (4) it uploads the change of the shared part, with noise;
(5) the server averages, and the client keeps P_p and C_p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.branches import PRIVATE, TwoBranches
from fedkeep.methods.checks import check_choice, check_least, check_positive
from fedkeep.methods.client import Client, Tables
from fedkeep.methods.dependence import MIXTURE, SINGLE, hsic
from fedkeep.methods.features import Known
from fedkeep.methods.labels import check_rows
from fedkeep.methods.phase import Phase
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, CrossEntropy, Term, cross_entropy, example_mean
from fedkeep.privacy import GaussianNoise

ARCHITECTURES = {
    "A": ("classifier",),
    "B": ("encoder", "classifier"),
    "C": ("embedding", "encoder", "classifier"),
}
"""What is private in KTEPS, Table 8, by the parts of ``models.TextClassifier``."""

Kernel = Literal["mixture", "single", "median"]
DEFAULT = TwoBranches()


PLATEAU = 10  # rounds
NEAR = 0.95  # of the loss at chance


def note_on_plateau(loss: Term, classes: int | None, losses: Sequence[float]) -> str:
    """Return what to say of a run of KTEPS whose loss has not left 2 β ln C, that of knowing nothing; empty: it has.

    Args:
        loss: of the run's phase.
        classes: C; None where the task has none.
        losses: the training loss of each round.
    """
    last = losses[-PLATEAU:]
    if not isinstance(loss, BranchLoss) or not isinstance(loss.loss, CrossEntropy):
        return ""
    if not classes or len(last) < PLATEAU:
        return ""
    chance = 2 * loss.share * math.log(classes)
    if not all(value >= NEAR * chance for value in last):
        return ""
    return (
        f"The training loss of the last {PLATEAU} rounds was {min(last):.3g} to {max(last):.3g}, about that of two "
        f"branches that know nothing, {chance:.3g}. Train for longer, set diversity = 0 to see whether HSIC holds it "
        f"there, or take kernel = 'median', whose gradient does not shrink features."
    )


def knowledge_transfer(
    teacher: Tensor,
    student: Tensor,
    weight: Tensor | None = None,
    temperature: float = 4.0,
    student_temperature: float = 1.0,
) -> Tensor:
    """Return L_kt = −Σ_c σ(g_s; T)_c log σ(g_p; T_p)_c, the mean over examples; no gradient flows into the teacher.

    KTEPS, eq. 8, whose formula is lost; this form and T = 4, T_p = 1 are those of its first author's published code
    (FedRepo).

    Args:
        teacher: (B, C) logits g_s.
        student: (B, C) logits g_p.
        weight: (B,) of the examples.
        temperature, student_temperature: T and T_p, positive.
    """
    check_rows(teacher)
    wanted = (teacher.detach() / temperature).softmax(1)
    return example_mean(-(wanted * (student / student_temperature).log_softmax(1)).sum(1), weight)


@dataclass(frozen=True)
class BranchLoss(Around):
    """β (L(g_s) + L(g_p)) + λ1 HSIC(a, b) + λ2 L_kt(g_s → g_p), KTEPS eq. 9, whose β is lost; 1 here.

    Attributes:
        branches: the two branches.
        loss: L, of each branch's output.
        share: β, the weight of each branch's loss, positive.
        diversity: λ1, at least 0.
        transfer: λ2, at least 0.
        temperature, student_temperature: T and T_p of the transfer.
        widths: of HSIC's Gaussian kernels.
        unit, normalised: of HSIC; see ``dependence.hsic``.
    """

    branches: TwoBranches = DEFAULT
    loss: Term = cross_entropy()
    diversity: float = 0.01
    transfer: float = 0.01
    temperature: float = 4.0
    student_temperature: float = 1.0
    widths: tuple[float, ...] = MIXTURE
    share: float = 1.0
    unit: Literal["mean", "median"] = "mean"
    normalised: bool = False

    def __post_init__(self) -> None:
        check_least(0, diversity=self.diversity, transfer=self.transfer)
        check_positive(share=self.share)
        check_positive(temperature=self.temperature, student_temperature=self.student_temperature)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        a, b, g_s, g_p = self.branches.both(net, params, batch)
        weight = batch.get("weight")
        total = self.loss(Known(net, g_s), params, batch, received)
        total = total + self.loss(Known(net, g_p), params, batch, received)
        if self.share != 1:
            total = self.share * total
        if self.diversity:
            related = hsic(a, b, weight, self.widths, unit=self.unit, normalised=self.normalised)
            total = total + self.diversity * related
        if self.transfer:
            taught = knowledge_transfer(g_s, g_p, weight, self.temperature, self.student_temperature)
            total = total + self.transfer * taught
        return total


@dataclass(frozen=True)
class PredictBranches:
    """Predict with the shared branch (``"s"``), the private one (``"p"``), or the mean of both logits (``"sp"``).

    Attributes:
        branches: the two branches.
        how: which (KTEPS, Table 6).
    """

    branches: TwoBranches = DEFAULT
    how: Literal["s", "p", "sp"] = "sp"

    def __post_init__(self) -> None:
        check_choice("predict", self.how, ("s", "p", "sp"))

    def __call__(self, net: Net, params: Params, batch: Batch) -> Tensor:
        """Return logits, shape (B, C)."""
        if self.how == "s":
            return self.branches.shared(net, params, batch)[2]
        found = self.branches.both(net, params, batch)
        if self.how == "p":
            return found.private_logits
        return (found.shared_logits + found.private_logits) / 2


class KtepsOptions(TypedDict, total=False):
    """The arguments of ``kteps`` but for its noise, for methods that build on it."""

    diversity: float
    transfer: float
    architecture: Literal["A", "B", "C"] | tuple[str, ...]
    projections: bool
    temperature: float
    student_temperature: float
    kernel: Kernel
    normalised: bool
    share: float
    predict: Literal["s", "p", "sp"]
    tables: Tables
    local: Phase
    server: Server


def kteps(
    diversity: float = 0.01,
    transfer: float = 0.01,
    *,
    architecture: Literal["A", "B", "C"] | tuple[str, ...] = "A",
    projections: bool = True,
    temperature: float = 4.0,
    student_temperature: float = 1.0,
    kernel: Kernel = "mixture",
    normalised: bool = False,
    share: float = 1.0,
    predict: Literal["s", "p", "sp"] = "sp",
    noise: float = 1e-3,
    tables: Tables = "local",
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return KTEPS, for a model with ``features`` and ``head`` whose head is its part ``classifier``.

    With an embedding table that the model names in ``lookup``, each client trains and sends the rows that it uses
    (§4.2, Remark 3).

    Args:
        diversity: λ1, of HSIC between the branches' features.
        transfer: λ2, of the knowledge transfer.
        architecture: what the private branch has for itself: A the classifier, B encoder and classifier, C the whole
            model (Table 8), or the names of the model's parts.
        projections: P_s and P_p before the classifiers.
        temperature, student_temperature: of the transfer's teacher and student.
        kernel: of HSIC: three Gaussians or one, whose gradient rewards shrinking features, or one Gaussian by the
            batch's median distance, which doesn't; see ``dependence.hsic``.
        normalised: HSIC is divided by those of each branch with itself.
        share: of each branch's L in the loss; ½: their mean, at which the trunk's gradient is about FedAvg's.
        predict: how a client predicts; the shared part alone predicts with the shared branch.
        noise: σ of the noise on uploads (the paper's value is lost).
        tables: as ``Client.tables``.
        local: the local phase, with L of each branch; patterns of its optimiser's rates may name ``private.*``.
        server: see ``methods``.
    """
    if isinstance(architecture, str) and architecture not in ARCHITECTURES:
        raise MethodError(
            f"architecture must be one of {list(ARCHITECTURES)} or the names of the model's parts; got "
            f"{architecture!r}."
        )
    check_choice("kernel", kernel, get_args(Kernel))
    copies = ARCHITECTURES[architecture] if isinstance(architecture, str) else tuple(architecture)
    branches = TwoBranches(copies, projections)
    loss = BranchLoss(
        branches=branches,
        loss=local.loss,
        diversity=float(diversity),
        transfer=float(transfer),
        temperature=float(temperature),
        student_temperature=float(student_temperature),
        widths=MIXTURE if kernel == "mixture" else SINGLE,
        share=float(share),
        unit="median" if kernel == "median" else "mean",
        normalised=normalised,
    )
    phase = local.but(loss=loss)
    return Method(
        name="kteps",
        split=PRIVATE,
        client=Client(phases=(phase,), tables=tables),
        server=server,
        adapt=private_part(phase),
        predict=PredictBranches(branches=branches, how=predict),
        predict_shared=PredictBranches(branches=branches, how="s"),
        extend=branches,
        upload=(GaussianNoise(float(noise)),) if noise else (),
    )
