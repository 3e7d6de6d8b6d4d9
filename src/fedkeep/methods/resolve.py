"""A method that was written for parts of certain names, on a model that calls them otherwise.

Methods speak of a model's parts by names: ``head.*`` and ``classifier`` for where it ends, ``encoder.*`` for all before
that, ``*norm*`` for batch normalisation, ``user`` for a user's vector, and two steps, ``features`` and ``head``. A model that has these parts is
trained by them. Of any other one the head is found where a run is put together (``split.find_head``), and the method
that the run has names the layers that were found: its split, its phases and its parts alike. So what was found stands
wherever the method is described: in ``run.json``, in a project, on a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedkeep.core.copying import copied
from fedkeep.core.errors import MethodError, shown
from fedkeep.core.heads import ADVICE, Head
from fedkeep.core.net import Takes, every_tensor, logits_of
from fedkeep.core.params import Batch
from fedkeep.core.seeds import forked
from fedkeep.methods.added_parts import drawn_for
from fedkeep.methods.hook_declarations import GRADIENTS, Declaring, revealed
from fedkeep.methods.phase import Phase
from fedkeep.methods.terms import SquaredError
from fedkeep.methods.user import BIAS, VECTOR, AddUser
from fedkeep.methods.usual import usual_of
from fedkeep.privacy.link import Link
from fedkeep.privacy.projection import WORDS, Projection
from fedkeep.split.find_head import beside_head, find_head, is_layer, named_layer
from fedkeep.split.halves import divide, matches
from fedkeep.split.split import Split

T = TypeVar("T")
D = TypeVar("D", bound=Declaring)
HEAD, BODY, CLASSIFIER, NORMS, USER = "head.*", "encoder.*", "classifier", "*norm*", "user"
KIND = "type:"
"""Before the name of a layer's class, where a pattern stands: all parameters and buffers of such layers."""
COLUMNS = ("label", "name", "task")
"""Fields whose texts are no names of parts."""


class Resolvable(Protocol):
    """What of a method is looked at here."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def split(self) -> Split:
        """What is private."""

    @property
    def needs_features(self) -> bool:
        """Whether it looks at features."""

    @property
    def adapt(self) -> Any:
        """How clients adapt: ``split`` and ``phases``."""

    @property
    def extend(self) -> Callable[[nn.Module], nn.Module] | None:
        """What it adds to a model."""

    @property
    def head(self) -> Head | None:
        """Where the model ends."""

    @property
    def upload(self) -> tuple[Link, ...]:
        """What happens to an upload."""

    def but(self, **changes: Any) -> Self:
        """Return it with some fields changed."""


M = TypeVar("M", bound=Resolvable)


def resolved(method: M, model: nn.Module, batch: Callable[[], Batch | None]) -> M:
    """Return a method that names a model's own parts; the same method where the model has those that it names.

    Args:
        method: the method.
        model: the model as its user gave it; it is left as it is.
        batch: returns two or more real examples, on which the head is found; None: there are none.

    Raises:
        MethodError: the model's head is not found, or there is nothing to find it on.
    """
    method = _with_table(_with_kinds(method, model), model)
    extend = method.extend
    if extend is not None and getattr(extend, "has_parts", _no)(model):
        return method
    method, wanted = _with_norms(method, model), _texts(method)
    if USER not in method.split.private:  # a rate for a user's vector asks for none
        wanted.discard(USER)
    names, said = [*every_tensor(model), *_added(extend, model)], method.head is not None
    lacks = {text for text in (HEAD, BODY, USER) if text in wanted and (said or not matches_any(names, text))}
    steps = method.needs_features and (method.head is not None or not _has_steps(model, batch))
    steps = steps or hasattr(extend, "has_parts")  # the model's forward alone is met where it is made a part
    whole = CLASSIFIER in wanted or f"{CLASSIFIER}.*" in wanted
    if whole and (steps or CLASSIFIER not in dict(model.named_children())):
        lacks.add(CLASSIFIER)
    if not (lacks or steps):
        return method
    try:
        head = _head(method, model, batch())
    except MethodError as error:
        if "column" in error.facts or not lacks & {*method.split.private}:
            raise
        unmet = ", ".join(map(repr, sorted(lacks)))
        raise MethodError(
            "{why} {method!r} looks for a head as no parameter of {model} matches {unmet}; they are {names}. Or give it "
            "patterns of these: private=...",
            why=error,
            method=method.name,
            model=type(model).__name__,
            unmet=unmet,
            names=shown(list(every_tensor(model)), 200),
        ) from error
    changes = {text: _named(text, model, head) for text in lacks}
    if CLASSIFIER in lacks:
        changes[f"{CLASSIFIER}.*"] = (f"{head.layer}.*",)
    named = renamed(method, changes).but(head=head)
    if USER in lacks:
        return named.but(extend=AddUser(head.layer))
    adjusted: M = getattr(named.extend, "adjusted", _same_method)(named)
    return adjusted


@dataclass(frozen=True)
class DrawAnew:
    """Draws layers of a model anew, as they are made.

    Attributes:
        layers: their names.
    """

    layers: tuple[str, ...]

    def __call__(self, module: nn.Module) -> nn.Module:
        """Return a copy of ``module`` with other values in the layers."""
        both = copied(module)
        with drawn_for(module, "head"):
            for name in self.layers:
                layer: Any = both.get_submodule(name)
                layer.reset_parameters()
        return both


def with_drawn_head(method: M, model: nn.Module) -> M:
    """Return a method that draws a head of zeros anew where rounds hold it still and adapting trains it.

    Through zeros no gradient comes to what is before them, so rounds would train nothing (e.g. torchvision's ViT).
    """
    later = method.adapt.split
    if method.extend is not None or later is None or not method.adapt.phases:
        return method
    zeros = tuple(
        name
        for name, layer in model.named_modules()
        if is_layer(layer)
        and method.split.is_frozen(f"{name}.weight")
        and later.is_private(f"{name}.weight")
        and not layer.get_parameter("weight").any()
    )
    return method.but(extend=DrawAnew(zeros)) if zeros else method


def _added(extend: Callable[[nn.Module], nn.Module] | None, model: nn.Module) -> list[str]:
    """Return the names of what a method's own hook makes of a model, where it needs no head."""
    if extend is None or hasattr(extend, "has_parts"):
        return []
    with suppress(MethodError):
        return list(every_tensor(extend(copied(model))))
    return []


def _no(model: nn.Module) -> bool:
    return False


def _same_method(method: M) -> M:
    return method


def _head(method: Resolvable, model: nn.Module, batch: Batch | None) -> Head:
    """Return a model's head; without examples, where somebody says which it is."""
    if batch is not None:
        return find_head(model, batch, method.head)
    if method.head is not None:
        return replace(method.head, layer=named_layer(model, method.head))
    raise MethodError(
        "{method!r} looks for the head of {model}, which is found on examples, and there are none. {advice}",
        method=method.name,
        model=type(model).__name__,
        advice=ADVICE,
    )


def _with_kinds(method: M, model: nn.Module) -> M:
    """Return a method that names the layers of each type that it asks for: ``type:LayerNorm``.

    Raises:
        MethodError: there is no such layer.
    """
    asked = [text for text in _texts(method) if text.startswith(KIND)]
    found = {
        text: tuple(
            f"{name}.*" if name else "*"
            for name, layer in model.named_modules()
            if text[len(KIND) :] in {kind.__name__ for kind in type(layer).__mro__}
        )
        for text in asked
    }
    if lost := sorted(text for text in asked if not found[text]):
        kinds = sorted({type(layer).__name__ for layer in model.modules()})
        raise MethodError(
            "{model} has no layer of {name!r}; its layers are {kinds}.",
            model=type(model).__name__,
            name=lost[0],
            kinds=", ".join(kinds),
        )
    return renamed(method, found) if found else method


def _with_norms(method: M, model: nn.Module) -> M:
    """Return a method that names a model's layers of batch normalisation, where ``*norm*`` names others, or not all.

    Of a model that has none, what is named so stays private: layers of other normalisation.

    Raises:
        MethodError: there is neither.
    """
    layers = tuple(f"{name}.*" for name in batch_norms(model) if name)
    named = {name: (matches(name, (NORMS,)), matches(name, layers)) for name in every_tensor(model)}
    if NORMS not in _texts(method) or (layers and all(a == b for a, b in named.values())):
        return method
    if not layers and not any(a for a, _ in named.values()):
        raise MethodError(
            "{model} has no batch normalisation, which {method!r} keeps private. Name other layers "
            "in its option private, or take fedavg.",
            model=type(model).__name__,
            method=method.name,
        )
    return renamed(method, {NORMS: layers}) if layers else method


def _with_table(method: M, model: nn.Module) -> M:
    """Return a method that projects a model's own table of words, where it has another name for it.

    Raises:
        MethodError: the model has none, or several.
    """
    lost = [link for link in method.upload if isinstance(link, Projection) and link.table == WORDS]
    if not lost or matches_any(list(every_tensor(model)), WORDS):
        return method
    found = [
        f"{name}.weight".removeprefix(".")
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    ]
    if len(found) != 1:
        has = f"has several tables ({', '.join(found)})" if found else "has no table of words"
        advice = (
            f"Say which, as in table={found[0]!r}," if found else "Name another matrix in its option table,"
        )
        raise MethodError(
            "{model} {has}, and {method!r} uploads one by its principal components. {advice} or "
            "train without: kteps in place of kteps_star.",
            model=type(model).__name__,
            has=has,
            method=method.name,
            advice=advice,
        )
    links = tuple(replace(link, table=found[0]) if link in lost else link for link in method.upload)
    return method.but(upload=links)


def batch_norms(model: nn.Module) -> list[str]:
    """Return the names of a model's layers of batch normalisation."""
    return [name for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]


def _named(text: str, model: nn.Module, head: Head) -> tuple[str, ...]:
    """Return what a model has for the parts that a text names."""
    if text == BODY:
        return body_of(model, head.layer)
    if text == USER:
        return (f"{head.layer}.{VECTOR}", f"{head.layer}.{BIAS}")
    return (f"{head.layer}.*" if text == HEAD else head.layer,)


def told_head(method: Resolvable, model: nn.Module, batch: Callable[[], Batch | None]) -> str:
    """Return a line on a method's head: "head: decoder (27 numbers), private with fedrep"; empty: none was looked for.

    And on what joins the output beside it, and on what was drawn anew of it.
    """
    drawn = method.extend.layers if isinstance(method.extend, DrawAnew) else ()
    told = f"{' and '.join(drawn)} was all zeros, and is drawn anew for {method.name}" if drawn else ""
    if method.head is None:
        return told
    own = [(n, p) for n, p in model.named_parameters() if n.startswith(f"{method.head.layer}.")]
    numbers = sum(p.numel() for _, p in own)
    halves = {
        "private" if method.split.is_private(n) else "frozen" if method.split.is_frozen(n) else ""
        for n, _ in own
    }
    whose = next(iter(halves)) if len(halves) == 1 else ""
    others = [n for n, _ in model.named_parameters() if not n.startswith(f"{method.head.layer}.")]
    if not whose and others and all(map(method.split.is_private, others)):
        whose = "and what is before it private"
    line = f"head: {method.head.layer} ({numbers:,} numbers)"
    line = f"{line}, {whose} with {method.name}" if whose else line
    if whose == "private" and not others:
        line = f"{line}; nothing is before it, so nothing is federated"
    if (examples := batch()) is not None and (beside := beside_head(model, examples, method.head)):
        parts = sorted({name.rpartition(".")[0] or name for name in beside})
        some = f"{', '.join(map(repr, parts[:3]))}{' and others' * (len(parts) > 3)}"
        joins, are = ("join", "are") if len(parts) > 1 else ("joins", "is")
        line = f"{line}; {some} {joins} the output beside it and {are} no part of it (head='NAME' takes a part that holds both)"
    return f"{line}; {told}" if told else line


def matches_any(names: list[str], pattern: str) -> bool:
    """Tell whether a pattern matches one of some names."""
    return any(fnmatchcase(name, pattern) for name in names)


def body_of(model: nn.Module, head: str) -> tuple[str, ...]:
    """Return patterns of all that is trained before a head.

    Raises:
        MethodError: nothing is.
    """
    halves = divide(model, ())
    trained = {n for n in halves.federated_names if not n.startswith(f"{head}.")}
    if not trained & halves.trainable:
        raise MethodError(
            "{model} has nothing that is trained before its head {head!r}, so no client can have a "
            "representation of its own. Take fedper, whose head is private.",
            model=type(model).__name__,
            head=head,
        )
    parts = list[str]()
    at: nn.Module | None = model
    path = ""
    for step in (*head.split("."),):
        assert at is not None
        parts += [f"{path}{n}.*" for n, _ in at.named_children() if n != step]
        parts += [f"{path}{n}" for n in (*at._parameters, *at._buffers)]
        at, path = at._modules.get(step), f"{path}{step}."
    return tuple(p for p in parts if any(matches(n, (p,)) for n in trained))


def _has_steps(model: nn.Module, batch: Callable[[], Batch | None]) -> bool:
    """Tell whether a model has the steps ``features`` and ``head``; layers of these names only if they give its output.

    Where there are no examples to try, layers are taken for steps.
    """
    steps = [getattr(model, step, None) for step in ("features", "head")]
    if not all(map(callable, steps)):
        return False
    if not any(isinstance(step, nn.Module) for step in steps):
        return True
    given = batch()
    if given is None:
        return True
    was = model.training
    model.eval()
    try:
        with torch.no_grad(), forked("cpu"):
            between = model.features(**Takes("features", model.features).of(given))  # type: ignore[operator, arg-type]
            ends = logits_of(model.head(between))  # type: ignore[operator]
            output = logits_of(model(**Takes("forward", model.forward).of(given)))
            return bool(torch.equal(ends, output))
    except Exception:  # noqa: BLE001 - whatever a model raises whose layers are no such steps
        return False
    finally:
        model.train(was)


def _texts(value: Any) -> set[str]:
    """Return all texts in a value of frozen dataclasses."""
    found = set[str]()

    def see(text: str) -> tuple[str, ...]:
        found.add(text)
        return (text,)

    _walk(value, see)
    return found


def renamed(value: T, changes: Mapping[str, tuple[str, ...]]) -> T:
    """Return a value of frozen dataclasses with other texts in it; in a tuple one text may become several."""
    changed: T = _walk(value, lambda text: changes.get(text, (text,)))
    return changed


def decided(method: D, model: nn.Module) -> D:
    """Return a method in whose phases nothing is left open: rates and sizes are the model's usual ones.

    With batch normalisation there is no last mini-batch of one example, unless a phase says else.
    """
    usual, merges, losses = usual_of(model), bool(batch_norms(model)), list[bool]()
    clips = not any(
        GRADIENTS in each.of for each in revealed(method)
    )  # what reads gradients wants them whole

    def look(value: Any) -> Any:
        losses.append(isinstance(value, SquaredError))
        return value

    def phase(value: Any) -> Any:
        if not isinstance(value, Phase):
            return value
        merged = value.but(merge_single=True) if merges and value.merge_single is None else value
        return usual.filled(merged, any(losses), clips)

    _walk(method, lambda text: (text,), look)
    changed: D = _walk(method, lambda text: (text,), phase)
    return changed


def _walk(
    value: Any, change: Callable[[str], tuple[str, ...]], whole: Callable[[Any], Any] = lambda v: v
) -> Any:
    again = functools.partial(_walk, change=change, whole=whole)
    if isinstance(value, str):
        found = change(value)
        return found[0] if len(found) == 1 else found
    if isinstance(value, tuple | list):
        items: list[Any] = []
        for item in value:
            if isinstance(item, str):
                items += change(item)
            elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
                items += _pairs(item, change, again)
            else:
                items.append(again(item))
        return value if _same(items, value) else type(value)(items)
    if isinstance(value, functools.partial):
        args, kept = again(value.args), {n: again(v) for n, v in value.keywords.items()}
        return (
            value
            if args is value.args and _same(kept.values(), value.keywords.values())
            else functools.partial(value.func, *args, **kept)
        )
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in fields(value) if f.init and f.name not in COLUMNS}
        new = {name: again(v) for name, v in own.items()}
        changes = {name: v for name, v in new.items() if v is not own[name] and v != own[name]}
        return whole(replace(value, **changes) if changes else value)
    return value


def _pairs(
    pair: tuple[str, Any], change: Callable[[str], tuple[str, ...]], again: Callable[[Any], Any]
) -> list[tuple[Any, ...]]:
    """Return a pair of a text and what belongs to it, e.g. a rate, once for each text that comes in its place."""
    name, own = pair
    if isinstance(own, str):
        return [again(pair)]
    names, new = change(name), again(own)
    return [pair] if names == (name,) and new is own else [(each, new) for each in names]


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=False)) and len(list(new)) == len(list(old))
