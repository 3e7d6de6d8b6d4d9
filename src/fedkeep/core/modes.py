"""Modes that see torch's operations: one without the compiler, and one that lets vmap answer as a model alone would.

Tensors that ``torch.func.vmap`` maps over say that they need no gradient: autograd works below it. A model that asks,
e.g. to penalise what is trained, would compute another loss.

Where a table and its ids are both mapped over, torch looks ids up in all tables at once, one below the other. It
moves the ids to where their table lies, but not ``padding_idx``: of all rows of padding it spares that of one table.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

Door = TypeVar("Door", bound=Callable[..., Any])


def with_gradients(door: Door) -> Door:
    """Let a function train whatever its caller has switched off: ``torch.no_grad()``, ``torch.inference_mode()``."""
    return torch.inference_mode(False)(torch.enable_grad()(door))


class EagerMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` for eager code alone.

    Torch keeps its compiler out of a mode by loading it, which takes seconds and 130 MB in every process.
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Sized(EagerMode):
    """While it is active, all tensors that are made from nothing together have at most so many bytes.

    The operating system promises more memory than there is, and ends a process, perhaps another one, when it is used.

    Args:
        most: bytes.

    Raises:
        MemoryError: they would be more; the tensor is not made.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.made = most, 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count what the operation is going to make, and call it."""
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        old = next((v for v in given.values() if isinstance(v, Tensor)), None)
        if old is not None and old.is_meta and "generator" in names and func._schema.name.endswith("_"):
            return old  # there is nothing to draw, and torch would load its compiler for that
        if "size" in given and (old is None or ".new_" in str(func)):
            kind = given.get("dtype") or (torch.get_default_dtype() if old is None else old.dtype)
            self.made += math.prod(given["size"]) * kind.itemsize
            if self.made > self.most:
                raise MemoryError(
                    f"it has {self.made / 1e9:,.1f} GB or more, and here at most {self.most / 1e9:,.1f} GB fit"
                )
        return func(*args, **(kwargs or {}))


LOOKS_UP: dict[Callable[..., Any], tuple[str, ...]] = {
    F.embedding: ("input", "weight", "padding_idx"),
    torch.embedding: ("weight", "indices", "padding_idx"),
}
"""Functions that look vectors up, and their first arguments."""


def looked_up(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return what one of ``LOOKS_UP`` returns, with vectors of padding that have no gradient."""
    out: Tensor = func(*args, **kwargs)
    how = dict(zip(LOOKS_UP[func], args, strict=False)) | dict(kwargs)
    padding = how.get("padding_idx")
    if padding is not None and padding < 0:  # from behind; torch.embedding means by it that there is none
        padding = padding + len(how["weight"]) if func is F.embedding else None
    if padding is None:
        return out
    ids: Tensor = how["input" if func is F.embedding else "indices"]
    return torch.where((ids == padding).unsqueeze(-1), out.detach(), out)


def _requires_grad(_: object, args: Sequence[Any], __: object) -> bool:
    """Tell whether a tensor requires a gradient, at any level of torch.func or below all of them."""
    value: Tensor = args[0]
    while is_functorch_wrapped_tensor(value):
        if value.requires_grad:
            return True
        value = get_unwrapped(value)
    return value.requires_grad


def _is_leaf(_: object, args: Sequence[Any], __: object) -> bool:
    """Tell whether a tensor is a leaf of autograd's graph, at every level of torch.func and below all of them."""
    value: Tensor = args[0]
    while is_functorch_wrapped_tensor(value):
        if not value.is_leaf:
            return False
        value = get_unwrapped(value)
    return value.is_leaf


ALONE: dict[Callable[..., Any], Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]] = {
    **dict.fromkeys(LOOKS_UP, looked_up),
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__: _is_leaf,  # type: ignore[attr-defined]
}
"""What vmap answers otherwise, and what computes it as alone; one dict, as every operation is looked for in it."""


class AsAlone(TorchFunctionMode):
    """While it is active, a model under ``torch.func.vmap`` is told what it is told alone.

    No row of padding has a gradient, and tensors say whether they require one.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace lookups and questions, and call everything else."""
        if (alone := ALONE.get(func)) is not None:
            return alone(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


REENTRANT, OTHER = "CheckpointFunction", "_checkpoint_without_reentrant_generator"
"""What torch's ``checkpoint`` calls; of the other kind torch 2.15 has ``_impl``, and the old name beside it."""


class Keeping:
    """Gradient checkpoints that keep what they compute (a context), where nothing may be computed again later.

    ``torch.utils.checkpoint`` runs a part of the model again in the backward pass. By then other values may stand in the
    module, and the re-entrant kind takes no ``torch.autograd.grad``, which is how fedkeep computes gradients. A
    checkpoint changes no result; it saves memory, which is then not saved. Threads may train side by side, so contexts
    need not end in the order in which they began: the last one to end puts torch's functions back.

    Args:
        reentrant: only those of the re-entrant kind.
    """

    _lock: ClassVar = threading.Lock()
    _inside: ClassVar = Counter[str]()
    _torchs: ClassVar = dict[str, Any]()

    def __init__(self, reentrant: bool = False) -> None:
        others = () if reentrant else (OTHER, *({f"{OTHER}_impl"} & vars(checkpoint).keys()))
        self.names = (REENTRANT, *others)

    def __enter__(self) -> None:
        module = vars(checkpoint)  # what its function looks up there
        with self._lock:
            for name in self.names:
                if not self._inside[name]:
                    self._torchs[name] = module[name]
                    module[name] = _Called if name == REENTRANT else _nothing
                self._inside[name] += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            for name in self.names:
                self._inside[name] -= 1
                if not self._inside[name]:
                    vars(checkpoint)[name] = self._torchs[name]


class _Called:
    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *given: Any) -> Any:
        """Call a function, in place of ``CheckpointFunction.apply``."""
        return function(*given)


def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    """Do nothing before and after a part of a model."""
    yield
