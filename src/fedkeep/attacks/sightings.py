"""What an attacker gets to see of a round: single uploads, or what a reduction releases of a cohort."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedkeep.core.params import Params, under
from fedkeep.engines import Answer, Job, LocalDevice, Order, Sequential
from fedkeep.engines.round import decode, run_round
from fedkeep.methods import Global, Method, PrivateMean
from fedkeep.methods.aggregate import spread
from fedkeep.methods.hook_checks import UPLOAD
from fedkeep.privacy import GaussianNoise
from fedkeep.split import Upload


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A client's round as it was, for judging an attack: what it sent, and what it kept before and after.

    Attributes:
        upload: what the server got, decoded.
        before, after: what the client keeps, by name; no attacker sees it.
    """

    upload: Upload
    before: Params
    after: Params


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What an attacker sees.

    Attributes:
        changes: by federated name, tables whole; of several clients their weighted mean.
        clients: whose it is; the server knows who takes part.
        rows: by name, the rows of a table that were sent; where it is absent, all were.
        noise: the standard deviation of the noise on each number.
    """

    changes: Params
    clients: tuple[str, ...]
    rows: Params = field(default_factory=dict)
    noise: float = 0.0


class _AnswerTap:
    """A device that notes the answers on their way."""

    def __init__(self, device: LocalDevice) -> None:
        self.device, self.seen = device, dict[str, tuple[Order, Upload]]()

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        for order, answer in zip(orders, self.device.train(orders), strict=True):
            if answer.upload is not None:
                self.seen[answer.client] = order, answer.upload
            yield answer

    def accept(self, shares: Mapping[str, float]) -> None:
        self.device.accept(shares)


def watch(job: Job, server: Global, clients: Sequence[str]) -> tuple[Global, dict[str, Observed]]:
    """Run one round of these clients, and note what each uploads and keeps; the job's store goes on.

    Returns:
        The server after the round, and by client what happened.
    """
    numbers = [job.data.index(client) for client in clients]
    tap, start = _AnswerTap(LocalDevice(job, Sequential())), {**server.params, **job.declared}
    kept = job.store.read(numbers)
    after, _ = run_round(job.method, tap, server, clients, job.declared)  # type: ignore[arg-type]
    keeps = job.store.read(numbers)
    found = {}
    for place, client in enumerate(clients):
        order, upload = tap.seen[client]
        links = under(UPLOAD, order.sent.state)
        found[client] = Observed(
            upload=decode(job.method, start, upload, client, links)[0],
            before={n: v[place] for n, v in kept.items()},
            after={n: v[place] for n, v in keeps.items()},
        )
    return after, found


def one_by_one(observed: Mapping[str, Observed], start: Params, method: Method) -> list[Sighting]:
    """Return what the server sees where nothing hides it: each upload by itself, with the noise of its links."""
    noise = math.hypot(*(link.sigma for link in method.upload if isinstance(link, GaussianNoise)))
    return [
        Sighting(
            changes={
                n: spread(v, o.upload.rows[n], start[n]) if n in o.upload.rows else v
                for n, v in o.upload.deltas.items()
            },
            clients=(client,),
            rows=dict(o.upload.rows),
            noise=noise,
        )
        for client, o in observed.items()
    ]


def summed(
    observed: Mapping[str, Observed],
    method: Method,
    server: Global,
    start: Params,
    cohorts: Sequence[Sequence[str]],
) -> list[Sighting]:
    """Return what a method's own reduction (secure sums, differential privacy) releases of each cohort."""
    found, rule = [], method.server.reduce
    for number, cohort in enumerate(cohorts):  # another round for each: noise is drawn by the round's number
        reduction = rule.begin(server.but(round=server.round + number), start, sorted(cohort))
        for client in sorted(cohort):
            reduction.add(client, observed[client].upload)
        noise = 0.0
        if isinstance(rule, PrivateMean):
            noise = rule.privacy.multiplier * rule.privacy.clipping.bounds[0][1] / rule.cohort
        found.append(Sighting(changes=reduction.value().changes, clients=tuple(cohort), noise=noise))
    return found
