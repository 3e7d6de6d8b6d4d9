"""Whether a model's ``forward`` is ``head(features(…))``, which many methods train in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.core.draws import forked, without_draws
from fedkeep.core.net import Net, logits_of
from fedkeep.core.params import Batch, Params, clone
from fedkeep.engines.mixing import apart, eager, tensors_in
from fedkeep.methods.features import Known
from fedkeep.split.joint import LocalLoss

OTHERWISE = (
    "The model's forward gives other values than its head(features(…)), and {method!r} trains these: it would be "
    "judged by what it has not trained. Let forward be head(features(…)), or give the two steps other names."
)


class _Heard(Known):
    """A net that notes which of the module's methods are called."""

    def __init__(self, net: Net) -> None:
        super().__init__(net, "forward")
        self.heard = set[str]()

    def call(self, method: str, params: Mapping[str, Tensor], batch: Batch) -> Any:
        self.heard.add(method)
        return self.net.call(method, params, batch)


def otherwise(net: Net, params: Params, losses: Iterable[LocalLoss], batch: Batch) -> bool:
    """Tell whether some loss calls ``head``, and ``forward`` differs by more than rounding from what it gives.

    A model that cannot be run on the batch, or draws, is not told: the run says why.

    Args:
        net: the model as a function, on the CPU; it is left as it is.
        params: all values by name.
        losses: ``(net, params, batch, received) -> scalar``, of a round's phases.
        batch: a few examples.
    """
    if not has_steps(net.module):
        return False
    mode, heard, found = net.module.training, _Heard(net), False
    net.train(False)
    with forked("cpu"), eager(), net.still():
        for loss in losses:
            with suppress(Exception):
                loss(heard, clone(params), batch, clone(params))
        if "head" in heard.heard:
            with torch.no_grad(), suppress(Exception):
                found = without_draws("model", partial(_apart, net, params, batch), "cpu")
    net.train(mode)
    return found


def has_steps(module: nn.Module) -> bool:
    """Tell whether a model has both ``features`` and ``head``, methods or layers."""
    return all(callable(getattr(module, step, None)) for step in ("features", "head"))


def _apart(net: Net, params: Params, batch: Batch) -> bool:
    between = {"features": net.call("features", clone(params), batch)}
    steps = logits_of(net.call("head", clone(params), between))
    return any(map(apart, tensors_in(net(clone(params), batch)), tensors_in(steps)))
