"""Dropout whose masks depend neither on how values lie in memory nor, on CUDA, on the engine."""

from __future__ import annotations

from threading import Lock
from typing import ClassVar

import torch
from torch import Tensor


class InOrder:
    """While one is open, ``torch.nn.functional.dropout`` draws its mask in the order of the input's axes.

    By itself PyTorch draws in the order of memory. That is another one where an input is not contiguous, as after
    ``transpose``, with ``channels_last`` or behind ``nn.LSTM(batch_first=True)``: then a mask would depend on which
    layer, kernel or engine the input comes from. Where it is contiguous, the bits are PyTorch's own; but for CUDA,
    where PyTorch draws and multiplies in one, and ``vectorised.Noise`` cannot draw the same. It holds for the whole
    process, as what a model calls cannot be seen otherwise at no cost.
    """

    _lock: ClassVar = Lock()
    _opened: ClassVar[int] = 0

    def __enter__(self) -> None:
        with self._lock:
            InOrder._opened += 1
            torch._VF.dropout, torch._VF.dropout_ = _dropout, _dropout_  # what F.dropout calls

    def __exit__(self, *error: object) -> None:
        with self._lock:
            InOrder._opened -= 1
            if not InOrder._opened:
                del torch._VF.dropout, torch._VF.dropout_  # behind them are PyTorch's


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if (input.is_contiguous() and not input.is_cuda) or not train:
        return torch.dropout(input, p, train)
    return input * _mask(input, p)


def _dropout_(input: Tensor, p: float, train: bool) -> Tensor:
    if (input.is_contiguous() and not input.is_cuda) or not train:
        return torch.dropout_(input, p, train)
    return input.mul_(_mask(input, p))


def _mask(input: Tensor, p: float) -> Tensor:
    mask = torch.ones_like(input, memory_format=torch.contiguous_format)
    if input.is_cuda and 0 < p < 1:
        return torch.bernoulli(mask, 1 - p).div_(
            1 - p
        )  # not in place: vmap draws so for a shared tensor, too
    return torch.dropout(mask, p, True)
