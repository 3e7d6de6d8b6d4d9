"""Benchmarks: each asserts a claim, and writes its numbers to ``results/``."""
