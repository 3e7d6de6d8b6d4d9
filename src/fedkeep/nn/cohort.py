"""From what vmap maps over to one call for a cohort, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def stacked(tensor: Any, dim: int | None, clients: int, cohort: bool) -> Any:
    """An argument under vmap as one with a client axis in front; an axis that is there already is merged."""
    if tensor is None:
        return None
    tensor = tensor.unsqueeze(0).expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.flatten(0, 1) if cohort else tensor


def per_client(tensor: Tensor, cohort: bool) -> tuple[Tensor, int]:
    """The tensor with each client's values contiguous, and the distance from client to client in elements."""
    if not cohort:
        return tensor.contiguous(), 0
    if tensor.shape[0] and not tensor[0].is_contiguous():
        tensor = tensor.contiguous()
    return tensor, tensor.stride(0)


def unstacked(tensors: Sequence[Tensor], clients: int, cohort: bool) -> list[Tensor]:
    """Results under vmap with the axis of vmap in front again."""
    return [t.reshape(clients, t.shape[0] // clients, *t.shape[1:]) if cohort else t for t in tensors]
