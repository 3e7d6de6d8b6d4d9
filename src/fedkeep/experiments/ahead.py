"""How long a run will take, before it begins: how many mini-batches are ahead, and the time of one.

A pass through the model is timed on a mini-batch of the first client's; with gradients and a step it takes about three
times as long. It is an estimate: clients are taken one after the other, while engines train several at a time; what
judging takes, often more, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.engines.batches import load_batch, planned_steps
from fedkeep.engines.rehearsal import first_values, seconds_of_a_pass
from fedkeep.experiments.simulate import Simulation, train_counts
from fedkeep.methods import Phase
from fedkeep.report.wording import duration, plain

A_ROUND = 1e-3
"""Seconds; what a round takes beside its mini-batches is more, so nobody waits less."""
WITH_GRADIENTS = 3
"""Times what a pass forward takes: a pass backward costs two of them."""
A_STEP = 1e-4
"""Seconds; what a step takes beside its two passes is about as much."""


@dataclass(frozen=True)
class Ahead:
    """What a run has before it.

    Attributes:
        rounds: that are to come.
        steps: mini-batches in a round, all its clients' together.
        later: mini-batches after the last round.
        step: seconds of a mini-batch.
    """

    rounds: int
    steps: float
    later: float
    step: float

    @property
    def seconds(self) -> float:
        """How long it will take, clients one after the other."""
        return self.rounds * (A_ROUND + self.steps * self.step) + self.later * self.step

    def __str__(self) -> str:
        later = f" and {plain(self.later)} after the last" if self.later else ""
        return (
            f"at least {duration(self.seconds)}, clients one after the other: {plain(self.rounds)} rounds of "
            f"{plain(round(self.steps, 1))} mini-batches{later}, {duration(self.step)} each"
        )


def ahead(simulation: Simulation, done: int = 0, tuned: int = 0) -> Ahead:
    """Return what a run has before it.

    Args:
        simulation: the run, put together.
        done: rounds that it has behind it.
        tuned: mini-batches that each client is fine-tuned on after the last round.
    """
    method, conductor, settings = simulation.method, simulation.conductor, simulation.settings
    counts = train_counts(simulation.data, method)
    trains = [int(n) for n in counts[counts > 0]]
    phases = method.client.phases
    if settings.centralised:
        steps = float(sum(planned_steps(phase.but(epochs=1), trains) for phase in phases))
    else:
        each = sum(method.client.steps(k) * _steps(phase, trains) for k, phase in enumerate(phases))
        steps = conductor.sampler.cohort * each / max(1, len(trains))
    adapts = method.adapt.everyone or settings.evaluate_adapted
    later = sum(_steps(phase, trains) for phase in method.adapt.phases) if adapts else 0
    return Ahead(
        max(0, conductor.rounds - conductor.first - done),
        steps,
        later + tuned * len(simulation.clients),
        _step(simulation, phases),
    )


def _steps(phase: Phase, counts: Sequence[int]) -> int:
    """Return the mini-batches of a phase, of clients with so many examples each."""
    return sum(planned_steps(phase, [count]) for count in counts)


def _step(simulation: Simulation, phases: Iterable[Phase]) -> float:
    """Return the seconds of a step on a mini-batch; a model that does not fit its data is not timed: training says so."""
    data, net, device = simulation.data, simulation.net, simulation.settings.device
    every = (np.asarray(data.rows(client, "train")) for client in simulation.clients.tolist())
    rows = next((some for some in every if len(some)), None)
    if rows is None:
        return A_STEP
    values = first_values(net, simulation.method, simulation.conductor.seed)
    batch = load_batch(data, rows[: max(p.batch_size for p in phases)], device, net.float_type)
    return A_STEP + WITH_GRADIENTS * seconds_of_a_pass(net, values, batch, device)
