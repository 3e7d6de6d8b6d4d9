"""A module used functionally: ``net(params, batch)`` instead of ``module(x)``; it takes columns by its arguments' names."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedkeep.core.buffers import (
    Remembered,
    Still,
    TensorPlace,
    buffers_of,
    is_batched,
    with_attributes,
    with_buffers,
    written,
)
from fedkeep.core.copying import copied, holds_beside
from fedkeep.core.declared import declared
from fedkeep.core.errors import MethodError, did_you_mean
from fedkeep.core.heads import FEATURES, STEPS, found_head, step_of
from fedkeep.core.modes import AsAlone, Keeping
from fedkeep.core.params import Batch, Params, clone, is_state

ALONG = (nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
"""Layers that look along a sequence."""
IMAGES = 4
"""Axes of images: examples, channels, height, width."""
BESIDE = {"label", "client", "time", "opted_in"}
"""Columns that are beside the features: a function is given them where it names them."""


class Takes:
    """The columns that a function takes: by the names of its arguments, and with ``**columns`` all features.

    A module of torch's own, such as a sequence of layers, names its argument itself. It takes the features ``x``, or
    else the only column beside the label; layers that look along a sequence want one for each example.

    Images as uint8, (examples, channels, height, width), become floats from 0 to 1, unless the module or a layer of it
    declares that it takes bytes.

    Args:
        who: the function's name in messages.
        function: what is called with columns.

    Raises:
        MethodError: it takes arguments by position alone.
    """

    def __init__(self, who: str, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.who, self.names = who, [p.name for p in parameters if p.kind in kinds]
        self.placed = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        self.needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
        self.all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        home = getattr(function, "__module__", None) or ""
        self.torchs, self.built_in = (
            home.startswith(("torch.", "fedkeep.nn.")),
            home.startswith("fedkeep.models."),
        )
        owner = getattr(function, "__self__", None)
        self._module = owner if isinstance(owner, nn.Module) else None
        self.mixes = isinstance(owner, nn.Module) and any(isinstance(m, ALONG) for m in owner.modules())
        placed = (
            inspect.Parameter.POSITIONAL_ONLY,
            *(() if self.all else (inspect.Parameter.VAR_POSITIONAL,)),
        )
        if nameless := [p for p in parameters if p.kind in placed]:
            raise MethodError(
                "{who} takes {argument!r} by position alone, but columns are given by name. Name each "
                "argument as its column, e.g. forward(self, x), without '/' and '*'.",
                who=who,
                argument=str(nameless[0]),
            )

    def of(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of the columns.

        Raises:
            MethodError: one is missing that has no default.
        """
        for name in self.needed:
            if name not in columns:
                others = sorted(columns.keys() - BESIDE)
                if self.torchs and len(self.needed) == 1 and (len(others) == 1 or "x" in others):
                    return self._scaled({name: self._apart("x" if "x" in others else others[0], columns)})
                advice = "Name the argument as the column, or take a model that reads these."
                if self.torchs:
                    advice = "Put it into a module whose forward names the column, or take a model that reads these."
                if self.built_in:
                    advice = "Take a model that reads these: fedkeep start FILE proposes one, fedkeep list names all."
                raise MethodError(
                    "{who} wants the column {column!r}; the data have {columns}.{near} {advice}",
                    who=self.who,
                    column=name,
                    columns=sorted(columns),
                    near=did_you_mean(name, columns),
                    advice=advice,
                )
        every = sorted(columns.keys() - BESIDE) if self.all else []
        return self._scaled({name: columns[name] for name in [*self.names, *every] if name in columns})

    @cached_property
    def _pixels(self) -> torch.dtype | None:
        """The type of floats that images in bytes become; None: they stay bytes."""
        if self._module is None or any(declared(layer).takes_bytes for layer in self._module.modules()):
            return None
        return float_type(self._module)

    def _scaled(self, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return arguments with images in bytes as floats from 0 to 1, where the module does not scale them itself."""
        images = [n for n, v in arguments.items() if v.dtype == torch.uint8 and v.dim() == IMAGES]
        if not images or self._pixels is None:
            return arguments
        return arguments | {name: arguments[name].to(self._pixels) / 255 for name in images}

    def given(self, arguments: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments as an author would give them: by position as far as that goes, which hooks see, then by name."""
        names = list(arguments)
        if names == self.placed[: len(names)]:
            return list(arguments.values()), {}
        first = list(itertools.takewhile(arguments.__contains__, self.placed))
        return [arguments[n] for n in first], {n: v for n, v in arguments.items() if n not in first}

    def _apart(self, name: str, columns: Mapping[str, Tensor]) -> Tensor:
        """Return a column, unless all of its examples would be one sequence."""
        if self.mixes and columns[name].dim() < 3:
            raise MethodError(
                "{who} would take the column {column!r}, (examples, features), as one sequence, and mix "
                "examples. Put it into a module that makes (examples, steps, features) of it.",
                who=self.who,
                column=name,
            )
        return columns[name]


def tensors_of(module: nn.Module) -> Params:
    """Return a module's own parameters and persistent buffers, by name; tied ones once, under their first name.

    What ``get_extra_state`` of a layer gives is none of them: it stays in the module.
    """
    first: dict[int, str] = {}
    tensors = every_tensor(module)
    return {name: value for name, value in tensors.items() if first.setdefault(id(value), name) == name}


def every_tensor(module: nn.Module) -> Params:
    """Return a module's own parameters and persistent buffers under each of their names."""
    extra = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if name.rpartition(".")[2] != extra}


def float_type(module: nn.Module) -> torch.dtype:
    """Return the type of a model's floating inputs: that of its parameters where all have one, else float32."""
    kinds = {value.dtype for value in module.parameters() if value.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else torch.float32


def is_compiled(module: nn.Module) -> bool:
    """Tell whether ``torch.compile`` compiles this module, whatever stands in it."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def compiled_layer(module: nn.Module) -> str | None:
    """Return what is compiled in a module, for messages: its first such layer, or None."""
    for name, layer in module.named_modules():
        if is_compiled(layer):
            return f"the layer {name!r}" if name else "the model"
    return None


class _Caller(nn.Module):
    """Lets ``functional_call`` reach methods other than ``forward``; none meets what a method has added beside it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, placed: Sequence[Any], named: Mapping[str, Any]) -> Any:
        module = self.module
        head = found_head(module) if method in STEPS else None
        # A call, not forward alone: hooks of the module itself run, and so does a __call__ of its own.
        whole = method == "forward" or head is not None
        function: Any = module if whole else getattr(module, method)  # it may be an added part
        if head is not None:
            columns = {n: v for n, v in named.items() if n != FEATURES}
            with without_added(module):
                run = partial(function, *placed, **columns)
                return step_of(module, head, method, named.get(FEATURES), run)
        if not added_to(module):
            return function(*placed, **named)
        with without_added(module):
            return function(*placed, **named)


class Net:
    """A module as a pure function of its parameters and of a batch.

    The parameter names of the module's ``forward`` are column names of the data: a model with
    ``forward(self, text, text_length)`` is given the columns ``text`` and ``text_length`` of each batch.

    Args:
        module: the model. Its own values are the initial ones; they are never changed.

    Attributes:
        lookup: tables of embeddings, by parameter, with the column of ids that is all that looks them up: those that
            the module declares, and in a simulation those that a trace finds.
        parameters: the module's own, by first name: nothing trains or changes these very tensors.
        aliases: where tied parameters stand besides, by their first name.
        written: what a forward pass may write into in evaluation too, by name; it is given a copy then.
        float_type: of floating inputs, in training and judging alike.
        switches: whether a layer's own ``train`` or ``eval`` does more than switch.
        copies: whether ``forward`` writes into what it is given; then it is given copies.
        functional: whether other tensors can be put in the place of its own: not where it holds these in a list, too.
        trains_into: what a forward pass writes into in training, by name, also unseen by torch.
        rehearsed: whether ``written`` has the parameters that the module's own ``forward`` constrains, too.
        opted_out: private values that opted-out examples may have made in an earlier run, which this one goes on with.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.lookup: Mapping[str, str] = dict(declared(module).lookup)
        self._caller = _Caller(module)
        self._every = list(self._caller.modules())
        self._takes: dict[str, Takes] = {}
        self.parameters = dict(module.named_parameters())
        self._trainable = frozenset(name for name, p in self.parameters.items() if p.requires_grad)
        self.aliases = aliases(module)
        self._first = {other: name for name, others in self.aliases.items() for other in others}
        self._modules, self._layers = with_attributes(module), with_buffers(module)
        self._remembered, self._watched, self.rehearsed = Remembered(self._modules), False, False
        self._buffers = buffers_of(self._layers)
        self._places = {place.name: place for place in self._buffers}
        self.written = written(module, self._layers, self._first)
        self.opted_out: frozenset[str] = frozenset()
        self.switches = any(_switches(layer) for layer in module.modules())
        self.float_type = float_type(module)
        self.copies, self.trains_into, self.functional = False, set[str](), not holds_beside(module)
        if self.switches:  # at rest it is in training mode, whatever it was given in
            module.train()
        self._bound: Mapping[str, Tensor] | None = None
        self._held: list[tuple[TensorPlace, Tensor]] = []
        self._assigned: dict[int, tuple[Tensor, Tensor]] = {}

    def initial(self) -> Params:
        """Return a copy of the module's parameters and buffers, by name; tied ones once, under their first name."""
        return clone(tensors_of(self.module))

    def buffers(self) -> set[str]:
        """Return the names of the module's buffers."""
        return {place.name for place in self._buffers}

    def trainable(self) -> frozenset[str]:
        """Return the names of the parameters that required gradients when the net was made (buffers don't)."""
        return self._trainable

    def train(self, mode: bool = True) -> None:
        """Switch dropout and batch statistics on (training) or off (evaluation)."""
        if self.switches:
            self.module.train() if mode else self.module.eval()
        elif any(layer.training is not mode for layer in self._every):
            self._caller.train(mode)

    @contextmanager
    def judging(self, params: Params) -> Iterator[Params]:
        """Hold values in the module and be in evaluation mode for a while; yields these values.

        They stand there before it is switched: a module's own ``train`` or ``eval`` may merge adapters into weights. Such
        a module is back in training mode afterwards.
        """
        values = dict(params)
        with self.bound(values):
            self.train(False)
            try:
                yield values
            finally:
                if self.switches:
                    self.train()

    def __call__(self, params: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the module's output for a batch, computed with ``params``.

        Args:
            params: values by name; a name that is absent keeps the module's own value, a method's state is ignored.
                In training a buffer that ``forward`` assigns is replaced here; while others are ``bound``, its tensor
                gets the new values by ``settle``, so that other dicts with it have them too.
            batch: columns by name, first axis examples.

        Raises:
            MethodError: ``forward`` wants a column that the batch lacks.
        """
        output: Tensor = self.call("forward", params, batch)
        return output

    def call(self, method: str, params: Mapping[str, Tensor], batch: Batch) -> Any:
        """Return what another method of the module returns, computed with ``params``.

        The steps of a model whose head was found (``core.heads``) are such methods, too: ``features``; ``head``, which
        is given these under ``FEATURES``; and ``rest``, which is given them there beside the data's columns.
        """
        given = method, *self._given(method, batch)
        held = self._bound or {}
        other: Params = {}
        if params is not held:  # a method's state is none of the module's
            other = {n: v for n, v in params.items() if held.get(n) is not v and not is_state(n)}
        if self.written and not self.module.training:
            other |= {
                n: params.get(n, place.tensors[place.leaf]).clone() for n, place in self.written.items()
            }
        if other and not self.functional:
            raise MethodError(
                "{who} holds its tensors in a list or a closure, too, so it cannot be run at two sets of values at once, "
                "which this training method does. Let forward take them by their attributes.",
                who=type(self.module).__name__,
            )
        if not other and held:
            output = self._caller.forward(*given)
        else:
            others = self.placed(other)
            placed = {n: self._now(v) for n, v in others.items()} if self._assigned else others
            prefixed = {f"module.{name}": value for name, value in placed.items()}
            before = [place.now for place in self._buffers]
            with Keeping():
                output = torch.func.functional_call(self._caller, prefixed, given, tie_weights=False)
            for place, own in zip(self._buffers, before, strict=True):
                now = prefixed.get(f"module.{place.name}")
                if place.name not in placed:
                    if place.now is not own and is_batched(
                        place.now
                    ):  # what is of several clients or examples
                        place.tensors[place.leaf] = own
                        raise RuntimeError(_assigned(place))
                elif self.module.training and now is not placed[place.name]:
                    self._hand_back(place, others[place.name], now, params)
        return logits_of(output) if method == "forward" else output

    def _given(self, method: str, batch: Batch) -> tuple[list[Any], dict[str, Any]]:
        """Return what of a batch a method of the module takes, by position and by name."""
        if method in STEPS and found_head(self.module) is not None:
            put = {n: v for n, v in batch.items() if n == FEATURES}
            columns = {n: v for n, v in batch.items() if n != FEATURES}
            placed, named = ([], {}) if method == "head" else self._given("forward", columns)
            return placed, {**named, **put}
        if not callable(getattr(self.module, method, None)):
            raise MethodError(
                "{model} has no method {method!r}, which this training method needs. Give the model "
                "`{method}(self, <columns>)`.",
                model=type(self.module).__name__,
                method=method,
            )
        if method not in self._takes:
            function = getattr(self.module, method)
            if method == "forward" and _calls_its_own_way(self.module):
                function = self.module.__call__
            self._takes[method] = Takes(f"{type(self.module).__name__}.{method}", function)
        takes = self._takes[method]
        arguments = takes.of(batch)
        if self.copies:
            arguments = {n: v.clone() for n, v in arguments.items()}
        return takes.given(arguments)

    def taken(self, values: Mapping[str, Tensor]) -> Params:
        """Return values with what ``forward`` has assigned in their place while others are ``bound``; it is settled."""
        found = {name: self._now(value) for name, value in values.items()}
        self._assigned.clear()
        return found

    def _now(self, value: Tensor) -> Tensor:
        """Return what ``forward`` has assigned in place of a tensor and is not settled yet, or the tensor."""
        return self._assigned.get(id(value), (value, value))[1]

    def _hand_back(
        self, place: TensorPlace, before: Tensor, after: Tensor | None, params: Mapping[str, Tensor]
    ) -> None:
        """Hand a buffer that ``forward`` has assigned to whom the old one is from."""
        if is_batched(before) or is_batched(after):
            raise RuntimeError(_assigned(place))
        place.check(before, after)
        assert after is not None
        if self._bound is not None:  # a gradient that is still to be computed may need the old values
            self._assigned[id(before)] = (before, after.detach())
        elif isinstance(params, dict):
            params[self._first.get(place.name, place.name)] = after.detach()

    def still(self, who: object = None, moved: Collection[str] = ()) -> Still:
        """Keep the module as it is (a context); with ``who`` trains, changing its own buffers but ``moved`` is an error.

        So is drawing from ``random`` or ``numpy.random``, which is looked for where somebody trains the first time.
        """
        draws, self._watched = who is not None and not self._watched, self._watched or who is not None
        return Still(self._modules, self._layers, self._remembered, who, draws, moved)

    def settle(self) -> None:
        """Copy what ``forward`` has assigned to buffers, held or of another dict, into these."""
        for place, held in self._held:
            if (now := place.now) is not held:
                place.check(held, now)
                with torch.no_grad():
                    held.copy_(now)  # type: ignore[arg-type]
                place.tensors[place.leaf] = held
        for old, new in self._assigned.values():
            with torch.no_grad():
                old.copy_(new)
        self._assigned.clear()

    def placed(self, params: Mapping[str, Tensor]) -> Params:
        """Return values by every place in the module where they belong: tied ones several times, state nowhere.

        A value that names one of the other places stands there: a private copy's of a tied layer.
        """
        own = {name: value for name, value in params.items() if not is_state(name)}
        for name in self.aliases.keys() & own.keys():
            own = {**dict.fromkeys(self.aliases[name], own[name]), **own}
        return own

    def bound(self, params: Mapping[str, Tensor], trained: Collection[str] = ()) -> Bound:
        """Hold ``params`` in the module's own tensors for a while (a context), ``trained`` ones with gradients.

        What is changed in place inside is seen by the next call; another dict costs what it has of other tensors. What
        ``forward`` assigns to a buffer is seen by the next call too, and in the dict after ``settle``, or afterwards.
        """
        return Bound(self, params, trained)

    def own(self, name: str) -> Tensor | None:
        """Return the module's own tensor of this name, or None."""
        first = self._first.get(name, name)
        if first in self.parameters:
            return self.parameters[first]
        place = self._places.get(first)
        return None if place is None else place.now

    def place(self, name: str) -> tuple[dict[str, Any], str]:
        """Return where a parameter stands: its layer's parameters, and its name there."""
        owner, _, leaf = name.rpartition(".")
        return self.module.get_submodule(owner)._parameters, leaf


def _assigned(place: TensorPlace) -> str:
    return (
        f"forward assigns the buffer {place.name!r}, which cannot be followed for several clients or examples at once; "
        f"self.{place.leaf}.copy_(...) in place of self.{place.leaf} = ... can"
    )


def _switches(layer: nn.Module) -> bool:
    """Tell whether a layer's class has a ``train`` or ``eval`` of its own."""
    kind = type(layer)
    own = kind.train is not nn.Module.train or kind.eval is not nn.Module.eval
    return own and not kind.__module__.startswith(("torch.", "fedkeep."))


def _calls_its_own_way(module: nn.Module) -> bool:
    """Tell whether a module's class has a ``__call__`` that names its arguments."""
    if type(module).__call__ is nn.Module.__call__:
        return False
    kinds = [p.kind for p in inspect.signature(module.__call__).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL not in kinds


def logits_of(output: Any) -> Any:
    """Return what of a model's output is judged: its field ``logits``, else a tuple's first, else all of it.

    A loss that stands first in a tuple, as transformers put it there where they are given labels, is passed over.
    """
    found = output if type(output) is Tensor else getattr(output, "logits", output)
    if found is not output or not isinstance(output, tuple) or not output:
        return found
    alone = isinstance(output[0], Tensor) and not output[0].dim()
    return output[1 if alone and len(output) > 1 else 0]


class Bound:
    """Values in the very tensors of a net's module; what ``Net.bound`` returns.

    Each of the module's parameters and buffers takes the memory of the value of its name, and stands in the dict in its
    place, so whoever knows these tensors (hooks, closures, lists of the user's own) sees the values. Afterwards the
    module has its own memory back, and the dict plain tensors with the values as they have become.

    Args:
        net: the model as a function.
        params: the values, by name; changed as said.
        trained: the names of those that are to require gradients; others do not meanwhile.
    """

    def __init__(self, net: Net, params: Mapping[str, Tensor], trained: Collection[str] = ()) -> None:
        self.net, self.trained = net, frozenset(trained)
        self.params: Any = params  # a dict, where the module has any of the names

    def __enter__(self) -> Self:
        net, self._before = self.net, (self.net._bound, self.net._held)
        self._swapped: list[tuple[str, Tensor, Tensor, bool]] = []
        self._untied: list[tuple[dict[str, Any], str, Any]] = []
        if net.switches:  # what switching writes into frozen values, and takes back, leaves rounding
            for name, still in net.parameters.items():
                if name not in self.params:
                    self._swapped.append((name, still, still.data, still.requires_grad))
                    still.data = still.data.clone()
        for name, value in list(self.params.items()):
            own = net.parameters[name] if name in net.parameters else net.own(name)
            if own is None or own is value:
                continue
            if name in net._first:  # a tied place with a value of its own: a private copy's
                place, leaf = net.place(name)
                self._untied.append((place, leaf, place[leaf]))
                own = place[leaf] = nn.Parameter(value.detach(), requires_grad=False)
            self._swapped.append((name, own, own.data, own.requires_grad))
            own.data = value
            if own.requires_grad is not (name in self.trained):
                own.requires_grad_(name in self.trained)
            self.params[name] = own
        here = {name for name, *_ in self._swapped} if net._buffers else ()
        net._held = [(place, place.now) for place in net._buffers if place.name in here]  # type: ignore[misc]
        net._bound = self.params
        self._keeping = Keeping(reentrant=True)
        self._keeping.__enter__()
        return self

    def put(self, values: Params) -> None:
        """Replace some of the values."""
        for name, value in values.items():
            self.params[name].data = value.detach()

    def __exit__(self, *error: object) -> None:
        try:
            self.net.settle()
        finally:
            self._keeping.__exit__()
            self.net._bound, self.net._held = self._before
            for name, own, data, wanted in self._swapped:
                if self.params.get(name) is own:
                    self.params[name] = own.detach()
                if own.requires_grad is not wanted:
                    own.requires_grad_(wanted)
                own.data = data
            for place, leaf, before in self._untied:
                place[leaf] = before


def aliases(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each tensor that several layers share (tied weights), its first name and where else it stands.

    A layer that is registered under two names is one place.
    """
    first: dict[int, str] = {}
    places: dict[str, list[str]] = {}
    for prefix, layer in module.named_modules():
        for leaf, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
            if tensor is None:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            known = first.setdefault(id(tensor), name)
            if known != name:
                places.setdefault(known, []).append(name)
    return {name: tuple(others) for name, others in places.items()}


def on_cpu(net: Net) -> Net:
    """Return a model that computes on the CPU: the same, or of one elsewhere a copy."""
    if all(t.device.type == "cpu" for t in net.initial().values()):
        return net
    found = Net(copied(net.module).cpu())
    found.lookup = net.lookup
    return found


class PooledNet(Net):
    """A net whose private parameters are tables with a row per client: centralised training.

    Every example is computed with its own client's row, found by the batch's column ``client``. A module that
    declares its private parameters ``per_example`` is given the gathered rows at once, shape
    (examples, *shape); any other module is mapped over the examples one by one (``torch.func.vmap``), which batch
    normalisation cannot be trained with.

    Args:
        module: the model.
        private: the names of the private parameters, whose values in ``params`` are (clients, *shape).
        by_client: the examples of a call are one client's, and ``params`` hold that client's values.
    """

    def __init__(self, module: nn.Module, private: frozenset[str], by_client: bool = False) -> None:
        super().__init__(module)
        self.private, self.by_client = private, by_client
        self.gathers = private <= set(declared(module).per_example)

    def call(self, method: str, params: Mapping[str, Tensor], batch: Batch) -> Any:
        """Return what a method of the module returns, each example computed with its own client's row."""
        if not self.private or self.by_client:
            return super().call(method, params, batch)
        missing = sorted(self.private - params.keys())
        if missing:
            raise MethodError(
                "Examples of many clients together need a table of the private {parameter!r}, which this "
                "method does not pass on: it computes with one client's copy. Train it with "
                "engine='sequential'.",
                parameter=missing[0],
            )
        if "client" not in batch:
            raise MethodError(
                "Examples of many clients together need to say whose each is, which this method does not "
                "pass on where it computes with {method!r} alone. Train it with engine='sequential'.",
                method=method,
            )
        client = batch["client"]
        rows = {name: gather(params[name], client) for name in self.private}
        shared = {name: value for name, value in params.items() if name not in self.private}
        if self.gathers:
            return super().call(method, shared | rows, batch)
        if self.module.training and any(isinstance(layer, _BatchNorm) for layer in self.module.modules()):
            raise MethodError(
                "{model} normalises over a batch, but in centralised training it is computed example by "
                "example, each with its own client's {private}. If its forward takes a row of these for each "
                "example, say fedkeep.declare(module, per_example=...); else choose a federated engine.",
                model=type(self.module).__name__,
                private=sorted(self.private),
            )

        def one(own: Params, example: Batch) -> Any:
            single = {name: value.unsqueeze(0) for name, value in example.items()}
            return super(PooledNet, self).call(method, shared | own, single).squeeze(0)

        with AsAlone():
            return torch.func.vmap(one, randomness="different")(rows, dict(batch))


def gather(table: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``table[index]``, shape (len(index), *shape), with a cheap dense gradient."""
    flat = nn.functional.embedding(index, table.reshape(table.shape[0], -1))
    return flat.reshape(index.shape[0], *table.shape[1:])


ADDED = "_added_by_method"
"""The attribute of a model that names what was added; plain, so that copies and pickles have it too."""


def added_to(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the direct parts and parameters that a method has added to a model."""
    names: tuple[str, ...] = vars(module).get(ADDED, ())
    return names


def mark_added(module: nn.Module, names: Sequence[str]) -> None:
    """Note names of direct parts and parameters that a method has added."""
    setattr(module, ADDED, (*added_to(module), *names))


@contextmanager
def without_added(module: nn.Module) -> Iterator[None]:
    """Take what was added out of a module for a while; afterwards it is back in its place, behind the model's own."""
    places: tuple[dict[str, Any], ...] = (module._modules, module._parameters)
    taken = [(place, n, place.pop(n)) for n in added_to(module) for place in places if n in place]
    try:
        yield
    finally:
        for place, name, value in taken:
            place[name] = value
