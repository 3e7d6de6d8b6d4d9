"""``accelerate``: a user's own layers on fedkeep's kernels, where these give the same and are faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fedkeep.core.copying import copied
from fedkeep.core.net import is_compiled
from fedkeep.nn.swapped import FastGRU, FastLinear, FastLSTM, FastSequential, hooked, pools

KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: FastLSTM,
    nn.GRU: FastGRU,
    nn.Linear: FastLinear,
    nn.Sequential: FastSequential,
}
HIDDEN = {nn.LSTM: 256, nn.GRU: 512}
"""Hidden units up to which the recurrent kernels are the faster ones."""
WEIGHTS = 1 << 18
"""Weights from which on the linear kernel is. Clients with fewer may be faster side by side, on torch's products."""


@dataclass(frozen=True)
class Swaps:
    """What of a model runs on fedkeep's kernels.

    Attributes:
        swapped: the kind of each layer that does, by name, e.g. ``{"lstm": "LSTM"}``; the model itself has no name.
        left: of layers of these kinds that do not, why.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Say it in a line; empty where there is nothing to say."""
        parts = [f"on fedkeep's kernels: {_listed(self.swapped)}"] if self.swapped else []
        parts += [f"torch's own: {_listed(self.left)}"] if self.left else []
        return "; ".join(parts)


def accelerate(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose layers run on fedkeep's kernels where these give the same and are faster.

    ``nn.LSTM``, ``nn.GRU``, large ``nn.Linear``, and convolution, ReLU and max-pooling that follow each other in an
    ``nn.Sequential``. Names of parameters, ``state_dict``, attributes and calls are as they were; results are, to 1e-6
    of the largest in float32 and 1e-12 in float64. Layers with hooks, of subclasses, with shared or parametrised
    weights, quantised or compiled ones stay torch's, and so do calls that the kernels cannot take, e.g. from initial
    states other than zeros, or on a GPU. ``swaps_of`` says what was done.

    ``simulate`` does this by itself, unless it is told not to.
    """
    return swap_(copied(model))


def swap_(model: nn.Module) -> nn.Module:
    """Swap a model's layers in place, and return it; whose model it is has made it, or a copy."""
    for _, layer, why in _candidates(model):
        if not why and type(layer) in KINDS:
            layer.__class__ = KINDS[type(layer)]
    return model


def swaps_of(model: nn.Module) -> Swaps:
    """Return which layers of a model run on fedkeep's kernels, and why others do not."""
    names = {fast: kind.__name__ for kind, fast in KINDS.items()} | {
        FastSequential: "convolution, ReLU, pooling"
    }
    found = Swaps({n: names[type(m)] for n, m in model.named_modules() if type(m) in names})
    found.left.update({name: why or "accelerate was not asked for" for name, _, why in _candidates(model)})
    return found


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the layers of kinds that can be swapped, by name, with why one can't be.

    Layers of fedkeep's own models are not among them: these have the kernels where they pay.
    """
    tensors = [
        t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None
    ]
    used = Counter(t.untyped_storage().data_ptr() for t in tensors if not nn.parameter.is_lazy(t))
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    compiled = {id(inner) for m in model.modules() if is_compiled(m) for inner in m.modules()}
    for name, layer, ours in _owned(model, "", False):
        if (
            not ours
            and isinstance(layer, tuple(KINDS))
            and type(layer) not in KINDS.values()
            and _large(layer)
        ):
            why = "it is compiled" if id(layer) in compiled else _why_not(layer, places[id(layer)] > 1, used)
            yield name, layer, why


def _owned(module: nn.Module, name: str, ours: bool) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield all layers by name, with whether the model that they stand in is fedkeep's."""
    package = type(module).__module__.partition(".")[0]
    inside = ours if package == "torch" else package == "fedkeep"
    yield name, module, inside
    for leaf, child in module.named_children():
        yield from _owned(child, f"{name}.{leaf}" if name else leaf, inside)


def _large(layer: nn.Module) -> bool:
    """Tell whether a layer is worth a word: a chain that pools, a linear layer of many weights, any recurrent one."""
    if isinstance(layer, nn.Sequential):
        layers = list(layer._modules.values())
        return any(pools(layers[k : k + 3]) for k in range(len(layers)))
    return not isinstance(layer, nn.Linear) or layer.in_features * layer.out_features >= WEIGHTS


def _why_not(layer: nn.Module, twice: bool, used: Counter[int]) -> str:
    """Return why a layer stays torch's, in a few words; empty: it can be swapped."""
    kind, parameters = type(layer), list(layer.parameters())
    if is_parametrized(layer) or any(hasattr(h, "name") for h in layer._forward_pre_hooks.values()):
        return "its weights are parametrised"  # weight_norm and spectral_norm of old are hooks with a name
    if kind not in KINDS:
        return f"it is a subclass, {kind.__name__}"
    if "forward" in vars(layer):
        return "its forward was replaced"
    if hooked(layer):
        return "it has hooks"
    if any(map(nn.parameter.is_lazy, parameters)):
        return "it is lazy"
    if twice:
        return "it stands in two places"
    if any(type(p) is not nn.Parameter or used[p.untyped_storage().data_ptr()] > 1 for p in parameters):
        return "its weights are shared, or no plain parameters"
    if any(p.dtype not in (torch.float32, torch.float64) for p in parameters):
        return f"it is of {parameters[0].dtype}"
    if isinstance(layer, nn.RNNBase):
        return _why_not_recurrent(layer)
    return "it has no bias" if isinstance(layer, nn.Linear) and layer.bias is None else ""


def _why_not_recurrent(layer: nn.RNNBase) -> str:
    if layer.dropout and layer.num_layers > 1:
        return "it has dropout between its layers"
    if layer.proj_size:
        return "it has projections"
    if not layer.bias:
        return "it has no bias"
    most = HIDDEN[type(layer)]
    return f"torch's is as fast beyond {most} hidden units" if layer.hidden_size > most else ""


def _listed(layers: dict[str, str]) -> str:
    return ", ".join(f"{name or 'the model'} ({what})" for name, what in layers.items())
