"""A user's own vector and bias at a model's head, for models that have none.

The head's output becomes W h + b + V u + b_u, the same as a head that is given the user's vector u beside the features
h: V is federated, u and b_u (private) start at zero, so that the model starts as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.errors import MethodError
from fedkeep.core.heads import is_convolution
from fedkeep.methods.added_parts import drawn_for
from fedkeep.methods.features import linear_layers, no_counts, part, width

VECTOR, BIAS, WEIGHT = "user", "user_bias", "user_weight"


@dataclass(frozen=True)
class AddUser:
    """Adds the parameters ``user`` (u), ``user_bias`` (b_u) and ``user_weight`` (V) to the layer that is the head.

    Attributes:
        head: the layer.
        size: entries of u.
    """

    head: str
    size: int = 8

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` whose head adds V u + b_u.

        Raises:
            MethodError: the head has parameters of these names already.
        """
        both = copied(module)
        layer = part(both, self.head)
        if any(hasattr(layer, name) for name in (VECTOR, BIAS, WEIGHT)):
            raise MethodError(
                "The head {head!r} has an attribute that is called like a user's vector; rename it.",
                head=self.head,
            )
        zeros, features = no_counts(both, self.head), width(both, self.head)
        with drawn_for(module, "user"):
            joined = nn.Linear(features + self.size, len(zeros))
        layer.register_parameter(VECTOR, nn.Parameter(zeros.new_zeros(self.size)))
        layer.register_parameter(BIAS, nn.Parameter(zeros))
        layer.register_parameter(WEIGHT, nn.Parameter(joined.weight.detach()[:, features:].clone()))
        last = linear_layers(both, self.head)[-1]
        layer.register_forward_hook(add_to_channels if is_convolution(last) else add_to_last)
        return both


def added(layer: nn.Module) -> Tensor:
    """Return V u + b_u, (C,)."""
    found: Tensor = layer.user_bias + torch.mv(layer.user_weight, layer.user)  # type: ignore[operator, arg-type]
    return found


def add_to_last(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Return a head's output, (…, C), with what is the user's."""
    return output + added(layer)


def add_to_channels(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Return a convolution's output, (B, C, …), with what is the user's."""
    return output + added(layer).reshape(-1, *[1] * (output.dim() - 2))
