"""Checks of what methods are given, and of what their functions do.

A method's functions draw no random numbers, write into nothing that they are given, and give what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError, NonFiniteError, check_range, check_whole
from fedkeep.core.net import every_tensor
from fedkeep.core.params import Params, State, misfit, nonfinite
from fedkeep.core.seeds import without_draws
from fedkeep.split.halves import Frozen


def check_count(least: int, **given: int | None) -> None:
    """Raise MethodError unless every number is a whole one of at least ``least``; None stands for no number."""
    check_whole({name: value for name, value in given.items() if value is not None}, MethodError)
    check_range(f"[{least}, inf]", MethodError, **given)


def check_plain(model: nn.Module) -> None:
    """Raise MethodError unless a model is an ordinary module with values, which is trained here and now."""
    for name, layer in model.named_modules():
        who, kind = f"The layer {name!r}" if name else "The model", type(layer).__name__
        if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise MethodError(
                "{who} is a {kind}, which spreads every batch over several devices. Give the module that it holds "
                "(.module); simulate's device says where to train.",
                who=who,
                kind=kind,
            )
        if isinstance(layer, torch.jit.ScriptModule):
            raise MethodError(
                "{who} is a script of torch.jit. Give the module that it was made from.", who=who
            )
        for leaf, value in (*layer._parameters.items(), *layer._buffers.items()):
            full = f"{name}.{leaf}" if name else leaf
            if value is not None and nn.parameter.is_lazy(value):
                raise MethodError(
                    "{who} is a {kind}, and its {full!r} has no shape before its first call. Call the model on a "
                    "batch once, or give the layer its sizes.",
                    who=who,
                    kind=kind,
                    full=full,
                )
            if value is not None and value.layout is not torch.strided:
                raise MethodError(
                    "{full!r} is a sparse tensor ({layout}), which is neither sent nor kept. Keep its places "
                    "and its values as buffers, and make it of them in forward, e.g. by torch.sparse_coo_tensor.",
                    full=full,
                    layout=value.layout,
                )
            if value is not None and value.is_meta:
                raise MethodError(
                    "{full!r} is on the device 'meta', which holds no values. Load the model's weights first, e.g. "
                    "by to_empty(device='cpu') and load_state_dict.",
                    full=full,
                )
        if getattr(layer, "_compiled_call_impl", None) is not None:
            raise MethodError(
                "{who} was compiled in place, which is lost where fedkeep copies the model. Give it uncompiled, or "
                "put torch.compile(layer) into the model where it is made.",
                who=who,
            )
    for name, value in every_tensor(model).items():
        if not isinstance(value, Tensor):
            raise MethodError(
                "{name!r} in the model's state is a {kind}, no tensor: layers that are quantised or packed cannot be "
                "trained. Give the model as it was before.",
                name=name,
                kind=type(value).__name__,
            )
    if hasattr(model, "_orig_mod"):
        raise MethodError(
            "The model is what torch.compile returns, which hides what columns its forward takes. Give the module that "
            "it holds (._orig_mod); layers in it may be compiled."
        )
    _check_apart(model)


def _check_apart(model: nn.Module) -> None:
    """Refuse two tensors in one memory, of which a parameter would have its own in the copy that is trained."""
    tensors = {
        n: v
        for n, v in every_tensor(model).items()
        if type(v.data) is Tensor and v.layout is torch.strided and v.numel()
    }
    places = sorted(
        (v.data_ptr(), v.data_ptr() + v.nbytes, n) for n, v in tensors.items() if v.is_contiguous()
    )
    for (_, end, name), (start, _, other) in pairwise(places):
        both = tensors[name], tensors[other]
        if start < end and both[0] is not both[1] and any(isinstance(v, nn.Parameter) for v in both):
            raise MethodError(
                "{name!r} and {other!r} are two tensors in one memory, and fedkeep trains a copy of the model, in "
                "which each has its own. Give both names one Parameter (self.b = self.a) to tie them, or clone() one.",
                name=name,
                other=other,
            )


T = TypeVar("T")
UPLOAD = "upload/"
"""Under which the upload chain's states stand among a method's: ``upload/0/residual`` is of the first link."""


def called(
    who: str,
    hook: Callable[[], T],
    *given: Mapping[str, Tensor],
    device: str = "cpu",
    kind: type[Any] = object,
    draws: bool = True,
) -> T:
    """Return what a method's function gives. What it writes through ``.data`` or ``.numpy()`` is not noticed.

    Args:
        who: the function, for messages: "finish of 'furl'".
        hook: calls it.
        given: values that it is given, which others hold too.
        device: where it computes.
        kind: of what it is to give.
        draws: whether it may have drawn random numbers: not where nothing of the user's is called.

    Raises:
        MethodError: it drew random numbers, wrote into what it was given, or gave something of another kind.
    """
    watched = Frozen(
        {f"{number}/{name}": v for number, values in enumerate(given) for name, v in values.items()}
    )
    found = without_draws(who, hook, device) if draws else hook()
    if changed := watched.changed():
        raise MethodError(
            "The {who} wrote into {name!r}, which others read too. Make a new tensor: "
            "v * 0.5, not v.mul_(0.5).",
            who=who,
            name=changed[0].partition("/")[2],
        )
    if not isinstance(found, kind):
        raise MethodError(
            "The {who} gives {got}; wanted {wanted}.", who=who, got=type(found).__name__, wanted=kind.__name__
        )
    return found


def as_state(who: str, make: Callable[[], Any]) -> State:
    """Return the state that a method's function begins with: a tensor by each name.

    Raises:
        MethodError: it drew random numbers, or gave something else.
    """
    values = called(who, make, kind=Mapping)
    check_tensors(who, values)
    for name in values:
        if not isinstance(name, str) or not name or name.startswith(UPLOAD):
            raise MethodError(
                "The {who} gives {name!r} as a name; wanted a text that does not begin with {upload!r}, which belongs "
                "to the upload chain.",
                who=who,
                name=name,
                upload=UPLOAD,
            )
    return dict(values)


def check_tensors(who: str, values: Mapping[str, Any]) -> None:
    """Raise MethodError at the first value that is no tensor."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise MethodError(
                "The {who} gives {name!r} as {got}; wanted a tensor, such as torch.tensor(1.0).",
                who=who,
                name=name,
                got=type(value).__name__,
            )


def check_hook(who: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise MethodError unless a function gives known names of the same shapes and types."""
    check_tensors(who, given)
    for name, value in given.items():
        if name not in wanted:
            known = sorted(wanted)
            raise MethodError(
                "The {who} gives {name!r}, which is not known there; known are {known}.",
                who=who,
                name=name,
                known=known,
            )
        want = wanted[name]
        if value.shape != want.shape or value.dtype != want.dtype:
            raise MethodError(
                "The {who} gives {name!r} as {got} {got_dtype}; wanted {wanted} {wanted_dtype}, as it was.",
                who=who,
                name=name,
                got=tuple(value.shape),
                got_dtype=value.dtype,
                wanted=tuple(want.shape),
                wanted_dtype=want.dtype,
            )


def check_all(who: str, wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise MethodError unless a function gives all names, of the same shapes and types."""
    check_hook(who, wanted, given)
    if fault := misfit(wanted, given):
        raise MethodError("The {who} does not give all: {fault}.", who=who, fault=fault)


def check_numbers(who: str, values: Params, known: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError where a function gives a NaN or an infinity; what is ``known`` as it is was looked at."""
    name = nonfinite({n: v for n, v in values.items() if known.get(n) is not v})
    if name is not None:
        raise NonFiniteError(
            "The {who} gives {name!r}, which holds a NaN or an infinity.", who=who, name=name
        )
