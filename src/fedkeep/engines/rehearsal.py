"""Which parameters a model's own forward writes into, e.g. to bound a norm: found once, before anybody is served.

In training they are a client's own copies, and a constraint holds there. Judging and hooks compute with what all share.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.buffers import Place
from fedkeep.core.dispatch import EagerMode
from fedkeep.core.draws import forked
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import Batch, Params, clone, is_state
from fedkeep.engines.batches import float_type, load_batch
from fedkeep.engines.tables.local_rows import Examples


def rehearse(net: Net, params: Params, data: Examples, rows: np.ndarray, device: str) -> None:
    """Add to ``net.written`` the parameters that ``forward`` writes into: a pass in each mode, the first time.

    Tables that are only looked up are no part of it. A pass that fails finds nothing; the run says why, and for whom.

    Args:
        net: the model as a function.
        params: values to compute with; they are not changed.
        data: the data set; ``rows`` are examples in it.
        device: where to compute.

    Raises:
        MethodError: ``forward`` makes layers, or draws from a generator of its own.
    """
    if net.rehearsed or not len(rows):
        return
    net.rehearsed, mode, found = True, net.module.training, set[str]()
    every = {**tensors_of(net.module), **params}
    given = {n: v.detach().to(device) for n, v in every.items() if not is_state(n)}
    batch = load_batch(data, np.resize(rows[:2], 2), device, float_type(given))
    for training in (True, False):
        net.train(training)
        found |= _written(net, given, clone(batch), device)
    net.train(mode)
    for prefix, layer in net.module.named_modules():
        own = [Place(f"{prefix}.{leaf}".lstrip("."), layer._parameters, leaf) for leaf in layer._parameters]
        net.written.update({place.name: place for place in own if place.name in found})


def _written(net: Net, given: Params, batch: Batch, device: str) -> set[str]:
    """Return the names of values that a pass writes into, or gives other memory: of copies, tables aside."""
    values = {n: v if n in net.lookup else v.clone() for n, v in given.items()}
    before, writes = {n: _place(v) for n, v in values.items()}, Writes()
    # A compiled model would be compiled for these examples, and anew for a run's mini-batches.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with forked(device), torch.no_grad(), net.still(), suppress(Exception), eager, writes:
        net(values, batch)
    moves = set(_laid_together(net, device))
    return {
        n
        for n, place in before.items()
        if place in writes.places or (n not in moves and _place(values[n]) != place)
    }


def _laid_together(net: Net, device: str) -> list[str]:
    """Return the weights that torch's recurrent layers bring into one piece of memory on CUDA, as they are."""
    layers = net.module.named_modules() if device.startswith("cuda") else ()
    return [
        f"{prefix}.{leaf}".lstrip(".")
        for prefix, layer in layers
        if isinstance(layer, nn.RNNBase)
        for leaf in layer._parameters
    ]


class Writes(EagerMode):
    """Notes in ``places`` the memory that is written into, whether or not values change by it."""

    def __init__(self) -> None:
        super().__init__()
        self.places = set[int]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call, and note what it writes into."""
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            if argument.is_write and (value := given.get(argument.name)) is not None:
                several = value if isinstance(value, list | tuple) else [value]
                self.places |= {_place(v) for v in several if isinstance(v, Tensor)}
        return func(*args, **(kwargs or {}))


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
