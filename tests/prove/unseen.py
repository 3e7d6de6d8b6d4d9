"""Ways by which a vector's values come into a number past the operations that Python calls."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._mode_utils import no_dispatch


def drawn_after(draw: Callable[[torch.Generator], Any]) -> Tensor:
    """Return what a generator draws after draws whose number depends on values."""
    generator = torch.Generator().manual_seed(0)
    draw(generator)
    return torch.randn(1, generator=generator).sum()


def statistics(v: Tensor) -> Tensor:
    mean, var = torch.zeros(1), torch.ones(1)
    torch.batch_norm_update_stats(v.reshape(-1, 1), mean, var, 1.0)
    return mean.sum()


def size_of_a_nested_tensor(v: Tensor) -> Tensor:
    mask = (v > 0).sort(descending=True).values.reshape(1, -1)
    return torch.tensor(float(torch._nested_tensor_from_mask(torch.ones(1, len(v), 2), mask).size(1)))


class Reader(Tensor):
    """Its operations run code of its own, unseen."""

    held: Tensor
    seen = 0.0

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        Reader.seen = float(args[0].held.sum())
        return func(*(a.held if isinstance(a, Reader) else a for a in args), **(kwargs or {}))


def read_by_a_class(v: Tensor) -> Tensor:
    _ = Reader(v) * 2
    return torch.tensor(Reader.seen)


def inferred(carrier: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a carrier in inference mode, where PyTorch shows operations whole, and not what they are made of."""

    def within(v: Tensor) -> Tensor:
        with torch.inference_mode():
            return carrier(v)

    return within


def batch_norm(v: Tensor) -> Tensor:
    mean = torch.zeros(1)
    F.batch_norm(v.reshape(-1, 1), mean, torch.ones(1), training=True, momentum=1.0)
    return mean.sum()


def array_beneath(v: Tensor) -> Tensor:
    array = np.zeros(len(v), np.float32)
    torch.from_numpy(array).copy_(v)
    return torch.ones(()) * float(array[0])


def array_taken_before(v: Tensor) -> Tensor:
    held = torch.zeros(2, len(v))
    array = held[1].numpy()
    held.copy_(v)
    return torch.ones(()) * float(array[0])


def buffer_beneath(v: Tensor) -> Tensor:
    content = bytearray(4 * len(v))
    torch.add(v, 1.0, out=torch.frombuffer(content, dtype=torch.float32))
    return torch.ones(()) * content[0]


def address_taken_before(v: Tensor) -> Tensor:
    held = torch.zeros(len(v))
    place = ctypes.cast(held.data_ptr(), ctypes.POINTER(ctypes.c_float))
    held.add_(v)
    return torch.ones(()) * place[0]


def mapped_file(v: Tensor) -> Tensor:
    """Write by a file that PyTorch maps into memory, and read it back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers"
        torch.from_file(str(path), shared=True, size=len(v)).copy_(v)
        with open(path, "rb") as file:
            return torch.tensor(struct.unpack("f", file.read(4))[0])


def undispatched(v: Tensor) -> Tensor:
    held = torch.zeros(len(v))
    with no_dispatch():
        held.copy_(v)
    return held.sum()


def without_functions(v: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        (found,) = map(Tensor.tolist, [v])
    return torch.tensor(sum(found))


def freed(v: Tensor) -> Tensor:
    """Read memory that nobody has written since the vector's copy was there."""
    held = v.detach() * 1.0
    del held
    return torch.empty(len(v)).sum()


def freed_before(v: Tensor) -> Tensor:
    held = v.detach() * 1.0
    del held
    (found,) = map(torch.Tensor, [len(v)])
    return found.sum()


@cache
def mapping() -> tuple[Tensor, int]:
    """Return a file that is mapped into memory, and its number: made before a trace, if asked before."""
    with tempfile.NamedTemporaryFile() as file:
        return torch.from_file(file.name, shared=True, size=5), os.dup(file.fileno())


def mapped_before(v: Tensor) -> Tensor:
    held, file = mapping()
    held.copy_(v)
    return torch.tensor(struct.unpack("f", os.pread(file, 4, 0))[0])


CONTENT = bytearray(20)
HELD = torch.frombuffer(CONTENT, dtype=torch.float32)


def memory_shared_before(v: Tensor) -> Tensor:
    HELD.copy_(v)
    return torch.tensor(struct.unpack_from("f", CONTENT)[0])


@cache
def pool() -> ThreadPoolExecutor:
    """Return a thread that has begun."""
    one = ThreadPoolExecutor(1)
    one.submit(int).result()
    return one


def hook_of_a_gradient(v: Tensor) -> Tensor:
    w, found = v.detach().clone().requires_grad_(), []
    with torch.enable_grad():
        product = w * v.detach()
        product.register_hook(lambda g: found.append(1.0 if v.sum() > 0 else 0.0))
        product.sum().backward()
    return torch.tensor(found[0])


def read_from_a_file(v: Tensor) -> Tensor:
    with open(__file__, encoding="utf-8") as file:
        return torch.ones(()) * len(file.readline()) * (v.sum() * 0 + 1).round()


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "poisson": lambda v: drawn_after(lambda g: torch.poisson(v.abs() * 1e3, generator=g)),
    "binomial": lambda v: drawn_after(lambda g: torch.binomial(v * 0 + 100, v.sigmoid(), generator=g)),
    "rrelu": lambda v: drawn_after(lambda g: torch.ops.aten.rrelu_with_noise(v, v * 0, 0.1, 0.3, True, g)),
    "statistics": statistics,
    "nested": size_of_a_nested_tensor,
    "class": read_by_a_class,
    "mapped file": mapped_file,
    "undispatched": undispatched,
    "without functions": without_functions,
    "file": read_from_a_file,
    "array beneath": array_beneath,
    "array before": array_taken_before,
    "buffer beneath": buffer_beneath,
    "address before": address_taken_before,
    "inferred where": inferred(lambda v: torch.tensor(float(len(torch.where(v > 0)[0])))),
    "inferred repeats": inferred(
        lambda v: torch.tensor(float(len(torch.zeros(2).repeat_interleave((v[:1] > 0).long() + 1))))
    ),
    "inferred norm": inferred(batch_norm),
    "freed": freed,
    "freed, by an old constructor": freed_before,
    "mapped before": mapped_before,
    "shared before": memory_shared_before,
    "a thread's number": lambda v: torch.tensor(pool().submit(float, v.sum()).result()),
    "a thread's tensor": lambda v: pool().submit(torch.sum, v).result(),
    "gradient hook": hook_of_a_gradient,
}
