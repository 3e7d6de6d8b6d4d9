"""A model in two steps, for methods that look between them: ``features``, then ``head``.

A model may say so by two methods: ``features(self, <columns>)`` returns (B, F), and ``head(self, features)`` returns
what ``forward`` does. Of any other model the head is found, and features are what it is given: see ``methods.resolve``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, check_range, did_you_mean
from fedkeep.core.heads import FEATURES, Pool, found_head, is_convolution
from fedkeep.core.net import Net, logits_of
from fedkeep.core.params import Batch, Params, is_state
from fedkeep.methods.terms import Around
from fedkeep.split.find_head import is_layer


def features(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return the model's features, shape (B, F); of a sequence (B, T, F), of an image (B, height, width, F).

    Raises:
        MethodError: the model has no method ``features``, and no head was found.
    """
    found: Tensor = _call(net, "features", params, batch)
    return found


def head(net: Net, params: Params, features: Tensor, batch: Batch) -> Tensor:
    """Return the model's output for features, which ``features`` gave for this batch, or others in their place.

    Raises:
        MethodError: the model has no method ``head``, and no head was found.
    """
    known = found_head(net.module)
    if known is None:
        output: Tensor = _call(net, "head", params, {"features": features})
    elif known.last:
        output = net.call("head", params, {FEATURES: features})
    else:
        output = logits_of(net.call("rest", _unwritten(net, params), {**batch, FEATURES: features}))
    return output


def pooled_features(net: Net, params: Params, batch: Batch) -> Tensor:
    """Return the model's features of each example, (B, F)."""
    return pooled(net, features(net, params, batch), batch)


def _unwritten(net: Net, params: Params) -> Params:
    """Return the parameters with copies of what a forward pass writes into: it was written once already."""
    trained = net.trainable()
    own = {n: v for n, v in params.items() if n not in trained and not is_state(n)}
    return {**params, **{n: v.clone() for n, v in own.items()}}


def pooled(net: Net, features: Tensor, batch: Batch) -> Tensor:
    """Return features of each example, (B, F), of features as ``features`` gives them: as ``Head.pool`` says.

    Positions of a sequence are padding where a column of the batch says so: a mask, (B, T), called ``mask`` or
    ``..._mask``, or lengths, (B,), called ``length``, ``lengths`` or ``..._length``.
    """
    known = found_head(net.module)
    return pooled_by(known.pool if known else "mean", features, batch)


def pooled_by(how: Pool, features: Tensor, batch: Batch) -> Tensor:
    """Return features of each example, (B, F), as ``pooled`` does."""
    if features.dim() <= 2:
        return features
    if features.dim() > 3:
        return features.flatten(1, -2).mean(1)
    real = _real(batch, features)
    if how == "mean":
        if real is None:
            return features.mean(1)
        share = real.to(features.dtype)
        share = share / share.sum(1, keepdim=True).clamp_min(1)
        return (features * share.unsqueeze(2)).sum(1)
    places = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    if real is not None:
        places = torch.where(real, places, features.shape[1] - 1 if how == "first" else 0)
    place = places.amin(1) if how == "first" else places.amax(1)
    return features.gather(1, place.reshape(-1, 1, 1).expand(-1, 1, features.shape[2])).squeeze(1)


def _real(batch: Batch, features: Tensor) -> Tensor | None:
    """Return which positions are no padding, (B, T); None: nothing says."""
    for name, value in batch.items():
        last = name.rpartition("_")[2]
        if last == "mask" and value.shape == features.shape[:2]:
            return value > 0
        if last in ("length", "lengths") and value.shape == features.shape[:1]:
            return torch.arange(features.shape[1], device=value.device) < value.unsqueeze(1)
    return None


def _call(net: Net, step: str, params: Params, batch: Batch) -> Any:
    if found_head(net.module) is None and not callable(getattr(net.module, step, None)):
        raise MethodError(
            "{module} has no method {step!r}, which this training method needs. Give the model "
            "two: `features(self, <columns>)`, e.g. all but its last layer, and `head(self, features)`, the rest; or "
            "say which layer is its head: method.but(head='NAME').",
            module=type(net.module).__name__,
            step=step,
        )
    return net.call(step, params, batch)


def linear(net: Net, params: Params, layer: str, inputs: Tensor) -> Tensor:
    """Return what a linear layer of the module, a direct child of the name ``layer``, makes of inputs."""
    output: Tensor = net.call(layer, params, {"input": inputs})
    return output


def as_received(net: Net, params: Params, received: Mapping[str, Tensor]) -> Params:
    """Return the parameters with the federated ones as the server sent them.

    What the model writes into where it runs is copied: buffers, and tables of vectors of bounded norm.
    """
    copied = received.keys() - net.trainable() | net.written.keys()
    return {**params, **{n: v.clone() if n in copied else v for n, v in received.items()}}


class Known(Net):
    """A net whose ``forward`` is known already, or another method's: hands any loss an output that is not the model's.

    Args:
        net: answers everything else.
        output: what ``forward`` gives, or the method that does.
    """

    def __init__(self, net: Net, output: Tensor | str) -> None:  # no super: it would look at the module again
        self.net, self.module, self.written, self.output = net, net.module, net.written, output

    def trainable(self) -> frozenset[str]:
        """See ``Net``."""
        return self.net.trainable()

    def call(self, method: str, params: Mapping[str, Tensor], batch: Batch) -> Any:
        """See ``Net``."""
        if method == "forward" and isinstance(self.output, Tensor):
            return self.output
        return self.net.call(str(self.output) if method == "forward" else method, params, batch)


@dataclass(frozen=True)
class WithFeatures(Around):
    """L + a factor · ``penalty`` of the model's features, which are computed once; with a factor of 0 only L.

    Subclasses have fields for the factor and for L (``loss``), and a ``penalty``.

    Raises:
        MethodError: the factor is below 0.
    """

    def __post_init__(self) -> None:
        check_range("[0, inf]", MethodError, **{fields(self)[0].name: self.factor})

    @property
    def factor(self) -> float:
        """λ: the first field."""
        first: float = getattr(self, fields(self)[0].name)
        return first

    def penalty(
        self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor], found: Tensor
    ) -> Tensor:
        """Return the penalty, a scalar, of features ``found``, (B, F), pooled; else as for a term."""
        raise TypeError(f"{type(self).__name__} lacks penalty.")

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        found = features(net, params, batch)
        value: Tensor = self.inner(Known(net, head(net, params, found, batch)), params, batch, received)
        if not self.factor:
            return value
        return value + self.factor * self.penalty(net, params, batch, received, pooled(net, found, batch))


def part(module: nn.Module, name: str) -> nn.Module:
    """Return a part of a model, by its name.

    Raises:
        MethodError: there is none of this name.
    """
    children = dict(module.named_children())
    if name not in children and (not name or name not in dict(module.named_modules())):
        raise MethodError(
            "{module} has no part {name!r}, which this training method needs; its parts are "
            "{there}.{near} Name the model's own part in the method's options.",
            module=type(module).__name__,
            name=name,
            there=list(children),
            near=did_you_mean(name, children),
        )
    return module.get_submodule(name)


def linear_layers(module: nn.Module, classifier: str) -> list[nn.Linear | nn.Conv1d]:
    """Return the linear layers of a classifier (a part of the model), which tell its features and classes.

    A convolution of single points is one of them.

    Raises:
        MethodError: the part has none.
    """
    layers: list[Any] = [layer for layer in part(module, classifier).modules() if is_layer(layer)]
    if not layers:
        raise MethodError(
            "The part {classifier!r} of {module} has no linear layer, so the numbers of its features "
            "and classes are not known; this training method needs one that begins and ends with nn.Linear.",
            classifier=classifier,
            module=type(module).__name__,
        )
    return layers


def width(module: nn.Module, classifier: str) -> int:
    """Return F, the number of features that a classifier takes; see ``linear_layers``."""
    first: Any = linear_layers(module, classifier)[0]
    size: int = first.in_channels if is_convolution(first) else first.in_features
    return size


def no_counts(module: nn.Module, classifier: str) -> Tensor:
    """Return a zero for each class of a classifier, (C,), of the model's type; see ``linear_layers``."""
    last: Any = linear_layers(module, classifier)[-1]
    classes = last.out_channels if is_convolution(last) else last.out_features
    zeros: Tensor = last.weight.detach().new_zeros(classes)
    return zeros


def one_hot(label: Tensor, counts: Tensor) -> Tensor:
    """Return a 1 at each example's class, (B, C), of the type and for the classes of ``counts``.

    Raises:
        MethodError: a label is no class of the model.
    """
    classes = len(counts)
    if len(label) and not 0 <= int(label.min()) <= int(label.max()) < classes:
        raise MethodError(
            "The labels reach from {low} to {high}; the model's classifier knows the classes "
            "0 .. {last}. Make it with as many classes as the data have.",
            low=int(label.min()),
            high=int(label.max()),
            last=classes - 1,
        )
    return nn.functional.one_hot(label, classes).to(counts.dtype)
