"""``Run``: what a simulation has made, finished or not; and one client's model as a module that predicts."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.errors import ConfigError, DataError, MethodError
from fedkeep.core.net import Net, tensors_of
from fedkeep.core.params import Params, State, is_state, to
from fedkeep.core.records import Record
from fedkeep.data import FederatedData
from fedkeep.data.ids import SomeIds
from fedkeep.engines import Job, Judged, LocalDevice, Order, Sequential, orders_of
from fedkeep.engines.adapt import Fits, one_by_one
from fedkeep.methods import Global, Kept, Method, Sent
from fedkeep.methods.base import Recalls, forward
from fedkeep.store import PrivateStore
from fedkeep.tasks import tasks_in
from fedkeep.tasks.results import Examples, Model

ALL = ""
"""Stands for every client, where a server sends all the same."""
Metric = Callable[[np.ndarray, np.ndarray], float]
"""A metric of all examples: outputs, (examples, …), and labels, (examples,), to a number."""


def _check_metrics(metrics: object) -> None:
    """Raise ConfigError unless metrics are functions by name that take two arguments."""
    wanted = "metrics must be {name: function(outputs, labels)}"
    if not isinstance(metrics, Mapping | None):
        raise ConfigError(f"{wanted}; got {textwrap.shorten(repr(metrics), 80)}.")
    for name, function in (metrics or {}).items():
        if not callable(function):
            raise ConfigError(f"{wanted}; {name!r} is {textwrap.shorten(repr(function), 80)}.")
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise ConfigError(f"{wanted}; {name!r} does not take both: {error}.") from error
        except ValueError:  # a function of C says nothing of its arguments
            continue


def _measured(name: str, metric: Metric, outputs: np.ndarray, labels: np.ndarray) -> float:
    found = metric(outputs, labels)
    if isinstance(found, str | bytes) or found is None or np.size(found) != 1:
        raise ConfigError(
            f"metrics must be {{name: function(outputs, labels)}}, and return a number; {name!r} returned "
            f"{textwrap.shorten(repr(found), 80)}."
        )
    return float(found)


@dataclass
class Run:
    """A finished or resumed simulation.

    Attributes:
        net: the model as a function.
        method: the method.
        data: the data set.
        server: federated parameters, by name.
        private: the store of what clients keep.
        history: records, in order.
        engine: the engine that ran, as ``auto`` picked it.
        round: finished rounds.
        rounds_per_epoch: rounds that use every training example once.
        clients: ids of the clients that take part in federation; ``.positions`` has their numbers in ``data``.
        held_out: of those that don't.
        folder: the run's folder, or None.
        device: where it computes.
        engine_reason: why ``auto`` picked its engine.
        state: the method's own on the server, by name.
        examples: each test example's result at the round that was best on ``valid``; None where there is none.
        last: what the server had after the last round; ``server``, ``state`` and ``round`` go before its own.
        metrics: what ``simulate`` was told to measure beside the usual.
        published: of a run whose server is elsewhere, what that sends by client's id, or ``ALL`` alike; None: it is here.
    """

    net: Net
    method: Method
    data: FederatedData
    server: Params
    private: PrivateStore
    engine: str
    rounds_per_epoch: int
    clients: SomeIds
    held_out: SomeIds
    history: list[Record] = field(default_factory=list)
    round: int = 0
    folder: Path | None = None
    device: str = "cpu"
    engine_reason: str = ""
    state: State = field(default_factory=dict)
    examples: Examples | None = None
    last: Global = field(default_factory=lambda: Global(params={}))
    metrics: tuple[str, ...] = ()
    published: Mapping[str, Sent] | None = None

    def __repr__(self) -> str:
        return (
            f"<Run of {self.method.name!r} with {type(self.net.module).__name__} after round {self.round}, engine "
            f"{self.engine!r}, {len(self.clients)} clients, {len(self.server)} federated parameters>"
        )

    @property
    def whole(self) -> Global:
        """All that the server has."""
        return self.last.but(
            params=self.server,
            state=self.state,
            round=self.round,
            trainable=self.net.trainable(),
            clients=self.data,
        )

    def evaluate(
        self,
        split: str = "test",
        *,
        clients: Iterable[str | int] | None = None,
        shared: bool = False,
        metrics: Mapping[str, Metric] | None = None,
    ) -> dict[str, float]:
        """Return metrics of the clients' personalised models on their own examples of a split.

        Args:
            split: ``train``, ``valid`` or ``test``.
            clients: their ids; by default of the clients that take part in federation.
            shared: judge the shared part alone, with default private values; so too where clients have models of their
                own only after adapting (mixture of experts).
            metrics: metrics of your own, by name: each is given all outputs, (examples, …), and labels, (examples,), as
                arrays, and returns a number. Of tokens each one with a label is an example.

        Returns:
            Metrics over all examples pooled; ``accuracy_user_mean`` is the unweighted mean over clients. The run's
            ``metrics`` are among them.

        Raises:
            DataError: there is no such client, or none of them has an example in the split.
            ConfigError: what ``metrics`` has is no function of both that returns a number.
        """
        _check_metrics(metrics)
        chosen = self.members(clients)
        if not self.data.counts(split)[chosen.positions].any():
            raise DataError(
                f"There is nothing to judge: none of the {len(chosen)} clients has an example in the split {split!r}. "
                f"Hold some out, e.g. data.split_per_user((0.8, 0.1, 0.1)), or name another split."
            )
        model: Model = "shared" if shared else self.personal
        out: dict[str, float] = {}
        for judged in self.judge((model,), split, chosen):
            out |= judged.metrics(model, self.metrics)
        if metrics:
            found = self.local_device().outputs(self.orders(chosen), split, model)
            for task, (outputs, labels) in zip(tasks_in(self.data.meta), found, strict=True):
                out |= {task.metric(n): _measured(n, own, outputs, labels) for n, own in metrics.items()}
        return out

    def members(self, clients: Iterable[str | int] | None = None) -> SomeIds:
        """Return clients' ids, with their positions in ``data``.

        Args:
            clients: their ids; an integer stands for its decimal digits. None: all that take part in federation.

        Raises:
            DataError: there is no such client, one is named twice, or one id stands where several are wanted.
        """
        clients = self.clients if clients is None else clients
        if isinstance(clients, SomeIds) and clients.ids is self.data.ids:
            return clients
        if isinstance(clients, str | int | np.integer):
            raise DataError(
                f"Wanted the ids of clients; got one, {clients!r}. Put it into a list: [{clients!r}]."
            )
        found = np.array([self.data.index(c) for c in clients], np.int64)
        numbers, times = np.unique(found, return_counts=True)
        if (twice := numbers[times > 1]).size:
            raise DataError(
                f"Wanted different clients; {self.data.ids[int(twice[0])]!r} is named more than once."
            )
        return SomeIds(self.data.ids, found)

    @property
    def personal(self) -> Model:
        """The model that is a client's own: ``shared`` where it has one only after adapting."""
        return "shared" if self.method.waits(sorted(self.net.trainable())) else "own"

    def judge(
        self,
        models: Sequence[Model],
        split: str = "test",
        clients: Iterable[str | int] | None = None,
    ) -> list[Judged]:
        """Judge models on the same examples, with every example's result; one for each task of the data.

        Args:
            models: their names, see ``engines.Model``.
            split: ``train``, ``valid`` or ``test``.
            clients: their ids; by default of the clients that take part in federation.

        Raises:
            DataError: there is no such client.
        """
        return self.local_device().judge(self.orders(self.members(clients)), split, models)

    def local_device(self, fits: Fits = one_by_one) -> LocalDevice:
        """Return the device of all clients, which lets every example's result leave."""
        return LocalDevice(self.job, Sequential(), leaves="examples", judges="all", fits=fits)

    @property
    def job(self) -> Job:
        """What all clients have in common; its seed is that of the private defaults."""
        return Job(self.method, self.net, self.data, self.private, self.private.default.seed, self.device)

    def orders(self, clients: Iterable[str | int]) -> Iterator[Order]:
        """Yield what the server asks of clients, given by their ids, that it does not train.

        Raises:
            DataError: there is no such client.
        """
        if self.published is None:
            return orders_of(self.method, self.whole, self.members(clients))
        return (Order(round=self.round, client=c, sent=self.sent(c)) for c in self.members(clients))

    def parameters(self, client: str | int) -> Params:
        """Return a client's whole model on the run's device, given the client's id: all parameters by name."""
        frozen = self.method.split.halves(self.net.module).frozen(self.net.initial())
        return to({**frozen, **self.sent(client).params, **self.kept(client).params}, self.device)

    def model(self, client: str | int) -> nn.Module:
        """Return a client's own model as a module that predicts, called with the data's columns by name.

        Raises:
            DataError: there is no such client.
            MethodError: the method looks at the client's examples to predict.
        """
        check_module(self.method)
        frozen = self.method.split.halves(self.net.module).frozen(self.net.initial())
        values = {**frozen, **self.sent(client).flat, **self.own(client)}
        return as_module(self.net.module, self.method, to(values, self.device))

    def sent(self, client: str | int) -> Sent:
        """Return what the server would send a client now, given the client's id.

        Raises:
            DataError: there is no such client.
            ConfigError: the server is elsewhere, and has published nothing for this client.
        """
        name = str(self.data.ids[self.data.index(client)])
        if self.published is None:
            return self.method.server.sent(self.whole, name)
        found = self.published.get(name, self.published.get(ALL))
        if found is None:
            raise ConfigError(
                f"What was published is for {', '.join(map(repr, self.published))}, and not for {name!r}. Ask the server's "
                f"owner for it: fedkeep flower publish RUN --client {name}."
            )
        return found

    def own(self, client: str | int) -> Params:
        """Return what is a client's own, by name, its state as ``client/NAME``; of one never trained the default."""
        return {n: v[0] for n, v in self.private.read([self.data.index(client)]).items()}

    def kept(self, client: str | int) -> Kept:
        """Return what is a client's own, its values and its state apart."""
        return Kept.of(self.own(client))

    @property
    def epoch(self) -> float:
        """Passes over the training data that the finished rounds make."""
        return self.round / self.rounds_per_epoch


class PersonalModel(nn.Module):
    """One client's model, of a method that predicts in a way of its own; called with columns by name.

    Args:
        module: holds the client's values.
        method: says how to predict.
        state: what the method keeps beside the model, by name.
    """

    def __init__(self, module: nn.Module, method: Method, state: Params) -> None:
        super().__init__()
        self.module, self._net, self._predict, self._names = module, Net(module), method.predict, list(state)
        # as buffers, whose names have no dot, they move with the module; a whole number, such as which model is the
        # client's, is none, so that the exporter of ONNX knows it
        for place, value in enumerate(state.values()):
            if value.ndim or value.is_floating_point():
                self.register_buffer(f"_state_{place}", value, persistent=False)
            else:
                setattr(self, f"_state_{place}", value)

    def forward(self, **columns: Tensor) -> Any:
        """Return what the method predicts for examples."""
        state = {name: getattr(self, f"_state_{place}") for place, name in enumerate(self._names)}
        return self._predict(self._net, {**tensors_of(self.module), **state}, columns)


def check_module(method: Method) -> None:
    """Raise MethodError where a method looks at a client's own examples to predict, which no module holds."""
    if isinstance(method.predict, Recalls):
        raise MethodError(
            f"{method.name!r} looks at a client's own examples to predict, and a model by itself holds none. Take a "
            f"run of another method."
        )


def as_module(bare: nn.Module, method: Method | None, values: Params) -> nn.Module:
    """Return a copy of a module with one client's values, ready to predict as its method says.

    Args:
        bare: the module, as ``Method.made_for`` made it.
        method: None: the module predicts by itself.
        values: of all of the module's tensors, and the method's state beside them.
    """
    module, state = copied(bare), {n: v for n, v in values.items() if is_state(n)}
    found = {n: v for n, v in values.items() if n not in state}
    module.load_state_dict({**module.state_dict(), **Net(module).placed(found)})  # what is no tensor stays
    if method is None or method.predict is forward:
        return module.eval()
    return PersonalModel(module, method, state).eval()
