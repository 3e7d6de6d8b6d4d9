"""The native CPU kernels: finding the library that the installation built, and calling it.

The library is looked for in this folder only, at the first use; it is never built here (``build.py`` does that).
The variable ``FEDKEEP_NATIVE`` chooses: ``0`` pure PyTorch, ``avx512``, ``avx2`` or ``portable`` at most this
instruction set; unset or ``1`` the best that the processor has.
"""
