"""A model's head, found by watching it: its last layer that has parameters, called once and by no other way.

A vector of the model itself that is added behind the head, such as a user's bias, is no part of what follows: it is one
of the model's values like any before the head.

A rehearsal on a few real examples says whether a model can be taken apart there: its head is called exactly once, its
parameters are used nowhere else, nothing that has parameters is called after it, every output depends on it, gradients
flow into it and through it, and a pass whose head is given the features that were caught gives the same bits.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedkeep.core.copying import copied
from fedkeep.core.errors import MethodError, did_you_mean, first_line
from fedkeep.core.heads import ADVICE, Head, features_last, put_in, the_tensor
from fedkeep.core.net import Takes, aliases, logits_of
from fedkeep.core.params import Batch, tensors_in
from fedkeep.core.seeds import forked, seed_all


@dataclass
class ForwardPass:
    """What was seen of one forward pass.

    Attributes:
        calls: how often each layer was called, by name.
        uses: of each parameter that was computed with, in order: its names, and the layers that were being called.
        given, gave: by layer, what it was given and gave at its last call.
        output: what is judged of the model's output.
    """

    calls: dict[str, int] = field(default_factory=dict)
    uses: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    gave: dict[str, Any] = field(default_factory=dict)
    output: Any = None


class _ParameterUse(TorchFunctionMode):
    """Notes which parameters are computed with; what only asks for a type or a shape computes nothing."""

    def __init__(self, names: Mapping[int, tuple[str, ...]], seen: ForwardPass) -> None:
        super().__init__()
        self.names, self.seen, self.within = names, seen, list[str]()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call, and note the parameters that are given, if a tensor comes of it."""
        found = func(*args, **(kwargs or {}))
        if tensors_in(found):
            for value in tensors_in((args, dict(kwargs or {}))):
                if names := self.names.get(id(value)):
                    self.seen.uses.append((names, tuple(self.within)))
        return found


def watched(module: nn.Module, arguments: Mapping[str, Any]) -> ForwardPass:
    """Return what is seen of a forward pass with the module's own values."""
    seen, names = ForwardPass(), dict[int, tuple[str, ...]]()
    for name, value in module.named_parameters(remove_duplicate=False):
        names[id(value)] = (*names.get(id(value), ()), name)
    watch = _ParameterUse(names, seen)
    handles = []
    for name, layer in module.named_modules():
        if not name:
            continue

        def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            watch.within.append(name)
            seen.calls[name] = seen.calls.get(name, 0) + 1
            seen.given[name] = (args, kwargs)

        def leave(layer: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            watch.within.pop()
            seen.gave[name] = output

        handles += [
            layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            layer.register_forward_hook(leave, with_kwargs=True),
        ]
    try:
        with watch:
            seen.output = logits_of(_run(module, arguments))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def find_head(model: nn.Module, batch: Batch, wanted: Head | None = None) -> Head:
    """Return where a model ends, or check that it ends where somebody says.

    Args:
        model: the model; it is left as it is.
        batch: two or more real examples.
        wanted: the head by name or pattern; None: it is found. A part called ``head`` is one where it ends the model.

    Raises:
        MethodError: the model cannot be taken apart before its head; one sentence says why, and what to do.
    """
    module = copied(model).cpu()
    takes = Takes(f"{type(module).__name__}.forward", module.forward)
    arguments = {n: v.cpu() for n, v in takes.of(batch).items()}
    examples = next((len(v) for v in arguments.values() if v.dim()), 0)
    with forked("cpu"), torch.enable_grad():
        seed_all(0, "cpu")
        module.eval()
        try:
            seen = watched(module, _again(arguments))
        except MethodError:
            raise
        except Exception as error:
            raise MethodError(
                "The model's forward cannot be computed on examples of the data, so its head is not found: "
                "{error}: {why}.",
                error=type(error).__name__,
                why=first_line(error, 300).rstrip("."),
            ) from error
        name = named_layer(module, wanted) if wanted else _last(module, seen)
        found = replace(wanted or Head(layer=name), layer=name)
        _check_called(module, seen, found, bool(wanted))
        _check_replayed(module, seen, found, arguments, examples)
        ends = _ends_with(seen, name)
        module.train()
        with suppress(RuntimeError, ValueError):  # e.g. statistics of too few examples: training says so
            trained = watched(module, _again(arguments))
            _check_gradients(module, trained, found)
            ends = ends and _ends_with(trained, name)
    return replace(found, last=ends)


def beside_head(model: nn.Module, batch: Batch, head: Head) -> tuple[str, ...]:
    """Return the parameters that reach a model's output beside its head alone: a second head's, or a wide part's.

    What also reaches the head's features, as around a residual connection, is not among them; nor are a vector or a
    number of the model itself.

    Args:
        model: the model; it is left as it is.
        batch: real examples.
        head: where the model ends, as it was found.
    """
    module = copied(model).cpu().eval()
    takes = Takes(f"{type(module).__name__}.forward", module.forward)
    arguments = {n: v.cpu() for n, v in takes.of(batch).items()}
    with forked("cpu"), torch.enable_grad():
        seen = watched(module, _again(arguments))
        layer, gave = module.get_submodule(head.layer), seen.gave[head.layer]
        rest = logits_of(_with_output(module, layer, _again(arguments), gave.detach().clone()))
    bare = {n for n, p in module.named_parameters(recurse=False) if p.dim() < 2}
    beside, before = leaves_of(rest), leaves_of(the_tensor(*seen.given[head.layer], head.layer))
    return tuple(n for n, p in module.named_parameters() if id(p) in beside - before and n not in bare)


def leaves_of(value: Tensor) -> set[int]:
    """Return the ids of the tensors without a past that autograd would give a gradient from a value."""
    found, nodes, known = set[int](), [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        nodes += [before for before, _ in node.next_functions]
    return found


def _run(module: nn.Module, arguments: Mapping[str, Any]) -> Any:
    placed, named = Takes(type(module).__name__, module.forward).given(dict(arguments))
    return module(*placed, **named)


def _again(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in arguments.items()}


def named_head(model: nn.Module, given: Head | nn.Module | Callable[[nn.Module], Any]) -> Head:
    """Return a head by its name, where a layer of the model or a function that returns one is given.

    Raises:
        MethodError: it is no layer of the model.
    """
    if isinstance(given, Head):
        return given
    layer = given if isinstance(given, nn.Module) else given(model)
    if isinstance(layer, str):
        return Head(layer=layer)
    name = next((name for name, part in model.named_modules() if name and part is layer), None)
    if name is None:
        raise MethodError(
            "head= is to be a layer of {model}, a function that returns one, or a name; got "
            "{got}, which is none of its layers.",
            model=type(model).__name__,
            got=reprlib.repr(layer),
        )
    return Head(layer=name)


def named_layer(module: nn.Module, wanted: Head) -> str:
    """Return the layer that a name or pattern names.

    Raises:
        MethodError: it names none, or several.
    """
    layers = [name for name, _ in module.named_modules() if name]
    if wanted.layer in layers:
        return wanted.layer
    found = [n for n in layers if fnmatchcase(n, wanted.layer)]
    outermost: list[str] = [n for n in found if not any(n.startswith(f"{other}.") for other in found)]
    if len(outermost) != 1:
        what = f"matches {outermost[:4]}" if outermost else "names no layer of it"
        raise MethodError(
            "head={layer!r} is to name one layer of {module}, and {what}.{near}",
            layer=wanted.layer,
            module=type(module).__name__,
            what=what,
            near=did_you_mean(wanted.layer, layers),
        )
    return outermost[0]


def is_layer(layer: nn.Module) -> bool:
    """Tell whether a layer is one that a model ends with: linear, or a convolution of single points."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return set(layer.kernel_size) == {1} and layer.groups == 1
    return isinstance(layer, nn.Linear)


def _last(module: nn.Module, seen: ForwardPass) -> str:
    """Return the name of the last layer whose parameters are computed with."""
    kind = type(module).__name__
    if is_layer(module):
        raise MethodError(
            "{model} is one layer, so it is all head. Put it into a sequence, torch.nn.Sequential(layer), whose head is "
            "its part '0'.",
            model=kind,
        )
    if not seen.uses:
        raise MethodError(
            "No parameter of {model} is seen in what forward computes. Let it call the model's layers, or say which is "
            "the head: method.but(head='NAME').",
            model=kind,
        )
    own = {n for n, p in module.named_parameters(recurse=False) if p.dim() < 2}  # a bias, a scale
    uses = [use for use in seen.uses if not own.intersection(use[0])]
    names, within = uses[-1] if uses else seen.uses[-1]
    of = names[0].rpartition(".")[0]
    if of and of not in within and is_layer(module.get_submodule(of)):
        raise MethodError(
            "{model} computes last with {parameter!r} outside its layer, so no features are caught there. Let forward "
            "call {of!r}, or say which other layer is the head: method.but(head='NAME').",
            model=kind,
            parameter=names[0],
            of=of,
        )
    for name in reversed(within):
        if any(n.startswith(f"{name}.") for n in names) and is_layer(module.get_submodule(name)):
            return _whole(module, seen, name)
    raise MethodError(
        "{model} computes last with {parameter!r}, which is no parameter of a linear layer or of a convolution of single "
        "points that is called, so its head is not known. {advice}",
        model=kind,
        parameter=names[0],
        advice=ADVICE,
    )


def _whole(module: nn.Module, seen: ForwardPass, name: str) -> str:
    """Return ``head`` if that is a part of the model which ends with the layer, else the layer."""
    part = module._modules.get("head")
    whole = part is not None and name.startswith("head.") and seen.calls.get("head") == 1
    return "head" if whole else name


def _check_called(module: nn.Module, seen: ForwardPass, head: Head, given: bool) -> None:
    """Raise MethodError unless a head is called once, its parameters are its alone, and none come after it."""
    name, kind = head.layer, type(module).__name__
    own = {n for n, _ in module.get_submodule(name).named_parameters(f"{name}", remove_duplicate=False)}
    if not own:
        raise MethodError(
            "The head {head!r} of {model} has no parameters. {advice}", head=name, model=kind, advice=ADVICE
        )
    if (calls := seen.calls.get(name, 0)) != 1:
        raise MethodError(
            "The head {head!r} of {model} is called {calls} times in one forward. {advice}",
            head=name,
            model=kind,
            calls=calls,
            advice=ADVICE,
        )
    for first, others in aliases(module).items():
        names = (first, *others)
        inside = [n for n in names if n in own]
        if inside and len(inside) < len(names):
            outside = next(n for n in names if n not in own)
            raise MethodError(
                "The head {head!r} of {model} shares {parameter!r} with {outside!r} (tied weights), so it has no values "
                "of its own. Untie them, or say which layer is the head: method.but(head='NAME').",
                head=name,
                model=kind,
                parameter=inside[0],
                outside=outside,
            )
    astray = [n for names, within in seen.uses if name not in within for n in names if n in own]
    if astray:
        raise MethodError(
            "{model} computes with {parameter!r} outside of its head {head!r}, too. {advice}",
            model=kind,
            parameter=astray[0],
            head=name,
            advice=ADVICE,
        )
    after = False
    bare = {n for n, p in module.named_parameters(recurse=False) if p.dim() < 2}
    for names, within in seen.uses:
        if bare.intersection(names):
            continue
        inside_now = name in within
        if after and not inside_now:
            raise MethodError(
                "{model} computes with {parameter!r} after its head {head!r}; a head is the last that has parameters. "
                "{advice}",
                model=kind,
                parameter=names[0],
                head=name,
                advice=ADVICE,
            )
        after = after or inside_now


def _check_replayed(
    module: nn.Module, seen: ForwardPass, head: Head, arguments: Mapping[str, Tensor], examples: int
) -> None:
    """Raise MethodError unless putting in the features gives the output, and all of it hangs on the head."""
    name, kind = head.layer, type(module).__name__
    layer = module.get_submodule(name)
    features = the_tensor(*seen.given[name], name).detach()
    if not isinstance(seen.output, Tensor):
        raise MethodError(
            "{model} gives a {got}, so it may have several heads; a method that knows one wants "
            "a tensor. Let forward return the output of the head, or take fedavg, fedprox or ditto.",
            model=kind,
            got=type(seen.output).__name__,
        )
    if not isinstance(seen.gave[name], Tensor):
        raise MethodError(
            "The head {head!r} of {model} gives no tensor. {advice}", head=name, model=kind, advice=ADVICE
        )
    with torch.no_grad():
        again = logits_of(put_in(layer, features.clone(), partial(_run, module, _again(arguments)), name))
        if not (isinstance(again, Tensor) and torch.equal(again, seen.output)):
            raise MethodError(
                "A forward of {model} whose head {head!r} is given the same features gives another output. {advice}",
                model=kind,
                head=name,
                advice=ADVICE,
            )
        other = logits_of(_with_output(module, layer, _again(arguments), _shifted(seen.gave[name])))
    same = (other == seen.output).reshape(-1, seen.output.shape[-1] if seen.output.dim() > 1 else 1).all(0)
    if bool(same.any()) and seen.output.numel():
        raise MethodError(
            "Some of what {model} gives does not hang on {head!r}, so it has several heads. Let forward return the "
            "output of one, or say which part holds all of them: method.but(head='NAME').",
            model=kind,
            head=name,
        )
    if features_last(layer, features).shape[:1] != (examples,):
        raise MethodError(
            "The head {head!r} of {model} is given features of shape {got}, whose first axis is not "
            "that of the {examples} examples. Let forward put it first.",
            head=name,
            model=kind,
            got=tuple(features.shape),
            examples=examples,
        )


def _shifted(output: Tensor) -> Tensor:
    """Return an output of the head that differs everywhere."""
    return output + torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output) + 3.0


@contextmanager
def _gives(layer: nn.Module, value: Tensor) -> Iterator[None]:
    handle = layer.register_forward_hook(lambda *_: value)
    try:
        yield
    finally:
        handle.remove()


def _with_output(module: nn.Module, layer: nn.Module, arguments: Mapping[str, Tensor], value: Tensor) -> Any:
    with _gives(layer, value):
        return _run(module, arguments)


def _ends_with(seen: ForwardPass, name: str) -> bool:
    return seen.output is seen.gave.get(name)


def _check_gradients(module: nn.Module, seen: ForwardPass, head: Head) -> None:
    """Raise MethodError unless gradients reach the head's parameters, and its features where something is before it."""
    name, kind = head.layer, type(module).__name__
    own = {n: p for n, p in module.named_parameters() if n.startswith(f"{name}.") and p.requires_grad}
    if not own:
        raise MethodError(
            "All of the head {head!r} of {model} is frozen (requires_grad=False), so no client can have its own. Let it be "
            "trained, or say which layer is the head: method.but(head='NAME').",
            head=name,
            model=kind,
        )
    output = seen.output
    slopes = (
        torch.autograd.grad(output.sum(), list(own.values()), allow_unused=True, retain_graph=True)
        if output.requires_grad
        else [None]
    )
    if all(slope is None for slope in slopes):
        raise MethodError(
            "No gradient reaches the head {head!r} of {model} (detached, or within a re-entrant checkpoint). Take "
            "checkpoint(..., use_reentrant=False), leave detach() out, or say which other layer is the head: "
            "method.but(head='NAME').",
            head=name,
            model=kind,
        )
    features = the_tensor(*seen.given[name], name)
    bare = {n for n, p in module.named_parameters(recurse=False) if p.dim() < 2}
    before = [names[0] for names, within in seen.uses if name not in within and not bare.intersection(names)]
    trained = [n for n in before if module.get_parameter(n).requires_grad]
    if trained and not features.requires_grad:
        raise MethodError(
            "The features that the head {head!r} of {model} is given carry no gradient, though {trained!r} is before it "
            "(detached, or a re-entrant checkpoint). Take checkpoint(..., use_reentrant=False), or leave detach() out.",
            head=name,
            model=kind,
            trained=trained[0],
        )
