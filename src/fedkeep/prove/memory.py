"""Memory of tensors that Python's code has too: what is written there leaves unseen."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SHARE = {
    "numpy",
    "data_ptr",
    "untyped_storage",
    "_to_dlpack",
    "to_dlpack",
    "_to_dlpack_versioned",
    "_to_dlpack_unversioned",
}
"""Functions that hand out a tensor's memory, not a copy of it."""


class Shared:
    """Storages whose memory somebody else has, and by what."""

    def __init__(self) -> None:
        self._by: dict[int, tuple[StorageWeakRef, str]] = {}

    def add(self, tensor: Tensor, what: str) -> None:
        """Note that a tensor's memory was handed out, or came from elsewhere."""
        storage = tensor.untyped_storage()
        self._by[storage._cdata] = StorageWeakRef(storage), what  # type: ignore[no-untyped-call]

    def by(self, tensor: Tensor) -> str:
        """Return by what a tensor's memory is shared; empty: by nothing that was seen."""
        found = self._by.get(tensor.untyped_storage()._cdata)
        return "" if found is None else found[1]


def held(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold a sparse one's places and values; a tensor with a storage of its own is itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def lent(tensor: Tensor) -> bool:
    """Tell whether a tensor's memory is an array's or a file's: PyTorch cannot make it larger."""
    return not tensor.untyped_storage().resizable()
