"""KTEPS, KTEPS⋆, FedFusion and PFL-DA by readings of what KTEPS's paper leaves open, as methods.

Each is the library's method, of the same name, with further options; at their defaults it is the very same. A
configuration names it by its place here, e.g. ``kind = "fedkeep_papers.kteps.methods:kteps"``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack, get_args

import torch
from torch import Tensor, nn

from fedkeep import methods
from fedkeep.core.errors import MethodError, check_choice, check_range
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods.added_parts import COPY, PREFIX, copy_of, extended, publish_own
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.branches import TwoBranches
from fedkeep.methods.client import Client, Start, Started, Tables
from fedkeep.methods.dependence import MIXTURE, SINGLE, hsic
from fedkeep.methods.features import Known, features
from fedkeep.methods.fedfusion import AddFusion, Operator, fused
from fedkeep.methods.kteps import DEFAULT, Plateau, PredictBranches, knowledge_transfer
from fedkeep.methods.pfl_da import mixture_and_general
from fedkeep.methods.phase import Phase
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, Term, cross_entropy
from fedkeep.privacy import Projection

ARCHITECTURES = {
    "A": ("classifier",),
    "B": ("encoder", "classifier"),
    "C": ("embedding", "encoder", "classifier"),
}
"""What is private in KTEPS, Table 8, by the parts of ``models.TextClassifier``."""

Kernel = Literal["mixture", "single", "median"]


@dataclass(frozen=True)
class BranchLoss(Around):
    """β (L(g_s) + L(g_p)) + λ1 HSIC(a, b) + λ2 L_kt(g_s → g_p), KTEPS eq. 9, whose β is lost.

    Attributes:
        branches, loss, diversity, transfer, temperature: as of the library's ``BranchLoss``.
        share: β, the weight of each branch's loss, positive.
        student_temperature: T_p of the transfer, positive.
        widths: of HSIC's Gaussian kernels.
        unit, normalised: of HSIC; see ``dependence.hsic``.
    """

    branches: TwoBranches = DEFAULT
    loss: Term = cross_entropy()
    diversity: float = 0.01
    transfer: float = 0.01
    temperature: float = 4.0
    share: float = 1.0
    student_temperature: float = 1.0
    widths: tuple[float, ...] = MIXTURE
    unit: Literal["mean", "median"] = "mean"
    normalised: bool = False

    def __post_init__(self) -> None:
        check_range("(0, inf]", MethodError, share=self.share, student_temperature=self.student_temperature)

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


class Readings(TypedDict, total=False):
    """The arguments of ``kteps`` but for its noise."""

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
    """Return KTEPS as ``fedkeep.methods.kteps``, by a reading.

    Args:
        diversity, transfer, temperature, noise, tables, local, server: as there.
        architecture: what the private branch has for itself: A the classifier, B encoder and classifier, C the whole
            model (Table 8), or the names of the model's parts.
        projections: P_s and P_p before the classifiers.
        student_temperature: of the transfer's student.
        kernel: of HSIC: three Gaussians, one, or one by the batch's median distance.
        normalised: HSIC is divided by those of each branch with itself.
        share: of each branch's L in the loss; ½: their mean, at which the trunk's gradient is about FedAvg's.
        predict: how a client predicts (Table 6); the shared part alone predicts with the shared branch.

    Raises:
        MethodError: an option has no such value.
    """
    if isinstance(architecture, str):
        check_choice("architecture must be", architecture, ARCHITECTURES, MethodError)
    check_choice("kernel must be", kernel, get_args(Kernel), MethodError)
    copies = ARCHITECTURES[architecture] if isinstance(architecture, str) else tuple(architecture)
    plain = methods.kteps(
        diversity,
        transfer,
        copies=copies,
        temperature=temperature,
        noise=noise,
        tables=tables,
        local=local,
        server=server,
    )
    branches = TwoBranches(copies, projections)
    loss = BranchLoss(
        branches=branches,
        loss=local.loss,
        diversity=float(diversity),
        transfer=float(transfer),
        temperature=float(temperature),
        share=float(share),
        student_temperature=float(student_temperature),
        widths=MIXTURE if kernel == "mixture" else SINGLE,
        unit="median" if kernel == "median" else "mean",
        normalised=normalised,
    )
    phase = local.but(loss=loss)
    return plain.on_client(phases=(phase,)).but(
        adapt=private_part(phase),
        predict=PredictBranches(branches, predict),
        predict_shared=PredictBranches(branches, "s"),
        extend=branches,
        note=plain.note and Plateau(2 * share),
    )


def kteps_star(
    start: int = 2,
    end: int = 150,
    *,
    table: str = "embedding.weight",
    target: Literal["matrix", "delta"] = "matrix",
    center: bool = True,
    noise: float = 1e-3,
    **others: Unpack[Readings],
) -> Method:
    """Return KTEPS⋆ as ``fedkeep.methods.kteps_star``, by a reading.

    Args:
        start, end, table, target, noise: as there.
        center: the components are those of the table's covariance; False: of the table itself.
        others: the other arguments of ``kteps``.
    """
    base = kteps(noise=noise, **others)
    projection = Projection(start, end, table, target, center)
    return base.but(name="kteps_star", upload=(projection, *base.upload))


@dataclass(frozen=True)
class AddKeptFusion(AddFusion):
    """Adds the part ``fusion``, and private copies ``own.*`` of all parts but the classifier.

    Attributes:
        gamma: where γ starts.
    """

    gamma: float = 0.0

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with the parts added."""
        kept = {n: v for n, v in module.named_children() if n != self.classifier}
        whole = super().__call__(module)
        if self.operator != "conv":
            nn.init.constant_(whole.fusion.gamma, self.gamma)  # type: ignore[arg-type, union-attr]
        return extended(whole, {"own": nn.ModuleDict(copy.deepcopy(kept))}, copies="own")


def fused_with_own(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return logits with the private extractor as E_l and the federated one as E_g."""
    received = features(net, params, batch)
    return fused(net, params, features(net, {**params, **copy_of(params)}, batch), received, batch)


@dataclass(frozen=True)
class KeptFusionLoss(Around):
    """The loss of the fused model, E_l being the private extractor.

    Attributes:
        loss: of its output.
        train_received: E_g is trained, too.
    """

    loss: Term = cross_entropy()
    train_received: bool = False

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        if self.train_received:
            output = fused_with_own(net, params, batch)
        else:
            with torch.no_grad():
                frozen = features(net, params, batch)
            output = fused(net, params, features(net, {**params, **copy_of(params)}, batch), frozen, batch)
        return self.loss(Known(net, output), params, batch, received)


def start_as_received(start: Start) -> Started:
    """Start the private copies as what they are copies of was received."""
    sent = start.sent.params
    return Started(params={n: sent[n.removeprefix(PREFIX)] for n in start.kept.params})


def fedfusion(
    operator: Operator = "multi",
    *,
    persistent_local: bool = False,
    reset_local: bool = False,
    train_received: bool = False,
    gamma: float = 0.0,
    local: Phase = Phase(),
    server: Server | None = None,
) -> Method:
    """Return FedFusion as ``fedkeep.methods.fedfusion``, by a reading.

    Args:
        operator, local, server: as there.
        persistent_local: a client's extractor goes on from where its last round left it, and a copy of it is uploaded
            (as KTEPS counts FedFusion among the methods with a private embedding); False: it starts as received (the
            paper). The shared part predicts as the aggregated model either way.
        reset_local: with ``persistent_local``, a client's extractor starts every round as received (the paper), and
            what its last round made of it is kept to predict with, beside the received one.
        train_received: with ``persistent_local``, the received extractor is trained beside the client's own, and it is
            what is uploaded; the client's own is not.
        gamma: with ``persistent_local``, where γ starts; 0 (the published code) begins with the client's own features
            alone, and gives a received extractor that is trained no gradient at first.

    Raises:
        MethodError: an option that wants ``persistent_local`` without it, an unknown operator, or a ``gamma`` that is
            not finite, or stands beside ``conv``.
    """
    plain = methods.fedfusion(operator, local=local, server=server)
    if not persistent_local:
        if reset_local or train_received or gamma:
            raise MethodError(
                "reset_local, train_received and gamma are of a kept extractor, and none is kept. Set persistent_local "
                "too."
            )
        return plain
    if not math.isfinite(gamma) or (gamma and operator == "conv"):
        raise MethodError(
            "gamma is where the weight of received features starts, a finite number, and 0 by 'conv', which has no "
            "such weight; got {gamma:g} with operator {operator!r}.",
            gamma=gamma,
            operator=operator,
        )
    phase = local.but(loss=KeptFusionLoss(local.loss, train_received))
    start = start_as_received if reset_local else None
    if train_received:
        client = Client(phases=(phase,), start=start)
    else:
        kept = phase.but(trains=(f"{PREFIX}*", "fusion.*", "classifier.*"))
        client = Client(phases=(kept,), start=start, finish=publish_own, tables="local")
    return plain.but(
        split=COPY,
        client=client,
        adapt=private_part(phase),
        predict=fused_with_own,
        extend=AddKeptFusion(operator, gamma=float(gamma)),
    )


@dataclass(frozen=True)
class BothLosses(Around):
    """The loss of PFL-DA's gated mixture, and of the general model by itself.

    Attributes:
        loss: of the mixture's log-probabilities, taken as logits, and of M_G's logits.
        general: β, the weight of M_G's own loss, at least 0.
    """

    loss: Term = cross_entropy()
    general: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.general < math.inf:
            raise MethodError("general must be a number of at least 0; got {general}.", general=self.general)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        mixed, general = mixture_and_general(net, params, batch)
        value = self.loss(Known(net, mixed), params, batch, received)
        if self.general:
            value = value + self.general * self.loss(Known(net, general), params, batch, received)
        return value


def pfl_da(*, general: float = 0.0, local: Phase = Phase(), server: Server = Server()) -> Method:
    """Return PFL-DA as ``fedkeep.methods.pfl_da``, on L(α M_G(x) + (1 − α) M_k(x)) + β L(M_G(x)).

    Args:
        general: β; 0: the paper, where M_G may predict nothing useful without the private model.
        local, server: as there.
    """
    phase = local.but(loss=BothLosses(local.loss, general))
    plain = methods.pfl_da(local=local, server=server)
    return plain.on_client(phases=(phase,)).but(adapt=private_part(phase))
