"""What the prover knows of operations: which ones read shapes alone, which ones write unsaid, and where numbers may be
read out of tensors.

Everything else has one rule: all that an operation returns or writes may depend on all that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, ModuleType
from typing import Any

import torch
from torch._ops import OpOverload

from fedkeep.nn import operation

OUTSIDE = 1
"""The label of tensors that nobody declared."""
SHAPES = re.compile(
    r"(zeros|ones|empty|full|rand|randn|randint)_like(_|$)|new_(zeros|ones|empty|full|empty_strided)$"
)
"""Operations that take of a tensor its shape and type, and none of its values."""
OF_SHAPES = {
    "size",
    "stride",
    "numel",
    "dim",
    "is_same_size",
    "sym_size",
    "sym_stride",
    "sym_numel",
    "sym_storage_offset",
}
"""Operations that return numbers of Python, of shapes."""
UNWRITTEN = re.compile(r"(new_)?empty(_|$)|new$|resize_")
"""Operations, and functions, whose result is memory as others left it."""
ROWS = re.compile(r"_foreach_|_fused_(sgd|adam|adamw|adagrad)_?$")
"""Operations on lists: what is at one place of the result is made of what is at that place of each list."""
HIDDEN = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
    "instance_norm": ("running_mean", "running_var"),
    "batch_norm_update_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}
"""Arguments that are written though the operation's schema does not say so."""
TELL = {
    "_nested_tensor_from_mask",
    "_nested_from_padded",
    "_nested_view_from_buffer",
    "_nested_view_from_buffer_copy",
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "rrelu_with_noise_functional",
}
"""Operations without a tag that tell of values: by the sizes of a nested tensor, or by how often they draw, which all
that is drawn later depends on."""
SPARSE = {
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_coo_tensor_unsafe",
    "_sparse_compressed_tensor_unsafe",
    "sparse_compressed_tensor",
    "detach",
    "alias",
    "t",
    "transpose",
    "clone",
}
"""Operations whose sparse results have as many entries as what they are given; of others the number tells of values."""

TABLES = "fedkeep.engines.tables"
ROW_NUMBERS = {"index_select": "index", "index_copy_": "index", "index_fill_": "index", "index": "indices"}
"""Arguments that say which rows of a table they are, in ``TABLES``: every run tells these (``rows/NAME``)."""
READERS = {"tensor_split", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Functions that read whole numbers of their second argument unseen, for the shapes of their results."""
CROSSINGS = {
    "numpy",
    "tolist",
    "data_ptr",
    "untyped_storage",
    "_to_dlpack",
    "to_dlpack",
    "_to_dlpack_versioned",
    "_to_dlpack_unversioned",
    "apply_",
    "map_",
    "map2_",
    "set_state",
    "register_hook",
    "register_prehook",
    "start_new_thread",
    "start_joinable_thread",
    "fork",
    "fork_exec",
    "from_file",
    "shm_open",
    "_share_filename_cpu_",
    "_share_fd_cpu_",
    "memfd_create",
}
"""Functions by which values leave tensors unseen, or something begins that is not seen."""
HIDING = {
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "_DisableTorchDispatch",
    "_ExcludeDispatchKeyGuard",
    "_disable_current_modes",
    "no_dispatch",
    "ctypes",
    "mmap",
    "cffi",
    "setprofile",
    "settrace",
    "import_module",
    "get_objects",
}
"""Names in a module's or a method's code by which operations are hidden from the prover, or memory from PyTorch."""


def hiding(code: CodeType, values: Mapping[str, Any], cells: Sequence[Any] = ()) -> str:
    """Return by what a function's code hides what it does: a name, what a name stands for, or a text that names it.

    Args:
        code: the function's, with that of functions inside.
        values: its module's names.
        cells: what its free names stand for.
    """
    names = {*code.co_names, *code.co_freevars}
    if found := HIDING & names:
        return min(found)
    known = [values[n] for n in names if n in values] + list(cells)
    for one in known:
        named = getattr(one, "__name__", "") if isinstance(one, type | ModuleType) or callable(one) else ""
        last = named.rpartition(".")[2] if isinstance(named, str) else ""
        if last in HIDING or (named in ("torch._C", "torch.utils._python_dispatch") and "getattr" in names):
            return named
    for constant in code.co_consts:
        if isinstance(constant, str) and len(constant) < 100 and constant.rpartition(".")[2] in HIDING:
            return constant
    return "_C" if {"_C", "getattr"} <= names else ""


RUNS = {"eval", "exec", "__import__"}
"""Functions of Python that run code which is not there before."""
OPENS = {"open", "open_code", "socket"}
"""Functions that begin what may carry values past tensors."""
QUIET = {
    "importlib._bootstrap",
    "importlib._bootstrap_external",
    "linecache",
    "tokenize",
    "zipimport",
    "warnings",
}
"""Modules of Python that open files of code for themselves."""

OWN_NODES = (operation.Eager, operation.Transformed, operation.Gradient)
"""Functions of fedkeep whose backward passes have a rule."""

WRITES: dict[tuple[str, bool], tuple[str, ...]] = {
    ("recurrent", False): ("output", "pooled", "work"),
    ("recurrent", True): ("work", "grad_input", "grad_weights"),
    ("convolution", False): ("output", "kept"),
    ("convolution", True): ("grad_input", "grad_weight", "grad_bias"),
    ("linear", False): ("output",),
    ("linear", True): ("grad_input", "grad_weight", "grad_bias"),
    ("rows", False): ("rows",),
    ("rows", True): ("rows", "table", "velocity", "last", "products"),
    ("values", False): ("sum", "mean"),
}
"""What each native kernel writes, by the names of its fields; what it writes may depend on all that it is given."""


WHOLE = torch._C.DispatchKey.CompositeImplicitAutograd
"""The key of operations that are made of others; by ``OpOverload.decompose`` some would be made of other ones."""


@dataclass(frozen=True)
class Rule:
    """What is known of one operation.

    Attributes:
        name: what it is called.
        arguments: the names of what it is given.
        whole: it is made of other operations.
        random: it draws random numbers.
        shapes: it reads no values.
        rows: it works on lists place by place.
        written: the arguments that it writes.
        tells: its result, or the shape of it, is a number of Python that depends on values; or a generator's state is.
        unknown: why nothing is known of it; empty: something is.
    """

    name: str
    arguments: tuple[str, ...]
    whole: bool
    random: bool
    shapes: bool
    rows: bool
    written: frozenset[str]
    tells: bool
    unknown: str


@cache
def rule_of(func: OpOverload) -> Rule:
    """Return the rule of an operation."""
    name, schema = func._schema.name.partition("::")[2], func._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written.update(HIDDEN.get(name, ()))
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    numbers = any("Tensor" not in str(r.type) for r in schema.returns) and name not in OF_SHAPES
    known = func.namespace in ("aten", "fedkeep")
    return Rule(
        name=name,
        arguments=tuple(a.name for a in schema.arguments),
        whole=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), WHOLE),  # type: ignore[no-untyped-call]
        random=torch.Tag.nondeterministic_seeded in func.tags,
        shapes=bool(SHAPES.match(name)),
        rows=bool(ROWS.match(name)),
        written=frozenset(written),
        tells=numbers or name in TELL or (bool(tags & {*func.tags}) and name != "index"),
        unknown="" if known else f"the operation {schema.name} has no rule",
    )


def foreign(node: Any) -> bool:
    """Tell whether a gradient function runs a backward pass of other code's in Python."""
    return not any(node._forward_cls is own for own in OWN_NODES)


def short(func: OpOverload | str) -> str:
    """Return what an operation or a kernel is called in a path."""
    return func if isinstance(func, str) else str(func._schema.name.partition("::")[2])
