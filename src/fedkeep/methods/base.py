"""``Method``: a federated method as a value, of a split, a client, a server and how clients adapt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

from fedkeep.core.copying import copied
from fedkeep.core.describe import check_kind, describe
from fedkeep.core.errors import MethodError, check_choice
from fedkeep.core.heads import FOUND, Head
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, State
from fedkeep.core.records import Record
from fedkeep.methods.client import Client
from fedkeep.methods.hook_checks import check_plain
from fedkeep.methods.phase import Changeable, Phase
from fedkeep.methods.resolve import decided, resolved, told_head, with_drawn_head
from fedkeep.methods.server import Optimize, Server
from fedkeep.nn.accelerate import swap_
from fedkeep.privacy import Chain, Link
from fedkeep.split import Split
from fedkeep.split.find_head import named_head, named_layer

Predict = Callable[[Net, Params, Batch], Any]
Note = Callable[[Sequence[Record], Mapping[str, Any]], str]


@dataclass(frozen=True, kw_only=True)
class Recall:
    """What ``Recalls.recall`` is given.

    Attributes:
        net: the model as a function.
        params: all of the client's values, as ``predict`` is given them.
        outputs: applies a function (net, params, batch) to the client's own examples of a split (``train``, ``valid``),
            opted out or not, batch by batch, dropout off and without gradients; yields its results with their batches.
    """

    net: Net
    params: Params
    outputs: Callable[[Predict, str], Iterator[tuple[Any, Batch]]]


@runtime_checkable
class Recalls(Protocol):
    """A way to predict that looks at the client's own examples first, and finds what it made of them in its ``params``.

    It is asked on the device, each time that the client's model (``own`` or ``adapted``) is judged; nothing of it is
    stored or sent. ``default``, ``shared`` and ``local`` recall nothing: there it must predict without.

    A ``Client.start`` with this method gives a client that adapts without having kept any state its own, made of the
    examples that it adapts on (the split ``train``). It is kept with what the client adapts; nothing is sent.
    """

    def recall(self, given: Recall) -> State:
        """Return what to predict with, by name: ``predict`` finds it as ``client/NAME``."""


def forward(net: Net, params: Params, batch: Batch) -> Any:
    """Predict with the model's own ``forward``."""
    return net(params, batch)


@dataclass(frozen=True, kw_only=True)
class Adapt(Changeable):
    """How a client is personalised after federation; nothing of it is uploaded.

    Attributes:
        phases: the passes of training; none: there is no adaptation.
        split: what is a client's own while it adapts, e.g. ``Split("*")`` for a fine-tuned copy of everything; None:
            what the method's split says.
        start: gives values of its own that a client starts from, by name; it is given the client's whole model as it
            is before.
        rate_decay: ``"linear"``: the rates fall to zero over each phase's own mini-batches, so that what a client ends
            with does not swing with the last few of them; None: they stay, however many mini-batches there are.
        everyone: whether this is the method's own last step, which every client takes once the rounds are over: its
            models are those that are judged, written and predict. False: who was not in the rounds adapts alone.
    """

    phases: tuple[Phase, ...] = ()
    split: Split | None = None
    start: Callable[[Params], Params] | None = None
    rate_decay: Literal["linear"] | None = None
    everyone: bool = False

    def __post_init__(self) -> None:
        check_choice("rate_decay must be", self.rate_decay, (None, "linear"), MethodError)


def private_part(local: Phase) -> Adapt:
    """Return the usual adaptation: the local phase, private parameters alone, 10 passes over all own examples."""
    return Adapt(phases=(replace(local, trains="private", epochs=10, steps=None, examples="all"),))


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method, as a value. The defaults are FedAvg (McMahan et al., 2017).

    Attributes:
        name: for tables and records.
        split: which parameters are private.
        client: what happens on the device.
        server: what happens on the server.
        adapt: how a client is personalised after federation.
        predict: how the personalised model predicts; it is given all of a client's values, state under
            ``client/NAME`` and ``server/NAME``. One that has a method ``recall`` sees the client's examples first.
        predict_shared: how the shared part alone predicts, given default private values; None: it can't.
        extend: adds the method's own modules to the user's model; None: nothing to add.
        upload: the chain that an upload goes through, e.g. compression and noise; decoded before it is reduced.
        note: what the owner of a finished run is warned of, given its records and what the data say of themselves
            (``FederatedData.meta``); an empty text: of nothing.
        needs_features: whether it looks at the model's features or changes them, see ``resolved``.
        head: where the model ends: the name or pattern of a layer, a layer of the model itself, or a function that is
            given the model and returns one; None: the model has the parts that the method names, or it is found.
    """

    name: str = "fedavg"
    split: Split = Split()
    client: Client = field(default_factory=Client)
    server: Server = field(default_factory=Server)
    adapt: Adapt = field(default_factory=Adapt)
    predict: Predict = forward
    predict_shared: Predict | None = forward
    extend: Callable[[nn.Module], nn.Module] | None = None
    upload: tuple[Link, ...] = ()
    note: Note | None = None
    needs_features: bool = False
    head: Head | None = None

    def __post_init__(self) -> None:
        if isinstance(self.head, str):
            object.__setattr__(self, "head", Head(layer=self.head))
        given: Any = self.head
        nameless = callable(given) and not isinstance(given, type)  # a layer or a function; a model will tell
        if nameless:
            object.__setattr__(self, "head", None)
        elif given is not None:
            check_kind("head", given, Head, "the name of a layer, a layer, a function, or a fedkeep.Head")
        for name, kind in (("split", Split), ("client", Client), ("server", Server), ("adapt", Adapt)):
            check_kind(name, getattr(self, name), kind, f"a fedkeep.{kind.__name__}")
        describe(self, f"methods.{self.name}")  # refused now, not when a run is resumed
        if nameless:
            object.__setattr__(self, "head", given)

    def resolved(self, model: nn.Module, batch: Callable[[], Batch | None] = lambda: None) -> Method:
        """Return this method with the names that a user's model has for the parts that it speaks of.

        What its phases leave open is filled in with what is usual for the model.

        Where the model has them already, that is this method. Elsewise its head is found on examples: the last layer
        that has parameters, called once, with nothing after it that has any.

        Args:
            model: the model; it is left as it is.
            batch: returns two or more real examples; None: there are none.

        Raises:
            MethodError: the head is not found, or the model can't be taken apart there; says what to do.
        """
        check_plain(model)
        method = self if self.head is None else self.but(head=named_head(model, self.head))
        return with_drawn_head(resolved(decided(method, model), model, batch), model)

    def tells_head(self, model: nn.Module, batch: Callable[[], Batch | None] = lambda: None) -> str:
        """Return a line on the head that was found for a model, and on whose it is; empty: there is nothing to tell.

        Args:
            model: the model; it is left as it is.
            batch: returns real examples, on which it is seen what joins the output beside the head; None: there are none.
        """
        return told_head(self, model, batch)

    def made_for(self, model: nn.Module, accelerate: bool = False) -> nn.Module:
        """Return a copy of a user's model as this method trains it: with the method's own modules, and checked.

        Embeddings with sparse gradients are trained with dense ones, which gives the same. Parameters and buffers are
        contiguous in it. Of a model on a GPU the copy is on the CPU, and whoever trains moves it.

        Args:
            model: the model; it is not changed.
            accelerate: whether its own layers run on fedkeep's kernels, see ``fedkeep.accelerate``.

        Raises:
            SplitError, MethodError, ConfigError: model and method don't fit each other.
        """
        check_plain(model)
        module = copied(model)
        if any(t.is_cuda for t in (*module.parameters(), *module.buffers())):
            module = module.cpu()
        module = swap_(module) if accelerate else module
        if self.head is not None:
            head = named_head(model, self.head)
            setattr(module, FOUND, replace(head, layer=named_layer(module, head)))
        module = self.extend(module) if self.extend else module
        for layer in module.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                layer.sparse = False
        self.check(module)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.detach().contiguous()  # files know no other order
        still, later = self.split.halves(module).frozen_names, self.adapt.split or Split()
        for name, parameter in module.named_parameters():
            if name in still and not later.is_private(name):
                parameter.requires_grad_(False)
        return module

    def chain(self) -> Chain:
        """Return the upload chain."""
        return Chain(self.upload)

    def check(self, module: nn.Module) -> None:
        """Check the method against a module: the split, the phases' patterns, and that no upload uses opt-out examples.

        Raises:
            SplitError, MethodError, ConfigError: with what doesn't fit.
        """
        self.split.check(module)
        if self.adapt.split is not None:
            self.adapt.split.check(module)
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        federated = [n for n in names if not self.split.is_private(n) and not self.split.is_frozen(n)]
        values = dict(module.named_parameters())
        self.chain().client_state(
            {n: values[n] for n in federated}
        )  # a link that cannot take these says so now
        if isinstance(self.server.update, Optimize):
            self.server.update.optimizer.check_patterns(federated)
        for phase in self.adapt.phases:
            phase.trained_names(self.adapt.split or self.split, names)
            phase.optimizer.check_patterns(names)
        self._check_opt_out(names)

    def _check_opt_out(self, names: list[str]) -> None:
        parts = [(phase, phase.trained_names(self.split, names)) for phase in self.client.phases]
        everything = {n for p, part in parts if p.examples == "all" for n in part if self.split.is_private(n)}
        stops = any(p.early_stopping for p in self.client.phases)
        hooks = self.client.start is not None or self.client.finish is not None
        if hooks and (everything or stops):
            raise MethodError(
                "{method!r} has hooks (start, finish) that see private values, so opted-out and validation "
                "examples, which train or choose them, would influence what leaves the client. Use "
                "examples='opted_in' and no early stopping.",
                method=self.name,
            )
        for phase, trained in parts:
            phase.optimizer.check_patterns(names)
            leaves = [n for n in trained if not self.split.is_private(n)]
            if phase.early_stopping and leaves:
                raise MethodError(
                    "A phase of {method!r} that trains the federated {federated!r} can't stop early by a client's "
                    "own validation examples, which would influence what leaves the client. Stop private phases alone.",
                    method=self.name,
                    federated=leaves[0],
                )
            if phase.examples == "all" and leaves:
                raise MethodError(
                    "A phase of {method!r} trains the federated {federated!r} on all examples, so opted-out "
                    "examples would influence what leaves the client. Use examples='opted_in', or train private "
                    "parameters alone.",
                    method=self.name,
                    federated=leaves[0],
                )
            both = sorted(everything & set(trained))
            if leaves and both:
                raise MethodError(
                    "{method!r} trains the private {name!r} on all examples in one phase and together with the "
                    "federated {federated!r} in another, so opted-out examples would influence what leaves the "
                    "client. Use examples='opted_in' in both.",
                    method=self.name,
                    name=both[0],
                    federated=leaves[0],
                )

    def leaving(self, names: list[str]) -> list[Phase]:
        """Return the phases that train something that leaves the client, given the trainable names."""
        return [
            p
            for p in self.client.phases
            if not all(map(self.split.is_private, p.trained_names(self.split, names)))
        ]

    def waits(self, names: Sequence[str]) -> bool:
        """Tell whether clients have models of their own only after adapting, given the trainable names.

        Rounds then train no private parameter, and what they make is judged by the shared part.
        """
        rounds, later = self._trained_by(names)
        return bool(later) and not rounds and self.predict_shared is not None

    def left_to_adapting(self, names: Sequence[str]) -> list[str]:
        """Return the private parameters that adapting trains and no round does, given the trainable names."""
        rounds, later = self._trained_by(names)
        return sorted(later - rounds)

    def _trained_by(self, names: Sequence[str]) -> tuple[set[str], set[str]]:
        """Return the private parameters that rounds train, and those that adapting trains."""
        rounds, later = (
            {n for p in phases for n in p.trained_names(split, list(names)) if self.split.is_private(n)}
            for phases, split in (
                (self.client.phases, self.split),
                (self.adapt.phases, self.adapt.split or self.split),
            )
        )
        return rounds, later

    def but(self, **changes: Any) -> Method:
        """Return this method with some fields changed, e.g. ``furl().but(name="mine")``."""
        return replace(self, **changes)

    def on_client(self, **changes: Any) -> Method:
        """Return this method with some fields of its client changed, e.g. ``furl().on_client(tables="local")``."""
        return replace(self, client=replace(self.client, **changes))

    def on_server(self, **changes: Any) -> Method:
        """Return this method with some fields of its server changed."""
        return replace(self, server=replace(self.server, **changes))

    def adapting(self, **changes: Any) -> Method:
        """Return this method with some fields of its adaptation changed."""
        return replace(self, adapt=replace(self.adapt, **changes))
