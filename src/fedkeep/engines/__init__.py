"""The local run, the round, and the engines that run a cohort."""

from fedkeep.engines.adapt import Adaptation, Adapted, Fitting, fit
from fedkeep.engines.auto import Auto, Choice
from fedkeep.engines.batches import Stream
from fedkeep.engines.centralised import Centralised
from fedkeep.engines.client_step import ClientResult, ClientToTrain, Engine, Job, Sequential
from fedkeep.engines.device import Answer, Defers, Device, LocalDevice, Order, job_of, orders_of
from fedkeep.engines.first_values import first_default, first_global, first_kept
from fedkeep.engines.lanes import LocalResult, LocalRunWatch, local_run
from fedkeep.engines.round import RoundReport, Sampler, run_round
from fedkeep.engines.tally import Judged, Judgement, Leaves, Pair, Tallies, to_records
from fedkeep.engines.vectorised.vectorised import Vectorised
from fedkeep.engines.workers.workers import Workers, available_cores

__all__ = [
    "Adaptation",
    "Adapted",
    "Answer",
    "Auto",
    "Centralised",
    "Choice",
    "ClientResult",
    "ClientToTrain",
    "Defers",
    "Device",
    "Engine",
    "Fitting",
    "Job",
    "Judged",
    "Judgement",
    "Leaves",
    "LocalDevice",
    "LocalResult",
    "LocalRunWatch",
    "Order",
    "Pair",
    "RoundReport",
    "Sampler",
    "Sequential",
    "Stream",
    "Tallies",
    "Vectorised",
    "Workers",
    "available_cores",
    "first_default",
    "first_global",
    "first_kept",
    "fit",
    "job_of",
    "local_run",
    "orders_of",
    "run_round",
    "to_records",
]
