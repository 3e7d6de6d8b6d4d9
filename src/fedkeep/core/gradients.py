"""Gradients by name, and what is said where PyTorch has none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedkeep.core.errors import MethodError
from fedkeep.core.params import Params


def gradients(value: Tensor, leaves: Mapping[str, Tensor], create_graph: bool = False) -> Params:
    """Return the gradient of a scalar by name; a leaf that it does not depend on has none.

    Raises:
        MethodError: something that ``forward`` did cannot be differentiated, or was written over before.
    """
    try:
        found = torch.autograd.grad(
            value, list(leaves.values()), create_graph=create_graph, allow_unused=True
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = str(error).strip().split("\n")[0].split("; expected version")[0].rstrip(".")
        advice = "Look in the model's forward for what PyTorch names there"
        if "inplace" in said:
            advice = (
                "A forward may not write in place into what its gradient needs: write y = y.clone() before"
            )
        elif "not implemented" in said:
            advice = "Use another layer, or a method that takes no second derivatives, e.g. per_fedavg(order='free')"
        raise MethodError(f"The loss has no gradient: {said}. {advice}.") from error
    return {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}
