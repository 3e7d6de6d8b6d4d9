"""Reproductions of FURL, KTEPS and the federated mixture of experts: scenes, readers, configurations, tables, figures.

fedkeep finds what is here by entry points; see ``pyproject.toml``.
"""

__version__ = "0.1.0"
