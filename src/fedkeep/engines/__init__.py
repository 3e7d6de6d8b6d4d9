"""The local run, the round, and the engines that run a cohort."""

from fedkeep.engines.base import CohortResult, Engine, Job
from fedkeep.engines.judge import Judgement, judge, tasks_of, to_records
from fedkeep.engines.local import LocalResult, Stream, Watch, local_run
from fedkeep.engines.pooled import Pooled
from fedkeep.engines.round import RoundReport, Sampler, Server, run_round
from fedkeep.engines.sequential import Sequential
from fedkeep.engines.vectorised import Vectorised

__all__ = [
    "CohortResult",
    "Engine",
    "Job",
    "Judgement",
    "LocalResult",
    "Pooled",
    "RoundReport",
    "Sampler",
    "Sequential",
    "Server",
    "Stream",
    "Vectorised",
    "Watch",
    "judge",
    "local_run",
    "run_round",
    "tasks_of",
    "to_records",
]
