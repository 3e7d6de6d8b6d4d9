"""Every rule of labels, tried by perturbation: where an output changes with an input, it has that input's label."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from fedkeep import nn as layers
from fedkeep.prove.rules import OUTSIDE, WRITES
from fedkeep.prove.sites import PASSED_ON, PASSES, SITES
from fedkeep.prove.traced_labels import Tracer

core, quietly = torch._C, torch._C.DisableTorchFunction
A, B, C = (torch.linspace(0.1, k, 12).reshape(3, 4) for k in (1, 2, 3))
Function = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def batch_norm(t: Sequence[Tensor]) -> Sequence[Tensor]:
    mean, var = t[1][0], t[2][0]
    return [F.batch_norm(t[0], mean, var, training=True), t[1], t[2]]


def in_place(t: Sequence[Tensor]) -> Sequence[Tensor]:
    t[0].view(-1)[2:5].mul_(t[1].sum())
    return t


def fused(t: Sequence[Tensor]) -> Sequence[Tensor]:
    torch._fused_sgd_(
        [t[0], t[1]],
        [t[2], t[2].clone()],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
    return t


def adam(t: Sequence[Tensor]) -> Sequence[Tensor]:
    first, second = ([torch.zeros(3, 4) for _ in range(2)] for _ in range(2))
    steps = [torch.ones(()), torch.ones(())]
    torch._fused_adam_(
        [t[0], t[1]],
        [t[2], torch.ones(3, 4)],
        first,
        second,
        [],
        steps,
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    return [*t, *first, *second]


def backward(t: Sequence[Tensor]) -> Sequence[Tensor]:
    x, w = t[0].clone().requires_grad_(), t[1].clone().requires_grad_()
    return torch.autograd.grad((x * w * t[2]).tanh().sum(), [x, w])


def native_linear(t: Sequence[Tensor]) -> Sequence[Tensor]:
    x, w, b = (
        v.clone().requires_grad_()
        for v in (t[0].repeat(1, 64), t[1].repeat(100, 64)[:260], t[2].repeat(22, 1).view(-1)[:260])
    )
    y = layers.linear_layer.run(x, w, b, True)
    return [y, *torch.autograd.grad((y**2).sum(), [x, w, b])]


FUNCTIONS: dict[str, Function] = {
    "sum": lambda t: [t[0] + t[1], t[1] * t[2]],
    "like": lambda t: [torch.full_like(t[0], 3.0), t[1].new_zeros(2), torch.zeros_like(t[2])],
    "foreach": lambda t: torch._foreach_mul([t[0], t[1]], [t[2], t[1]]),
    "foreach norm": lambda t: torch._foreach_norm([t[0], t[1], t[2]]),
    "foreach tensor": lambda t: torch._foreach_mul([t[0], t[1]], t[2].sum()),
    "foreach lists": lambda t: (torch._foreach_addcmul_([t[0], t[1]], [t[2], t[1]], [t[2], t[1]]), t)[1],
    "fused": fused,
    "adam": adam,
    "batch norm": batch_norm,
    "in place": in_place,
    "views": lambda t: [t[0].T[1:], t[1].expand(2, 3, 4), torch.cat([t[2], t[0]])],
    "split": lambda t: [*t[0].split(1), *torch.stack([t[1], t[2]]).unbind(0)],
    "sorted": lambda t: [*t[0].sort(), t[1].argmax(), *t[2].topk(2)],
    "set": lambda t: [torch.zeros(0).set_(t[0]), t[1]],
    "backward": backward,
    "linear kernel": native_linear,
    "cross entropy": lambda t: [F.cross_entropy(t[0] @ t[1].T, torch.arange(3)), t[2].log_softmax(1)],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_changes_with_an_input_has_its_label(name: str) -> None:
    function = FUNCTIONS[name]
    tracer, given = Tracer(nn.Identity()), [v.clone() for v in (A, B, C)]
    for place, value in enumerate(given):
        tracer.begin(value, f"input {place}")
    with tracer:
        found = list(function(given))
    labels = [tracer.node(v) for v in found]
    assert not any(n is None or n.labels & OUTSIDE for n in labels)
    before = [v.detach().clone() for v in function([v.clone() for v in (A, B, C)])]
    seen = 0
    for place in range(3):
        for scale in (0.3, 2.0, -1.0):
            inputs = [v.clone() for v in (A, B, C)]
            inputs[place] = inputs[place] * scale + torch.linspace(0, 0.1, 12).reshape(3, 4)
            for node, one, two in zip(labels, before, function(inputs), strict=True):
                if not torch.equal(one, two):
                    seen += 1
                    assert node.labels & tracer.bit(f"input {place}")
    assert seen or name == "like"


@pytest.mark.parametrize("name", ["foreach", "fused", "adam"])
def test_places_of_lists_stay_apart(name: str) -> None:
    tracer, given = Tracer(nn.Identity()), [v.clone() for v in (A, B, C)]
    for place, value in enumerate(given):
        tracer.begin(value, f"input {place}")
    with tracer:
        first, second = list(FUNCTIONS[name](given))[:2]
    one, two = tracer.node(first), tracer.node(second)
    assert not one.labels & tracer.bit("input 1")
    assert not two.labels & tracer.bit("input 0")


def test_shapes_tell_nothing_and_memory_that_nobody_declared_is_outside() -> None:
    tracer, secret = Tracer(nn.Identity()), torch.ones(3)
    tracer.begin(secret, "secret")
    with tracer:
        made, odd = torch.full_like(secret, 2.0), A + 1
    assert tracer.node(made).labels == 0  # type: ignore[union-attr]
    assert tracer.node(odd).labels == OUTSIDE  # type: ignore[union-attr]


SECRET = torch.tensor([2.0, 1.0])
UNSEEN: dict[str, Callable[[Tensor], object]] = {
    "dlpack": lambda v: np.from_dlpack(v),  # type: ignore[call-overload]
    "tensor_split": lambda v: torch.tensor_split(torch.zeros(9), v.long()),
    "tensor_split, by name": lambda v: torch.zeros(9).tensor_split(tensor_indices_or_sections=v.long()),
    "an error of embedding": lambda v: F.embedding(9 * v.long(), torch.zeros(2, 2)),
    "an error of _linalg_check_errors": lambda v: torch.linalg.cholesky(torch.eye(2) * -v),
    "an error of multinomial": lambda v: torch.multinomial(-v, 1),
    "_pad_packed_sequence": lambda v: rnn.pad_packed_sequence(rnn.PackedSequence(torch.ones(3, 1), v.long())),
    "gru": lambda v: nn.GRU(1, 1)(rnn.PackedSequence(torch.ones(3, 1), v.long())),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_numbers_that_are_read_unseen_cross(name: str) -> None:
    tracer, secret = Tracer(nn.Identity()), SECRET.clone()
    tracer.begin(secret, "secret")
    with tracer, suppress(RuntimeError, IndexError):
        UNSEEN[name](secret)
    assert any(name.partition(",")[0] in crossing.what for crossing in tracer.crossings.values())


NEW: dict[str, Callable[[Tensor], Tensor]] = {
    "list": lambda v: torch.tensor([v[0], 1.0]),
    "by name": lambda v: torch.tensor(data=[v[0]]),
    "deque": lambda v: torch.tensor(deque([v[0]])),
    "old constructor": lambda v: torch.Tensor([v[0]]),
    "new": lambda v: torch.zeros(2).new_tensor([v[0]]),
}


@pytest.mark.parametrize("name", NEW)
def test_a_tensor_that_is_made_of_others_has_their_labels(name: str) -> None:
    tracer, secret = Tracer(nn.Identity()), SECRET.clone()
    tracer.begin(secret, "secret")
    with tracer:
        found = NEW[name](secret) + 1.0
        constant = torch.tensor([1.0]) + torch.zeros(2).index_fill(0, torch.tensor([0]), 3.0)
    assert tracer.node(found).labels & (OUTSIDE | tracer.bit("secret"))  # type: ignore[union-attr]
    assert not tracer.node(constant).labels  # type: ignore[union-attr]


def aliased(v: Tensor) -> Tensor:
    with quietly():
        return v + 1


def by_a_text(v: Tensor) -> Tensor:
    with getattr(core, "DisableTorchFunction")():  # noqa: B009
        return v + 1


def in_pieces(v: Tensor) -> Tensor:
    with getattr(core, "Disable" + "Torch".title() + "Function")():
        return v + 1


def in_a_cell() -> Callable[[Tensor], object]:
    inner = quietly

    def hidden(v: Tensor) -> Tensor:
        with inner():
            return v + 1

    return hidden


def evaluated(v: Tensor) -> object:
    return eval("v + 1")  # noqa: S307


@pytest.mark.parametrize("call", [aliased, by_a_text, in_pieces, in_a_cell(), evaluated])
def test_code_that_hides_what_it_does_crosses(call: Callable[[Tensor], object]) -> None:
    """Whatever an import calls it."""
    tracer = Tracer(nn.Identity())
    with tracer:
        call(SECRET.clone())
    assert any(crossing.node.labels & OUTSIDE for crossing in tracer.crossings.values())


def test_what_hides_nothing_does_not_cross() -> None:
    def plain(v: Tensor) -> Tensor:
        nn.Linear(2, 2).eval()
        return v + float(getattr(v, "ndim", 0))

    tracer = Tracer(nn.Identity())
    with tracer:
        plain(SECRET.clone())
    assert not any(crossing.node.labels & OUTSIDE for crossing in tracer.crossings.values())


def test_every_kernel_has_a_rule() -> None:
    from fedkeep.kernels import native

    assert {k for k, _ in WRITES} == set(native._FIELDS)
    for (kernel, _), names in WRITES.items():
        assert set(names) <= {f.partition("[")[0] for f in native._FIELDS[kernel]}


@pytest.mark.parametrize(
    ("module", "name"), sorted({*SITES, *PASSED_ON, *((module, "") for module in PASSES)})
)
def test_the_register_names_functions_that_are_there(module: str, name: str) -> None:
    """One that was renamed would leave every proof unknown."""
    path = name.partition(".<locals>")[0]
    assert reduce(getattr, path.split(".") if path else [], importlib.import_module(module)) is not None
