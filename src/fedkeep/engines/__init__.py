"""The local run, the round, and the engines that run a cohort."""

from fedkeep.engines.auto import Auto, AutoDevice, Choice, Measured, choose
from fedkeep.engines.base import ClientResult, Engine, Job, Work, first_global, first_kept
from fedkeep.engines.batches import Stream
from fedkeep.engines.centralised import Centralised
from fedkeep.engines.device import Answer, Device, LocalDevice, Order
from fedkeep.engines.judge import Judgement, judge, tasks_of, to_records
from fedkeep.engines.local import LocalResult, Watch
from fedkeep.engines.round import RoundReport, Sampler, run_round
from fedkeep.engines.sequential import Sequential
from fedkeep.engines.single import local_run
from fedkeep.engines.vectorised.engine import Vectorised
from fedkeep.engines.workers.cores import available_cores
from fedkeep.engines.workers.engine import Workers

__all__ = [
    "Answer",
    "Auto",
    "AutoDevice",
    "Centralised",
    "Choice",
    "ClientResult",
    "Device",
    "Engine",
    "Job",
    "Judgement",
    "LocalDevice",
    "LocalResult",
    "Measured",
    "Order",
    "RoundReport",
    "Sampler",
    "Sequential",
    "Stream",
    "Vectorised",
    "Watch",
    "Work",
    "Workers",
    "available_cores",
    "choose",
    "first_global",
    "first_kept",
    "judge",
    "local_run",
    "run_round",
    "tasks_of",
    "to_records",
]
