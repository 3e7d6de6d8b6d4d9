"""Parts that are to be trained and cannot move, such as both factors of a product that start at zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.split.halves import Halves
from fedkeep.split.holding import Held
from fedkeep.split.joint import LocalLoss

STEPS = 5


def immovable(
    net: Net,
    halves: Halves,
    start: Mapping[str, Tensor],
    batches: Sequence[Batch],
    loss: LocalLoss,
    names: Collection[str] | None = None,
    *,
    steps: int = STEPS,
    learning_rate: float = 0.1,
    seed: int = 0,
) -> tuple[str, ...]:
    """Return which parameters have a gradient of exactly zero at the start and after every one of some steps.

    Every batch is trained on by itself, with plain gradient descent on ``names`` together. One nonzero entry of one
    gradient is enough to count as moving: with factors A ≠ 0 and B = 0 of a product, B moves at once and A at the second
    step; with A = B = 0 neither ever does. A part that takes more than ``steps`` steps to wake counts as immovable.

    Args:
        net: the model as a function.
        halves: of its module.
        start: all values by name, of the type that is trained in; they are not changed.
        batches: one or more, e.g. one of each of a few users.
        loss: ``(net, params, batch, received) -> scalar``.
        names: the parameters to be trained; None: all that aren't frozen.
        steps: gradient steps on each batch.
        learning_rate: of these steps.
        seed: seeds what the model draws, e.g. dropout.

    Returns:
        Names in the order of ``start``.
    """
    trained = halves.trainable if names is None else halves.trainable & set(names)
    still = [name for name in start if name in trained]
    received = {name: value for name, value in start.items() if name not in halves.private_names}
    with Held(net.module) as held:
        for number, batch in enumerate(batches):
            held.anew()
            params = {name: value.detach().clone() for name, value in start.items()}
            for step in range(steps):
                if not still:
                    return ()
                slopes = _gradients(net, params, batch, loss, trained, received, seed + number * steps + step)
                still = [name for name in still if name not in slopes or not bool(slopes[name].any())]
                for name, slope in slopes.items():
                    params[name] = params[name] - learning_rate * slope
    return tuple(still)


def _gradients(
    net: Net, params: Params, batch: Batch, loss: LocalLoss, names: frozenset[str], received: Params, seed: int
) -> Params:  # fmt: skip
    leaves = {n: v.detach().requires_grad_() for n, v in params.items() if n in names}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        value = loss(net, {**params, **leaves}, batch, {n: v.detach().clone() for n, v in received.items()})
    if not value.requires_grad:
        return {}
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {name: slope for name, slope in zip(leaves, found, strict=True) if slope is not None}
