"""Whether what a model predicts for an example depends on the examples beside it in the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkeep.core.draws import forked, without_draws
from fedkeep.core.net import Net
from fedkeep.core.params import Params, clone
from fedkeep.data import FederatedData
from fedkeep.engines.batches import float_type, load_batch

EXAMPLES = 4  # judged together, and as two pairs: layers that want two examples refuse one
CLIENTS = 100
"""So many are asked for training examples, at most."""
ROUNDING = 1e-3
"""Of the largest output: single precision gives an example other last digits in a larger batch."""
MIXES = (
    "The model predicts otherwise for an example when others are in its batch, also in evaluation (e.g. statistics "
    "of the batch, or texts' padding that counts). Metrics then depend on which examples are judged together, other "
    "clients' among them, and differ between a simulation and real devices. Let forward compute each example alone."
)


def mixes(net: Net, params: Params, data: FederatedData, device: str = "cpu") -> bool:
    """Tell whether outputs for examples differ by more than rounding when fewer are in the batch.

    A model that cannot be run on these examples, or draws, mixes nothing: the run says why, and for whom.

    Args:
        net: the model as a function; it is left as it is.
        params: all values by name.
        data: the data set; a few training examples of one client are used.
        device: where to compute.
    """
    rows = _rows(data)
    if not len(rows):
        return False
    mode, found = net.module.training, False
    values = {n: v.detach().to(device) for n, v in params.items()}
    net.train(False)
    with forked(device), torch.no_grad(), suppress(Exception), eager():
        outputs = []
        for some in (rows, rows[:2], rows[2:]):
            batch = load_batch(data, some, device, float_type(values))
            with net.still():
                outputs.append(without_draws("model", partial(net, clone(values), batch), device))
        found = any(map(_differ, *map(tensors_in, outputs)))
    net.train(mode)
    return found


def _differ(many: Tensor, first: Tensor, second: Tensor) -> bool:
    """Tell whether examples' outputs are others in two batches than in one, by more than rounding.

    A number, e.g. a penalty beside the logits, is no example's output.
    """
    if not first.dim() == second.dim() == many.dim() > 0:
        return False
    return first.shape[1:] == second.shape[1:] and apart(many, torch.cat([first, second]))


def apart(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one shape differ by more than rounding; False of other shapes, and of integers."""
    if one.shape != other.shape or not (one.is_floating_point() and one.numel()):
        return False
    return bool((other - one).abs().amax() > ROUNDING * one.abs().amax())


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output, a tensor or a mapping, tuple or list of such, in their order."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping | tuple | list):
        for each in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from tensors_in(each)


def eager() -> AbstractContextManager[Any]:
    """Compute a compiled model as it is written: it would be compiled for a few examples, and anew for batches."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _rows(data: FederatedData) -> np.ndarray:
    """Return training examples of the first client that has as many."""
    for client in range(min(len(data), CLIENTS)):
        rows = data.rows(client, "train")
        if len(rows) >= EXAMPLES:
            return np.asarray(rows[:EXAMPLES])
    return np.empty(0, np.int64)
