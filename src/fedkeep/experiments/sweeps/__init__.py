"""Sweeps: for each method equally many trials of settings, chosen by what is measured on ``valid``.

Optuna proposes the settings (TPE) and ends trials early that fall behind. Interrupted, a sweep goes on: a trial that
was in the middle continues, none is counted twice::

    sweep.json          what is swept: configurations, space, seeds, data
    journal.log         every trial, by Optuna
    trials/METHOD-N/    the runs of a trial, one a seed, while it runs and as long as it is the best of its method
"""

from fedkeep.experiments.sweeps.plan import Prune, Sweep, plan
from fedkeep.experiments.sweeps.space import Range, Space, read_space
from fedkeep.experiments.sweeps.sweep_results import Result, best_name, results, status, table, write
from fedkeep.experiments.sweeps.trials import run

__all__ = [
    "Prune",
    "Range",
    "Result",
    "Space",
    "Sweep",
    "best_name",
    "plan",
    "read_space",
    "results",
    "run",
    "status",
    "table",
    "write",
]
