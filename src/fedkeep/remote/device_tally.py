"""What a run has asked of a device, and what its owner lets a server ask: counted and noted in the run's own file.

Each message that is served is noted in the transaction that keeps what it makes, so a device that is killed has either
both or neither. A message that comes again, to the byte, is the same: it counts once.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from fedkeep.core.describe import digest
from fedkeep.core.packet import Packet
from fedkeep.engines import Judged
from fedkeep.remote.agreement import RefusalError
from fedkeep.remote.device_file import Counts, DeviceFile, Score, ServedMessage, hashed
from fedkeep.remote.messages import ClientAnswer, Partition, Work

AGAIN = 10
"""How often a round that did not count may come again, at least, and a finished run may be judged or adapted to."""
Most = Annotated[int, Field(ge=0)] | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a client does in a run; None: as much as it is asked.

    Attributes:
        trainings: times it trains.
        judgings: messages in which its models are judged.
        adaptations: times it adapts.
    """

    trainings: Most = None
    judgings: Most = None
    adaptations: Most = None

    def with_others(self, other: Limits, choose: Callable[[Sequence[int]], int] = min) -> Limits:
        """Return the smaller ones of two, or those that ``choose`` does; where one has none, the other's."""
        found = {}
        for one in fields(Limits):
            both = [n for each in (self, other) if (n := getattr(each, one.name)) is not None]
            found[one.name] = choose(both) if both else None
        return Limits(**found)


@dataclass(frozen=True, kw_only=True)
class SignedWords:
    """What the owner of a project has signed beside an experiment's text.

    Attributes:
        preparation: the rules of the summary that a device is asked for.
        secure: as of ``Hello``.
        limits: the most that the project's rounds ask of a client.
    """

    preparation: Mapping[str, Any]
    secure: float | None = None
    limits: Limits = Limits()


def asked_of(packet: Packet, work: Work) -> ServedMessage:
    """Return what a message asks."""
    head = json.dumps([packet.header, digest(packet.tensors)], sort_keys=True)
    return ServedMessage(
        hashlib.sha256(head.encode()).hexdigest(),
        time.time(),
        work.round,
        [one.client for one in work.orders if one.train],
        [one.client for one in work.orders if one.judge],
        [one.client for one in work.orders if one.adapt],
        sorted({judging.split for one in work.orders for judging in one.judge}),
    )


class Tally:
    """What a run has asked so far, and whether more may be.

    Args:
        file: the run's.
        limits: of each client.
        least: examples in a sum that leaves, and in what the sums of several messages differ by.
        asked: the message that is served now.
        counts: returns by client how many examples of a part are judged.
    """

    def __init__(
        self,
        file: DeviceFile,
        limits: Limits,
        least: int,
        asked: ServedMessage,
        counts: Callable[[Partition], Mapping[str, int]],
    ) -> None:
        self.file, self.limits, self.least, self.asked, self.counts = file, limits, least, asked, counts

    def check(self) -> None:
        """Raise RefusalError if the message asks a client for more than its owner has agreed to."""
        if self.file.has_asked(self.asked.name):
            return
        counted = self.file.counts()
        for one in fields(Limits):
            most = getattr(self.limits, one.name)
            for client in getattr(self.asked, one.name):
                if most is not None and getattr(counted.get(client, Counts()), one.name) >= most:
                    raise RefusalError(
                        "This device's owner has agreed to at most {most} {one} of a client in this run, and "
                        "client {client!r} has had them. Sign a project of more rounds, or ask the owner for more "
                        "(device.{one}).",
                        most=most,
                        one=one.name,
                        client=client,
                    )

    def admits(self, split: Partition, clients: Sequence[str]) -> bool:
        """Tell whether a sum over the examples of some clients may leave, and note it.

        Neither it nor any difference between sums of this run may be of fewer than ``least`` examples.
        """
        if self.least <= 1:
            return True
        counts = self.counts(split)
        new = {hashed(client): counts[client] for client in clients if counts[client]}
        before = self.file.sums(split) + [one for at, one in self.asked.sums if at == split]
        if not new or new in before:
            return True
        if smallest_block([*before, new]) < self.least:
            return False
        self.asked.sums.append((split, new))
        return True

    def note(self, judged: Sequence[tuple[Partition, Judged]], answers: Sequence[ClientAnswer]) -> None:
        """Note how clients' models did, for the device's owner; nothing of it leaves, and a sum that may not leave is in it too."""
        found = []
        for split, one in judged:
            metric = one.task.headline
            values = ((model, one.metrics(model).get(metric)) for model in one.models)
            found += [Score(split, model, metric, v, one.count) for model, v in values if v is not None]
        if losses := [one.loss for one in answers if math.isfinite(one.loss)]:
            found.append(Score("train", "", "loss", fmean(losses), len(losses)))
        self.asked.scores = [one for one in found if math.isfinite(one.value)]


def smallest_block(sums: Sequence[Mapping[str, int]]) -> int:
    """Return how many examples the fewest are that sums, or differences between them, can tell of.

    Args:
        sums: by client, how many of its examples a sum holds; those that came later are the last of them.
    """
    blocks: dict[tuple[bool, ...], int] = {}
    for client in {client for one in sums for client in one}:
        ends = [one.get(client, 0) for one in sums]
        for start, end in pairwise(sorted({0, *ends})):
            inside = tuple(here >= end for here in ends)  # in which sums these examples are
            blocks[inside] = blocks.get(inside, 0) + end - start
    return min(blocks.values(), default=0)
