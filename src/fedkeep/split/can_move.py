"""Parts that are to be trained and cannot move, such as both factors of a product that start at zero."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, clone, gradients, weighted_mean
from fedkeep.core.seeds import forked, seed_all
from fedkeep.split.halves import Halves
from fedkeep.split.holding import Held
from fedkeep.split.joint import LocalLoss

ROUNDS, STEPS = 2, 3


def immovable(
    net: Net,
    halves: Halves,
    start: Mapping[str, Tensor],
    batches: Sequence[Batch],
    phases: Sequence[tuple[LocalLoss, Collection[str]]],
    *,
    learning_rate: float = 0.1,
    seed: int = 0,
) -> tuple[str, ...]:
    """Return which parameters have a gradient of exactly zero at the start and at every step of a small training.

    Users, one for each batch, train for two rounds, every phase for three steps of plain gradient descent on its names;
    then their federated values are averaged. One nonzero entry of one gradient is enough to count as moving: of the
    factors A ≠ 0 and B = 0 of a product, B moves at once and A at the second step; with A = B = 0 neither ever does.
    What takes longer to wake counts as immovable.

    Args:
        net: the model as a function.
        halves: of its module.
        start: all values by name, of the type that is trained in; they are not changed. Every user starts from these.
        batches: one or more, e.g. one of each of a few users.
        phases: of a round, in order: the loss, ``(net, params, batch, received) -> scalar``, and the names it trains.
        learning_rate: of these steps.
        seed: seeds what the model draws, e.g. dropout.

    Returns:
        The names of some phase that nothing moves, in the order of ``start``.
    """
    trained = {name for _, names in phases for name in names} & halves.trainable
    still = {name for name in start if name in trained}
    users = [clone(start) for _ in batches]
    with Held(net.module) as held:
        for _ in range(ROUNDS):
            received = {n: v for n, v in users[0].items() if n not in halves.private_names}
            for user, params in enumerate(users):
                held.anew()
                for loss, names in phases:
                    moving = halves.trainable & set(names)
                    for step in range(STEPS):
                        if not still:
                            return ()
                        slopes = _gradients(net, params, batches[user], loss, moving, received, seed + step)
                        still -= {name for name, slope in slopes.items() if bool(slope.any())}
                        params |= {n: params[n] - learning_rate * slope for n, slope in slopes.items()}
            mean = weighted_mean([halves.federated(params) for params in users], [1.0] * len(users))
            users = [{**params, **clone(mean)} for params in users]
    return tuple(name for name in start if name in still)


def _gradients(
    net: Net,
    params: Params,
    batch: Batch,
    loss: LocalLoss,
    names: frozenset[str],
    received: Params,
    seed: int,
) -> Params:
    """Return the loss's gradients for those of ``names`` that it reaches; buffers of ``params`` change in place."""
    leaves = {n: v.detach().requires_grad_() for n, v in params.items() if n in names}
    # what forward assigns to buffers is copied into them as ``bound`` ends: the gradient may need the old values
    device = next((str(v.device) for v in params.values()), "cpu")
    with net.bound({}), forked(device), torch.enable_grad():
        seed_all(seed, device)
        value = loss(net, {**params, **leaves}, batch, clone(received))
        return gradients(value, leaves) if value.requires_grad else {}
