"""Two branches over one model: a shared one, and a private one that has copies of some of the model's parts.

The shared branch is the model itself, with a projection before its classifier if asked for. The private branch computes
with its copies (``private.classifier``, …) wherever it has one, and with the model's own parts elsewhere.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, under
from fedkeep.methods.added_parts import drawn_for, extended, nested_parts
from fedkeep.methods.features import features, head, linear, part, pooled, width
from fedkeep.split import Split

PREFIX = "private."
PRIVATE = Split((f"{PREFIX}*",))


class Outputs(NamedTuple):
    """What both branches make of a batch.

    Attributes:
        shared, private: (B, F), pooled: what each classifier sees: a and b of KTEPS eq. 6.
        shared_logits, private_logits: (B, C), g_s and g_p.
    """

    shared: Tensor
    private: Tensor
    shared_logits: Tensor
    private_logits: Tensor


@dataclass(frozen=True)
class TwoBranches:
    """A model with a private branch: called, it extends a module.

    Attributes:
        copies: the parts of the model that the private branch has for itself, e.g. ``("encoder", "classifier")``.
        projections: each branch's classifier follows a linear layer of its own, features → features, with bias:
            ``projection`` (federated) and ``private.projection``.
        classifier: the part that the model's ``head`` consists of.
    """

    copies: tuple[str, ...] = ("classifier",)
    projections: bool = True
    classifier: str = "classifier"

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with the private branch; the copies start with the model's values.

        Raises:
            MethodError: the model lacks a part, or has one of the names that are added.
        """
        own = nested_parts(copy.deepcopy({name: part(module, name) for name in self.copies}))
        added: dict[str, nn.Module] = {"private": own}
        if self.projections:
            size = width(module, self.classifier)
            with drawn_for(module, "projections"):
                added["projection"] = nn.Linear(size, size)
                own.add_module("projection", nn.Linear(size, size))
        return extended(module, added, copies="private")

    def shared(self, net: Net, params: Params, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the model's features h̄, the shared branch's a = P_s(h̄), and its logits."""
        found = features(net, params, batch)
        a = linear(net, params, "projection", found) if self.projections else found
        return found, a, head(net, params, a, batch)

    def both(self, net: Net, params: Params, batch: Batch) -> Outputs:
        """Return what both branches make of a batch; the model's features are computed once."""
        found, a, shared_logits = self.shared(net, params, batch)
        renamed = {**params, **under(PREFIX, params)}
        b = found if self.copies in ((), (self.classifier,)) else features(net, renamed, batch)
        if self.projections:
            b = linear(net, renamed, "projection", b)
        own = head(net, renamed, b, batch)
        return Outputs(pooled(net, a, batch), pooled(net, b, batch), shared_logits, own)
