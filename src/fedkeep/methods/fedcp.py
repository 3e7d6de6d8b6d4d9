"""FedCP: for each example a shared network says which of its features the shared head sees, and which the client's own.

Source: Zhang et al., FedCP: Separating Feature Information for Personalized Federated Learning via Conditional Policy,
arXiv 2307.01217; layers, kernels and what is uploaded of the head are those of the authors' code. The policy is the
paper's softmax; the code adds Gumbel noise to it, in training as in testing.
Shared are a body f, a head and the policy network P; each client keeps a head of its own, of the same form.
One round: (1) a cohort downloads f, head and P; (2) each client takes v, the column sums of its own head's weight (of
several linear layers, of their product), divided by its length, and holds it and the received head as they are; (3) it
trains f, P and its own head on F_k of own(s ⊙ h) + head(r ⊙ h), with h = f(x) and (s, r) = softmax of P(h ⊙ v) over its
two halves, plus λ MMD²(f(X), f^t(X)), f^t as received; (4) it uploads the changes of f and P, and as its head the mean
of its own and the received one; it keeps its own; (5) the server averages. P is linear, layer normalisation and ReLU.
A client predicts with own(s ⊙ h) + head(r ⊙ h); the shared part with its head in both places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.net import Net, aliases
from fedkeep.core.params import CLIENT, Batch, Params, State, prefixed, under
from fedkeep.methods.added_parts import drawn_for, extended
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.branches import PREFIX, PRIVATE, TwoBranches
from fedkeep.methods.client import Client, Finish, Finished, Start, Started
from fedkeep.methods.features import Known, as_received, features, head, part, pooled, pooled_features, width
from fedkeep.methods.hook_declarations import reveals
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, Term, cross_entropy, unit
from fedkeep.split.find_head import is_layer

WIDTHS = (10.0, 15.0, 20.0, 50.0)
"""a of the kernels e^(−‖x − y‖² / (2 a)) of MMD²."""
CONDITION = "condition"


@dataclass(frozen=True)
class AddPolicy:
    """Adds the private part ``private``, a copy of the head, and the part ``policy``."""

    classifier: str

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with both.

        Raises:
            MethodError: the head shares a tensor with the body.
        """
        for names in ((first, *others) for first, others in aliases(module).items()):
            inside = [n.startswith(f"{self.classifier}.") for n in names]
            if any(inside) and not all(inside):
                raise MethodError(
                    "FedCP uploads the head by another rule than the body; {name!r} and {other!r} of "
                    "{module} are one tensor (tied weights). Untie them.",
                    name=names[0],
                    other=names[1],
                    module=type(module).__name__,
                )
        size = width(module, self.classifier)
        with drawn_for(module, "fedcp"):
            policy = nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size), nn.ReLU())
        copies = TwoBranches(copies=(self.classifier,), projections=False, classifier=self.classifier)
        return extended(copies(module), {"policy": policy})


def condition_of(net: Net, params: Params, classifier: str) -> Tensor:
    """Return v of a client's own head, (F,), of length 1; a number of it that is rounding alone is 0.

    The rows of a head that began at zero sum to zero: cross-entropy's gradients do, over the classes. What is left by
    rounding would be scaled to length 1.
    """
    own = under(f"{PREFIX}{classifier}.", params)
    inner = part(net.module, classifier).named_modules()
    names = [f"{n}.weight" if n else "weight" for n, layer in inner if is_layer(layer)]
    if missing := [name for name in names if name not in own]:
        raise MethodError(
            "FedCP reads the weights of its own head, and {prefix}{classifier}.{name} is no parameter. Take a "
            "linear layer without a parametrisation, such as weight_norm.",
            prefix=PREFIX,
            classifier=classifier,
            name=missing[0],
        )
    layers = [own[name].flatten(1) for name in reversed(names)]
    sums, sizes = layers[0].sum(0), layers[0].abs().sum(0)
    for weight in layers[1:]:
        sums, sizes = sums @ weight, sizes @ weight.abs()
    rounding = 1e3 * torch.finfo(sums.dtype).eps * sizes
    return unit(torch.where(sums.abs() > rounding, sums, 0.0), 0)


@dataclass(frozen=True)
class FirstCondition:
    """The state of a new client: v of the model's head."""

    classifier: str

    def __call__(self, net: Net) -> State:
        """Return the state."""
        return {CONDITION: condition_of(net, net.initial(), self.classifier)}


@dataclass(frozen=True)
class TakeCondition:
    """Takes v before a round's training."""

    classifier: str

    def __call__(self, start: Start) -> Started:
        """Return v."""
        return Started(state={CONDITION: condition_of(start.net, start.params, self.classifier)})


def separated(net: Net, params: Params, found: Tensor, condition: Tensor, batch: Batch) -> Tensor:
    """Return own(s ⊙ h) + head(r ⊙ h) for a batch's features h, (B, C); no gradient flows into the shared head."""
    policy = net.call("policy", params, {"input": found * condition})
    own, shared = policy.unflatten(-1, (2, -1)).softmax(-2).unbind(-2)  # (…, F) each
    mine = under(PREFIX, params)
    still = {n: params[n].detach() for n in mine}
    personal = head(net, {**params, **mine}, own * found, batch)
    return personal + head(net, {**params, **still}, shared * found, batch)


@dataclass(frozen=True)
class PredictSeparated:
    """Predicts with both heads.

    Attributes:
        classifier: the part that the model's ``head`` consists of.
        alone: the shared head stands in the client's place too.
    """

    classifier: str
    alone: bool = False

    def __call__(self, net: Net, params: Params, batch: Batch) -> Tensor:
        """Return the logits, (B, C)."""
        if self.alone:
            params = {**params, **prefixed(PREFIX, {n: params[n] for n in under(PREFIX, params)})}
        condition = condition_of(net, params, self.classifier)
        return separated(net, params, features(net, params, batch), condition, batch)


def mmd2(x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Return Σ over kernels of mean K_xx + mean K_yy − 2 mean K_xy, of features (B, F) of the same examples."""
    share = x.new_ones(len(x)) if weight is None else weight.to(x.dtype)
    share = share / share.sum().clamp_min(torch.finfo(x.dtype).tiny)
    both, signed = torch.cat((x, y)), torch.cat((share, -share))
    products = both @ both.T
    squares = products.diagonal()
    apart = squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * products
    kernel = torch.stack([torch.exp(-apart / (2 * a)) for a in WIDTHS]).sum(0)
    return (kernel * signed.outer(signed)).sum()


@dataclass(frozen=True)
class SeparatedLoss(Around):
    """L of both heads' output + λ MMD²(f(X), f^t(X)); λ at least 0."""

    lam: float = 5.0
    loss: Term = cross_entropy()

    def __post_init__(self) -> None:
        check_range("[0, inf]", MethodError, lam=self.lam)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        found = features(net, params, batch)
        output = separated(net, params, found, params[CLIENT + CONDITION], batch)
        value: Tensor = self.loss(Known(net, output), params, batch, received)
        if not self.lam:
            return value
        with torch.no_grad():
            frozen = pooled_features(net, as_received(net, params, received), batch)
        return value + self.lam * mmd2(pooled(net, found, batch), frozen, batch.get("weight"))


# of the own head, in a mean with one that the server knows
@reveals("upload/*", of=(f"private {PREFIX}*", f"kept {CONDITION}", "examples"))
def publish_half(done: Finish) -> Finished:
    """Upload the mean of the client's own and the received head."""
    sent = done.sent.params
    own = {n: v for n, v in under(PREFIX, done.trained).items() if n in sent and v.is_floating_point()}
    return Finished(params={n: (v + sent[n]) / 2 for n, v in own.items()})


@telling
def fedcp(
    lam: float = 5.0, *, classifier: str = "classifier", local: Phase = Phase(), server: Server = Server()
) -> Method:
    """Return FedCP, for a model with ``features`` and ``head``.

    A client's head reaches the server in a mean with the one that it was sent, so who sees a single upload knows it.

    Args:
        lam: λ.
        classifier: the part that the model's ``head`` consists of; linear layers, with or without others between.
        local: as in ``methods``; its loss is taken of the sum of both heads' outputs.
        server: see ``methods``.

    Raises:
        MethodError: λ is negative.
    """
    phase = local.but(loss=SeparatedLoss(lam=float(lam), loss=local.loss))
    return Method(
        name="fedcp",
        needs_features=True,
        split=PRIVATE,
        server=server,
        client=Client(
            phases=(phase,),
            state=FirstCondition(classifier),
            start=TakeCondition(classifier),
            finish=publish_half,
        ),
        adapt=private_part(phase),
        predict=PredictSeparated(classifier),
        predict_shared=PredictSeparated(classifier, alone=True),
        extend=AddPolicy(classifier=classifier),
    )
