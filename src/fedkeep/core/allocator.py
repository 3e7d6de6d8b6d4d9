"""Lets the process keep the memory that it frees: giving it back to the system after every step costs page faults.

glibc returns a large tensor's memory as soon as it is freed, and the next step has to ask for it again, page by page;
for a convolutional network that is a quarter of a step. Other allocators and systems are left as they are. This holds
for the whole process and cannot be undone, so importing fedkeep and ``fedkeep.simulate`` don't do it: the command line
does, and a program of one's own may call ``tune_allocator`` first.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

from fedkeep.core.errors import check_choice

# Numbers of mallopt(3) in glibc's malloc.h, and what they are set to, in bytes.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
KEPT = {MMAP_THRESHOLD: 1 << 30, TRIM_THRESHOLD: 1 << 30, TOP_PAD: 64 << 20}
LARGEST_MMAP = 32 << 20  # all that some versions accept
# The user's own settings, which come first.
OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


@cache
def tune_allocator() -> bool:
    """Let the process keep the memory that it frees, from the first call on (Linux with glibc only).

    The variable ``FEDKEEP_MALLOC=default`` leaves the allocator as it is.

    Returns:
        Whether the allocator was set so.

    Raises:
        ConfigError: ``FEDKEEP_MALLOC`` has another value than ``keep`` and ``default``.
    """
    if (mallopt := _mallopt()) is None:
        return False
    done = [bool(mallopt(number, size)) for number, size in KEPT.items()]
    if not done[0]:
        done[0] = bool(mallopt(MMAP_THRESHOLD, LARGEST_MMAP))
    return all(done)


def give_large_back() -> bool:
    """Let memory of 1 MB and more go back to the system as soon as it is freed, from now on (Linux with glibc only).

    For a process that holds many large tensors, each for a moment only, as a federation's server: glibc else keeps what
    one leaves, and finds no place in it for the next. Returns and errors are as for ``tune_allocator``.
    """
    mallopt = _mallopt()
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, 1 << 20))


def _mallopt() -> Callable[[int, int], int] | None:
    """Return mallopt(3); None: it is not here, or the allocator is the user's to set."""
    setting = os.environ.get("FEDKEEP_MALLOC") or "keep"
    check_choice("FEDKEEP_MALLOC must be", setting, ("keep", "default"))
    if setting == "default" or sys.platform != "linux" or any(name in os.environ for name in OWN):
        return None
    try:
        library = ctypes.CDLL(None)
    except OSError:
        return None
    if not all(hasattr(library, name) for name in ("gnu_get_libc_version", "mallopt")):
        return None
    mallopt: Callable[[int, int], int] = library.mallopt
    return mallopt


def is_tuned() -> bool:
    """Tell whether ``tune_allocator`` was called in this process, and did something: so its own processes follow it."""
    return tune_allocator.cache_info().currsize > 0 and tune_allocator()
