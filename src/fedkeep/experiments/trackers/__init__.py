"""Trackers: they receive a run's records while it goes on.

A tracker is told every record of a run once its round is committed, and of a resumed run what it was not told before.
It changes no result. One that fails is told nothing more; the run goes on, and its folder has all records.
"""

from fedkeep.experiments.trackers.contract import End, EndRun, Facts, Tracker
from fedkeep.experiments.trackers.stores import MLflow, TensorBoard, WandB
from fedkeep.experiments.trackers.telling import Tell, named_trackers, tracked

__all__ = [
    "End",
    "EndRun",
    "Facts",
    "MLflow",
    "Tell",
    "TensorBoard",
    "Tracker",
    "WandB",
    "named_trackers",
    "tracked",
]
