"""Many clients as one tensor program: for GPUs, and for small clients in large cohorts."""

from fedkeep.engines.vectorised.vectorised import Vectorised

__all__ = ["Vectorised"]
