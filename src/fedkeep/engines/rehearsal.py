"""A model and a method are tried on a few examples before anybody is served.

What is asked: which parameters forward writes into (``rehearse``), whether a prediction depends on the examples beside
it (``mixes``), whether forward is ``head(features(…))`` where a method trains these (``steps_differ``), and whether all
that is trained can move (``cannot_move``). ``model_warnings`` asks the last three. Whether clients can be trained side
by side is asked in ``vectorised``, of lanes. The module, its buffers and chance are left as they were.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.core.buffers import TensorPlace
from fedkeep.core.declared import declared
from fedkeep.core.errors import FedkeepError
from fedkeep.core.modes import EagerMode
from fedkeep.core.net import IMAGES, Net, float_type, logits_of, on_cpu, tensors_of
from fedkeep.core.params import SERVER, Batch, Params, clone, is_state, prefixed, tensors_in
from fedkeep.core.seeds import forked, without_draws
from fedkeep.data import FederatedData, Ragged
from fedkeep.engines.batches import load_batch
from fedkeep.engines.first_values import first_default, first_kept
from fedkeep.engines.tables.local_rows import ExampleRows
from fedkeep.methods import Method
from fedkeep.methods.features import Known
from fedkeep.methods.hook_declarations import sent_to
from fedkeep.methods.terms import Term
from fedkeep.split import immovable
from fedkeep.split.constraint_check import stuck
from fedkeep.split.joint import LocalLoss

USERS, EXAMPLES = 3, 8
TOGETHER = 4
"""Examples judged together, and as two pairs: layers that want two examples refuse one."""
ASKED = 100
"""So many clients are asked for as many training examples, at most."""
ROUNDING = 1e-3
"""Of the largest output: single precision gives an example other last digits in a larger batch."""
MIXES = (
    "The model predicts otherwise for an example when others are in its batch, also in evaluation (e.g. statistics "
    "of the batch, or texts' padding that counts). Metrics then depend on which examples are judged together, other "
    "clients' among them, and differ between a simulation and real devices. Let forward compute each example alone."
)
STEPS_DIFFER = (
    "The model's forward gives other values than its head(features(…)), and {method!r} trains these: it would be "
    "judged by what it has not trained. Let forward be head(features(…)), or give the two steps other names."
)


def divides_bytes(module: nn.Module, data: FederatedData) -> str | None:
    """Return the name of a layer whose code names 255, where images of bytes are scaled before it; None: there is none."""
    images = [
        c
        for c in data.columns.values()
        if not isinstance(c, Ragged) and c.dtype == np.uint8 and c.ndim == IMAGES
    ]
    if not images or any(declared(layer).takes_bytes for layer in module.modules()):
        return None
    for kind in {type(layer) for layer in module.modules()}:
        with suppress(OSError, TypeError):  # of a class made without a file there is no code
            if not kind.__module__.startswith(("torch.", "fedkeep.")) and "255" in inspect.getsource(kind):
                return kind.__name__
    return None


def model_warnings(
    method: Method,
    net: Net,
    data: FederatedData,
    seed: int,
    device: str = "cpu",
    *,
    whose: bool = False,
    given: bool = False,
) -> Iterator[str]:
    """Yield what is to be said of a model before it is trained.

    Of phases that train nothing; of predictions that depend on the examples beside them; of parameters that cannot
    move; and of two steps, trained by the method, that are not ``forward``.

    Args:
        method: the method.
        net: the model as a function.
        data: the data set.
        seed: the run's.
        device: where to compute; what takes gradients is computed on the CPU.
        whose: with the column ``client`` of centralised training.
        given: whether parameters are named, too, that cannot move from values of the module's own. These are the
            user's; a number that new clients' private values are set to is always looked at.
    """
    names = sorted(net.trainable())
    if not names:
        yield "No parameter of the model requires a gradient, so rounds train nothing."
    elif idle := [p.trains for p in method.client.phases if not p.trained_names(method.split, names)]:
        yield (
            f"A phase of {method.name!r} trains {idle[0]!r} parameters, and the split leaves none, so it does nothing. "
            f"Name other parameters as private."
        )
    if mixes(net, first_values(net, method, seed), data, device):
        yield MIXES
    if (who := divides_bytes(net.module, data)) is not None:
        yield (
            f"{who} names the number 255, and images of bytes are given to a model as floats from 0 to 1. Where it divides by "
            f"255, leave that out, or say fedkeep.declare(self, takes_bytes=True) in its __init__."
        )
    moving = given or not isinstance(method.client.keep.value, str | tuple)
    if not (moving or has_steps(net.module)):
        return
    net, still = on_cpu(net), tuple[str, ...]()
    try:
        start, batches = first_values(net, method, seed), first_batches(data, net, whose=whose)
        terms = losses(net, method, data)
        if batches and moving:
            still = cannot_move(net, method, batches, start, terms)
    except (FedkeepError, RuntimeError, ValueError, LookupError):
        return  # the model does not fit the data: training says so, and for which client
    if still:
        yield stuck(still)
    if batches and steps_differ(net, start, terms, batches[0]):
        yield STEPS_DIFFER.format(method=method.name)


def resolve(method: Method, model: nn.Module, data: FederatedData) -> Method:
    """Return a method that names the parts of a model, found on the first client's training examples if need be.

    Raises:
        MethodError: see ``Method.resolved``.
    """
    return method.resolved(model, partial(some_examples, model, data))


def told_head(method: Method, model: nn.Module, data: FederatedData) -> str:
    """Return a line on the head that was found for a model, see ``Method.tells_head``, and on whom the server cannot serve."""
    told = method.tells_head(model, partial(some_examples, model, data))
    if sent_to(method.server.send) != "members":
        return told
    nobody = (
        f"{method.name}'s server has a part for each client that trains, and none for people who come later"
    )
    return f"{told}; {nobody}" if told else nobody


def some_examples(model: nn.Module, data: FederatedData) -> Batch | None:
    """Return two or more of the first client's training examples that has any; None where none has."""
    rows = (np.asarray(data.rows(client, "train")[:EXAMPLES]) for client in range(len(data)))
    some = next((r for r in rows if len(r)), None)
    if some is None:
        return None
    return load_batch(data, np.resize(some, max(2, len(some))), "cpu", float_type(model))


def first_values(net: Net, method: Method, seed: int) -> Params:
    """Return the values that a new client's first training starts from."""
    kept = first_default(method, net, seed)("")
    return {**net.initial(), **{n: v for n, v in kept.items() if not is_state(n)}}


def first_batches(
    data: FederatedData, net: Net, users: int = USERS, examples: int = EXAMPLES, *, whose: bool = False
) -> list[Batch]:
    """Return a small batch of training examples of each of the first users that have any.

    ``whose``: with the column ``client`` of centralised training, each example's client.
    """
    kind = net.float_type
    batches = []
    for client in range(len(data)):
        rows = np.asarray(data.rows(client, "train")[:examples])
        if len(rows):
            batch = load_batch(data, rows, "cpu", kind)
            batches.append({**batch, "client": torch.full((len(rows),), client)} if whose else batch)
        if len(batches) == users:
            break
    return batches


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


def losses(net: Net, method: Method, data: FederatedData) -> list[WithState]:
    """Return the phases' losses with the state that they may look at."""
    kept = {n: v for n, v in first_kept(method, net).items() if is_state(n)}
    sent = prefixed(SERVER, method.server.state(net, data))
    return [WithState(phase.loss, kept, sent) for phase in method.client.phases]


def cannot_move(
    net: Net, method: Method, batches: Sequence[Batch], start: Params, terms: Sequence[WithState]
) -> tuple[str, ...]:
    """Return the parameters that a round of the method is to train and cannot move from where they start."""
    names = sorted(net.trainable())
    trained = [phase.trained_names(method.split, names) for phase in method.client.phases]
    phases = list(zip(terms, trained, strict=True))
    return immovable(net, method.split.halves(net.module), start, batches, phases)


@contextmanager
def _as_it_was(net: Net, device: str, *, training: bool = False) -> Iterator[None]:
    """Try a model in one of its modes; its mode, what it remembers and chance go on where they were.

    A compiled model is computed as it is written: it would be compiled for a few examples, and anew for a run's.
    """
    mode = net.module.training
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    net.train(training)
    try:
        with forked(device), eager, net.still():
            yield
    finally:
        net.train(mode)


LONG = 0.05
"""Seconds; a pass that takes longer is timed once."""


def seconds_of_a_pass(net: Net, params: Params, batch: Batch, device: str) -> float:
    """Return how long a pass forward takes, without gradients; 0 of a model that the batch does not fit.

    Args:
        net: the model as a function; it is left as it is.
        params: all values by name.
        batch: a mini-batch, on the device.
        device: where to compute.
    """
    took = math.inf
    values = {n: v.detach().to(device) for n, v in params.items()}
    with _as_it_was(net, device, training=True), torch.no_grad(), suppress(Exception):
        for _ in range(2):  # the first pays for what is loaded but once
            began = time.perf_counter()
            for output in tensors_in(net(clone(values), clone(batch))):
                output.sum().item()  # on a GPU it is waited for
            took = min(took, time.perf_counter() - began)
            if took > LONG:
                break
    return 0.0 if took == math.inf else took


def mixes(net: Net, params: Params, data: FederatedData, device: str = "cpu") -> bool:
    """Tell whether outputs for examples differ by more than rounding when fewer are in the batch.

    A model that cannot be run on these examples, or draws, mixes nothing: the run says why, and for whom.

    Args:
        net: the model as a function; it is left as it is.
        params: all values by name.
        data: the data set; a few training examples of one client are used.
        device: where to compute.
    """
    every = (data.rows(client, "train") for client in range(min(len(data), ASKED)))
    rows = next((np.asarray(some[:TOGETHER]) for some in every if len(some) >= TOGETHER), None)
    if rows is None:
        return False
    values = {n: v.detach().to(device) for n, v in params.items()}
    with suppress(Exception), torch.no_grad():
        outputs = []
        for some in (rows, rows[:2], rows[2:]):
            batch = load_batch(data, some, device, net.float_type)
            with _as_it_was(net, device):
                outputs.append(tensors_in(without_draws("model", partial(net, clone(values), batch), device)))
        return any(map(_joined_apart, *outputs))
    return False


def _joined_apart(many: Tensor, first: Tensor, second: Tensor) -> bool:
    """Tell whether examples' outputs are others in two batches than in one, by more than rounding.

    A number, e.g. a penalty beside the logits, is no example's output.
    """
    if not first.dim() == second.dim() == many.dim() > 0:
        return False
    return first.shape[1:] == second.shape[1:] and _apart(many, torch.cat([first, second]))


def _apart(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one shape differ by more than rounding; False of other shapes, and of integers."""
    if one.shape != other.shape or not (one.is_floating_point() and one.numel()):
        return False
    return bool((other - one).abs().amax() > ROUNDING * one.abs().amax())


class _Heard(Known):
    """A net that notes which of the module's methods are called."""

    def __init__(self, net: Net) -> None:
        super().__init__(net, "forward")
        self.heard = set[str]()

    def call(self, method: str, params: Mapping[str, Tensor], batch: Batch) -> Any:
        self.heard.add(method)
        return self.net.call(method, params, batch)


def has_steps(module: nn.Module) -> bool:
    """Tell whether a model has both ``features`` and ``head``, methods or layers."""
    return all(callable(getattr(module, step, None)) for step in ("features", "head"))


def steps_differ(net: Net, params: Params, losses: Iterable[LocalLoss], batch: Batch) -> bool:
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
    heard, found = _Heard(net), False
    with _as_it_was(net, "cpu"):
        for loss in losses:
            with suppress(Exception):
                loss(heard, clone(params), clone(batch), clone(params))
        if "head" in heard.heard:
            with torch.no_grad(), suppress(Exception):
                found = without_draws("model", partial(_steps_apart, net, params, batch), "cpu")
    return found


def _steps_apart(net: Net, params: Params, batch: Batch) -> bool:
    between = {"features": net.call("features", clone(params), clone(batch))}
    steps = logits_of(net.call("head", clone(params), between))
    return any(map(_apart, tensors_in(net(clone(params), batch)), tensors_in(steps)))


def rehearse(net: Net, params: Params, data: ExampleRows, rows: np.ndarray, device: str) -> None:
    """Add to ``net.written`` the parameters that ``forward`` writes into, e.g. to bound a norm: found once.

    In training they are a client's own copies, and a constraint holds there; judging and hooks compute with what all
    share. Tables that are only looked up are no part of it. A pass that fails finds nothing; the run says why.

    Args:
        net: the model as a function.
        params: values to compute with; they are not changed.
        data: the data set; ``rows`` are examples in it.
        device: where to compute.

    Raises:
        MethodError: ``forward`` makes layers, or draws from a generator of its own.
    """
    if net.rehearsed or not len(rows):
        return
    net.rehearsed, found = True, set[str]()
    every = {**tensors_of(net.module), **params}
    given = {n: v.detach().to(device) for n, v in every.items() if not is_state(n)}
    batch = load_batch(data, np.resize(rows[:2], 2), device, net.float_type)
    for training in (True, False):
        written = _written(net, given, tried := clone(batch), device, training=training)
        net.copies |= any(value._version for value in tried.values())
        if training:
            net.trains_into |= written
        found |= written
    for prefix, layer in net.module.named_modules():
        own = [
            TensorPlace(f"{prefix}.{leaf}".lstrip("."), layer._parameters, leaf) for leaf in layer._parameters
        ]
        net.written.update({place.name: place for place in own if place.name in found})


def _written(net: Net, given: Params, batch: Batch, device: str, *, training: bool) -> set[str]:
    """Return the names of values that a pass writes into, or gives other memory: of copies, tables aside."""
    values = {n: v if n in net.lookup else v.clone() for n, v in given.items()}
    before, writes = {n: _place(v) for n, v in values.items()}, Writes()
    copies = [n for n, v in values.items() if v is not given[n]]
    with _as_it_was(net, device, training=training), torch.no_grad(), suppress(Exception), writes:
        net(values, batch)
    moves = set(_laid_together(net, device))
    return {
        n
        for n, place in before.items()
        if place in writes.places or (n not in moves and _place(values[n]) != place)
    } | {
        n for n in copies if not torch.equal(_bits(values[n]), _bits(given[n]))
    }  # written unseen, e.g. by .data


WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(value: Tensor) -> Tensor:
    """Return a tensor's bits as whole numbers: NaN is like itself."""
    if (whole := WHOLE.get(value.element_size())) is not None and not value.is_complex():
        return value.view(whole)
    return value.detach().contiguous().flatten().view(torch.uint8)


def _laid_together(net: Net, device: str) -> list[str]:
    """Return the weights that torch's recurrent layers bring into one piece of memory on CUDA, as they are."""
    layers = net.module.named_modules() if device.startswith("cuda") else ()
    return [
        f"{prefix}.{leaf}".lstrip(".")
        for prefix, layer in layers
        if isinstance(layer, nn.RNNBase)
        for leaf in layer._parameters
    ]


class Writes(EagerMode):
    """Notes in ``places`` the memory that is written into, whether or not values change by it."""

    def __init__(self) -> None:
        super().__init__()
        self.places = set[int]()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call, and note what it writes into."""
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            if argument.is_write and (value := given.get(argument.name)) is not None:
                self.places |= {_place(v) for v in tensors_in(value)}
        return func(*args, **(kwargs or {}))


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
