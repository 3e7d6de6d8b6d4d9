"""KTEPS: a shared and a private branch that learn different features, the private one taught by the shared one.

Source: Li et al., Preliminary Steps Towards Federated Sentiment Classification, arXiv 2107.11956, §4, eq. 6–9 and
algorithm 1. Other readings of its text are methods of the papers' package.
One round: (1) all clients download the model and the projection P_s; (2) each joins them with its own projection P_p
and classifier C_p, kept from its last participation; (3) with a = P_s(h̄) and b = P_p(h̄) it trains everything jointly
on L = L(C_s(a)) + L(C_p(b)) + λ1 HSIC(a, b) + λ2 L_kt; (4) it uploads the change of the shared part, with noise;
(5) the server averages, and the client keeps P_p and C_p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from torch import Tensor

from fedkeep.core.errors import MethodError, check_choice, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.core.records import Record
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.branches import PRIVATE, TwoBranches
from fedkeep.methods.client import Client, Tables
from fedkeep.methods.dependence import SINGLE, hsic
from fedkeep.methods.features import Known
from fedkeep.methods.labels import check_rows
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, CrossEntropy, Term, cross_entropy, example_mean
from fedkeep.privacy import GaussianNoise

Kernel = Literal["mixture", "median"]
DEFAULT = TwoBranches()
PLATEAU = 10  # rounds
NEAR = 0.95  # of the loss at chance


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
    """L(g_s) + L(g_p) + λ1 HSIC(a, b) + λ2 L_kt(g_s → g_p), KTEPS eq. 9.

    Attributes:
        branches: the two branches.
        loss: L, of each branch's output.
        diversity: λ1, at least 0.
        transfer: λ2, at least 0.
        temperature: T of the transfer's teacher, positive.
        kernel: of HSIC, as in ``kteps``.
    """

    branches: TwoBranches = DEFAULT
    loss: Term = cross_entropy()
    diversity: float = 0.01
    transfer: float = 0.01
    temperature: float = 4.0
    kernel: Kernel = "mixture"

    def __post_init__(self) -> None:
        check_range("[0, inf]", MethodError, diversity=self.diversity, transfer=self.transfer)
        check_range("(0, inf]", MethodError, temperature=self.temperature)
        check_choice("kernel must be", self.kernel, get_args(Kernel), MethodError)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        a, b, g_s, g_p = self.branches.both(net, params, batch)
        weight = batch.get("weight")
        total = self.loss(Known(net, g_s), params, batch, received)
        total = total + self.loss(Known(net, g_p), params, batch, received)
        if self.diversity:
            median = self.kernel == "median"
            related = hsic(a, b, weight, SINGLE, unit="median") if median else hsic(a, b, weight)
            total = total + self.diversity * related
        if self.transfer:
            total = total + self.transfer * knowledge_transfer(g_s, g_p, weight, self.temperature)
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
        check_choice("predict must be", self.how, ("s", "p", "sp"), MethodError)

    def __call__(self, net: Net, params: Params, batch: Batch) -> Tensor:
        """Return logits, shape (B, C)."""
        if self.how == "s":
            return self.branches.shared(net, params, batch)[2]
        found = self.branches.both(net, params, batch)
        if self.how == "p":
            return found.private_logits
        return (found.shared_logits + found.private_logits) / 2


@dataclass(frozen=True)
class Plateau:
    """A note on a run whose loss has not left that of branches that know nothing, ``losses`` times ln C.

    Attributes:
        losses: how often cross-entropy counts in the loss: once for each branch.
    """

    losses: float = 2.0

    def __call__(self, history: Sequence[Record], meta: Mapping[str, Any]) -> str:
        """Return the note, of a run's records and the data's ``classes``; empty: there is nothing to say."""
        last = [r.value for r in history if r.split == "train" and r.metric == "loss"][-PLATEAU:]
        chance = self.losses * math.log(meta.get("classes") or 1)
        if not chance or len(last) < PLATEAU or not all(value >= NEAR * chance for value in last):
            return ""
        return (
            f"The training loss of the last {PLATEAU} rounds was {min(last):.3g} to {max(last):.3g}, about that of two "
            f"branches that know nothing, {chance:.3g}. Train for longer, set diversity = 0 to see whether HSIC holds "
            f"it there, or take kernel = 'median', whose gradient does not shrink features."
        )


class KtepsOptions(TypedDict, total=False):
    """The arguments of ``kteps`` but for its noise, for methods that build on it."""

    diversity: float
    transfer: float
    copies: tuple[str, ...]
    temperature: float
    kernel: Kernel
    tables: Tables
    local: Phase
    server: Server


@telling
def kteps(
    diversity: float = 0.01,
    transfer: float = 0.01,
    *,
    copies: tuple[str, ...] = ("classifier",),
    temperature: float = 4.0,
    kernel: Kernel = "mixture",
    noise: float = 1e-3,
    tables: Tables = "local",
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return KTEPS, for a model with ``features`` and ``head`` whose head is its part ``classifier``.

    With an embedding table that the model declares (``lookup``), each client trains and sends the rows that it uses
    (§4.2, Remark 3). A client predicts with both branches, the shared part with the shared one.

    Args:
        diversity: λ1, of HSIC between the branches' features.
        transfer: λ2, of the knowledge transfer.
        copies: the parts of the model that the private branch has for itself.
        temperature: of the transfer's teacher.
        kernel: of HSIC: ``"mixture"``, three Gaussians, whose gradient rewards shrinking features (the paper);
            ``"median"``, one Gaussian by the batch's median distance, whose gradient does not.
        noise: σ of the noise on uploads (the paper's value is lost).
        tables: as ``Client.tables``.
        local: the local phase, with L of each branch; patterns of its optimiser's rates may name ``private.*``.
        server: see ``methods``.
    """
    branches = TwoBranches(copies)
    loss = BranchLoss(branches, local.loss, float(diversity), float(transfer), float(temperature), kernel)
    phase = local.but(loss=loss)
    return Method(
        name="kteps",
        needs_features=True,
        split=PRIVATE,
        client=Client(phases=(phase,), tables=tables),
        server=server,
        adapt=private_part(phase),
        predict=PredictBranches(branches),
        predict_shared=PredictBranches(branches, "s"),
        extend=branches,
        upload=(GaussianNoise(float(noise)),) if noise else (),
        note=Plateau() if isinstance(local.loss, CrossEntropy) else None,
    )
