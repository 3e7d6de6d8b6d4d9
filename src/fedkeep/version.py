"""The version, apart from the package's front, so that every room may know it."""

__version__ = "0.1.0"

NUMERICS = 3
"""Raised by a commit that makes any run give other numbers, if only by rounding (CONTRIBUTING.md says how to see that).

1: version 0.1, up to the kernels that came before commit 4c34503. 2: until APFL, FedBN, FedRep, IFCA, MR-MTL, Per-FedAvg
and pFedMe took the plain mean of their papers by default. 3: since then; all other runs are equal to the bit.
"""
