"""Whose code runs: by the frames of Python's stack."""

from __future__ import annotations

import re
import sys
from types import FrameType

from fedkeep.prove.sites import PASSED_ON

COMPREHENSION = re.compile(r"(\.<locals>\.<(listcomp|setcomp|dictcomp|genexpr)>)+$")
"""What a comprehension's frame is called behind its function's name; from Python 3.12 on, most have no frame."""
NATIVE = {*sys.stdlib_module_names, "torch", "numpy", "fedkeep", "__main__"}


def own(frame: FrameType) -> bool:
    """Tell whether code is the prover's."""
    return str(frame.f_globals.get("__name__", "")).startswith("fedkeep.prove")


def others(frame: FrameType) -> bool:
    """Tell whether code is neither PyTorch's nor fedkeep's, nor what these stand on."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in NATIVE or package == "__main__"


def where(skip: bool = True) -> tuple[FrameType | None, str, str]:
    """Return the frame, the module and the function of the code that runs, beneath PyTorch and the prover."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        name = COMPREHENSION.sub("", frame.f_code.co_qualname)
        hidden = skip and (module.startswith(("torch.", "contextlib")) or (module, name) in PASSED_ON)
        if not module.startswith(("fedkeep.prove", "torch._dynamo", "torch._compile")) and not hidden:
            return frame, module, name
        frame = frame.f_back
    return None, "", "?"
