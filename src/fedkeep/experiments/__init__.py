"""Experiments: simulation, run directories, configurations, and the papers' tables and figures."""
