"""The server's side of an audit: what it has after each round, from its uploads alone, or from something besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedkeep.audit.bench import Bench, Recorded, quiet
from fedkeep.core.copying import copied
from fedkeep.core.errors import FedkeepError, UploadError
from fedkeep.core.net import Net
from fedkeep.core.packet import Packet
from fedkeep.core.params import Params, prefixed
from fedkeep.data import FederatedData
from fedkeep.engines import Answer, Judged, Order, first_global, run_round
from fedkeep.engines.faults import Faults
from fedkeep.engines.first_values import declared
from fedkeep.methods import Global
from fedkeep.remote.messages import Answers, message_of
from fedkeep.store import VersionLedger


class _Replayed:
    """A device that gives the recorded answers of a round."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.answers = answers
        self.ledger = VersionLedger(0)

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        yield from (self.answers[order.client] for order in orders)

    def accept(self, shares: Mapping[str, float]) -> None:
        return

    def judge(self, *given: Any) -> list[Judged]:
        return []

    adapt = judge

    def flush(self) -> None:
        return

    def committed(self) -> None:
        return


def begun(bench: Bench, data: FederatedData) -> Params:
    """Return what a simulation's server has before the first round: it is handed the data as the list of clients."""
    with quiet():
        net = Net(bench.method.made_for(copied(bench.model)))
        return _values(first_global(bench.method, net, data))


def followed(bench: Bench, heard: Mapping[str, Recorded]) -> list[Params]:
    """Return what the server has after each round, given the recorded answers."""
    with quiet():
        net = Net(bench.method.made_for(copied(bench.model)))
        server, found, method = first_global(bench.method, net, bench.data), [], bench.method
        rounds: dict[int, dict[str, Answer]] = {}
        for recorded in heard.values():
            for work, content in recorded.answered():
                try:
                    found_here = message_of(Packet.from_bytes(content), Answers, method.split).answers
                except UploadError:  # as the server refused it
                    continue
                for one in found_here:
                    if one.upload is not None or one.fault is not None:
                        rounds.setdefault(int(work.header["round"]), {})[one.client] = one
        last = max(rounds, default=-1) + 1
        for number in sorted(rounds):
            server = server.but(progress=number / last, round=number)
            try:
                server, _ = run_round(
                    method,
                    _Replayed(rounds[number]),
                    server,
                    list(rounds[number]),
                    declared(method, net),
                    Faults(broken="skip", malformed="skip", minimum=0),
                )
            except FedkeepError:  # a round that does not count
                break
            found.append(_values(server))
        return found


def _values(server: Global) -> Params:
    return {**server.params, **prefixed("server/", server.state), **prefixed("links/", server.links)}
