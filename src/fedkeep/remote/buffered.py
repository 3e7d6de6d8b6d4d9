"""Buffered asynchrony: the server updates whenever enough answers are there, whatever version they were trained from.

Source: FedBuff (Nguyen et al., 2022), algorithm 1, and its appendix on the factor (1 + s)^-a of an upload that is s
versions old. A version is an update. As many clients as a cohort has are under way at any time, each with one order;
who is next follows from the draws of cohorts. What has come at one instant is used before others are sent off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from fedkeep.core.errors import FailedError, LateError, MethodError, RoundError
from fedkeep.core.params import Params, nbytes, prefixed
from fedkeep.engines import Answer, Device, Order, RoundReport
from fedkeep.engines.faults import Fault, Faults
from fedkeep.engines.round import Received, enough_threads, report_of, take, updated, with_links
from fedkeep.methods import Global, Method
from fedkeep.methods.hook_checks import UPLOAD
from fedkeep.remote.exchange import Exchange
from fedkeep.remote.fleet import Fleet
from fedkeep.split import Upload


@dataclass(frozen=True)
class _UnderWay:
    order: Order
    exchange: Exchange
    version: int


class Buffered:
    """Rounds of a buffer's length; called like ``run_round``.

    Args:
        fleet: the clients; its policy says how many answers make an update, and what becomes of old ones.
        draw: returns the ids of the cohort of a number.
        concurrency: how many clients are under way.
        population: how many clients are drawn from.

    Raises:
        MethodError: the method's state assumes synchronous rounds.
    """

    def __init__(
        self,
        method: Method,
        fleet: Fleet,
        draw: Callable[[int], Sequence[str]],
        concurrency: int,
        population: int,
    ) -> None:
        check_buffered(method)
        self.fleet, self.concurrency, self.population = fleet, concurrency, population
        self._under_way: dict[str, _UnderWay] = {}
        self._draw, self._next = draw, _stream(draw, 0)

    def __call__(
        self,
        method: Method,
        device: Device,
        server: Global,
        cohort: Sequence[str],
        declared: Params,
        faults: Faults,
    ) -> tuple[Global, RoundReport]:
        """Wait for a buffer of uploads and update; the clients that are still under way stay so.

        Raises:
            RoundError: all clients that are left to fill the buffer have failed, or take no part.
        """
        began, policy = time.perf_counter(), self.fleet.policy
        if not self._under_way:
            self._next = _stream(self._draw, server.round)
        received, uploads = Received(), dict[str, Upload]()
        out: dict[str, Fault] = {}  # since the last upload: asked again, they would be out again
        self._refill(method, server, uploads)
        while len(uploads) < policy.buffer:
            arrived = False
            for client, one in self._arrived():
                arrived = True
                age = server.round - one.version
                answer = self._in_time(one.exchange.answer(client), age)
                self.fleet.tell_fault(client, answer.fault)
                upload = take(method, one.order, answer, declared, received, faults)
                if upload is not None:
                    self.fleet.staged([client], one.exchange)
                    uploads[client] = _scaled(upload, (1.0 + age) ** -policy.staleness)
                    out.clear()
                elif not isinstance(fault := received.faults[-1], LateError):
                    out[client] = fault
                if len(uploads) == policy.buffer:
                    break
            if arrived and len(uploads) < policy.buffer:
                self._refill(method, server, {*uploads, *out})
            if out and not self._under_way:
                raise RoundError(
                    "Round {round} does not count: {count} of {buffer} uploads are there, and "
                    "no client is left to be asked. Nothing was lost: the last finished round is kept. The first "
                    "fault: {fault}",
                    failed=all(isinstance(fault, FailedError) for fault in out.values()),
                    round=server.round,
                    count=len(uploads),
                    buffer=policy.buffer,
                    fault=next(iter(out.values())),
                )
        full = time.perf_counter()
        start = {**server.params, **declared}
        reduction = method.server.reduce.begin(server, start, list(uploads))
        for client in sorted(uploads):
            reduction.add(client, uploads[client])
        if sum(received.weights.values()) > 0:
            with enough_threads(start):
                server = updated(method, server, reduction.value())
            links = method.chain().update(server.links, received.reports, len(received.weights))
            server = server.but(links=links)
        device.accept(received.shares)
        return server.but(round=server.round + 1), report_of(
            received, nbytes(server.params), began, time.perf_counter() - full, reduction.held_bytes
        )

    def _refill(self, method: Method, server: Global, waiting: Collection[str]) -> None:
        """Send clients off, until as many are under way as shall be; those that wait are not asked."""
        links = prefixed(UPLOAD, method.chain().sent(server.links))
        shared = None if method.server.send is not None else with_links(method.server.sent(server, ""), links)
        orders: list[Order] = []
        tried: set[str] = set()
        free = self.concurrency - len(self._under_way)
        while len(orders) < free and len(tried) < self.population:
            client = next(self._next)
            if client in tried or client in self._under_way or client in waiting:
                tried.add(client)
                continue
            tried.add(client)
            sent = shared or with_links(method.server.sent(server, client), links)
            orders.append(Order(round=server.round, client=client, sent=sent, progress=server.progress))
        if orders:
            exchange = self.fleet.exchange(self.fleet.with_entries([(order, True, {}) for order in orders]))
            self._under_way |= {o.client: _UnderWay(o, exchange, server.round) for o in orders}

    def _arrived(self) -> Iterator[tuple[str, _UnderWay]]:
        """Wait for the next answers; yield those that have come or will not come any more, in the order of ids."""
        exchanges = {id(one.exchange): one.exchange for one in self._under_way.values()}
        heard = [exchange.poll() for exchange in exchanges.values()]
        done = [c for c, one in self._under_way.items() if c not in one.exchange.open or one.exchange.closed]
        if not done and not any(heard):
            self.fleet.nodes.transport.wait(self.fleet.rules.poll)
        for client in sorted(done):
            yield client, self._under_way.pop(client)

    def _in_time(self, answer: Answer, age: int) -> Answer:
        """Return an answer, with a fault in the place of an upload that is too old."""
        oldest = self.fleet.policy.oldest
        if answer.upload is None or oldest is None or age <= oldest:
            return answer
        fault = LateError(
            "The upload of client {client!r} is {age} versions old; the oldest taken are {oldest}.",
            client=answer.client,
            age=age,
            oldest=oldest,
        )
        return Answer(client=answer.client, fault=fault)


def check_buffered(method: Method) -> None:
    """Raise MethodError where a method's state assumes synchronous rounds."""
    if method.server.synchronous:
        raise MethodError(
            "{method!r} assumes that all uploads of a round began with what the server has now, so it cannot run "
            "with rounds.mode = 'buffered'. Use 'synchronous', or another method.",
            method=method.name,
        )


def _scaled(upload: Upload, factor: float) -> Upload:
    """Return an upload whose changes are multiplied by a factor; integer counters are no changes."""
    return upload.but({n: v * factor if v.is_floating_point() else v for n, v in upload.deltas.items()})


def _stream(draw: Callable[[int], Sequence[str]], number: int) -> Iterator[str]:
    while True:
        yield from draw(number)
        number += 1
