"""What the split checker's probes need of a method: first values, losses with state, and a few users' batches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.core.errors import FedkeepError
from fedkeep.core.net import Net, on_cpu
from fedkeep.core.params import SERVER, Batch, Params, is_state, prefixed
from fedkeep.data import FederatedData
from fedkeep.engines.base import first_kept
from fedkeep.engines.batches import float_type, load_batch
from fedkeep.engines.mixing import MIXES, mixes
from fedkeep.engines.two_steps import OTHERWISE, has_steps, otherwise
from fedkeep.methods import Method
from fedkeep.methods.terms import Term
from fedkeep.split import immovable
from fedkeep.split.check import stuck
from fedkeep.store import Default

USERS, EXAMPLES = 3, 8


@dataclass(frozen=True)
class WithState:
    """A loss that is also given a method's state, as it is before the first round, in double where the model is.

    Attributes:
        loss: the loss.
        kept: a client's, under ``client/NAME``.
        sent: the server's, under ``server/NAME``.
    """

    loss: Term
    kept: Params
    sent: Params

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        """Return the loss, a scalar."""
        exact = any(v.dtype == torch.float64 for v in params.values())
        kept, sent = (
            {n: v.double() if exact and v.is_floating_point() else v for n, v in state.items()}
            for state in (self.kept, self.sent)
        )
        return self.loss(net, {**kept, **params}, batch, {**received, **sent})


def first_values(net: Net, method: Method, seed: int) -> Params:
    """Return the values that a new client's first training starts from."""
    kept = Default(first_kept(method, net), method.client.keep.value, seed, net.buffers())("")
    return {**net.initial(), **{n: v for n, v in kept.items() if not is_state(n)}}


def losses(net: Net, method: Method, data: FederatedData) -> list[WithState]:
    """Return the phases' losses with the state that they may look at."""
    kept = {n: v for n, v in first_kept(method, net).items() if is_state(n)}
    sent = prefixed(SERVER, method.server.state(net, data))
    return [WithState(phase.loss, kept, sent) for phase in method.client.phases]


def stays(
    net: Net, method: Method, batches: Sequence[Batch], start: Params, terms: Sequence[WithState]
) -> tuple[str, ...]:
    """Return the parameters that a round of the method is to train and cannot move from where they start."""
    names = sorted(net.trainable())
    trained = [phase.trained_names(method.split, names) for phase in method.client.phases]
    phases = list(zip(terms, trained, strict=True))
    return immovable(net, method.split.halves(net.module), start, batches, phases)


def first_batches(
    data: FederatedData, net: Net, users: int = USERS, examples: int = EXAMPLES, *, whose: bool = False
) -> list[Batch]:
    """Return a small batch of training examples of each of the first users that have any.

    ``whose``: with the column ``client`` of centralised training, each example's client.
    """
    kind = float_type(net.initial())
    batches = []
    for client in range(len(data)):
        rows = list(data.rows(client, "train")[:examples])
        if rows:
            batch = load_batch(data, rows, "cpu", kind)  # type: ignore[arg-type]
            batches.append({**batch, "client": torch.full((len(rows),), client)} if whose else batch)
        if len(batches) == users:
            break
    return batches


def warn_of_the_model(method: Method, net: Net, data: FederatedData, seed: int, device: str = "cpu") -> None:
    """Warn of a model of which nothing is trained, and of parameters that cannot move from the number that new clients'
    private values are set to; of one that predicts otherwise for an example when others are beside it; and of one
    whose two steps, where the method trains these, are not its ``forward``.

    Both layers of a private network that starts at zero, for example. Values of the module's own are the user's; for
    these ``fedkeep check`` tells.
    """
    names = sorted(net.trainable())
    if not names:
        warnings.warn("No parameter of the model requires a gradient, so rounds train nothing.", stacklevel=2)
    elif idle := [p.trains for p in method.client.phases if not p.trained_names(method.split, names)]:
        warnings.warn(
            f"A phase of {method.name!r} trains {idle[0]!r} parameters, and the split leaves none, so it does nothing. "
            f"Name other parameters as private.",
            stacklevel=2,
        )
    if mixes(net, first_values(net, method, seed), data, device):
        warnings.warn(MIXES, stacklevel=2)
    set_here, still = not isinstance(method.client.keep.value, str | tuple), tuple[str, ...]()
    if not (set_here or has_steps(net.module)):
        return
    net = on_cpu(net)
    try:
        start, batches, terms = (
            first_values(net, method, seed),
            first_batches(data, net),
            losses(net, method, data),
        )
        if batches and set_here:
            still = stays(net, method, batches, start, terms)
    except (FedkeepError, RuntimeError, ValueError, IndexError):
        return  # the model does not fit the data: training says so, and for which client
    if still:
        warnings.warn(stuck(still), stacklevel=2)
    if batches and otherwise(net, start, terms, batches[0]):
        warnings.warn(OTHERWISE.format(method=method.name), stacklevel=2)
