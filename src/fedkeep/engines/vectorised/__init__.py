"""Many clients as one tensor program: for GPUs, and for small clients in large cohorts."""
