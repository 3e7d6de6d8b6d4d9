"""Loads the native library and calls it with the addresses of tensors."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

LIBRARY = Path(__file__).with_name("_kernels.so")
ABI, CHUNK = 5, 64  # FK_ABI in runtime.h, CHUNK in recurrent.h
LEVELS = ("portable", "avx2", "avx512")
LEVEL_NAMES = ("portable", "AVX2", "AVX-512")

# The 64-bit words of `struct Call` in recurrent.h, convolution.h, linear.h, rows.h and values.h, in their order.
RECURRENT = (
    *("gru", "is_double", "threads", "level", "pool", "G", "D", "B", "L", "I", "H", "V"),
    *("lengths", "lengths_stride", "x", "x_stride", "ids", "ids_stride", "table", "table_stride"),
    *(f"weights[{i}]" for i in range(8)),
    *(f"weight_strides[{i}]" for i in range(8)),
    *("output", "pooled", "work", "grad_output", "grad_pooled", "grad_input"),
    *(f"grad_weights[{i}]" for i in range(8)),
)
CONVOLUTION = (
    *("threads", "level", "is_double", "G", "B", "C", "H", "W", "O", "K", "padding", "bytes"),
    *("x", *(f"x_strides[{i}]" for i in range(5)), "weight", "bias", "weight_stride", "bias_stride"),
    *("output", *(f"output_strides[{i}]" for i in range(5)), "kept"),
    *("grad_output", *(f"grad_output_strides[{i}]" for i in range(5))),
    *("grad_input", *(f"grad_input_strides[{i}]" for i in range(5)), "grad_weight", "grad_bias"),
)
LINEAR = (
    *("threads", "level", "is_double", "G", "B", "I", "O", "relu", "x", "x_stride", "row_stride"),
    *("weight", "bias", "weight_stride", "bias_stride", "output"),
    *("grad_output", "grad_input", "grad_weight", "grad_bias"),
)
ROWS = (
    *("threads", "level", "is_double", "N", "D", "step", "used", "table", "velocity", "anchor"),
    *("products", "last", "powers", "rates", "rows", "grads"),
)
VALUES = (
    *(
        "phase",
        "threads",
        "level",
        "is_double",
        "N",
        "given",
        "held",
        "sum",
        "fresh",
        "weight",
        "held_weight",
    ),
    *("mean", "places", "width"),
)
_FIELDS = {
    "recurrent": RECURRENT,
    "convolution": CONVOLUTION,
    "linear": LINEAR,
    "rows": ROWS,
    "values": VALUES,
}
_DOUBLES = ("weight", "held_weight")
_WORDS = {
    kernel: struct.Struct("=" + "".join("d" if kernel == "values" and f in _DOUBLES else "q" for f in fields))
    for kernel, fields in _FIELDS.items()
}
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    kernel: (f"fk_{kernel}", f"fk_{kernel}_backward") for kernel in _FIELDS if kernel != "values"
}
_FUNCTIONS["values"] = ("fk_values",)


@dataclass(frozen=True)
class Status:
    """Which kernels are in use: ``native`` or not, the instruction set, and why not the best."""

    native: bool
    level: str
    reason: str

    def __str__(self) -> str:
        return f"native kernels ({self.level})" if self.native else f"pure PyTorch: {self.reason}"


@dataclass(frozen=True)
class _LoadedKernels:
    library: ctypes.CDLL | None
    level: int
    reason: str


def status() -> Status:
    """Which kernels the layers use on the CPU, and why, where it is pure PyTorch."""
    loaded = load()
    if loaded.library is None:
        return Status(False, "pure PyTorch", loaded.reason)
    return Status(True, LEVEL_NAMES[loaded.level], loaded.reason)


def available() -> bool:
    """Whether the native library is in use.

    A graph that is exported or traced holds torch's operations alone, and so does what is differentiated forward
    (``torch.func.jvp``).
    """
    recorded = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    return load().library is not None and not recorded and not forward_mode()


def forward_mode() -> bool:
    """Whether values are differentiated forward now."""
    return forward_ad._current_level >= 0


@cache
def load() -> _LoadedKernels:
    """Opens the library once; says why where it cannot be used."""
    setting = os.environ.get("FEDKEEP_NATIVE", "1").lower()
    if setting == "0":
        return _LoadedKernels(None, 0, "FEDKEEP_NATIVE=0")
    if setting not in ("1", "", *LEVELS):
        reason = f"FEDKEEP_NATIVE={setting} is not one of 0, 1, {', '.join(LEVELS)}"
        return _LoadedKernels(None, 0, reason)
    library, reason = _open(LIBRARY)
    if library is None:
        return _LoadedKernels(None, 0, reason)
    library.fk_team(team())
    level = int(library.fk_level())
    if setting in LEVELS:
        level = min(level, LEVELS.index(setting))
    return _LoadedKernels(library, level, f"{LIBRARY.name} on this processor")


def _open(path: Path) -> tuple[ctypes.CDLL | None, str]:
    again = "run 'python -m fedkeep.kernels.build'"
    if not path.exists():
        return None, f"no native library was built at installation; {again}"
    try:
        library = ctypes.CDLL(str(path))
        library.fk_abi.restype = ctypes.c_int64
        abi = int(library.fk_abi())
    except (OSError, AttributeError) as error:
        return None, f"{path.name} was built for another machine or is not whole ({error}); {again}"
    if abi != _abi():
        return None, f"{path.name} belongs to another version of fedkeep; {again}"
    for names in _FUNCTIONS.values():
        for name in names:
            function = getattr(library, name)
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int64
    library.fk_team.argtypes, library.fk_team.restype = [ctypes.c_void_p], None
    library.fk_level.restype = ctypes.c_int64
    library.fk_peak.argtypes, library.fk_peak.restype = [ctypes.c_int64], ctypes.c_double
    return library, ""


def team() -> int | None:
    """The address of ``GOMP_parallel`` in the OpenMP library that PyTorch itself is linked with; None: it has none.

    The kernels compute on PyTorch's threads, which busily wait for a while after each of its operations: threads of
    the kernels' own would have to share their cores with them.
    """
    path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(path)).GOMP_parallel  # in one of the libraries that this one needs
        return ctypes.cast(found, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _abi() -> int:
    version = ABI
    for fields in _FIELDS.values():
        version = version * 1000 + len(fields)
    return version


BAD_LENGTH, BAD_ID = 1, 2
PLAIN = {Tensor, torch.nn.Parameter}


def call(
    kernel: Literal["recurrent", "convolution", "linear", "rows", "values"],
    backward: bool,
    words: Sequence[float],
) -> int:
    """Runs a forward or backward pass of a kernel; ``words`` are the values of its fields above.

    Returns:
        0, or, of the recurrent kernel, ``BAD_LENGTH`` (below 1 or above L) or ``BAD_ID`` (below 0 or not below V), or,
        of ``values``, 1 where a number is not finite.

    Raises:
        MemoryError: the kernel's own arrays could not be allocated.
        RuntimeError: no library is in use.
    """
    library = load().library
    if library is None:
        raise RuntimeError("the native kernels are not in use")
    function = getattr(library, _FUNCTIONS[kernel][backward])  # the library keeps it
    code: int = function(_WORDS[kernel].pack(*words))  # ctypes hands over the address of the bytes
    if code == 3:
        raise MemoryError(f"the {kernel} kernel is out of memory")
    return code


def peak() -> float:
    """Float32 operations per second of one core in multiply-adds alone: the most that a kernel could reach.

    Measured for some milliseconds at each call, as clocks change and cores are shared.

    Raises:
        RuntimeError: no library is in use.
    """
    loaded = load()
    if loaded.library is None:
        raise RuntimeError("the native kernels are not in use")
    return float(loaded.library.fk_peak(loaded.level))


def in_memory(*tensors: Tensor) -> bool:
    """Whether the values of tensors lie where they say: those of a subclass (``FakeTensor``, say) may be nowhere."""
    return {*map(type, tensors)} <= PLAIN


def address(tensor: Tensor | None) -> int:
    """Where the values of a tensor lie; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def chunks(sequences: int) -> int:
    """Into how many chunks the kernel divides so many sequences."""
    return -(-sequences // CHUNK) or 1


def lanes(dtype: torch.dtype) -> int:
    """How many numbers of this type one vector of the instruction set in use holds."""
    return (16, 32, 64)[load().level] // dtype.itemsize
