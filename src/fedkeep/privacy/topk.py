"""Only the largest numbers of an upload travel; what is left out is sent later.

Source: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018, algorithm 1 (here over local changes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedkeep.core.errors import ConfigError, UploadError, check_range, did_you_mean
from fedkeep.core.params import Params
from fedkeep.privacy.draws import Draw
from fedkeep.privacy.link import Encoded, Link

VALUES, PLACES = "/values", "/places"


@dataclass(frozen=True)
class TopK(Link):
    """Sends the k numbers of largest magnitude of the change plus what earlier rounds left out (error feedback).

    With change d and memory m: g = top_k(d + m) travels, and m ← d + m − g stays with the client. All floating-point
    tensors are ranked together; of equal magnitudes the first by name and place travels. On the wire a tensor ``name``
    is ``name/values`` and ``name/places`` (its flat places, ascending, int32 or int64). Counters travel as they are.

    Attributes:
        fraction: k over the number of entries, in (0, 1], rounded up.
    """

    fraction: float = 0.1

    reveals: ClassVar[tuple[str, ...]] = ("upload/*",)  # what earlier rounds left out

    def __post_init__(self) -> None:
        check_range("(0, 1]", fraction=self.fraction)

    def client_state(self, shapes: Params) -> Params:
        """Return memories of zeros."""
        return {n: torch.zeros_like(v) for n, v in shapes.items() if v.is_floating_point()}

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        """Return the chosen numbers and their places; the others are the new state.

        Raises:
            ConfigError: a link before has renamed tensors, or the client's state is not of these tensors.
        """
        names = sorted(n for n, v in tensors.items() if v.is_floating_point())
        for name in names:
            if name not in start:
                raise ConfigError(
                    "TopK ranks changes of federated parameters, and {name!r} is none: put it before the links "
                    "that rename what they encode.",
                    name=name,
                )
            if name not in state or state[name].shape != tensors[name].shape:
                raise ConfigError(
                    "TopK wants a client's memory of {name!r}, shape {shape}; got {got}. Begin with client_state.",
                    name=name,
                    shape=tuple(tensors[name].shape),
                    got=tuple(state[name].shape) if name in state else f"none{did_you_mean(name, state)}",
                )
        whole = {n: tensors[n] + state[n].to(tensors[n].device) for n in names}
        chosen = self._chosen(whole)
        out, left = {n: v for n, v in tensors.items() if n not in whole}, Params()
        for name, places in chosen.items():
            flat = whole[name].reshape(-1)
            out[name + VALUES] = flat[places]
            out[name + PLACES] = places if flat.numel() > torch.iinfo(torch.int32).max else places.int()
            left[name] = flat.index_fill(0, places, 0).reshape(whole[name].shape)
        return Encoded(tensors=out, state=left)

    def _chosen(self, whole: Params) -> dict[str, Tensor]:
        """Return the flat places of what travels, by name, ascending."""
        if not whole:
            return {}
        sizes = [v.numel() for v in whole.values()]
        magnitude = torch.cat([v.reshape(-1).abs().double() for v in whole.values()])
        count = math.ceil(self.fraction * len(magnitude))
        if count == 0:
            return {n: torch.zeros(0, dtype=torch.int64) for n in whole}
        least = magnitude.topk(count, sorted=True).values[-1]
        keep = magnitude > least
        equal = (magnitude == least).nonzero().squeeze(1)
        keep[equal[: count - int(keep.sum())]] = True
        parts = torch.split(keep, sizes)
        return {name: part.nonzero().squeeze(1) for name, part in zip(whole, parts, strict=True)}

    def decode(self, tensors: Params, start: Params, sent: Params) -> Params:
        """Return changes that are zero but for what travelled.

        Raises:
            UploadError: one of a pair is missing, or values and places don't fit.
        """
        used: set[str] = set()
        out: Params = {}
        for name, value in start.items():
            if value.is_floating_point():
                out[name] = self._restored(name, tensors, value)
                used |= {name + VALUES, name + PLACES}
            elif name in tensors:
                out[name] = tensors[name]
                used.add(name)
        left = sorted(tensors.keys() - used)
        if left:
            raise UploadError(
                "{left!r} is nothing that TopK sends",
                left=left[0],
            )
        return out

    def _restored(self, name: str, tensors: Params, start: Tensor) -> Tensor:
        values, places = (v.to(start.device) for v in self.pair(name, tensors, VALUES, PLACES))
        if values.dim() != 1 or places.shape != values.shape or values.dtype != start.dtype:
            raise UploadError(
                "{name!r} should come as two lists of one length, of {dtype} and whole numbers; came as "
                "{shape} {dtype_2} and {shape_2} {dtype_3}",
                name=name,
                dtype=start.dtype,
                shape=tuple(values.shape),
                dtype_2=values.dtype,
                shape_2=tuple(places.shape),
                dtype_3=places.dtype,
            )
        if places.dtype not in (torch.int32, torch.int64):
            raise UploadError(
                "{name!r} should be int32 or int64, is {dtype}",
                name=name + PLACES,
                dtype=places.dtype,
            )
        places = places.long()
        if len(places) and (
            int(places[0]) < 0 or int(places[-1]) >= start.numel() or bool((places.diff() <= 0).any())
        ):
            raise UploadError(
                "{name!r} should ascend within 0 … {largest}",
                name=name + PLACES,
                largest=start.numel() - 1,
            )
        return start.new_zeros(start.numel()).index_copy_(0, places, values).reshape(start.shape)
