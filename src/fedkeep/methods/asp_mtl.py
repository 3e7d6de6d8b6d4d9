"""ASP-MTL: adversarial shared-private multi-task learning, centralised; each client is a task.

Source: Liu, Qiu and Huang, Adversarial Multi-task Learning for Text Classification, ACL 2017, eq. 8–13, with the
features' normalisation of a published re-implementation (FrankWork/fudan_mtl_reviews).
A round is one pass over all clients' pooled examples: (1) each mini-batch is one client's, k; (2) s = E_s(x) and
p = E_k(x) give logits C_k([s ‖ p]); (3) everything that these use steps on L + λ L_adv + γ L_diff: a discriminator
learns to tell the client from s, and E_s, behind a reversed gradient, to keep it from that; L_diff = ‖Sᵀ P‖² keeps s
and p apart.
Nothing is federated: a server sees all examples. It trains with ``centralised=True``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.errors import MethodError, check_range
from fedkeep.core.heads import found_head
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, prefixed, under
from fedkeep.methods.added_parts import drawn_for, extended
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.branches import PREFIX, PRIVATE
from fedkeep.methods.client import Client
from fedkeep.methods.features import Known, linear, no_counts, part, pooled_features, width
from fedkeep.methods.hook_checks import check_count
from fedkeep.methods.phase import Phase, telling
from fedkeep.methods.server import Server
from fedkeep.methods.terms import Around, Term, cross_entropy, example_mean, unit
from fedkeep.split import updated_buffers


class PrivateModel(nn.Module):
    """A client's own encoder E_k, and its classifier C_k of [s ‖ p]."""

    def __init__(self, encoder: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.encoder, self.classifier = encoder, classifier

    def forward(self, both: Tensor) -> Tensor:
        """Return logits, shape (B, C), for both features, shape (B, 2F)."""
        logits: Tensor = self.classifier(both)
        return logits


@dataclass(frozen=True)
class AddPrivateModel:
    """Adds the part ``private``, a client's encoder and classifier with new values, and the ``discriminator``.

    Of a model whose head was found the encoder is all before the head, and the classifier is one linear layer.

    Attributes:
        tasks: how many clients there are.
        encoder: the part of the model that a client has for itself too.
        classifier: the part that the model's ``head`` consists of; the private one is like it, but for twice the
            features. The model's own is left as it is, and not used.
    """

    tasks: int = 16
    encoder: str = "encoder"
    classifier: str = "classifier"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with both parts."""
        size, known = width(module, self.classifier), found_head(module)
        encoder = copied(module if known else part(module, self.encoder))
        if moving := updated_buffers(encoder):
            raise MethodError(
                "ASP-MTL trains all clients' encoders in one pass, which knows no statistics of a client's own "
                "({name!r}). Take group or layer normalisation in the model, or ditto.",
                name=min(moving),
            )
        with drawn_for(module, "task"):
            if known:
                encoder.set_submodule(known.layer, nn.Identity())
                classifier: nn.Module = nn.Linear(2 * size, len(no_counts(module, self.classifier)))
            else:
                classifier = widened(copied(part(module, self.classifier)), 2 * size)
            for layer in [*encoder.modules(), *classifier.modules()]:
                reset = getattr(layer, "reset_parameters", None)
                if callable(reset):
                    reset()
            discriminator = nn.Linear(size, self.tasks)
        return extended(
            module, {"private": PrivateModel(encoder, classifier), "discriminator": discriminator}
        )


def widened(classifier: nn.Module, size: int) -> nn.Module:
    """Return a classifier whose first linear layer takes ``size`` features."""
    if isinstance(classifier, nn.Linear):
        return nn.Linear(size, classifier.out_features, classifier.bias is not None)
    for name, layer in classifier.named_modules():
        if isinstance(layer, nn.Linear):
            classifier.set_submodule(name, nn.Linear(size, layer.out_features, layer.bias is not None))
            break
    return classifier


def reversed_gradient(x: Tensor) -> Tensor:
    """Return x, through which gradients flow with their sign turned (Ganin and Lempitsky, 2015)."""
    return 2 * x.detach() - x


def orthogonality(s: Tensor, p: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return ‖Sᵀ P‖², rows = the batch's features, each scaled to length 1; examples of weight 0 are left out.

    Args:
        s: (B, F).
        p: (B, F).
        weight: (B,) of the examples.
    """
    s, p = unit(s, 1), unit(p, 1)
    if weight is not None:
        s = s * (weight > 0).to(s.dtype).unsqueeze(1)
    return (s.mT @ p).square().sum()


def shared_and_own(net: Net, params: Params, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return s = E_s(x) and p = E_k(x), shape (B, F) each."""
    mine = prefixed("" if found_head(net.module) else "encoder.", under(f"{PREFIX}encoder.", params))
    s, p = (pooled_features(net, values, batch) for values in (params, {**params, **mine}))
    return s, p


def logits_of(net: Net, params: Params, s: Tensor, p: Tensor) -> Tensor:
    """Return C_k([s ‖ p]), shape (B, C)."""
    logits: Tensor = net.call("private", params, {"both": torch.cat((s, p), 1)})
    return logits


def predict_task(net: Net, params: Params, batch: Batch) -> Tensor:
    """Predict with a client's own encoder and classifier."""
    return logits_of(net, params, *shared_and_own(net, params, batch))


@dataclass(frozen=True)
class AdversarialLoss(Around):
    """L + λ L_adv + γ L_diff.

    Attributes:
        loss: L, of a client's output.
        adversarial: λ, at least 0. Where a batch doesn't say whose it is (no column ``client``), as when one client
            fine-tunes, there is nothing to tell apart, and the term is left out.
        difference: γ, at least 0.
    """

    loss: Term = cross_entropy()
    adversarial: float = 0.05
    difference: float = 0.01

    def __post_init__(self) -> None:
        check_range("[0, inf]", MethodError, adversarial=self.adversarial, difference=self.difference)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        s, p = shared_and_own(net, params, batch)
        weight = batch.get("weight")
        total = self.loss(Known(net, logits_of(net, params, s, p)), params, batch, received)
        if self.adversarial and "client" in batch:
            told = linear(net, params, "discriminator", reversed_gradient(s))
            try:
                surprise = nn.functional.cross_entropy(told, batch["client"], reduction="none")
            except IndexError as error:
                raise MethodError(
                    "ASP-MTL's discriminator tells tasks={tasks} clients apart, and there are more. Let tasks "
                    "be the number of clients.",
                    tasks=told.shape[1],
                ) from error
            total = total + self.adversarial * example_mean(surprise, weight)
        if self.difference:
            total = total + self.difference * orthogonality(s, p, weight)
        return total


@telling
def asp_mtl(
    tasks: int = 16,
    adversarial: float = 0.05,
    difference: float = 0.01,
    *,
    local: Phase = Phase(batch_size=16),
    server: Server = Server(),
) -> Method:
    """Return ASP-MTL, for a classifier of examples.

    Args:
        tasks: how many clients there are.
        adversarial: λ.
        difference: γ.
        local: the local phase, with L; SGD, whose momentum goes on through all clients' mini-batches and rounds. An
            epoch is a pass over all examples of a round.
        server: what the server does; a centralised round has one upload, so only its update can matter.
    """
    check_count(1, tasks=tasks)
    loss = AdversarialLoss(loss=local.loss, adversarial=float(adversarial), difference=float(difference))
    phase = local.but(loss=loss)
    return Method(
        name="asp_mtl",
        needs_features=True,
        split=PRIVATE,
        client=Client(phases=(phase,), pools="clients"),
        server=server,
        adapt=private_part(phase),
        predict=predict_task,
        predict_shared=None,
        extend=AddPrivateModel(tasks=tasks),
    )
