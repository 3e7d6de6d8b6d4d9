"""Rows of padding under ``torch.func.vmap``, whose own rule trains them.

Where a table and its ids are both mapped over, torch looks ids up in all tables at once, one below the other. It
moves the ids to where their table lies, but not ``padding_idx``: of all rows of padding it spares that of one table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LOOKS_UP: dict[Callable[..., Any], tuple[str, ...]] = {
    F.embedding: ("input", "weight", "padding_idx"),
    torch.embedding: ("weight", "indices", "padding_idx"),
}
"""Functions that look vectors up, and their first arguments."""


def looked_up(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what one of ``LOOKS_UP`` returns, with vectors of padding that have no gradient."""
    out: Tensor = func(*args, **kwargs)
    how = dict(zip(LOOKS_UP[func], args, strict=False)) | dict(kwargs)
    padding = how.get("padding_idx")
    if padding is not None and padding < 0:  # from behind; torch.embedding means by it that there is none
        padding = padding + len(how["weight"]) if func is F.embedding else None
    if padding is None:
        return out
    ids: Tensor = how["input" if func is F.embedding else "indices"]
    return torch.where((ids == padding).unsqueeze(-1), out.detach(), out)
