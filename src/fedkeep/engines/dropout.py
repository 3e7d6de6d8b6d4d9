"""Dropout whose masks depend neither on how values lie in memory nor, on CUDA, on the engine.

``InOrder`` sees to one client's model; ``Noise`` to many clients' at once, each with a random stream of its own, and to
what else vmap must not do its own way: attention, which may have dropout, lookups with a row of padding, cross-entropy,
and what tensors say of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fedkeep.core.modes import ALONE


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


class Noise(TorchFunctionMode):
    """While it is active, ``dropout`` inside ``torch.func.vmap`` draws each client's mask from that client's stream.

    So a mask depends neither on who else is computed nor on where. It is, to the bit, the mask that
    ``torch.nn.functional.dropout`` draws for this client alone (``InOrder``). Any other random function is refused by
    vmap itself.

    Args:
        seeds: the clients' streams, by position.
        device: where masks are drawn.
    """

    def __init__(self, seeds: Sequence[int], device: str) -> None:
        super().__init__()
        self.seeds, self.device = seeds, device
        self.generators: dict[int, torch.Generator] = {}
        self.drawing: list[torch.Generator] = []
        self.client: Tensor | None = None

    def of(self, who: Sequence[int]) -> Noise:
        """Return this, ready for a call with the clients at these positions."""
        self.who = who
        self.drawing = []
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace dropout, attention, lookups, cross-entropy and questions, and call everything else."""
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if func in (F.cross_entropy, F.nll_loss):
            return _likelihood(func, *args, **(kwargs or {}))
        if (alone := ALONE.get(func)) is not None:
            return alone(func, args, kwargs or {})
        if func is F.multi_head_attention_forward:  # what it calls is not seen here
            with sdpa_kernel(SDPBackend.MATH):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        keep = 1.0 - p if training else 1.0
        if keep in (0.0, 1.0):
            return input * keep
        if not self.drawing:
            self.drawing = [self._generator(k) for k in self.who]
        mask: Tensor = _Mask.apply(self.client, tuple(input.shape), input.dtype, keep, self.drawing)  # type: ignore[no-untyped-call]
        return input.mul_(mask) if inplace else input * mask

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute in steps that vmap knows; torch's fused kernels would be called client by client."""
        if enable_gqa:
            several = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(several, -3) for x in (key, value))
        found = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            found = found.masked_fill(~attn_mask, torch.finfo(found.dtype).min).softmax(-1)
            found = found * attn_mask.any(-1, keepdim=True)  # a place that sees nothing gets nothing
        elif attn_mask is not None:
            found = found + attn_mask
            blind = (found == -torch.inf).all(-1, keepdim=True)
            found = found.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)  # the same of a float mask
        else:
            found = found.softmax(-1)
        return self._dropout(found, dropout_p) @ value if dropout_p else found @ value

    def _generator(self, position: int) -> torch.Generator:
        if position not in self.generators:
            made = torch.Generator(self.device).manual_seed(self.seeds[position])
            self.generators[position] = made
        return self.generators[position]


def _likelihood(
    func: Callable[..., Any],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    size_average: Any,
    ignore_index: int,
    reduce: Any,
    reduction: str,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute cross-entropy of (examples, classes) by the steps that torch takes under vmap, to the bit.

    Torch takes them in Python, and loads sympy for it: a second in each process.
    """
    other = weight is not None or size_average is not None or reduce is not None or label_smoothing
    if other or input.dim() != 2 or target.dim() != 1 or reduction not in ("mean", "sum", "none"):
        more = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
        given = (input, target, weight, size_average, ignore_index, reduce, reduction)
        return func(*given, **more)  # type: ignore[no-any-return]
    logs = input.log_softmax(1) if func is F.cross_entropy else input
    counts = target != ignore_index
    found = -logs.gather(1, torch.where(counts, target, 0).unsqueeze(1)).squeeze(1)
    found = torch.where(counts, found, 0)
    if reduction == "mean":
        return found.sum() / counts.sum().to(found)
    return found.sum() if reduction == "sum" else found


class _Mask(torch.autograd.Function):
    """A mask for each client that vmap runs over, shape (clients, *shape): 1/keep where an entry stays, else 0."""

    @staticmethod
    def forward(*_: Any) -> Tensor:
        """Never called: masks are drawn for clients side by side."""
        raise RuntimeError("Masks are drawn for clients side by side, never for one.")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing; a mask has no gradient."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        client: Tensor,
        shape: tuple[int, ...],
        kind: torch.dtype,
        keep: float,
        generators: Sequence[torch.Generator],
    ) -> tuple[Tensor, int]:
        """Draw."""
        masks = torch.empty(info.batch_size, *shape, dtype=kind, device=generators[0].device)
        for mask, generator in zip(masks, generators, strict=True):
            mask.bernoulli_(keep, generator=generator)
        return masks.div_(keep), 0
