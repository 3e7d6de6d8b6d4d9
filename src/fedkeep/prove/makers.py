"""What tensors are made of that come from Python, and where numbers leave them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedkeep.prove.frames import own, where
from fedkeep.prove.nested import flat
from fedkeep.prove.nodes import Node, made
from fedkeep.prove.rules import CROSSINGS, OUTSIDE, READERS
from fedkeep.prove.sites import SITES

MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer, Tensor.new_tensor}


class Notes(Protocol):
    """What ``Makers`` asks of the tracer.

    Attributes:
        fresh: what the tensor that is being made holds; None: nothing says.
        given: what the function that runs was given; None: none runs.
    """

    fresh: Node | None
    given: tuple[Any, ...] | None

    def parts(self, values: Any) -> tuple[Node, ...]:
        """Return what is known of tensors among values of Python."""

    def called(self, name: str, owner: Any) -> None:
        """Note that a function was called by which values leave tensors unseen."""

    def read(self, name: str, sizes: Sequence[Tensor]) -> None:
        """Note that a function reads numbers in C++."""


class Makers(TorchFunctionMode):
    """Sees what tensors are made of that come from Python, and where numbers leave them, whoever calls."""

    def __init__(self, tracer: Notes) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Say whether a new tensor holds constants, other tensors, or an array that nobody declared.

        A crossing that Python called has been noted already (``Tracer._profile``): noted again, it is the same one.
        """
        tracer, given = self.tracer, (args, *(kwargs or {}).values())
        before = tracer.fresh, tracer.given
        tracer.fresh, tracer.given = None, given
        name = getattr(func, "__name__", "")
        if func in MAKERS and not isinstance(args[0] if args else None, Tensor):
            place = where(skip=False)[1:]
            hidden = place not in SITES and any(isinstance(v, np.ndarray | np.generic) for v in flat(given))
            with torch._C.DisableTorchFunction():
                parts = tracer.parts(given)
            what = "tensor" if parts else "a constant"
            what = f"an array that nobody declared, in {'.'.join(place)}" if hidden else what
            tracer.fresh = made(what, parts, OUTSIDE if hidden else 0)
        elif name in CROSSINGS and not own(sys._getframe(1)):
            tracer.called(name, args[0] if args else None)
        elif name in READERS:
            sizes = (*args[1:2], *(kwargs or {}).values())
            tracer.read(name, [v for v in flat(sizes) if isinstance(v, Tensor) and not v.is_floating_point()])
        try:
            return func(*args, **(kwargs or {}))
        finally:
            tracer.fresh, tracer.given = before


def called_back(frame: FrameType | None) -> bool:
    """Tell whether PyTorch has called other code from inside a function of its own, where ``Makers`` sees nothing."""
    while frame is not None and frame.f_code is not Makers.__torch_function__.__code__:
        if not f"{frame.f_globals.get('__name__')}.".startswith(("torch.", "contextlib.", "fedkeep.prove.")):
            return True
        frame = frame.f_back
    return False
