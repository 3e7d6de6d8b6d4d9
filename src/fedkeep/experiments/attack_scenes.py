"""What attacks are run on: a trained method, two of its rounds and one of its steps, under each protection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fedkeep.attacks import Observed, Sighting, one_by_one, summed, watch
from fedkeep.core.errors import ConfigError, FedkeepError, check_range
from fedkeep.core.optim import sgd
from fedkeep.core.params import Params
from fedkeep.core.seeds import numpy_generator
from fedkeep.data import FederatedData
from fedkeep.data.federated import take
from fedkeep.data.splits import bounds_of
from fedkeep.engines import first_global, job_of
from fedkeep.experiments.build import LOCAL, SERVER, build_method
from fedkeep.experiments.config import Config, MethodConfig
from fedkeep.experiments.run import Run
from fedkeep.experiments.simulate import train_counts
from fedkeep.methods import Global, Method, SecureSums, differentially_private, securely
from fedkeep.privacy import DifferentialPrivacy, Release, epsilon
from fedkeep.privacy.clip_and_noise import norm
from fedkeep.store import MemoryStore

REGROUPED = 8
"""How often the clients of the second round are put into cohorts again, as a few sums alone say little."""
MOST_NOISE = 10_000.0
"""The largest noise multiplier that is tried for an ε."""
STEP = 0.1
"""The learning rate of the one step that inversions see."""


@dataclass(kw_only=True)
class AttackView:
    """What an attacker sees under one protection.

    Attributes:
        name: of the protection.
        scene: whose rounds they are.
        first, second: of two rounds in a row.
        step, single: of one step of SGD, on ``batch`` examples, or on one.
        bare: whether single uploads are seen.
        private: the names that the split keeps home, under every protection.
        privacy: how a run is trained under it; None: as it is.
        note: how it was set.
        why: why the protection can't be had; else empty.
    """

    name: str
    scene: AttackScene
    first: list[Sighting] = field(default_factory=list)
    second: list[Sighting] = field(default_factory=list)
    step: list[Sighting] = field(default_factory=list)
    single: list[Sighting] = field(default_factory=list)
    bare: bool = False
    private: tuple[str, ...] = ()
    privacy: DifferentialPrivacy | None = None
    note: str = ""
    why: str = ""


class AttackScene:
    """A trained run, and what some of its clients do in two more rounds, and in one step of SGD.

    Args:
        run: the run; it is not changed.
        clients: their ids.
        batch: examples in the one step.
    """

    def __init__(self, run: Run, clients: Sequence[str], batch: int) -> None:
        self.run, self.clients, self.net, self.data = run, list(clients), run.net, run.data
        self.job = job_of(
            run.method, run.net, run.data, self._store(run.data), run.private.default.seed, run.device
        )
        self.method = self.job.method
        self.server = first_global(self.method, run.net, run.data).but(
            params=run.server, state=run.state, round=run.round
        )
        self.start = {**self.server.params, **self.job.declared}
        self.later, self.first = watch(self.job, self.server, self.clients)
        _, self.second = watch(self.job, self.later, self.clients)
        self.few, self.one = (trimmed(run.data, size) for size in (batch, 1))
        self.step, self.single = (self._stepped(1, batch, data) for data in (self.few, self.one))

    def _stepped(self, number: int, batch: int, data: FederatedData) -> dict[str, Observed]:
        method = few_steps(self.method, number, batch)
        job = replace(self.job, method=method, data=data, store=self._store(data))
        return watch(job, self.server, self.clients)[1]

    def _store(self, data: FederatedData) -> MemoryStore:
        store = MemoryStore(self.run.private.default, data.ids)
        numbers = self.run.members(self.clients).positions.tolist()
        store.write(numbers, self.run.private.read(numbers))
        return store

    @property
    def private(self) -> list[str]:
        """The names of the private parameters."""
        return self.method.split.private_names(sorted(self.net.trainable()))

    def known(self) -> Params:
        """Return what a server knows: the federated part, what is frozen, and default private values."""
        return {**self.net.initial(), **self.run.private.default(self.clients[0]), **self.server.params}

    def batch(self, client: str, data: FederatedData | None = None) -> dict[str, torch.Tensor]:
        """Return a client's training examples, those that it has not opted out."""
        data = data or self.data
        number = data.index(client)
        return data.batch(np.asarray(data.rows(number, "train"), np.int64)[opted_in(data, number)])

    def bare(self, name: str) -> AttackView:
        """Return what the server sees where nothing hides single uploads."""
        seen = [
            one_by_one(o, self.start, self.method) for o in (self.first, self.second, self.step, self.single)
        ]
        return AttackView(
            name=name, scene=self, first=seen[0], second=seen[1], step=seen[2], single=seen[3], bare=True
        )

    def hidden(
        self, name: str, method: Method, cohort: int, privacy: DifferentialPrivacy | None, note: str
    ) -> AttackView:
        """Return what is released of sums over cohorts, which a method's reduction makes."""
        made: list[list[Sighting]] = []
        rounds: Sequence[tuple[Global, Mapping[str, Observed]]] = (
            (self.server, self.first),
            (self.later, self.second),
            (self.server, self.step),
            (self.server, self.single),
        )
        for number, (server, seen) in enumerate(rounds):
            start = {**server.params, **{n: v for n, v in self.start.items() if n not in server.params}}
            cohorts: list[list[str]] = []
            for again in range(REGROUPED if seen is self.second else 1):
                drawn = (
                    numpy_generator(again, "attack cohorts", round=number).permutation(self.clients).tolist()
                )
                cohorts += [drawn[k : k + cohort] for k in range(0, len(drawn) - cohort + 1, cohort)]
            shifted = server.but(round=server.round + 1000 * (number + 1))  # noise of its own
            made.append(summed(seen, method, shifted, start, cohorts))
        return AttackView(
            name=name,
            scene=self,
            first=made[0],
            second=made[1],
            step=made[2],
            single=made[3],
            privacy=privacy,
            note=note,
        )


def views(
    plain: Run,
    split: Run,
    clients: Sequence[str],
    *,
    batch: int,
    epsilons: Sequence[float],
    cohort: int,
    rounds: int,
) -> list[AttackView]:
    """Return what is seen of a plain run, of a split, and of the split under differential privacy and secure sums.

    Clipping is at the median norm of an upload. ε is that of the whole run, of ``rounds`` rounds with cohorts drawn
    from the N clients that train, at δ = 1 / (10 N).
    """
    one, two = (AttackScene(run, clients, batch) for run in (plain, split))
    found = [one.bare("plain"), two.bare("split")]
    bound = float(np.median([norm(o.upload.deltas) for o in two.first.values()]))
    weights = [o.upload.weight for o in two.first.values()]
    heaviest = None if two.method.server.reduce.weight(7.0) == 1 else float(np.median(weights))
    inside = min(cohort, len(clients))
    people = int((train_counts(split.data, split.method)[split.clients.positions] > 0).sum())
    cohort = min(cohort, people)
    delta, rate = 0.1 / people, cohort / people
    made: dict[str, tuple[Callable[[], Method], DifferentialPrivacy | None, str]] = {}
    for number, wanted in enumerate(epsilons, 1):
        noise = multiplier(wanted, rate, rounds, delta)
        privacy = DifferentialPrivacy(
            noise=noise, clip=bound, delta=delta, heaviest=heaviest, accountant="rdp", noise_seed=number
        )
        note = (
            f"what others than the server see, of {inside} clients a sum; noise multiplier {noise:.3g}, clipped at "
            f"{bound:.3g}, {cohort} of {people} clients in a round, {rounds} rounds, δ = {delta:.2g}"
        )
        made[f"dp ε={wanted:g}"] = partial(differentially_private, two.method, privacy, inside), privacy, note
    sums = partial(SecureSums, clip=bound, heaviest=heaviest, bits=64)
    made["secure"] = (
        lambda: securely(two.method, sums()),
        None,
        f"what the server sees: sums over {inside} clients",
    )
    for name, (method, asked, note) in made.items():
        try:
            found.append(two.hidden(name, method(), inside, asked, note))
        except FedkeepError as error:
            found.append(AttackView(name=name, scene=two, why=str(error)))
    for view in found:
        view.private = tuple(two.private)
    return found


def multiplier(wanted: float, rate: float, rounds: int, delta: float) -> float:
    """Return the noise multiplier at which so many rounds cost ``wanted`` ε, by bisection, to two thousandths.

    Raises:
        ConfigError: ε is not positive, or too small for any noise that is tried, or the package dp-accounting is not
            installed.
    """
    check_range("(0, inf]", ε=wanted)
    low, high = 0.05, MOST_NOISE
    while high / low > 1.002:
        middle = (low * high) ** 0.5
        spent = epsilon({Release(rate=rate, noise=middle): max(rounds, 1)}, delta, "rdp")
        low, high = (low, middle) if spent <= wanted else (middle, high)
    if high == MOST_NOISE:
        raise ConfigError(
            "No noise up to {most_noise:,g} comes to ε = {wanted:g}. Ask for a larger ε.",
            most_noise=MOST_NOISE,
            wanted=wanted,
        )
    return high


def few_steps(method: Method, number: int, batch: int) -> Method:
    """Return the method with so many steps of plain SGD for a local run: what gradient inversion is tried on."""
    plain: dict[str, Any] = {"steps": number, "batch_size": batch, "optimizer": sgd(STEP), "clip_norm": None}
    return method.on_client(phases=tuple(phase.but(**plain) for phase in method.client.phases))


def plain_method(config: Config, model: nn.Module) -> Method:
    """Return FedAvg of everything, with the local phase of a configuration's method."""
    own = config.method
    names = [n for n, _ in model.named_parameters()]
    options = {n: v for n, v in own.options.items() if n in LOCAL | SERVER}
    kept = {"optimizer": own.optimizer, "server_optimizer": own.server_optimizer}
    if (optimizer := own.optimizer) is not None:
        rates = tuple((p, r) for p, r in optimizer.rates if any(fnmatchcase(n, p) for n in names))
        kept["optimizer"] = replace(optimizer, rates=rates)
    made = MethodConfig.model_validate({"kind": "fedavg", "loss": own.loss, **kept, **options})
    return build_method(made).resolved(model)


def opted_in(data: FederatedData, client: int) -> np.ndarray:
    """Return which of a client's training examples it has not opted out, by their place among these."""
    rows, column = data.rows(client, "train"), data.columns.get("opted_in")
    inside = np.ones(len(rows), bool) if column is None else np.asarray(column)[rows.start : rows.stop]
    return np.flatnonzero(inside)


def trimmed(data: FederatedData, count: int) -> FederatedData:
    """Return the data with the first ``count`` training examples of each client, of those not opted out."""
    return divided(data, [opted_in(data, c)[:count] for c in range(len(data))])[0]


def divided(data: FederatedData, chosen: Sequence[np.ndarray]) -> tuple[FederatedData, np.ndarray]:
    """Return the data where of each client's training examples only the chosen train, and the others are tested on.

    Returns:
        The data, and the row that each of its rows had before.
    """
    order, counts = [], []
    for client, inside in enumerate(chosen):
        train, valid, test = (np.asarray(data.rows(client, s), np.int64) for s in ("train", "valid", "test"))
        out = np.delete(train, inside)
        order += [train[inside], valid, test, out]
        counts.append([len(inside), len(valid), len(test) + len(out)])
    rows = np.concatenate(order)
    made = FederatedData(
        take(data.columns, rows),
        data.offsets,
        data.ids,
        bounds_of(np.array(counts, np.int64)),
        data.meta,
        check=False,
    )
    return made, rows
