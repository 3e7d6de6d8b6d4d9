"""A round on the server's side: send, take what comes back, reduce, update. It knows ids, uploads and losses alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

import numpy as np

from fedkeep.core.errors import (
    ConfigError,
    LateError,
    LostError,
    MethodError,
    NonFiniteError,
    UploadError,
    check_choice,
    check_range,
    raising,
    refused_upload,
)
from fedkeep.core.optim import Optimizer
from fedkeep.core.params import Params, check_finite, misfit, mistyped, nbytes, prefixed, under
from fedkeep.core.seeds import numpy_generator, stream
from fedkeep.engines.device import Answer, Device, Order, paired
from fedkeep.engines.faults import Fault, Faults
from fedkeep.engines.workers.workers import one_thread
from fedkeep.methods import Global, Method, Optimize, Reduced, Sent, aggregate
from fedkeep.methods.hook_checks import UPLOAD, called, check_tensors
from fedkeep.privacy import Chain
from fedkeep.split import Upload, check_rows, check_upload

Sampling = Literal["shuffled", "independent", "poisson"]


@dataclass(frozen=True)
class RoundReport:
    """Measurements of one round.

    Attributes:
        clients: how many took part.
        examples: their training examples, weights' sum.
        loss: mean training loss, weighted as the uploads.
        download_bytes, upload_bytes: per client, the mean over those whose upload was taken.
        aggregate_seconds, seconds: time of decoding, reducing and updating, and of the whole round.
        refused: messages about clients that sat out, whatever their fault.
        lost: how many of these did not answer.
        downloads: how many clients downloaded: all but those lost, of whom nobody knows what has reached them.
        late: how many of those that did not answer are there, and had not answered when the round was closed.
        held_bytes: of uploads that the reduction kept until all were there; 0 where it keeps sums alone.
    """

    clients: int
    examples: float
    loss: float
    download_bytes: int
    upload_bytes: int
    aggregate_seconds: float
    seconds: float
    refused: tuple[str, ...] = ()
    lost: int = 0
    late: int = 0
    held_bytes: int = 0
    downloads: int = 0


class Sampler:
    """Draws the cohort of a round from (seed, round) alone, at a cost that does not grow with the clients.

    Args:
        clients: the indices that may be drawn, in order; an int n means 0 .. n − 1.
        cohort: how many a round.
        mode: ``"shuffled"``: all clients in a new order each epoch, consecutive groups of ``cohort``, so that an
            epoch uses every example once (FURL §4, read so); ``"independent"``: each round draws again;
            ``"poisson"``: each round and client has a coin of its own that falls for it with the probability
            ``rate``, so cohorts differ in size and may be empty. ``cohort`` is then the expected size.
        seed: the run's seed.
        joined: who may be drawn from a round on, where clients join on the way: rounds ascending, each with all
            indices from then on. An epoch begins there anew; ``count``, ``cohort`` and ``rounds_per_epoch`` stay those of
            the run's begin.
    """

    def __init__(
        self,
        clients: np.ndarray | int,
        cohort: int,
        mode: Sampling,
        seed: int,
        joined: Sequence[tuple[int, np.ndarray]] = (),
    ) -> None:
        self.clients, self.asked, self.joined = clients, cohort, joined
        self.count = clients if isinstance(clients, int) else len(clients)
        check_range("[1, inf]", cohort=cohort)
        if self.count < 1:
            raise ConfigError("There is no client with training examples to draw a cohort from.")
        check_choice("sampling must be", mode, get_args(Sampling))
        self.cohort, self.mode, self.seed = min(cohort, self.count), mode, seed
        self.rounds_per_epoch = -(-self.count // self.cohort)

    @property
    def rate(self) -> float:
        """The probability that a client is in a round of ``"poisson"``, (0, 1]."""
        return self.cohort / self.count

    def there(self, round: int) -> tuple[int, np.ndarray | int]:
        """Return who may be drawn in a round, and since which round they may."""
        return next((one for one in reversed(self.joined) if one[0] <= round), (0, self.clients))

    def population(self, round: int) -> int:
        """Return how many may be drawn in a round."""
        clients = self.there(round)[1]
        return clients if isinstance(clients, int) else len(clients)

    def __call__(self, round: int) -> list[int]:
        """Return the clients of a round, ascending order of the draw."""
        since, clients = self.there(round)
        count = self.population(round)
        cohort = min(self.asked, count)
        if self.mode == "independent":
            rng = numpy_generator(self.seed, "cohort", round=round)
            drawn = rng.choice(count, cohort, replace=False, shuffle=False)
        elif self.mode == "poisson":
            drawn = self._fallen(round)
        else:
            epoch, group = divmod(round - since, -(-count // cohort))
            places = range(group * cohort, min((group + 1) * cohort, count))
            key = stream(self.seed, "cohort", round=since + epoch)
            drawn = np.array([permuted(place, count, key) for place in places])
        return [int(c) for c in (drawn if isinstance(clients, int) else clients[drawn])]

    def never(self, rounds: int, first: int = 0) -> list[int]:
        """Return the clients that none of the rounds from ``first`` on to ``rounds`` draws, ascending."""
        whole = rounds // self.rounds_per_epoch > -(-first // self.rounds_per_epoch)  # an epoch lies between
        if self.mode == "shuffled" and whole and not self.joined:
            return []
        _, clients = self.there(rounds)
        left = set(range(clients) if isinstance(clients, int) else map(int, clients))
        for round in range(first, rounds):
            left.difference_update(self(round))
            if not left:
                break
        return sorted(left)

    def _fallen(self, round: int) -> np.ndarray:
        """Return the places whose coins fell for them. From one to the next there is a geometric number of places, so
        nobody looks at the others.
        """
        rng, parts, last = numpy_generator(self.seed, "cohort", round=round), [], -1
        while last < self.count:
            parts.append(last + np.cumsum(rng.geometric(self.rate, self.cohort + 16)))
            last = int(parts[-1][-1])
        places = np.concatenate(parts)
        return places[places < self.count]


def permuted(place: int, count: int, key: int) -> int:
    """Return where a pseudo-random permutation of 0 .. count − 1 sends ``place``, in constant time and memory.

    A four-round Feistel network on the next even power of two, walked until it lands inside.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for step in range(4):
            left, right = right, left ^ (stream(key, "feistel", str(step), right) & mask)
        place = (left << half) | right
        if place < count:
            return place


@dataclass
class Received:
    """What came back in a round.

    Attributes:
        weights: of the uploads that were taken, by client.
        losses: mean training losses, likewise.
        upload_bytes, download_bytes: of each.
        clients: how many clients trained, by an upload of their own or together.
        faults: of clients whose upload was not taken.
        reports: sums of what the links of the upload chain report.
    """

    weights: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    upload_bytes: list[int] = field(default_factory=list)
    download_bytes: list[int] = field(default_factory=list)
    clients: int = 0
    faults: list[Fault] = field(default_factory=list)
    reports: Params = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """Z = c_k / Σ c of each upload; 0 for all where Σ c is."""
        total = sum(self.weights.values())
        return {client: weight / total if total else 0.0 for client, weight in self.weights.items()}

    @property
    def loss(self) -> float:
        """The mean training loss, weighted as the uploads."""
        known = [
            (v, self.weights[c]) for c, v in self.losses.items() if np.isfinite(v) and self.weights[c] > 0
        ]
        total = sum(w for _, w in known)
        return sum(v * w for v, w in known) / total if total else float("nan")


def run_round(
    method: Method,
    device: Device,
    server: Global,
    cohort: Sequence[str],
    declared: Params,
    faults: Faults = Faults(),
) -> tuple[Global, RoundReport]:
    """Run one round; the device stages what clients keep, and keeps it if their upload was taken.

    Args:
        method: the method.
        device: where the clients live.
        server: what the server has; it is not changed, but its optimiser's state goes on.
        cohort: the ids of the clients; their order changes nothing.
        declared: zeros of what clients send along, under ``server/NAME``.
        faults: what to do about clients that break down, send something malformed, or are lost.

    Returns:
        What the server has after the round, and measurements.

    Raises:
        NonFiniteError, UploadError, LostError: a client has a fault of a kind that stops the run.
        RoundError: too few clients took part.
        MethodError: the method's update changes names, shapes or types.
    """
    began = time.perf_counter()
    cohort = sorted(cohort)
    chain = method.chain()
    links = prefixed(UPLOAD, chain.sent(server.links))
    sent = Sent(params=server.params, state={**server.state, **links})
    orders = [
        Order(
            round=server.round,
            client=client,
            progress=server.progress,
            sent=sent
            if method.server.send is None
            else with_links(method.server.sent(server, client), links),
        )
        for client in cohort
    ]
    start = {**server.params, **declared}
    reduction = method.server.reduce.begin(server, start, cohort)
    received = Received()
    seconds = 0.0
    for order, answer in paired(orders, device.train(orders)):
        arrived = time.perf_counter()
        upload = take(method, order, answer, declared, received, faults)
        if upload is None:
            reduction.skip(answer.client)
        else:
            reduction.add(answer.client, upload)
        del answer, upload  # large: they go before the next client is trained
        seconds += time.perf_counter() - arrived
    trained = time.perf_counter()
    faults.check_enough(server.round, received.clients, len(cohort), received.faults)
    total = sum(received.weights.values())
    held_bytes = reduction.held_bytes
    if total > 0 or method.server.reduce.counts_empty:
        with enough_threads(start):
            reduced = reduction.value()
            # Its sums are large: they go before the server has its next parameters beside the old.
            del reduction
            server = updated(method, server, reduced)
            del reduced
        server = server.but(links=chain.update(server.links, received.reports, len(received.weights)))
    combined = time.perf_counter()
    device.accept(received.shares)
    return server.but(round=server.round + 1), report_of(
        received, nbytes(sent.flat), began, seconds + combined - trained, held_bytes
    )


def report_of(
    received: Received, download_bytes: int, began: float, aggregate_seconds: float, held_bytes: int
) -> RoundReport:
    """Return the measurements of a round; ``download_bytes`` are told where nobody took part."""
    lost = sum(isinstance(fault, LostError) for fault in received.faults)
    return RoundReport(
        clients=received.clients,
        examples=sum(received.weights.values()),
        loss=received.loss,
        download_bytes=round_mean(received.download_bytes, download_bytes),
        upload_bytes=round_mean(received.upload_bytes, 0),
        aggregate_seconds=aggregate_seconds,
        seconds=time.perf_counter() - began,
        refused=tuple(str(fault) for fault in received.faults),
        lost=lost,
        late=sum(isinstance(fault, LateError) for fault in received.faults),
        held_bytes=held_bytes,
        downloads=received.clients + len(received.faults) - lost,
    )


def take(
    method: Method, order: Order, answer: Answer, declared: Params, received: Received, faults: Faults
) -> Upload | None:
    """Look at an answer, note what it says, and return its upload, decoded and checked; None: there is none."""
    try:
        if answer.fault is not None:
            raise answer.fault
        if answer.upload is None:
            received.clients += 1
            return None
        start = {**order.sent.params, **declared}
        links = under(UPLOAD, order.sent.state)
        upload, reports = decode(method, start, answer.upload, answer.client, links)
        faults.check_weight(upload.weight, answer.client)
    except (NonFiniteError, UploadError, LostError) as error:
        if answer.fault is None:
            faults.tell(answer.client, error)
        if faults.policy(error) == "stop":
            raise
        received.faults.append(error)
        return None
    received.clients += 1
    if reports:
        received.reports = Chain.total(received.reports, reports)
    received.weights[answer.client] = upload.weight
    received.losses[answer.client] = answer.loss
    up, down = method.server.reduce.traffic(answer.upload, order.sent.flat, start)
    received.upload_bytes.append(up)
    received.download_bytes.append(down)
    return upload


def with_links(sent: Sent, links: Params) -> Sent:
    """Return what a client is sent, with what the upload chain sends it."""
    return Sent(params=sent.params, state={**sent.state, **links})


def decode(
    method: Method, start: Params, upload: Upload, client: str, links: Params | None = None
) -> tuple[Upload, Params]:
    """Return a client's upload as changes of federated parameters, checked, and the reports of the upload chain.

    A masked one stays as it is; its weight is checked.

    Args:
        method: says what was done to the upload.
        start: what it is a change of, by name.
        upload: what arrived.
        client: the client's id.
        links: what the upload chain sent this client.

    Raises:
        UploadError: names the client and what is wrong.
    """
    reports = Params()
    if method.server.reduce.masked:
        if not 0 <= upload.weight < float("inf"):
            raise refused_upload(client, "its weight is {weight}.", weight=upload.weight)
        return upload, reports
    if method.upload:
        check_rows(upload, start, client)
        with raising(
            UploadError,
            "The upload of client {client!r} was refused: it cannot be decoded ({why}).",
            UploadError,
            KeyError,
            RuntimeError,
            client=client,
        ):
            tensors, reports = method.chain().decode(upload.deltas, upload.cut(start), links)
        upload = upload.but(tensors)
    check_upload(upload, start, client)
    return upload, reports


def enough_threads(params: Params) -> AbstractContextManager[object]:
    """Let a server compute with one thread, unless its parameters are large (``aggregate.LARGE``).

    Two threads save it 2 ms at most of smaller ones, and where other programs have the cores, too, one waits for the
    other: up to 170 ms were measured on two cores.
    """
    return one_thread() if nbytes(params) <= aggregate.LARGE else nullcontext()


def updated(method: Method, server: Global, reduced: Reduced) -> Global:
    """Return what the server has after its update, checked.

    Raises:
        MethodError: names, shapes or types changed; or it drew, or set what it may not.
        NonFiniteError: something became NaN or infinite.
    """
    who = f"update of {method.name!r}"
    given = (server.params, server.state, reduced.changes, reduced.state)
    update = method.server.update
    draws = type(update) is not Optimize or type(update.optimizer) is not Optimizer
    after: Global = called(who, lambda: update(server, reduced), *given, kind=Global, draws=draws)
    own = {f.name for f in fields(Global)} - {"params", "state", "optimizer"}
    if other := sorted(name for name in own if getattr(after, name) is not getattr(server, name)):
        raise MethodError(
            "The {who} sets {field!r}; it may set params, state and optimizer alone.", who=who, field=other[0]
        )
    for what, old, new in (("parameters", server.params, after.params), ("state", server.state, after.state)):
        check_tensors(who, new)
        fault = misfit(old, new) or mistyped(old, new)
        if fault:
            raise MethodError(
                "The update of {method!r} changes the server's {what}: {fault}.",
                method=method.name,
                what=what,
                fault=fault,
            )
        check_finite(new, f"The server's {what} after round {server.round}")
    return after


def round_mean(values: Iterable[int], default: int) -> int:
    """Return the mean to the nearest integer."""
    values = list(values)
    return round(sum(values) / len(values)) if values else default
