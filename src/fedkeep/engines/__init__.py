"""The local run, the round, and the engines that run a cohort."""

from fedkeep.engines.aggregate import RunningMean
from fedkeep.engines.auto import Auto, AutoDevice, Choice, Measured, choose
from fedkeep.engines.base import CohortResult, Engine, Job
from fedkeep.engines.centralised import Pooled
from fedkeep.engines.judge import Judgement, judge, tasks_of, to_records
from fedkeep.engines.local import LocalResult, Stream, Watch, local_run
from fedkeep.engines.round import RoundReport, Sampler, Server, run_round
from fedkeep.engines.sequential import Sequential
from fedkeep.engines.vectorised.engine import Vectorised
from fedkeep.engines.workers.cores import available_cores
from fedkeep.engines.workers.engine import Workers

__all__ = [
    "Auto",
    "AutoDevice",
    "Choice",
    "CohortResult",
    "Engine",
    "Job",
    "Judgement",
    "LocalResult",
    "Measured",
    "Pooled",
    "RoundReport",
    "RunningMean",
    "Sampler",
    "Sequential",
    "Server",
    "Stream",
    "Vectorised",
    "Watch",
    "Workers",
    "available_cores",
    "choose",
    "judge",
    "local_run",
    "run_round",
    "tasks_of",
    "to_records",
]
