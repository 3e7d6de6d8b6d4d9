"""Arithmetic on parameters: ``dict[str, Tensor]`` keyed by the module's own names, matched by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.overrides import has_torch_function

from fedkeep.core.errors import MethodError, NonFiniteError, UploadError
from fedkeep.kernels.values import is_finite

FEW = 1 << 16
"""Numbers that are looked at sooner together than tensor by tensor."""

Params = dict[str, Tensor]
State = dict[str, Tensor]
"""What a method keeps beside the model, by any names; stored, checkpointed and counted like parameters."""
Batch = dict[str, Tensor]

SERVER, CLIENT = "server/", "client/"
"""Prefixes of a method's state where it stands in one dictionary with parameters: the server's, and a client's."""


@lru_cache(maxsize=1 << 14)  # it is asked of every name of every client
def is_state(name: str) -> bool:
    """Tell whether a name is a method's state, not the module's."""
    return name.startswith((SERVER, CLIENT))


def prefixed(prefix: str, tree: Mapping[str, Tensor]) -> Params:
    """Return the tensors with a prefix before each name."""
    return {prefix + name: value for name, value in tree.items()}


def under(prefix: str, tree: Mapping[str, Tensor]) -> Params:
    """Return the tensors whose names begin with a prefix, without it."""
    return {n.removeprefix(prefix): value for n, value in tree.items() if n.startswith(prefix)}


def row(stacked: Mapping[str, Tensor], place: int) -> Params:
    """Return one client's values of several clients', (clients, *shape)."""
    return {name: values[place] for name, values in stacked.items()}


def add(a: Mapping[str, Tensor], b: Mapping[str, Tensor], scale: float = 1.0) -> Params:
    """Return a + scale · b over a's names; a name that b lacks keeps a's value."""
    return {name: a[name] + scale * b[name] if name in b else a[name] for name in a}


def weighted_mean(trees: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Params:
    """Return Σ wᵢ·treeᵢ / Σ wᵢ (FURL eq. 4), name by name.

    Sums run in the order given and in double precision, so that a mean of many clients loses no digits and
    depends on nothing but its inputs. Integer tensors (counters) are taken from the first tree, not averaged.

    Raises:
        UploadError: no tree, or the weights' sum is not positive.
    """
    total = float(sum(weights))
    if not trees or not total > 0:
        raise UploadError(
            "An average needs at least one upload of positive weight; got {got} of total {total}.",
            got=len(trees),
            total=total,
        )
    mean: Params = {}
    for name, first in trees[0].items():
        if not first.is_floating_point():
            mean[name] = first.clone()
            continue
        exact = torch.float64 if first.device.type != "mps" else first.dtype
        acc = torch.zeros_like(first, dtype=exact)
        for tree, weight in zip(trees, weights, strict=True):
            acc.add_(tree[name].to(exact), alpha=weight / total)
        mean[name] = acc.to(first.dtype)
    return mean


def nbytes(tree: Mapping[str, Tensor]) -> int:
    """Return the number of bytes that the tensors' values take."""
    return sum(map(attrgetter("nbytes"), tree.values()))


def clone(tree: Mapping[str, Tensor]) -> Params:
    """Return a copy that shares no storage and no graph with ``tree``."""
    return {name: t.detach().clone() for name, t in tree.items()}


def to(tree: Mapping[str, Tensor], device: str | torch.device) -> Params:
    """Return the tensors on ``device``; those already there are not copied."""
    there = torch.device(device)
    if there.type == "cpu" and all(map(attrgetter("is_cpu"), tree.values())):
        return dict(tree)
    return {name: t if t.device == there else t.to(there) for name, t in tree.items()}


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in what a function is given or gives: a tensor, or a mapping, tuple or list of such."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    return [t for v in values for t in tensors_in(v)] if isinstance(values, tuple | list) else []


def nonfinite(tree: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity, or None."""
    every = list(filter(Tensor.is_floating_point, tree.values()))
    cpu = all(map(attrgetter("is_cpu"), every))
    few = cpu and sum(map(Tensor.numel, every)) <= FEW
    # A finite sum has only finite summands.
    if not every or (few and math.isfinite(float(torch._C._nn.flatten_dense_tensors(every).sum()))):
        return None
    floats = {name: t for name, t in tree.items() if t.is_floating_point()}
    if cpu:
        return next((name for name, t in floats.items() if not is_finite(t)), None)
    # A GPU is asked for all at once: it answers no sooner for less.
    totals = torch.stack([t.sum().to(every[0].device, torch.float32) for t in every]).tolist()
    for (name, t), total in zip(floats.items(), totals, strict=True):
        if not math.isfinite(total) and not bool(torch.isfinite(t).all()):
            return name
    return None


def check_finite(tree: Mapping[str, Tensor], what: str) -> None:
    """Raise NonFiniteError naming ``what`` and the first tensor that holds a NaN or an infinity."""
    name = nonfinite(tree)
    if name is not None:
        raise NonFiniteError(
            "{what}: {name!r} holds a NaN or an infinity. Lower the learning rate or set clip_norm.",
            what=what,
            name=name,
        )


def difference_of_names(wanted: Iterable[str], got: Iterable[str]) -> str:
    """Say which names are missing and which are not known, or return an empty string."""
    wanted, got = set(wanted), set(got)
    parts = []
    if wanted - got:
        parts.append(f"missing {sorted(wanted - got)}")
    if got - wanted:
        parts.append(f"unknown {sorted(got - wanted)}")
    return ", ".join(parts)


def misfit(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """Say which names are missing or not known, or which shape differs first, or return an empty string."""
    fault = difference_of_names(wanted, got)
    if fault:
        return fault
    pairs = ((name, tuple(value.shape), tuple(got[name].shape)) for name, value in wanted.items())
    return next((f"{name!r} wants {want}, is {have}" for name, want, have in pairs if want != have), "")


def mistyped(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """Say of tensors that are no misfit which type differs first, or return an empty string."""
    pairs = ((name, value.dtype, got[name].dtype) for name, value in wanted.items())
    return next((f"{name!r} wants {want}, is {have}" for name, want, have in pairs if want != have), "")


def gradients(value: Tensor, leaves: Mapping[str, Tensor], create_graph: bool = False) -> Params:
    """Return the gradient of a scalar by name; a leaf that it does not depend on has none.

    Tables with sparse gradients (``nn.Embedding(sparse=True)``) have dense ones here.

    Raises:
        MethodError: something that ``forward`` did cannot be differentiated, or was written over before.
    """
    every, run = tuple(leaves.values()), Variable._execution_engine.run_backward
    plain = value.is_cpu and value.numel() == 1 and value.is_floating_point() and not create_graph
    try:
        if plain and every and not has_torch_function((value, *every)):
            # As torch.autograd.grad does, which first asks more of every tensor than a small step costs.
            found = run((value,), (torch.ones_like(value),), False, False, every, True, accumulate_grad=False)
        else:
            found = torch.autograd.grad(value, every, create_graph=create_graph, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        said = str(error).strip().split("\n")[0].split("; expected version")[0].rstrip(".")
        advice = "Look in the model's forward for what PyTorch names there"
        if "inplace" in said:
            advice = (
                "A forward may not write in place into what its gradient needs: write y = y.clone() before"
            )
        elif "fork-based" in said:
            advice = "This process used autograd in a way after which it cannot be forked: name engine='sequential'"
        elif "not implemented" in said:
            advice = "Use another layer, or a method that takes no second derivatives, e.g. per_fedavg(order='free')"
        raise MethodError("The loss has no gradient: {said}. {advice}.", said=said, advice=advice) from error
    return {
        name: slope.to_dense() if slope.is_sparse else slope
        for name, slope in zip(leaves, found, strict=True)
        if slope is not None
    }
