"""Whose code runs, and the register of places where fedkeep itself reads numbers out of tensors, and where these go.

What is read anywhere else, in a method or in a model, may go anywhere, and nothing is proved then.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from types import FrameType


@dataclass(frozen=True)
class Site:
    """A function that reads numbers out of tensors.

    Attributes:
        why: where they go.
        told: the channel by which they leave; empty: they do not leave, and decide nothing that does.
        unless: of a frame of the function, whether they do not leave this time.
        only: patterns of labels that may be on what it reads; empty: any.
    """

    why: str
    told: str = ""
    unless: Callable[[FrameType], bool] = lambda frame: False
    only: tuple[str, ...] = ()


def _of_all_examples(frame: FrameType) -> bool:
    """Tell whether a phase may have looked at opted-out examples: its loss does not leave then."""
    step = frame.f_locals["self"]
    return bool(step.looks)


RECEIVED, DATA, CHANCE = "received", "examples", "chance"
"""Labels of what a server sends a client, or has got from it; of examples; of random draws."""
OPTED_OUT, HELD = "opted-out examples", "validation and test examples"
"""Labels that examples have, too."""
GRADIENTS, CLIP = "gradients", "clip"
"""Labels of the channels by which a split says that private values reach federated ones."""
_ENGINES = "fedkeep.engines"
SITES: dict[tuple[str, str], Site] = {
    (f"{_ENGINES}.lanes", "LanePass.totals"): Site("the mean training loss", "loss", _of_all_examples),
    (f"{_ENGINES}.lanes", "Pass._note_moves"): Site(
        "whether a group has gradients, else it is an error", "status"
    ),
    ("fedkeep.core.params", "nonfinite"): Site("whether training broke down", "status"),
    ("fedkeep.kernels.values", "is_finite"): Site("whether training broke down", "status"),
    (f"{_ENGINES}.client_step", "_nonfinite"): Site("whether a hook broke down", "status"),
    ("fedkeep.core.seeds", "unmoved"): Site(
        "whether a hook, or another thread, drew random numbers: an error"
    ),
    (f"{_ENGINES}.client_step", "nowhere_else"): Site("which tensors share memory; no value is read"),
    (f"{_ENGINES}.rehearsal", "_place"): Site("where tensors are; no value is read"),
    (f"{_ENGINES}.rehearsal", "_written"): Site("what forward writes into, also unseen, which is an error"),
    (f"{_ENGINES}.rehearsal", "_as_it_was"): Site("chance goes on afterwards where it was"),
    (f"{_ENGINES}.lanes", "local_run"): Site("chance goes on afterwards where it was"),
    (f"{_ENGINES}.lanes", "_losses"): Site(
        "which phases read what opted-out examples made; they look at NaN then"
    ),
    (f"{_ENGINES}.lanes", "veiled"): Site(
        "whether a hidden buffer has moved; it is shown as NaN where it has"
    ),
    (f"{_ENGINES}.tables.lazy_rows", "LazyRows.look_up"): Site("which rows of a table examples use"),
    (f"{_ENGINES}.tables.lazy_rows", "MovingRows.finish"): Site(
        "whether a row of a table still lacks momentum steps"
    ),
    (f"{_ENGINES}.tables.local_rows", "_used"): Site("which rows of a table examples use"),
    ("fedkeep.privacy.topk", "TopK._chosen"): Site(
        "which changes are largest: their places are sent with them, and may depend on all of them",
        only=(GRADIENTS, CLIP, RECEIVED, CHANCE, "kept upload/*"),
    ),
    ("fedkeep.privacy.topk", "TopK._restored"): Site("whether an upload fits", only=(RECEIVED,)),
    ("fedkeep.methods.aggregate", "SumsByGroup.add"): Site("of which group an upload is", only=(RECEIVED,)),
    ("fedkeep.methods.aggregate", "MeansByGroup.seen"): Site("which groups have uploads", only=(RECEIVED,)),
    ("fedkeep.methods.fedala", "LearnWeights.__call__"): Site(
        "how many passes the weights get, which are private themselves"
    ),
    ("fedkeep.methods.ifca", "NearestModel.__call__"): Site(
        "which model fits the examples best", only=(RECEIVED, DATA, CHANCE)
    ),
    ("fedkeep.methods.ifca", "predict_with_pick"): Site("which model predicts", "judged"),
    ("fedkeep.methods.simplex", "least"): Site("how heads are mixed", only=(RECEIVED,)),
    ("fedkeep.methods.features", "one_hot"): Site("whether a label is a class, else it is an error"),
    ("fedkeep.kernels.native", "address"): Site("an address for a kernel, which has a rule"),
    (f"{_ENGINES}.centralised", "WithClient.batch"): Site("whose examples these are"),
    (f"{_ENGINES}.judge", "Window._load"): Site("whose examples these are"),
    (f"{_ENGINES}.judge", "labelled"): Site("which examples have a label", "judged"),
    (f"{_ENGINES}.judge", "_reduce"): Site("results of judging", "judged"),
    (f"{_ENGINES}.judge", "_numpy"): Site("results of judging", "judged"),
    ("fedkeep.data.federated", "FederatedData.batch"): Site("examples, which have labels of their own"),
}
PASSES = (
    "fedkeep.nn.native_recurrent",
    "fedkeep.nn.linear_layer",
    "fedkeep.nn.convolution",
    "fedkeep.engines.tables.lazy_rows",
)
"""Modules that take addresses for kernels with a rule (``rules.WRITES``)."""
PASSED_ON = {
    (f"{_ENGINES}.client_step", "mean_loss"),
    (f"{_ENGINES}.client_step", "begin.<locals>.<lambda>"),
    (f"{_ENGINES}.rehearsal", "Writes.__torch_dispatch__"),
}
"""Functions that read a number for a hook, or stand beneath a model that does: it goes to the hook or the model."""


def site_of(module: str, name: str, what: str) -> Site | None:
    """Return what is known of a function that reads numbers in some way; None: it is not in the register."""
    if module in PASSES and what == "data_ptr":
        return SITES["fedkeep.kernels.native", "address"]
    return SITES.get((module, name))


COMPREHENSION = re.compile(r"(\.<locals>\.<(listcomp|setcomp|dictcomp|genexpr)>)+$")
"""What a comprehension's frame is called behind its function's name; from Python 3.12 on, most have no frame."""
NATIVE = {*sys.stdlib_module_names, "torch", "numpy", "fedkeep", "__main__"}


@cache
def native_module(module: str | None) -> bool:
    """Tell whether a function of C code is PyTorch's, numpy's or Python's own; methods of types have no module."""
    return module is None or module.partition(".")[0] in NATIVE


def own(frame: FrameType) -> bool:
    """Tell whether code is the prover's."""
    return str(frame.f_globals.get("__name__", "")).startswith("fedkeep.prove")


def others(frame: FrameType) -> bool:
    """Tell whether code is neither PyTorch's nor fedkeep's, nor what these stand on."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in NATIVE or package == "__main__"


def asked_by(frame: FrameType | None, quiet: Collection[str]) -> str:
    """Return the code that a function of Python's library works for; empty: PyTorch, numpy or fedkeep, or it is quiet."""
    found = ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module in quiet:
            return ""
        if module.partition(".")[0] in ("torch", "numpy", "fedkeep"):
            break
        if others(frame):
            found = found or f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return found


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
