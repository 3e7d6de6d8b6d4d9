"""Fine-tuning a copy of a client's whole model, on the device, with tests on the way.

Source: KTEPS (arXiv 2107.11956), §5.3. Nothing is uploaded, and nothing of the copy is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedkeep.core.params import Params, is_state
from fedkeep.engines.adapt import trained_initial
from fedkeep.engines.batches import Stream
from fedkeep.engines.job import Job
from fedkeep.engines.judge import judge
from fedkeep.engines.lanes import Watch
from fedkeep.engines.single_lane import local_run
from fedkeep.engines.window import Way
from fedkeep.methods import Client, Phase, Sent
from fedkeep.methods.base import Predict
from fedkeep.split import Split
from fedkeep.store import Default, MemoryStore


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How clients are fine-tuned and tested.

    Attributes:
        phases: several of them take turns on every mini-batch, unless the method says otherwise; none: nothing is
            trained, and the first test is all of them.
        tests: how many after the first.
        every: mini-batches between two tests.
        round: the run's, which names the draws.
        predicts: what is tested, by name.
        split: on which examples.
    """

    phases: tuple[Phase, ...]
    tests: int
    every: int
    round: int
    predicts: Mapping[str, Predict]
    split: str = "test"


def curve(job: Job, client: int, sent: Sent, tuning: Tuning) -> dict[str, tuple[float, ...]]:
    """Fine-tune a client from what it is sent and keeps; return its accuracies by prediction: before, and at each test.

    Raises:
        NonFiniteError: fine-tuning broke down to NaN; names the client.
    """
    found: dict[str, list[float]] = {name: [] for name in tuning.predicts}

    def test(params: Params) -> None:
        for name, predict in tuning.predicts.items():
            found[name].append(accuracy(job, client, sent, params, predict, tuning.split))

    name, rows = str(job.data.ids[client]), job.data.rows(client, "train")
    kept = {n: v[0] for n, v in job.store.read([client]).items()}
    start = {n: v.to(job.device) for n, v in {**trained_initial(job), **sent.params, **kept}.items()}
    test(start)
    if not tuning.phases or not len(rows):
        return {way: tuple(values * (tuning.tests + 1)) for way, values in found.items()}
    draws = Stream(job.seed, f"personalization/{name}", tuning.round, f"Client {name!r}, fine-tuning")
    turns = job.method.client.turns
    if not isinstance(turns, tuple):
        turns = "batches" if len(tuning.phases) > 1 else "phases"
    local_run(
        job.net,
        Split("*"),
        Client(phases=tuning.phases, turns=turns, tables=job.method.client.tables),
        start,
        sent.flat,
        job.data,
        np.arange(rows.start, rows.stop),
        draws,
        device=job.device,
        watch=Watch(tuning.every, lambda _, params: test(params)),
    )
    return {way: tuple(values) for way, values in found.items()}


def accuracy(job: Job, client: int, sent: Sent, params: Params, predict: Predict, split: str) -> float:
    """Return a client's accuracy on the first task with a model of its own, given by its whole parameters.

    The client has an example with a label of that task.
    """
    personal = job.method.split.personal(params)
    own = {name: value.unsqueeze(0) for name, value in personal.items()}
    store = MemoryStore(Default(personal), job.data.ids)  # of nothing but these values' names and types
    others = {n: v for n, v in params.items() if n not in personal and not is_state(n)}
    given = Sent(params=others, state=sent.state)  # they have been trained since
    way = Way("own", predict, lambda clients: own)
    judged = judge(replace(job, store=store), [(client, given)], split, [way], "examples")
    ((found, _),) = judged[0].of("own").per_client().values()
    return found
