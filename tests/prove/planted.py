"""Ways by which values of a private vector, or of examples, come into a number, and places where that number leaves."""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import operator
import pickle
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep import Method, averaging, declare, methods
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods import Finish, Finished, Start, Started
from fedkeep.methods.terms import Term
from tests.audit.leaks import LOCAL, WIDTH, Own, a_number, furl
from tests.prove.unseen import UNSEEN

CACHE: list[Any] = [None]


class Attribute:
    """Something that outlives a round."""

    held: Any = None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


class FromNumpy(torch.autograd.Function):
    """Its backward pass hands a number to Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        CACHE[0] = float(ctx.saved_tensors[0].detach().numpy().sum())
        return torch.ones(WIDTH)


def out_argument(v: Tensor) -> Tensor:
    held = torch.zeros(WIDTH)
    torch.add(v, 1.0, out=held)
    return held.sum()


def through_a_view(v: Tensor) -> Tensor:
    held = torch.zeros(2, WIDTH)
    held.view(-1)[1 : 1 + WIDTH].copy_(v)
    return held.sum()


def put_by_set(v: Tensor) -> Tensor:
    return torch.zeros(0).set_(v).sum()


def put_by_data(v: Tensor) -> Tensor:
    held = torch.zeros(WIDTH)
    held.data = v
    return held.sum()


def cached(v: Tensor) -> Tensor:
    CACHE[0] = v.clone()
    return CACHE[0].sum()


def as_attribute(v: Tensor) -> Tensor:
    Attribute.held = v * 1.0
    return Attribute.held.sum()


def seeded(v: Tensor) -> Tensor:
    return torch.randn(1, generator=torch.Generator().manual_seed(int(1e6 * float(v.sum().abs())))).sum()


def state_of_chance(v: Tensor) -> Tensor:
    draw = torch.Generator()
    state = draw.get_state()
    state[24:40] = (
        v.detach().contiguous().view(torch.uint8)[:16]
    )  # of its words: what precedes them is checked
    draw.set_state(state)
    return torch.randn(1, generator=draw).sum()


def in_a_thread(v: Tensor) -> Tensor:
    found: list[float] = []
    worker = threading.Thread(target=lambda: found.append(float(v.sum())))
    worker.start()
    worker.join()
    return torch.tensor(found[0])


def text_of_an_error(v: Tensor) -> Tensor:
    try:
        raise ValueError(str(float(v[0])))
    except ValueError as error:
        return torch.tensor(float(str(error)))


def printed(v: Tensor) -> Tensor:
    return torch.tensor(float(len(repr(v))))


def by_address(v: Tensor) -> Tensor:
    return torch.tensor(ctypes.cast(v.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])


def written_by_address(v: Tensor) -> Tensor:
    held = torch.zeros(WIDTH)
    ctypes.memmove(held.data_ptr(), v.data_ptr(), 4 * WIDTH)
    return held.sum()


def element_by_element(v: Tensor) -> Tensor:
    found: list[float] = []
    v.detach().clone().apply_(lambda x: found.append(x) or x)
    return torch.tensor(sum(found))


def python_branch(v: Tensor) -> Tensor:
    return torch.tensor(1.0 if v.sum() > 0 else -1.0)


def shape_of_a_choice(v: Tensor) -> Tensor:
    return torch.tensor(float(v[v > 0].shape[0]))


def backward_pass(v: Tensor) -> Tensor:
    w = v.detach().clone().requires_grad_()
    with torch.enable_grad():
        torch.autograd.grad(FromNumpy.apply(w) * 2, [w])
    return torch.tensor(CACHE[0])


def gradient_of_gradient(v: Tensor) -> Tensor:
    w = v.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad((w**3).sum(), [w])[0].sum()


def a_table_is_too_small(v: Tensor) -> Tensor:
    try:
        nn.functional.embedding((v[:1] > 0).long() * 9, torch.zeros(2, 2))
    except IndexError:
        return torch.ones(())
    return torch.zeros(())


def not_positive(v: Tensor) -> Tensor:
    try:
        torch.linalg.cholesky(torch.eye(2) * v[0])
    except RuntimeError:
        return torch.ones(())
    return torch.zeros(())


def lengths_of_texts(v: Tensor) -> Tensor:
    sizes = torch.tensor([2, 2]) + (v[0] > 0).long() * torch.tensor([1, -1])
    packed = nn.utils.rnn.PackedSequence(torch.ones(4, 1), sizes)
    return nn.utils.rnn.pad_packed_sequence(packed)[0][0].sum()


def called_by_torch(made: Callable[[], Tensor]) -> Tensor:
    """Let a function of PyTorch call back for two distances: this one, then nought."""
    distances = iter((made, lambda: torch.zeros(1)))
    some = torch.zeros(1, 2)
    return nn.functional.triplet_margin_with_distance_loss(
        some, some.clone(), some.clone(), margin=99.0, distance_function=lambda *_: next(distances)()
    )


def bytes_of_storage(v: Tensor) -> Tensor:
    return torch.tensor(float(sum(v.untyped_storage().tolist())))


def mapped(v: Tensor) -> list[float]:
    """Return a vector's numbers without a call from Python."""
    (found,) = map(Tensor.tolist, [v])
    return found  # type: ignore[no-any-return]


def sign_of_a_mapped_number(v: Tensor) -> Tensor:
    return torch.ones(1) if mapped(v)[0] > 0 else torch.zeros(1)


SCRIPT = """
def numbers(v: Tensor) -> List[float]:
    found: List[float] = v.tolist()
    return found
"""


class Scripted(nn.Module):
    """Keeps a vector, and hands out its numbers without being given a tensor."""

    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.held = nn.Parameter(held.clone())

    def forward(self) -> float:
        held: list[float] = self.held.detach().tolist()
        return held[0]


def method_of_a_script(v: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is deprecated
        return torch.tensor(torch.jit.script(Scripted(v.detach()))())


CARRIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda v: v.sum(),
    "detached": lambda v: v.detach().clone().mean(),
    "norm": lambda v: v.norm(),
    "half": lambda v: v.half().float().sum(),
    "rounded": lambda v: (8 * v).round().sum(),
    "bits": lambda v: v.view(torch.int32).sum().float(),
    "last bits": lambda v: 1.0 + 1e-6 * v[0],
    "argmax": lambda v: v.argmax().float(),
    "order": lambda v: v.sort().indices[0].float(),
    "mask": lambda v: (v > 0).sum().float(),
    "where": lambda v: torch.where(v.sum() > 0, 1.0, -1.0),
    "index": lambda v: torch.arange(9.0)[(v.sum().abs() * 8).long() % 9],
    "embedding": lambda v: nn.functional.embedding((v.abs() * 8).long() % 4, torch.eye(4)).sum(),
    "scatter": lambda v: torch.zeros(8).scatter_(0, (v.abs() * 8).long() % 8, 1.0)[0],
    "foreach": lambda v: torch._foreach_add([torch.zeros(WIDTH), v], [torch.ones(WIDTH), v])[1].sum(),
    "foreach in place": lambda v: (h := torch.zeros(WIDTH), torch._foreach_add_([h], [v]))[0].sum(),
    "out": out_argument,
    "view": through_a_view,
    "set": put_by_set,
    "data": put_by_data,
    "cache": cached,
    "attribute": as_attribute,
    "function": lambda v: Doubled.apply(v).sum(),
    "backward": backward_pass,
    "second gradient": gradient_of_gradient,
    "vmap": lambda v: torch.vmap(lambda x: 2 * x)(v.detach()).sum(),
    "func.grad": lambda v: torch.func.grad(lambda x: (x**2).sum())(v.detach())[0],
    "einsum": lambda v: torch.einsum("i,i->", v, v),
    "sparse": lambda v: v.detach().to_sparse().to_dense().sum(),
    "sparse values": lambda v: torch.sparse_coo_tensor(torch.arange(len(v))[None], v.detach(), (9,)).sum(),
    "entries": lambda v: torch.tensor(float(len(v.detach().relu().to_sparse()._values()))),
    "bernoulli": lambda v: torch.bernoulli(v.detach().sigmoid()).sum(),
    "normal": lambda v: torch.normal(v.detach(), 1.0).sum(),
    "seed": seeded,
    "generator": state_of_chance,
    "item": lambda v: torch.tensor(v.sum().item()),
    "list": lambda v: torch.tensor(sum(v.tolist())),
    "numpy": lambda v: torch.from_numpy(v.detach().numpy().copy()).sum(),
    "asarray": lambda v: torch.tensor(np.asarray(v.detach()).sum()),
    "dlpack": lambda v: torch.from_dlpack(v.detach()).clone().sum(),
    "numpy's dlpack": lambda v: torch.tensor(float(np.from_dlpack(v.detach())[0])),
    "split": lambda v: torch.tensor(float(len(torch.tensor_split(torch.zeros(9), (v[:1] > 0).long())[0]))),
    "split's method": lambda v: torch.ones(9).tensor_split((v[:1] > 0).long())[0].sum(),
    "range error": a_table_is_too_small,
    "matrix error": not_positive,
    "lengths": lengths_of_texts,
    "list of tensors": lambda v: torch.tensor([v[0], v[1]]).sum(),
    "list by name": lambda v: torch.tensor(data=[v[0]]).sum(),
    "old constructor": lambda v: torch.Tensor([v[0]]).sum(),
    "new": lambda v: torch.zeros(2).new_tensor([v[0]]).sum(),
    "deque": lambda v: torch.tensor(deque([v[0]])).sum(),
    "deepcopy": lambda v: copy.deepcopy(v.detach()).sum(),
    "pickle": lambda v: pickle.loads(pickle.dumps(v.detach())).sum(),  # noqa: S301
    "storage": bytes_of_storage,
    "branch": python_branch,
    "shape": shape_of_a_choice,
    "equal": lambda v: torch.tensor(float(torch.equal(v.sign(), torch.ones(WIDTH)))),
    "thread": in_a_thread,
    "error": text_of_an_error,
    "printed": printed,
    "address": by_address,
    "written": written_by_address,
    "apply": element_by_element,
    "callback": lambda v: called_by_torch(lambda: torch.tensor([v[0]])),
    "mapped": lambda v: torch.tensor(sum(mapped(v))),
    "mapped to numpy": lambda v: torch.tensor(float(next(map(Tensor.numpy, [v])).sum())),
    "partial": lambda v: torch.tensor(sum(functools.partial(v.tolist)())),
    "method by name": lambda v: torch.tensor(sum(operator.methodcaller("tolist")(v))),
    "starmap": lambda v: torch.tensor(sum(next(itertools.starmap(Tensor.tolist, [(v,)])))),
    "script": lambda v: torch.tensor(sum(torch.jit.CompilationUnit(SCRIPT).numbers(v))),
    "mapped script": lambda v: torch.tensor(sum(next(map(torch.jit.CompilationUnit(SCRIPT).numbers, [v])))),
    "script's method": method_of_a_script,
    "callback's list": lambda v: called_by_torch(lambda: sign_of_a_mapped_number(v)),
    "callback's split": lambda v: called_by_torch(
        lambda: torch.ones(9).tensor_split((v[:1] > 0).long())[0].sum()
    ),
    **UNSEEN,
}


@dataclass(frozen=True)
class Leaves:
    """A hook or a term that lets a number of the private vector out by a carrier."""

    carrier: str

    def number(self, v: Tensor) -> Tensor:
        return CARRIERS[self.carrier](v.detach()).detach().float().reshape(())


class InFinish(Leaves):
    def __call__(self, f: Finish) -> Finished:
        return Finished(params={"linear.bias": f.trained["linear.bias"] + self.number(f.trained["user"])})


class InSends(Leaves):
    def __call__(self, f: Finish) -> Finished:
        return Finished(sends={"seen": self.number(f.started["user"])})


class InStart(Leaves):
    def __call__(self, s: Start) -> Started:
        return Started(
            params={"linear.bias": s.sent.params["linear.bias"] * self.number(s.kept.params["user"])}
        )


@dataclass(frozen=True)
class InTerm(Leaves, Term):
    """Writes into a federated parameter while the loss is computed."""

    inner: Term = LOCAL.loss

    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        with torch.no_grad():
            params["linear.bias"].data.add_(self.number(params["user"]))
        return self.inner(net, params, batch, received)


class InServer(Leaves):
    """The server begins with a number of the examples that it is handed as the list of clients, and sends it to all."""

    def __call__(self, net: Net, clients: Any) -> Params:
        return {"seen": self.number(torch.tensor(clients.columns["x"]).float().reshape(-1)[:WIDTH])}


class Counts(Own):
    """Has a federated buffer, which the forward pass writes."""

    def __init__(self, carrier: str) -> None:
        super().__init__()
        self.carrier = carrier
        self.register_buffer("seen", torch.zeros(()))
        declare(self, updated_buffers=("seen",))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.copy_(CARRIERS[self.carrier](self.user.detach()).float().reshape(()))
        return super().forward(x)


PLACES: dict[str, Callable[[str], tuple[nn.Module, Method, str]]] = {
    "finish": lambda c: (Own(), furl(finish=InFinish(c)), "upload/linear.bias"),
    "sends": lambda c: (Own(), furl(finish=InSends(c), sends=a_number), "sent/seen"),
    "start": lambda c: (Own(), furl(start=InStart(c)), "upload/linear.bias"),
    "term": lambda c: (Own(), methods.furl("user", local=LOCAL.but(loss=InTerm(c))), "upload/linear.bias"),
    "buffer": lambda c: (Counts(c), furl(), "upload/seen"),
    "server": lambda c: (Own(), furl().but(server=averaging().but(state=InServer(c))), "upload/linear.bias"),
}
