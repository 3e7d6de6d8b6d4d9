"""Clients on other machines as one device: a message for each node and round, training and judging together.

Judging rides with the next round's training (``Defers``). Which of its private versions a client builds on follows
from the ledger, and goes out with each order: so the device keeps what was accepted, and drops what was not. With it
goes the version of the best round so far, which the device keeps too. An order of that round, to adapt to it or to
judge it at the end, begins there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedkeep.core.errors import ConfigError, LateError, LostError, MethodError, NonFiniteError
from fedkeep.engines import Adaptation, Answer, Judged, Judgement, Order, Tallies
from fedkeep.engines.adapt import NOBODY
from fedkeep.engines.faults import Fault
from fedkeep.engines.tally import ROWS, tallied
from fedkeep.remote.client_ledger import Ledger
from fedkeep.remote.events import Events, Kind
from fedkeep.remote.exchange import Exchange, ExchangeRules
from fedkeep.remote.messages import ClientOrder, Judging, Partition
from fedkeep.remote.nodes import Nodes
from fedkeep.remote.policy import RoundPolicy
from fedkeep.store import Named, VersionLedger
from fedkeep.tasks import Task
from fedkeep.tasks.results import Model


@dataclass(frozen=True)
class _RoundResults:
    """What came of judging clients as they were after a round: models asked by split, results by split."""

    round: int
    asked: Mapping[str, Sequence[Model]]
    judged: Sequence[tuple[str, Judged]]

    def answers(self, round: int, split: str, models: Sequence[Model]) -> bool:
        return self.round == round and list(self.asked.get(split, ())) == list(models)


class Fleet:
    """The clients of a federation, wherever they are.

    Args:
        nodes: reaches them.
        rules: what server and devices have agreed on.
        lines: which of each client's private versions was accepted last.
        policy: deadline and over-selection.
        cohort: uploads that a round takes where more clients are asked.
        events: a log of who was missing, and why.
        attempts: gives the number of each attempt, see ``Attempts``.
        dropped: returns the clients that the run's owner has dropped.

    Attributes:
        defers: whether judging rides with the next round's training.
        after_commit: called when a round was committed.
        best: the best round so far, and the ledger as it was then; None: none was judged.
    """

    def __init__(
        self,
        nodes: Nodes,
        rules: ExchangeRules,
        lines: Ledger,
        policy: RoundPolicy,
        *,
        cohort: int,
        events: Events,
        attempts: Callable[[], int],
        dropped: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.nodes, self.rules, self.lines, self.policy = nodes, rules, lines, policy
        self.defers = policy.mode == "synchronous"
        self.cohort, self.events, self._next_attempt = cohort, events, attempts
        self._dropped = dropped
        self._gone: set[str] = (
            set()
        )  # were on no node at a deadline: nobody waits for them until they are back
        self.after_commit: Callable[[], None] = lambda: None
        self._announced: tuple[list[Order], Mapping[str, Sequence[Model]]] | None = None
        self._results: _RoundResults | None = None
        self._made: dict[str, int] = {}  # by client, the attempt of what it has staged
        self.best: tuple[int, VersionLedger] | None = None
        self._then: tuple[int, VersionLedger] | None = None
        """The ledger as it was after a round whose judging was announced: the next round goes on from there."""
        self._settled: dict[str, int] = {}  # by client, the version it was told of last

    def announce(self, orders: Sequence[Order], asked: Mapping[str, Sequence[Model]]) -> None:
        """Let judging ride with the next round's training."""
        self._announced = list(orders), asked
        round, best = orders[0].round, self.best
        self._then = best if best is not None and best[0] == round else (round, self.ledger.copy())

    def mark(self) -> None:
        """Take the round that was judged last for the best; clients hear of it with their next orders."""
        assert self._results is not None
        round, then = self._results.round, self._then
        self.best = then if then is not None and then[0] == round else (round, self.ledger.copy())

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Let clients train; the answers come in the order of ``orders``, as soon as they are there."""
        if not orders:
            return
        self._results = None
        enough = self.cohort if self.policy.over_selection > 1 else None
        exchange = self.exchange(self._with_judging(orders), enough)
        self.staged([order.client for order in orders], exchange)
        for order in orders:
            answer = self.taken(exchange.answer(order.client))
            self.tell_fault(order.client, answer.fault)
            yield answer
            del answer  # its upload is large
        exchange.finish()
        self._heard(exchange)
        if self._announced is not None:
            judged, asked_models = self._announced
            self._results, self._announced = (
                _RoundResults(judged[0].round, asked_models, exchange.judged),
                None,
            )
            self._tell_missed(exchange, [order.client for order in judged])

    def taken(self, answer: Answer) -> Answer:
        """Return an answer to train, as it is."""
        return answer

    def accept(self, shares: Mapping[str, float]) -> None:
        """Note which clients' states count; they hear of it with their next order."""
        self.lines.accept(shares, self._made)

    def staged(self, clients: Sequence[str], exchange: Exchange) -> None:
        """Note what these clients stage: that of an exchange."""
        self._made |= dict.fromkeys(clients, exchange.attempt)

    def judge(self, orders: Iterable[Order], split: str, models: Sequence[Model]) -> list[Judged]:
        """Judge models of clients, or give what was announced and has come with the last training."""
        orders = list(orders)
        if not orders:
            return [self._whole(task, tuple(models), []) for task in self.rules.tasks]
        round, asked = orders[0].round, {split: models}
        if self._announced is not None and self._announced[0][0].round == round:
            asked, self._announced = dict(self._announced[1]), None  # all at once, as no training follows
        elif self._results is not None and self._results.answers(round, split, models):
            return self._joined(self._results.judged, split, tuple(models))
        exchange = self.exchange(self.with_entries([(order, False, asked) for order in orders]))
        exchange.finish()
        self._heard(exchange)
        self._tell_missed(exchange, [order.client for order in orders])
        self._results = _RoundResults(round, asked, exchange.judged)
        return self._joined(exchange.judged, split, tuple(models))

    def adapt(self, orders: Iterable[Order], adaptation: Adaptation) -> list[Judged]:
        """Let clients adapt on their devices, which keep the result; judge it beside other models.

        Raises:
            ConfigError: there is no client.
            MethodError: it is to be another adaptation than the method's own on all of a client's examples, which no device
                takes from a server; or ``train`` is to be judged.
        """
        split, orders = adaptation.split, list(orders)
        if replace(adaptation, split="", beside=()) != Adaptation(split="", beside=()) or split == "train":
            raise MethodError(
                "Devices on other machines adapt as their method says, on all of a client's examples, and are judged on "
                "'valid' or 'test'. Use a simulation for anything else."
            )
        if not orders:
            raise ConfigError(NOBODY)
        models: tuple[Model, ...] = (*adaptation.beside, adaptation.name)
        asked: dict[str, Sequence[Model]] = {split: models} if split else {}
        wanted = self.with_entries([(order, False, asked) for order in orders])
        exchange = self.exchange({client: replace(one, adapt=True) for client, one in wanted.items()})
        exchange.finish()
        self._heard(exchange)
        self._tell_missed(exchange, list(wanted), "has not adapted")
        done = [c for c in exchange.heard if c not in exchange.found or exchange.found[c].fault is None]
        self.events.note("adapted", f"{len(done)} of {len(wanted)} clients have adapted.")
        self.events.sum_up()
        return self._joined(exchange.judged, split, models) if split else []

    def settle(self, orders: Iterable[Order]) -> None:
        """Tell clients which of their states was accepted last; those that know it already get no message."""
        orders = list(orders)
        entries = self.lines.entries([order.client for order in orders])
        news = [
            order for order in orders if entries[order.client].version != self._settled.get(order.client, 0)
        ]
        if news:
            exchange = self.exchange(self.with_entries([(order, False, {}) for order in news]))
            exchange.finish()
            self._heard(exchange)

    @property
    def ledger(self) -> VersionLedger:
        """Which of the clients' versions count."""
        return self.lines.versions

    def flush(self) -> None:
        """Do nothing: what clients keep is durable on their devices before they answer."""

    def committed(self) -> None:
        """Take note that the round is committed; clients hear of it with their next order."""
        self.ledger.committed()
        self.events.sum_up()
        self.after_commit()

    def exchange(self, orders: Mapping[str, ClientOrder], enough: int | None = None) -> Exchange:
        """Send orders of one round."""
        round, deadline = next(iter(orders.values())).round, self.policy.deadline
        self.events.round = round
        return Exchange(
            self.rules,
            self.nodes,
            self.events,
            round,
            self._next_attempt(),
            orders,
            self.nodes.transport.now() + deadline,
            enough,
            dropped=self._dropped,
            gone=self._gone,
        )

    def _with_judging(self, orders: Sequence[Order]) -> dict[str, ClientOrder]:
        """Return a round's orders to train, and those to judge that were announced; one for each client.

        A client that trains is judged with what it is sent to train from: it is what the server has now, too.
        """
        judged, asked = self._announced or ([], {})
        ids = {order.client for order in judged}
        wanted = [(o, True, asked if o.client in ids else {}) for o in orders]
        trained = {o.client for o in orders}
        groups = {id(o.sent.params): o.sent for o in orders}  # the global model travels once a node
        for order in judged:
            if order.client not in trained:
                sent = groups.get(id(order.sent.params), order.sent)
                wanted.append((replace(order, sent=sent, round=orders[0].round), False, asked))
        return self.with_entries(wanted)

    def with_entries(
        self, wanted: Sequence[tuple[Order, bool, Mapping[str, Sequence[Model]]]]
    ) -> dict[str, ClientOrder]:
        """Return orders, each to train or not and with what to judge, with the client's line of the ledger.

        It is the line as of the order's round, where that was announced to be judged, as the ledger may be one round on,
        or is the best, to which a run may go back.
        """
        clients = [order.client for order, _, _ in wanted]
        now, best = self.lines.entries(clients), dict[str, Named]()
        earlier = {}
        for moment in (self.best, self._then):
            if moment is not None:
                earlier[moment[0]] = replace(self.lines, versions=moment[1]).entries(clients)
        if self.best is not None:
            round = self.best[0]
            best = {c: Named(round, one.version, one.attempt) for c, one in earlier[round].items()}
        return {
            order.client: ClientOrder(
                **vars(order),
                **earlier.get(order.round, now)[order.client]._asdict(),
                best=best.get(order.client),
                train=train,
                judge=_judgings(asked),
            )
            for order, train, asked in wanted
        }

    def _heard(self, exchange: Exchange) -> None:
        begun = (client for client in exchange.heard if exchange.orders[client].begins)
        self._settled |= {client: exchange.orders[client].version for client in begun}
        missed = exchange.open if exchange.late else ()
        self._gone = {c for c in self._gone.union(missed) if c not in self.nodes.place}

    def tell_fault(self, client: str, fault: Fault | None) -> None:
        """Note why a client sat out, if it did."""
        if fault is not None:
            kinds: dict[type, Kind] = {LateError: "late", LostError: "lost", NonFiniteError: "broken"}
            self.events.note(kinds.get(type(fault), "refused"), str(fault), client=client)

    def _tell_missed(self, exchange: Exchange, clients: Sequence[str], what: str = "was not judged") -> None:
        for client in clients:
            answer = exchange.found.get(client)
            if answer is not None and answer.fault is not None:
                self.events.note("lost", f"Client {client!r} {what}: {answer.fault}", client=client)
            elif client not in exchange.heard:
                self.events.note("late", f"Client {client!r} {what}.", client=client)

    def _joined(
        self, found: Sequence[tuple[str, Judged]], split: str, models: tuple[Model, ...]
    ) -> list[Judged]:
        mine = [judged for where, judged in found if where == split]
        return [self._whole(task, models, [j for j in mine if j.task == task]) for task in self.rules.tasks]

    def _whole(self, task: Task, models: tuple[Model, ...], parts: Sequence[Judged]) -> Judged:
        """Return one result of several nodes', its rows in the order of the roster."""
        nobody = [Judgement.joined(task, ())] * len(models)
        table = tallied(task, models, nobody, ()).joined([part.tallies for part in parts])
        if self.rules.leaves == "sums" or not all(table.clients):
            table = table.total()
        else:
            table = _taken(table, np.argsort([self.lines.roster.index(client) for client in table.clients]))
        return Judged(task=task, models=models, leaves=self.rules.leaves, table=table)


def _judgings(asked: Mapping[str, Sequence[Model]]) -> tuple[Judging, ...]:
    splits: Mapping[str, Partition] = {"valid": "valid", "test": "test"}
    if wrong := asked.keys() - splits.keys():
        raise ConfigError(
            "Wanted one of {splits} to judge; got {wrong}.", splits=list(splits), wrong=sorted(wrong)
        )
    return tuple(Judging(split=splits[split], models=tuple(models)) for split, models in asked.items())


def _taken(table: Tallies, rows: np.ndarray) -> Tallies:
    """Return these rows of tallies."""
    columns = {name: getattr(table, name)[rows] for name in ROWS}
    return replace(table, clients=tuple(table.clients[row] for row in rows.tolist()), **columns)
