"""The device seam: what the server's round may know of the place where clients live.

A device owns data, private state and the local run. It takes orders and gives answers, and no type here has a private
value or an example in it. ``LocalDevice`` holds any number of clients in this process and its workers; a remote
transport is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

import numpy as np

from fedkeep.core.errors import ConfigError, LostError, MethodError, warn
from fedkeep.core.net import Net
from fedkeep.core.params import Params, row
from fedkeep.core.seeds import repeatable
from fedkeep.data import FederatedData
from fedkeep.data.ids import SomeIds
from fedkeep.engines.adapt import (
    NOBODY,
    Adaptation,
    FineTuning,
    Fits,
    Fitting,
    curve,
    first_rows,
    one_by_one,
    own_default,
    own_split,
    starting,
)
from fedkeep.engines.client_step import ClientResult, ClientToTrain, Engine, FirstMoves, Job
from fedkeep.engines.faults import Fault
from fedkeep.engines.first_values import defaults
from fedkeep.engines.judge import Asked, ExamplesOf, Way, judge, outputs_and_labels
from fedkeep.engines.lanes import Moves, made_of_all
from fedkeep.engines.tables.lookups import with_declared_tables
from fedkeep.engines.tally import Judged, Leaves
from fedkeep.methods import Global, Method, Sent, newest
from fedkeep.methods.base import Predict
from fedkeep.methods.client import accepted
from fedkeep.privacy.draws import Entropy
from fedkeep.split import Upload
from fedkeep.store import Default, MemoryStore, PrivateStore, VersionLedger
from fedkeep.store.versions import new_attempt
from fedkeep.tasks.results import MODELS, Model

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the server asks of a client.

    Attributes:
        round: the round's number.
        client: the client's id.
        sent: parameters and state that it trains from.
        progress: the finished part of the run in [0, 1), for schedules.
    """

    round: int
    client: str
    sent: Sent
    progress: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What comes back from a client.

    Attributes:
        client: its id.
        upload: what left it; None: there is none, see ``fault``. In centralised training one answer has the upload of
            all, and the others have neither.
        loss: its mean training loss.
        fault: why there is no upload.
    """

    client: str
    upload: Upload | None = None
    loss: float = float("nan")
    fault: Fault | None = None


AnyOrder = TypeVar("AnyOrder", bound=Order)


def paired(orders: Sequence[A], answers: Iterator[B]) -> Iterator[tuple[A, B]]:
    """Yield each order with its answer. Unlike ``zip``, hold on to no answer while the next is made: they are large.

    Raises:
        LostError: there are more or fewer answers than orders.
    """
    for given, order in enumerate(orders):
        try:
            yield order, next(answers)
        except StopIteration:
            raise LostError(
                "A device gave {got} answers to {wanted} orders.", got=given, wanted=len(orders)
            ) from None
    if next(answers, None) is not None:  # so it runs to its end
        raise LostError("A device gave more than {wanted} answers to as many orders.", wanted=len(orders))


class Device(Protocol):
    """Where clients live."""

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Train clients, all in one round; stage what they will keep; yield an answer for each, in their order."""

    def accept(self, shares: Mapping[str, float]) -> None:
        """Keep what clients have staged, given z = c_k / Σ c of those whose upload was taken; drop the others'."""

    def judge(self, orders: Iterable[Order], split: str, models: Sequence[Model]) -> list[Judged]:
        """Judge several models of each client on the client's own examples of a split; a result for each task."""

    def adapt(self, orders: Iterable[Order], adaptation: Adaptation) -> list[Judged]:
        """Personalise clients, hold the result, and judge it beside other models on the same examples."""

    @property
    def ledger(self) -> VersionLedger:
        """Which of the clients' versions count."""

    def flush(self) -> None:
        """Make what clients keep durable, where they live in this process; it counts when the server has committed."""

    def committed(self) -> None:
        """Take note that the round is committed."""


@runtime_checkable
class Defers(Protocol):
    """A device that can judge on the way: with the next round's training, where one message carries both.

    Attributes:
        defers: whether it does.
    """

    defers: bool

    def announce(self, orders: Sequence[Order], asked: Mapping[str, Sequence[Model]]) -> None:
        """Take note of what ``judge`` will ask after the next round, of clients as they are now: models by split."""


def job_of(
    method: Method,
    net: Net,
    data: FederatedData,
    store: PrivateStore,
    seed: int,
    device: str = "cpu",
    *,
    after_step: Callable[[float], None] | None = None,
    entropy: Entropy = "run",
) -> Job:
    """Put together what all clients of a device have in common; its method knows the tables that the model looks up.

    Args:
        method, net, data, store, seed, device, after_step, entropy: as for ``Job``.
    """
    known = with_declared_tables(method, net, data, device)
    return Job(known, net, data, store, seed, device, after_step, entropy)


class LocalDevice:
    """All clients of a data set in this process, trained by an engine.

    Args:
        job: what they have in common.
        engine: trains them.
        leaves: what of judging leaves the device; a simulation may let every example's result leave.
        judges: on which examples: on opted-in ones, or, where nothing leaves or the owner says so, on all.
        fits: fits clients that adapt, e.g. in processes side by side.
        ledger: says which of the clients' versions count, and is told; None: a new one.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        *,
        leaves: Leaves = "sums",
        judges: ExamplesOf = "opted_in",
        fits: Fits = one_by_one,
        ledger: VersionLedger | None = None,
    ) -> None:
        if leaves not in get_args(Leaves):
            raise ConfigError(
                "leaves must be one of {known}; got {got!r}.", known=list(get_args(Leaves)), got=leaves
            )
        self.job, self.engine, self.fits = job, engine, fits
        self.leaves, self.judges = leaves, judges
        self.ledger = VersionLedger(len(job.data)) if ledger is None else ledger
        repeatable(job.device)
        self._position = lru_cache(maxsize=1 << 16)(job.data.index)
        self._versions: dict[str, tuple[PrivateStore, Collection[int] | None]] = {}
        self.stopped: dict[int, tuple[int, ...]] = {}
        """By client, the pass that each phase of the last adaptation with early stopping kept (0: none)."""
        self._trained: dict[str, tuple[int, ...]] = {}
        """By the client that has the upload, whose versions are staged."""
        self._round = self._attempt = 0  # in which they trained
        self._first_moves = FirstMoves()

    def results(self, orders: Sequence[AnyOrder]) -> Iterator[tuple[AnyOrder, ClientResult]]:
        """Train clients; return an iterator over what comes of each as it is ready, in the order of ``orders``.

        Nothing is staged, and of no group is judged whether it moves.

        Raises:
            ConfigError: the orders are of several rounds, or of several parts of the run.
        """
        if len(times := sorted({(o.round, o.progress) for o in orders})) > 1:
            got = " and ".join(map(str, times))
            raise ConfigError(
                "Orders that are trained together must have one round and one progress; got {got}.", got=got
            )
        flat: dict[int, Params] = {}
        work = [
            ClientToTrain(self._position(o.client), flat.setdefault(id(o.sent), o.sent.flat)) for o in orders
        ]
        return paired(orders, self.engine.train(self.job, work, *times[0]))

    def train(self, orders: Sequence[Order]) -> Iterator[Answer]:
        """Train clients; the answers come as they are ready, in the order of ``orders``.

        Raises:
            ConfigError: the orders are of several rounds, or of several parts of the run.
            MethodError: all are trained, and a group's gradients were exactly zero at every client (``FirstMoves``).
        """
        store = self.job.store
        store.drop()
        self._trained = {}
        if not orders:
            return
        round = orders[0].round
        self._round = round
        self._attempt = new_attempt(round + 1)
        # Not held by a name: a round that is broken off lets go of it at once, and the engine ends what still runs.
        # Nor counted by enumerate, which holds on to what it gave last while the next client is trained.
        done, moves = 0, list[Moves]()
        for order, result in self.results(orders):
            done += 1  # noqa: SIM113
            notify = None if result.clients else self.job.after_step
            if result.kept is not None and result.clients:
                for k, client in enumerate(result.clients):
                    store.stage(client, row(result.kept, k), self._attempt, round)
                self._trained[order.client] = result.clients
            elif result.kept is not None:
                store.stage(result.client, result.kept, self._attempt, round)
                self._trained[order.client] = (result.client,)
            if result.note:
                warn(result.note)
            moves.append(result.moves)
            answer = Answer(client=order.client, upload=result.upload, loss=result.loss, fault=result.fault)
            del result  # its upload is large: it goes before the next client is trained
            yield answer
            del answer
            if notify is not None:
                notify(done / len(orders))
        self._first_moves.judge(self.job, round, moves)

    def accept(self, shares: Mapping[str, float]) -> None:
        """Keep what clients have staged."""
        store, rule = self.job.store, self.job.method.client.accept
        taken = {
            c: shares[name] for name, clients in self._trained.items() if name in shares for c in clients
        }
        clients = list(taken)
        if rule is not newest and clients:
            before, ids = store.read(clients), self.job.data.ids
            for k, (client, share) in enumerate(taken.items()):
                who = f"{str(ids[client])!r} in round {self._round}"
                kept = accepted(rule, row(before, k), store.staged(client), share, who)
                store.stage(client, kept, self._attempt, self._round)
        store.begin(self.ledger.accept(clients, [self._attempt] * len(clients)))
        store.drop()
        self._trained = {}

    def judge(self, orders: Iterable[Order], split: str, models: Sequence[Model]) -> list[Judged]:
        """Judge models of clients.

        Raises:
            MethodError: ``shared`` is asked of a method whose shared part can't predict, nothing is held of ``adapted``
                or ``local``, or a model does not fit the examples.
            ConfigError: no model is named, one twice, or one that is not known.
        """
        given: Any = models if isinstance(models, str) else list(models)
        if isinstance(given, str) or not given or len(set(given)) < len(given) or set(given) - set(MODELS):
            raise ConfigError(
                "Wanted a list of one or several of {known}, each once; got {got!r}.",
                known=list(MODELS),
                got=given,
            )
        ways = [self._way(model) for model in models]
        return judge(self.job, self._together(orders), split, ways, self.leaves, self.judges)

    def adapt(
        self,
        orders: Iterable[Order],
        adaptation: Adaptation,
        *,
        start: Mapping[str, Params] | None = None,
        known: Mapping[str, Params] | None = None,
        done: Callable[[int], None] = lambda clients: None,
    ) -> list[Judged]:
        """Personalise clients, and hold what is their own afterwards, and nothing older, under the adaptation's name.

        Args:
            orders: what the server sends each client.
            adaptation: how.
            start: by client, values to start from instead, which the device knows.
            known: by client, what it has adapted to before; it does not adapt again.
            done: called with the number of clients that are done.

        Raises:
            ConfigError: there is no client.
            MethodError: the method has no adaptation, or it trains federated parameters.
        """
        job, orders = self.job, list(orders)
        adapt = adaptation.adapt or job.method.adapt
        split, given, known = own_split(job.method, adapt), start or {}, known or {}
        if not orders:
            raise ConfigError(NOBODY)
        fittings = [
            Fitting(
                client,
                sent,
                first_rows(job, client, adaptation.examples),
                given[name]
                if (name := str(job.data.ids[client])) in given
                else starting(job, split, adaptation.begin, client),
            )
            for client, sent in self._asked(order for order in orders if order.client not in known)
        ]
        first = own_default(job, split, orders[0].sent, str(job.data.ids[0]))
        store = MemoryStore(Default(first), job.data.ids)
        made = made_of_all(adapt.phases, split, job.net, job.data)
        store.default.opted_out = job.store.default.opted_out | made
        self.stopped = {}
        for name, values in known.items():
            client = self._position(name)
            store.write([client], {n: v.unsqueeze(0) for n, v in values.items()})
            self.stopped[client] = ()
        self.hold(adaptation.name, store, self.stopped.keys())
        for number, found in enumerate(self.fits(job, adapt, fittings)):
            client = fittings[number].client
            store.write([client], {n: v.unsqueeze(0) for n, v in found.own.items()})
            self.stopped[client] = found.stopped
            done(number + 1)
        if not adaptation.split:
            return []
        return self.judge(orders, adaptation.split, (*adaptation.beside, adaptation.name))

    def curves(
        self, orders: Iterable[Order], tuning: FineTuning, predicts: Mapping[str, Predict], split: str
    ) -> Iterator[dict[str, tuple[float, ...]]]:
        """Fine-tune a copy of each client's whole model; yield its accuracies by prediction, before and on the way.

        Args:
            orders: what the server sends each client.
            tuning: how.
            predicts: what is tested, by name.
            split: on which examples.
        """
        for order in orders:
            client = self._position(order.client)
            yield curve(
                self.job, client, order.sent, tuning, round=order.round, predicts=predicts, split=split
            )

    def hold(
        self, name: Literal["adapted", "local"], store: PrivateStore, clients: Collection[int] | None = None
    ) -> None:
        """Hold values of clients (all, or those of the given indices) under a name, to be judged."""
        self._versions[name] = store, clients

    def held(self, name: str) -> PrivateStore:
        """Return the values that are held under a name.

        Raises:
            MethodError: there are none.
        """
        return self._held(name)[0]

    def _held(self, name: str) -> tuple[PrivateStore, Collection[int] | None]:
        if name not in self._versions:
            raise MethodError(
                "This device holds no {name!r} values of its clients. Let them adapt first.", name=name
            )
        return self._versions[name]

    def flush(self) -> None:
        """Make what clients keep durable; it counts when the server has committed."""
        self.job.store.flush()

    def committed(self) -> None:
        """Take note that the round is committed."""
        self.ledger.committed()

    def outputs(
        self, orders: Iterable[Order], split: str, model: Model
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each task a model's outputs and the labels of all examples, clients after each other.

        Raises:
            ConfigError: the device's policy keeps examples.
        """
        if self.leaves != "examples":
            raise ConfigError(
                "Outputs of examples stay on this device: its policy is {policy!r}.", policy=self.leaves
            )
        return outputs_and_labels(self.job, self._together(orders), split, self._way(model))

    def _way(self, model: Model) -> Way:
        method, store = self.job.method, self.job.store
        if model == "shared":
            if method.predict_shared is None:
                raise MethodError(
                    "The shared part of {method!r} cannot predict alone, so it has no global metric.",
                    method=method.name,
                )
            return Way(model, method.predict_shared, lambda clients: defaults(store, clients))
        if model == "default":
            return Way(model, method.predict, lambda clients: defaults(store, clients))
        if model == "own":
            return Way(model, method.predict, store.read)
        held, there = self._held(model)

        def adapted(clients: np.ndarray) -> Params:
            for client in clients.tolist():
                if there is not None and client not in there:
                    name = str(self.job.data.ids[client])
                    raise MethodError(
                        "Client {client!r} has no {model!r} values on this device. Let it adapt first.",
                        client=name,
                        model=model,
                    )
            return held.read(clients)

        return Way(model, method.predict, adapted)

    def _together(self, orders: Iterable[Order]) -> Iterator[Asked]:
        """Yield clients' indices, and what they are sent: all at once where it is the same."""
        clients = orders.clients if isinstance(orders, SameOrders) else None
        if (
            isinstance(orders, SameOrders)
            and isinstance(clients, SomeIds)
            and clients.ids is self.job.data.ids
        ):
            yield clients.positions, orders.sent
        else:
            yield from ((np.array([client]), sent) for client, sent in self._asked(orders))

    def _asked(self, orders: Iterable[Order]) -> Iterator[tuple[int, Sent]]:
        """Yield the clients' indices, and what each is sent; ids in the order of the data are found at once."""
        ids, clients, after = self.job.data.ids, len(self.job.data), 0
        for order in orders:
            if after >= clients or ids.at(after) != order.client:
                after = self.job.data.index(order.client)
            yield after, order.sent
            after += 1


@dataclass(frozen=True)
class SameOrders:
    """Orders of clients that a server does not train, and that are sent the same: made when they are asked for."""

    round: int
    clients: Iterable[str]
    sent: Sent

    def __iter__(self) -> Iterator[Order]:
        return (Order(round=self.round, client=client, sent=self.sent) for client in self.clients)


def orders_of(method: Method, server: Global, clients: Iterable[str]) -> Iterable[Order]:
    """Return what a server asks of clients that it does not train: what it has now, sent as the method says."""
    if method.server.send is None:
        return SameOrders(server.round, clients, method.server.sent(server, ""))
    return (Order(round=server.round, client=c, sent=method.server.sent(server, c)) for c in clients)
