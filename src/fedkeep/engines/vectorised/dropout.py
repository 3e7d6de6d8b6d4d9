"""Dropout for many clients at once, each from a random stream of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Noise(TorchFunctionMode):
    """While it is active, ``dropout`` inside ``torch.func.vmap`` draws each client's mask from that client's stream.

    So a mask depends neither on who else is computed nor on where. On the CPU it is, to the bit, the mask that
    ``torch.nn.functional.dropout`` draws for this client alone; on CUDA, where that one fuses drawing and multiplying,
    it is another. Any other random function is refused by vmap itself.

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
        """Replace dropout, and call everything else."""
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        keep = 1.0 - p if training else 1.0
        if keep in (0.0, 1.0):
            return input * keep
        if not self.drawing:
            self.drawing = [self._generator(k) for k in self.who]
        mask: Tensor = _Mask.apply(self.client, tuple(input.shape), input.dtype, keep, self.drawing)  # type: ignore[no-untyped-call]
        return input.mul_(mask) if inplace else input * mask

    def _generator(self, position: int) -> torch.Generator:
        if position not in self.generators:
            made = torch.Generator(self.device).manual_seed(self.seeds[position])
            self.generators[position] = made
        return self.generators[position]


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
