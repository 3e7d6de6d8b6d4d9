"""What tensors are made of that come from Python, and where numbers leave them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedkeep.prove.frames import own, where
from fedkeep.prove.nested import flat
from fedkeep.prove.nodes import made
from fedkeep.prove.rules import CROSSINGS, OUTSIDE, READERS
from fedkeep.prove.sites import SITES

if TYPE_CHECKING:
    from fedkeep.prove.labels import Tracer

MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer, Tensor.new_tensor}


class Makers(TorchFunctionMode):
    """Sees what tensors are made of that come from Python, and where numbers leave them, whoever calls."""

    def __init__(self, tracer: Tracer) -> None:
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
            tracer._called(name, args[0] if args else None)
        elif name in READERS:
            sizes = (*args[1:2], *(kwargs or {}).values())
            tracer._read(
                name, [v for v in flat(sizes) if isinstance(v, Tensor) and not v.is_floating_point()]
            )
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
