"""A training step of all users together: what the split checker compares split training with.

Source: FURL, §3.1–3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, weighted_mean

LocalLoss = Callable[[Net, Params, Batch, Params], Tensor]
Loss = Callable[[Params, Params, Batch, int], Tensor]
FederatedUpdate = Callable[[Params, Sequence[Params], Params, Sequence[float]], Params]
PrivateUpdate = Callable[[int, Params, Params, Params, Sequence[Params], Sequence[float]], Params]


@dataclass(frozen=True)
class Joint:
    """One training step of a model that holds every user's private parameters.

    Attributes:
        loss: ``(federated, private, batch, user) -> scalar``; ``federated`` holds the frozen half too, ``private``
            tables of shape (users, *shape), and ``batch`` belongs to ``user``. Buffers are changed in place, or
            replaced in these dicts.
        federated_update: ``(w_f, [u_f of each user], private tables after training, summaries) -> new w_f`` (a_f).
        private_update: ``(user, w_f, private tables before, private tables after training, [u_f], summaries)
            -> the user's new private values`` (a_p).
        own_rows: ``loss`` is built so that it is given the user's own rows alone, and the updates are plain averaging
            and keeping (``joint_from_loss``); then less has to be probed.
    """

    loss: Loss
    federated_update: FederatedUpdate
    private_update: PrivateUpdate
    own_rows: bool = False


def fedavg_update(
    w_f: Params, trained: Sequence[Params], private: Params, summaries: Sequence[float]
) -> Params:
    """Return the example-weighted mean of the trained federated parameters (FURL eq. 4)."""
    return weighted_mean(trained, summaries)


def keep_trained(
    user: int,
    w_f: Params,
    before: Params,
    after: Params,
    trained: Sequence[Params],
    summaries: Sequence[float],
) -> Params:
    """Return the user's locally trained private values (FURL eq. 7, z = 1)."""
    return {name: table[user] for name, table in after.items()}


def joint_from_loss(net: Net, loss: LocalLoss) -> Joint:
    """Return the joint model of split training: the user's row is taken out, and ``loss`` sees that row alone.

    What ``forward`` assigns to a buffer stands in the loss's dicts afterwards, whichever dict was given to the net.
    """

    def user_loss(federated: Params, private: Params, batch: Batch, user: int) -> Tensor:
        own = {name: table[user] for name, table in private.items()}
        received = {n: v.detach() if v.requires_grad else v.clone() for n, v in federated.items()}
        values = {**federated, **own}
        with net.bound({}):
            value = loss(net, dict(values), batch, received)
            new = net.taken(values)  # settled in place it would overwrite what the gradient may need
        federated |= {n: new[n].to(v.dtype) for n, v in federated.items()}
        for name, table in private.items():
            if new[name] is not own[name]:
                private[name] = table.clone()
                private[name][user] = new[name]
        return value

    return Joint(user_loss, fedavg_update, keep_trained, own_rows=True)
