"""A fleet whose uploads the server sees in a sum alone: the steps of secure sums, two messages a round.

    to train      the masked vector of this round; of the next cohort keys
    to unmask     shares that unmask this round's sum; of the next cohort sealed shares

The first round, and one that was tried before, asks its own cohort for keys and shares first: two messages more. What
is asked ahead changes nothing of this round; who does not answer it sits the next one out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from fedkeep.core.errors import LostError, RoundError, SecureSumError, raising, refused_upload
from fedkeep.core.params import Params
from fedkeep.engines import Answer, Order
from fedkeep.methods import Global, Method, Reduced, SecureMean, SecureSums, Sent
from fedkeep.methods.secure import Undivided, Vectors
from fedkeep.privacy.secure.secure_messages import Keys, WrongShareError
from fedkeep.privacy.secure.secure_server import SecureServer, Spent
from fedkeep.remote.exchange import Exchange
from fedkeep.remote.fleet import Fleet
from fedkeep.remote.masking import VECTOR, about, revealed_of
from fedkeep.remote.messages import Ask, ClientOrder, Step
from fedkeep.split import Upload

NOTHING = Sent(params={}, state={})
PARDON = 10
"""Rounds after which who was left out for wrong shares is asked again."""


@dataclass
class _RoundSum:
    """The sum of one round.

    Attributes:
        round, cohort: the round's number, and the ids of who begins, sorted.
        number: the sum's own; later ones have larger numbers.
        server: takes the steps.
        ready: who has sent shares.
    """

    round: int
    cohort: Sequence[str]
    number: int
    server: SecureServer
    ready: set[str] = field(default_factory=set)

    @property
    def enough(self) -> bool:
        """Whether enough have sent shares."""
        return len(self.ready) >= self.server.threshold

    def ask(self, step: Step, given: Mapping[str, str]) -> Ask:
        """Return what a client is asked for."""
        return Ask(step=step, sum=self.number, given=given)


class SecureFleet(Fleet):
    """The clients of a federation whose method sums securely.

    Args:
        rule: what the sums take.
        cohort_of: the ids of a round's cohort; empty after the last round.
        args, options: as for ``Fleet``.

    Attributes:
        vectors: how this round's uploads become vectors; ``RemoteMean`` says it before the round's orders.
    """

    def __init__(
        self, *args: Any, rule: SecureSums, cohort_of: Callable[[int], Sequence[str]], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.rule, self.cohort_of, self._spent = rule, cohort_of, Spent()
        self.vectors: Vectors | None = None
        # Who dealt a wrong share, and who says so: in which round.
        self._blamed = dict[tuple[str, str], int]()
        self._now: _RoundSum | None = None
        self._next: _RoundSum | None = None

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Let clients train as ever; each upload is a masked vector.

        Raises:
            RoundError: too few clients have sent keys or shares.
            SecureSumError: the cohort is too small for any sum.
        """
        if orders:
            self._now = self._begin(orders[0].round, [order.client for order in orders])
            self._next = self._new(orders[0].round + 1, sorted(self.cohort_of(orders[0].round + 1)))
        yield from super().train(orders)

    def add(self, client: str, upload: Upload) -> None:
        """Add a client's masked vector to the sum."""
        self._sum.server.add_masked(client, self._vector(upload))

    def total(self) -> np.ndarray:
        """Ask those whose vectors are in the sum to unmask it, and return it, in the ring.

        Raises:
            RoundError: too few are left, or a share is wrong.
        """
        here, ahead = self._sum, self._next
        with _ends_round():
            survivors = here.server.survivors()
        given = dict.fromkeys(survivors, "")
        asks = {client: [here.ask("revealed", given)] for client in survivors}
        self._ask_shares(ahead, asks)
        exchange = self._exchanged(here.round, asks)
        self._take(
            exchange, "revealed", lambda client, made: here.server.add_revealed(client, revealed_of(made))
        )
        self._take_shares(ahead, exchange)
        with _ends_round():
            try:
                total = here.server.total()
            except WrongShareError as error:
                self._blamed |= {(dealer, dealer): here.round for dealer in error.dealers}
                raise
        for client, whose in here.server.wrong.items():
            said = (
                f"Client {client!r} revealed wrong shares of {len(whose)} secrets, e.g. of {whose[0]!r}: it is faulty, "
                f"or who dealt them is. The sum was made without them."
            )
            self.events.note("refused", said, client=client)
        return total

    def _begin(self, round: int, cohort: Sequence[str]) -> _RoundSum:
        """Return this round's sum, with shares: the one that was asked for ahead, or a new one."""
        here, self._next = self._next, None
        if here is None or (here.round, here.cohort) != (round, cohort) or not here.enough:
            here = self._new(round, cohort)
            if here is None:
                raise SecureSumError(
                    "The cohort of round {round} is {count} client, and the sum of one is its own vector. Let "
                    "more clients take part in a round.",
                    round=round,
                    count=len(cohort),
                )
            keys = here.ask("keys", {"clients": str(len(cohort))})
            self._take_keys(here, self._exchanged(round, {client: [keys] for client in cohort}))
            asks: dict[str, list[Ask]] = {}
            with _ends_round():
                here.server.keys()
            self._ask_shares(here, asks)
            self._take_shares(here, self._exchanged(round, asks))
        with _ends_round():
            here.server.shares_for(next(iter(here.ready), ""))
        return here

    def _new(self, round: int, cohort: Sequence[str]) -> _RoundSum | None:
        """Return the sum of a round, of which nobody was asked; None: nobody, or one alone, is in it."""
        assert self.vectors is not None
        vectors = Vectors(self.rule, self.vectors.start, len(cohort))
        if vectors.threshold > len(cohort):
            return None
        number = self._next_attempt()
        name, size, kind = about(self.rules.run, number), vectors.size, vectors.ring.dtype
        return _RoundSum(
            round, cohort, number, SecureServer(name, vectors.threshold, size, kind, self._spent)
        )

    def _with_judging(self, orders: Sequence[Order]) -> dict[str, ClientOrder]:
        """Return a round's orders, each with the shares for its client; and those to the next cohort for keys."""
        here, ahead = self._sum, self._next
        wanted = super()._with_judging([order for order in orders if order.client in here.ready])
        asks: dict[str, list[Ask]] = {}
        for order in orders:
            if order.client in here.ready:
                boxes = here.server.shares_for(order.client)
                asks[order.client] = [here.ask("masked", {name: box.hex() for name, box in boxes.items()})]
        if ahead is not None:
            keys = ahead.ask("keys", {"clients": str(len(ahead.cohort))})
            for client in ahead.cohort:
                asks.setdefault(client, []).append(keys)
        light = _light(here.round, asks)
        return light | {
            client: replace(order, asks=tuple(asks.get(client, ()))) for client, order in wanted.items()
        }

    def _heard(self, exchange: Exchange) -> None:
        super()._heard(exchange)
        told = set() if self._now is None else set(self._now.cohort)  # train has their answers
        for client in [client for client, order in exchange.orders.items() if not order.begins]:
            if client not in told:
                self.tell_fault(client, exchange.answer(client).fault)
        self._take(exchange, "masked", self._blame)
        if self._next is not None:
            self._take_keys(self._next, exchange)

    def _blame(self, client: str, made: Mapping[str, str]) -> None:
        """Note whose shares a client could not open."""
        ready = self._sum.ready
        for dealer in sorted(ready.intersection(made) - {client}) if client in ready else ():
            self._blamed[dealer, client] = self._sum.round
            said = f"Client {client!r} cannot open the share that client {dealer!r} sealed for it."
            self.events.note("refused", said, client=dealer)

    def _left_out(self, one: _RoundSum) -> set[str]:
        """Return the fewest clients without whom nobody has been blamed of late; nobody, if too few would be left."""
        left, out = [pair for pair, at in self._blamed.items() if at > one.round - PARDON], set[str]()
        while left:
            named = Counter(client for pair in left for client in dict.fromkeys(pair))
            out.add(named.most_common(1)[0][0])  # of two alike the dealer
            left = [pair for pair in left if not out.intersection(pair)]
        return out if len(set(one.cohort) - out) >= one.server.threshold else set()

    def _exchanged(self, round: int, asks: Mapping[str, Sequence[Ask]]) -> Exchange:
        """Ask clients for steps alone, and wait for them until the deadline."""
        exchange = self.exchange(_light(round, asks))
        exchange.finish()
        for client in asks:
            self.tell_fault(client, exchange.answer(client).fault)
        return exchange

    def _ask_shares(self, one: _RoundSum | None, asks: dict[str, list[Ask]]) -> None:
        """Add what those are asked who have sent keys; nobody, where they are too few."""
        try:
            keys = {} if one is None else one.server.keys()
        except SecureSumError as error:
            self.events.note("round", f"The next round asks for keys anew. {error}")
            return
        given = {client: key.to_bytes().hex() for client, key in keys.items()}
        for client in keys:
            assert one is not None
            asks.setdefault(client, []).append(one.ask("shares", given))

    def _take_keys(self, one: _RoundSum, exchange: Exchange) -> None:
        out = self._left_out(one)

        def take(client: str, made: Mapping[str, str]) -> None:
            if client not in one.cohort:  # with more keys than were to begin the others would refuse the sum
                raise SecureSumError(
                    "It is not in the cohort of round {round}, and was asked for none.", round=one.round
                )
            if client not in out:
                one.server.add_keys(client, Keys.from_bytes(bytes.fromhex(made["keys"])))

        self._take(exchange, "keys", take)

    def _take_shares(self, one: _RoundSum | None, exchange: Exchange) -> None:
        def take(client: str, made: Mapping[str, str]) -> None:
            assert one is not None
            one.server.add_shares(client, {name: bytes.fromhex(box) for name, box in made.items()})
            one.ready.add(client)

        self._take(exchange, "shares", take)

    def _take(self, exchange: Exchange, step: Step, take: Callable[[str, Mapping[str, str]], None]) -> None:
        """Take what clients have made in a step; who sent something else is noted, and missed."""
        for client, made in exchange.made.items():
            if step in made:
                try:
                    take(client, made[step])
                except (SecureSumError, ValueError, KeyError) as error:
                    self.events.note(
                        "refused", f"The step {step!r} of client {client!r}: {error}", client=client
                    )

    def taken(self, answer: Answer) -> Answer:
        """Return an answer, with a fault where its upload is no vector of this sum, or none was asked for."""
        if answer.upload is None:
            asked = self._sum.ready.union(() if self._next is None else self._next.cohort)
            if answer.fault is not None and answer.client in asked:
                return answer
            text = "Client {client!r} sent no shares of this sum."
            if answer.client in self._left_out(self._sum):
                text = "Client {client!r} is left out: its shares are wrong, or it says so of others."
            return Answer(client=answer.client, fault=LostError(text, client=answer.client))
        assert self.vectors is not None
        values = answer.upload.deltas.get(VECTOR)
        wanted = (self.vectors.size,), self.vectors.ring.signed.name
        got = None if values is None else (tuple(values.shape), str(values.dtype).removeprefix("torch."))
        fault = "" if 0 <= answer.upload.weight < float("inf") else f"its weight is {answer.upload.weight}"
        if got != wanted or len(answer.upload.deltas) > 1 or answer.upload.rows:
            fault = f"it is no masked vector of {wanted}"
        if not fault:
            return answer
        refused = refused_upload(answer.client, "{fault}.", fault=fault)
        return Answer(client=answer.client, loss=answer.loss, fault=refused)

    def _vector(self, upload: Upload) -> np.ndarray:
        assert self.vectors is not None
        return upload.deltas[VECTOR].cpu().numpy().view(self.vectors.ring.dtype)

    @property
    def _sum(self) -> _RoundSum:
        assert self._now is not None, "a round begins with train"
        return self._now


class RemoteMean(SecureMean):
    """A ``SecureMean`` whose clients are on other machines.

    Args:
        mean: the method's own.
        fleet: reaches them; no field, as a method is described by values alone.
    """

    masked: ClassVar[bool] = True

    def __init__(self, mean: SecureMean, fleet: SecureFleet) -> None:
        super().__init__(mean=mean.mean, sums=mean.sums)
        object.__setattr__(self, "fleet", fleet)

    fleet: SecureFleet

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> RemoteSum:  # type: ignore[override]
        """Return the empty sum."""
        self.fleet.vectors = Vectors(self.sums, start, len(cohort))
        return RemoteSum(self.fleet, self.fleet.vectors)


class RemoteSum(Undivided):
    """A round's secure sum, unmasked by a message to those who are in it."""

    def __init__(self, fleet: SecureFleet, vectors: Vectors) -> None:
        self.fleet, self.vectors, self.count = fleet, vectors, 0

    def add(self, client: str, upload: Upload) -> None:
        """Add a masked vector."""
        self.fleet.add(client, upload)
        self.count += 1

    def value(self) -> Reduced:
        """Return the mean; RoundError: too few clients were left to unmask it."""
        return self.vectors.reduced(self.fleet.total(), self.count)


def fleet_of(method: Method, cohort_of: Callable[[int], Sequence[str]]) -> Callable[..., Fleet]:
    """Return what makes the fleet of a method; ``cohort_of`` as for ``SecureFleet``."""
    mean = method.server.reduce
    return (
        partial(SecureFleet, rule=mean.sums, cohort_of=cohort_of) if isinstance(mean, SecureMean) else Fleet
    )


def summing(method: Method, fleet: Fleet) -> Method:
    """Return a method as a server runs it over a fleet: with ``RemoteMean`` where it sums securely."""
    mean = method.server.reduce
    if not (isinstance(mean, SecureMean) and isinstance(fleet, SecureFleet)):
        return method
    return method.on_server(reduce=RemoteMean(mean, fleet))


@contextmanager
def _ends_round() -> Iterator[None]:
    """Let a sum that cannot be made end its round, which is tried again with new keys."""
    with raising(RoundError, "The round's secure sum failed. {why}", SecureSumError):
        yield


def _light(round: int, asks: Mapping[str, Sequence[Ask]]) -> dict[str, ClientOrder]:
    """Return orders for steps alone, without the model."""
    return {
        client: ClientOrder(round=round, client=client, sent=NOTHING, train=False, asks=tuple(each))
        for client, each in asks.items()
    }
