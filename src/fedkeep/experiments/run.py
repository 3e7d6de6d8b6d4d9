"""``Run``: what a simulation has made, finished or not; and one client's model as a module that predicts.

A run has one answer: what its clients predict with. Where the method has a last step that every client takes
(``Adapt.everyone``: fine-tuning, a mixture's own experts), a client takes it when it is first asked for; else it is
what the client kept in federation. ``fit`` gives models to clients who were not in federation. ``evaluate``, ``predict``,
``model``, the frames and ``export`` all speak of that; ``stage`` asks for another one.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from torch import Tensor, nn

from fedkeep.core.describe import describe
from fedkeep.core.errors import ConfigError, DataError, MethodError, check_choice, raising, warn
from fedkeep.core.files import expanded
from fedkeep.core.net import Net
from fedkeep.core.params import CLIENT, Params, State, is_state, to
from fedkeep.core.records import Record
from fedkeep.core.run_files import read_commit, read_info
from fedkeep.data import FederatedData
from fedkeep.data.alike import check_codes, respelled
from fedkeep.data.ids import SomeIds, as_id
from fedkeep.engines import Adaptation, Job, Judged, LocalDevice, Order, Sequential, orders_of, to_records
from fedkeep.engines.adapt import Fits, one_by_one, own_default, own_split
from fedkeep.engines.judge import recalled
from fedkeep.engines.use import Predicted, as_module, encoding_of
from fedkeep.experiments.new_rows import predict_rows
from fedkeep.experiments.personalize.adapting import fits_in, let_adapt
from fedkeep.experiments.personalize.kept import write_fitted
from fedkeep.experiments.recommending import USUAL, FullRanking, Ranking, full_ranking, recommended
from fedkeep.methods import Global, Kept, Method, Sent
from fedkeep.methods.base import Recalls
from fedkeep.store import Default, MemoryStore, PrivateStore
from fedkeep.tasks import tasks_in
from fedkeep.tasks.results import ExampleResults, Model

if TYPE_CHECKING:
    import pyarrow as pa

Stage = Literal["own", "before", "shared"]
"""Which of a client's models: its own after all steps of the method; as it was after the rounds, before a last step of
the method's own; or the shared part alone, with default private values."""

ANSWER = "own"
"""What stands behind a split's name in records of the run's answer."""

ALL = ""
"""Stands for every client, where a server sends all the same."""
Metric = Callable[[np.ndarray, np.ndarray], float]
"""A metric of all examples: outputs, (examples, …), and labels, (examples,), to a number."""


def _check_metrics(metrics: object) -> None:
    """Raise ConfigError unless metrics are functions by name that take two arguments."""
    wanted = "metrics must be {name: function(outputs, labels)}"
    if not isinstance(metrics, Mapping | None):
        raise ConfigError("{wanted}; got {got}.", wanted=wanted, got=textwrap.shorten(repr(metrics), 80))
    for name, function in (metrics or {}).items():
        if not callable(function):
            raise ConfigError(
                "{wanted}; {name!r} is {got}.",
                wanted=wanted,
                name=name,
                got=textwrap.shorten(repr(function), 80),
            )
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                "{wanted}; {name!r} does not take both: {why}.", wanted=wanted, name=name, why=error
            ) from error
        except ValueError:  # a function of C says nothing of its arguments
            continue


def _measured(name: str, metric: Metric, outputs: np.ndarray, labels: np.ndarray) -> float:
    found = metric(outputs, labels)
    if isinstance(found, str | bytes) or found is None or np.size(found) != 1:
        raise ConfigError(
            "metrics must be {{name: function(outputs, labels)}}, and return a number; {name!r} returned "
            "{got}.",
            name=name,
            got=textwrap.shorten(repr(found), 80),
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
        round: the round that all of this is of: the best on ``valid`` of those that were judged, or where there is none the
            last; see ``last``.
        rounds_per_epoch: rounds that use every training example once.
        clients: ids of the clients that take part in federation; ``.positions`` has their numbers in ``data``.
        held_out: of those that don't.
        folder: the run's folder, or None.
        device: where it computes.
        engine_reason: why ``auto`` picked its engine.
        state: the method's own on the server, by name.
        examples: each test example's result at the round that was best on ``valid``; None where there is none.
        base: what the server had then; ``server``, ``state`` and ``round`` go before its own.
        metrics: what ``simulate`` was told to measure beside the usual.
        ranking: how the run's configuration ranks all items; see ``full_ranking``.
        published: of a run whose server is elsewhere, what that sends by client's id, or ``ALL`` alike; None: it is here.
        fitted: by client's id, what is its own since it adapted after the rounds.
        stopped: by the ids of these, the pass that each phase with early stopping kept (0: none).
        writer: writes the run's folder, see ``save``; None: the run is made of another one.
        continues: of a run that went on from another one, what had changed in the data; else "".
        roster: of a run on other data (``on``), the data that it was trained on; None: these.
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
    examples: ExampleResults | None = None
    base: Global = field(default_factory=lambda: Global(params={}))
    metrics: tuple[str, ...] = ()
    ranking: Ranking = USUAL
    published: Mapping[str, Sent] | None = None
    fitted: dict[str, Params] = field(default_factory=dict, init=False, repr=False)
    stopped: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)
    writer: Callable[[Run, Path], None] | None = field(default=None, init=False, repr=False)
    roster: FederatedData | None = field(default=None, init=False, repr=False)
    continues: str = field(default="", init=False, repr=False)
    _last: Run | None = field(default=None, init=False, repr=False)

    def __repr__(self) -> str:
        return (
            f"<Run of {self.method.name!r} with {type(self.net.module).__name__} after {self.moment}, engine "
            f"{self.engine!r}, {len(self.clients)} clients, {len(self.server)} federated parameters>"
        )

    @property
    def last(self) -> Run:
        """This run after its last round, from which one that continues it goes on; itself where that is its round."""
        return self if self._last is None else self._last

    @property
    def moment(self) -> str:
        """In words, the round that this is of."""
        if self._last is None:
            return f"round {self.round}"
        judged = any(record.split == "valid" for record in self.history)
        which = "the best on valid" if judged else "the last that was judged"
        return f"round {self.round} of {self._last.round}, {which}"

    @property
    def whole(self) -> Global:
        """All that the server has."""
        return self.base.but(
            params=self.server,
            state=self.state,
            round=self.round,
            trainable=self.net.trainable(),
            clients=self.roster or self.data,
        )

    def evaluate(
        self,
        split: str = "test",
        *,
        clients: Iterable[str | int] | None = None,
        stage: Stage = "own",
        metrics: Mapping[str, Metric] | None = None,
    ) -> dict[str, float]:
        """Return metrics of the clients' models on their own examples of a split.

        Args:
            split: ``train``, ``valid`` or ``test``.
            clients: their ids; by default of the clients that take part in federation.
            stage: which of their models, see ``Stage``.
            metrics: metrics of your own, by name: each is given all outputs, (examples, …), and labels, (examples,), as
                arrays, and returns a number. Of tokens each one with a label is an example.

        Returns:
            Metrics over all examples pooled; ``accuracy_user_mean`` is the unweighted mean over clients. The run's
            ``metrics`` are among them, and of several numbers an example the RMSE of each in its own units, by its name:
            ``rmse/price``.

        Raises:
            DataError: there is no such client, or none of them has an example in the split.
            ConfigError: what ``metrics`` has is no function of both that returns a number.
        """
        _check_metrics(metrics)
        chosen = self.members(clients)
        if not self.data.counts(split)[chosen.positions].any():
            advice = (
                "Hold some out, e.g. data.split_per_user((0.8, 0.1, 0.1)), or name another split."
                if len(chosen)
                else "Only clients that took part are judged by default: name others, e.g. clients=run.held_out."
            )
            raise DataError(
                "There is nothing to judge: none of the {count} clients has an example in the split {split!r}. {advice}",
                count=len(chosen),
                split=split,
                advice=advice,
            )
        model, device = self._at(stage, chosen)
        out: dict[str, float] = {}
        for judged in device.judge(self.orders(chosen), split, (model,)):
            out |= judged.metrics(model, self.metrics)
            kind = judged.task.kind
            if judged.examples and judged.count and kind.errors and kind.several:
                found_each = judged.of(model).by_output().tolist()
                names = self.data.meta.get("label_names") or range(len(found_each))
                out |= {
                    judged.task.metric(f"rmse/{n}"): one for n, one in zip(names, found_each, strict=True)
                }
        if metrics:
            found = device.outputs(self.orders(chosen), split, model)
            for task, (outputs, labels) in zip(tasks_in(self.data.meta), found, strict=True):
                out |= {task.metric(n): _measured(n, own, outputs, labels) for n, own in metrics.items()}
        return out

    def frame(self) -> pa.Table:
        """Return the records as a table of pyarrow: all rounds', and the run's answer after the last as the last rows.

        ``.to_pandas()`` makes a data frame of it. Columns: round, epoch, split, stage, client, metric, value, n.
        ``client`` is null where all are meant. Rounds judge clients as they are before a last step of the method's own.
        """
        import pyarrow as pa

        return pa.Table.from_pylist(
            [
                asdict(record) | dict(zip(("split", "stage"), self._staged(record.split), strict=True))
                for record in [*self.history, *self._answer()]
            ],
            schema=pa.schema(
                [
                    ("round", pa.int64()),
                    ("epoch", pa.float64()),
                    ("split", pa.string()),
                    ("stage", pa.string()),
                    ("client", pa.string()),
                    ("metric", pa.string()),
                    ("value", pa.float64()),
                    ("n", pa.int64()),
                ]
            ),
        )

    def clients_frame(self, split: str = "test", *, stage: Stage = "own") -> pa.Table:
        """Return a row for each client in federation that has examples of a split, as a table of pyarrow.

        ``.to_pandas()`` makes a data frame of it. Columns: client, examples, and each task's metric.
        """
        import pyarrow as pa

        columns: dict[str, dict[str, Any]] = {}
        model, device = self._at(stage, self.clients)
        for judged in device.judge(self.orders(self.clients), split, (model,)):
            for client, (value, count) in judged.per_client(model).items():
                row = columns.setdefault(client, {"client": client, "examples": count})
                row[judged.task.client_metric] = value
        return pa.Table.from_pylist(list(columns.values()))

    def _answer(self) -> list[Record]:
        """Return records of the clients' models after the last round, of splits that have examples."""
        model, device = self._at("own", self.clients)
        found = []
        for split in ("valid", "test"):
            if self.data.counts(split)[self.clients.positions].any():
                judged = device.judge(self.orders(self.clients), split, (model,))
                name = f"{split}/{ANSWER}"
                found += to_records(judged, model, self.round, self.epoch, name, False, self.metrics)
        return found

    def _staged(self, split: str) -> tuple[str, str | None]:
        """Return the split and the stage that a record's split names."""
        name, _, stage = split.partition("/")
        if name not in ("valid", "test"):
            return split, None
        return name, {"shared": "shared", "adapted": "own", ANSWER: "own"}.get(
            stage, "before" if self.method.adapt.everyone else "own"
        )

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
                "Wanted the ids of clients; got one, {clients!r}. Put it into a list: [{clients!r}].",
                clients=clients,
            )
        found = np.array([self.data.index(c) for c in clients], np.int64)
        numbers, times = np.unique(found, return_counts=True)
        if (twice := numbers[times > 1]).size:
            raise DataError(
                "Wanted different clients; {client!r} is named more than once.",
                client=self.data.ids[int(twice[0])],
            )
        return SomeIds(self.data.ids, found)

    def on(self, data: FederatedData) -> Run:
        """Return this run on other examples: of next month, or of new people. It judges, fits and predicts there.

        Clients are the same where their ids are, and keep what is their own. Others have a new client's values until
        they are fitted. What is fitted there is known to this run too.

        Args:
            data: with the same columns; of data that are not split every example is of ``train``, but for a fifth, ``valid``,
                where a client's own step stops early by it.

        Raises:
            DataError: a number stands for another label, item, word or amount than in the run's data.
        """
        check_codes(self.data.meta, data.meta)
        data = labelled(data, self.method)
        ids = data.ids
        old = np.array([self.data.ids.position(c) for c in map(str, ids)], np.int64)
        store = MemoryStore(self.private.default, ids)
        for place in np.flatnonzero(old >= 0).tolist():
            if self.private.seen([int(old[place])])[0]:
                store.write([place], self.private.read([int(old[place])]))
        inside = np.isin(old, self.clients.positions)
        found = replace(
            self,
            data=parted(data, self.method),
            private=store,
            clients=SomeIds(ids, np.flatnonzero(inside)),
            held_out=SomeIds(ids, np.flatnonzero(~inside)),
            examples=None,
        )
        found.fitted, found.stopped, found.roster = self.fitted, self.stopped, self.roster or self.data
        found._last = None if self._last is None else self._last.on(data)
        return found

    def fit(
        self,
        clients: Iterable[str | int] | None = None,
        *,
        rows: FederatedData | None = None,
        workers: int = 1,
        progress: bool | None = None,
    ) -> Run:
        """Fit what is a client's own to all of its training examples, as the method adapts; nothing is uploaded.

        The federated part stays as it is. Who took part in federation starts from what it kept. From then on it is the
        client's answer; a run with a folder keeps it there, unless it is asked at another round (``last``).

        Args:
            clients: their ids; by default all of ``rows``, else those who need it: all, where the method has a last step
                that every client takes, or those held out of federation.
            rows: examples of other people than the run's data have; those that are not split train all.
            workers: processes side by side; results don't depend on it.
            progress: as for ``simulate``.

        Raises:
            ConfigError: there is no client to fit.
            DataError: there is no such client.
            MethodError: the method has no adaptation, or its server has a part for each client.
        """
        run = self if rows is None else self.on(rows)
        if rows is not None:
            known = set(map(str, self.data.ids))
            for name, other in respelled([c for c in map(str, rows.ids) if c not in known], known):
                warn(
                    f"The client {name!r} is new and the run knows {other!r}. Where they are the same, write the id as there: "
                    f"it begins with default values now."
                )
        everyone = SomeIds(run.data.ids, np.arange(len(run.data)))
        all_of_them = rows is not None or self.method.adapt.everyone
        chosen = clients if clients is not None else everyone if all_of_them else self.held_out
        if (
            rows is not None and not self.method.adapt.phases
        ):  # what a new client has is all that it will have
            own = set(run.private.default.initial)
            found = {
                c: {n: v for n, v in run.values(c).items() if n in own or n.startswith(CLIENT)}
                for c in run.members(chosen)
            }
            self.fitted |= found
        else:
            found = run._fit(chosen, workers, progress)
        if self.folder is not None and read_commit(self.folder, read_info(self.folder)).chosen == self.round:
            write_fitted(self.folder, self.round, found)
        return self

    def _fit(
        self, clients: Iterable[str | int], workers: int = 1, progress: bool | None = None
    ) -> dict[str, Params]:
        chosen = self.members(clients)
        fitted, stopped = let_adapt(
            self.local_device(fits_in(workers)), self.orders(chosen), chosen, Adaptation(), progress=progress
        )
        self.fitted |= fitted
        self.stopped |= stopped
        return fitted

    def _finish(self, clients: Iterable[str]) -> None:
        """Let clients take the method's own last step who have not."""
        if not self.method.adapt.everyone:
            return
        if late := [client for client in clients if client not in self.fitted]:
            self._fit(late)

    def _at(self, stage: Stage, clients: SomeIds) -> tuple[Model, LocalDevice]:
        """Return a stage's model by the name that it is judged by, and the device that has it of these clients."""
        check_choice("stage must be", stage, get_args(Stage))
        if stage == "own":
            self._finish(clients)
            if self.fitted and not self.fitted.keys().isdisjoint(clients):
                device = self.local_device()
                device.hold("adapted", self._store(clients))
                return "adapted", device
        return "shared" if stage == "shared" else self.before, self.local_device()

    @property
    def before(self) -> Model:
        """The model that was a client's own before any last step: ``shared`` where it had none."""
        return "shared" if self.method.waits(sorted(self.net.trainable())) else "own"

    def _store(self, clients: Sequence[str]) -> MemoryStore:
        """Return what the clients' own is now, as a store; what is recalled of their examples is made anew."""
        split = own_split(self.method)
        first = own_default(self.job, split, self.sent(clients[0]), clients[0])
        store = MemoryStore(Default(first), self.data.ids)
        store.default.opted_out = self.private.default.opted_out
        for client in clients:
            own = self.own(client)
            if not first.keys() <= own.keys():  # it has not adapted, and others to more than the rounds keep
                own = own_default(self.job, split, self.sent(client), client) | own
            store.write([self.data.index(client)], {n: own[n].unsqueeze(0) for n in first})
        return store

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
        device = LocalDevice(self.job, Sequential(), leaves="examples", judges="all", fits=fits)
        if known := [client for client in self.fitted if self._has(client)]:
            device.hold("adapted", self._store(known), {self.data.index(c) for c in known})
        return device

    @property
    def job(self) -> Job:
        """What all clients have in common; its seed is that of the private defaults."""
        return Job(self.method, self.net, self.data, self.private, self.private.default.seed, self.device)

    def orders(self, clients: Iterable[str | int]) -> Iterable[Order]:
        """Return what the server asks of clients, given by their ids, that it does not train.

        Raises:
            DataError: there is no such client.
        """
        if self.published is None and (self.roster is None or self.method.server.send is None):
            return orders_of(self.method, self.whole, self.members(clients))
        return (Order(round=self.round, client=c, sent=self.sent(c)) for c in self.members(clients))

    def parameters(self, client: str | int, *, stage: Stage = "own") -> Params:
        """Return a client's whole model on the run's device, given the client's id: all parameters by name.

        Tied ones stand under each of their names, so ``load_state_dict`` takes them.
        """
        found = {n: v for n, v in self.values(client, stage=stage).items() if not is_state(n)}
        module = self.net.module
        places: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        places |= module.named_buffers(remove_duplicate=False)
        tied = {id(places[name]): value for name, value in found.items() if name in places}
        again = {n: tied[id(place)] for n, place in places.items() if n not in found and id(place) in tied}
        return found | again

    def values(self, client: str | int, *, stage: Stage = "own") -> Params:
        """Return all that a client predicts with, on the run's device, by name: parameters, and the method's state.

        What the method makes of the client's own examples before it predicts (kNN-Per) is in it.
        """
        frozen = self.method.split.halves(self.net.module).frozen(self.net.initial())
        values = to({**frozen, **self.sent(client).flat, **self.own(client, stage=stage)}, self.device)
        if stage == "shared" or not isinstance(self.method.predict, Recalls) or not self._has(as_id(client)):
            return values
        with self.net.still():
            return values | recalled(self.job, self.method.predict, values, self.data.index(client))

    def model(self, client: str | int, *, stage: Stage = "own") -> nn.Module:
        """Return a client's model as a module that predicts, called with the data's columns by name.

        Raises:
            DataError: there is no such client.
            MethodError: the method's shared part cannot predict alone, and it is asked for.
        """
        method, before = self.method, self.before if stage == "before" else ""
        if stage == "shared" or before == "shared":
            if method.predict_shared is None:
                raise MethodError("The shared part of {method!r} cannot predict alone.", method=method.name)
            stage, method = "shared", method.but(predict=method.predict_shared)
        return as_module(self.net.module, method, self.values(client, stage=stage))

    def predict(self, client: str | int, rows: Any, *, stage: Stage = "own") -> list[Predicted]:
        """Return what a client's model says of new examples: labels with probabilities, or numbers.

        Args:
            client: the client's id.
            rows: a data frame with the columns that the training data had, as ``FederatedData.from_frame`` takes it; or
                a mapping, by column a value for each example, as ``Encoding.batch`` takes them: texts, rows of features
                before any scales; or data that are numbers already.
            stage: which model, see ``Stage``.

        Raises:
            DataError: there is no such client or column, or a value does not fit it.
            MethodError: the data's task gives neither classes nor numbers; call ``model(client)``.
        """
        return predict_rows(self.model(client, stage=stage), rows, encoding_of(self.data), as_id(client))

    def recommend(
        self, clients: Iterable[str | int] | None = None, n: int = 10, *, stage: Stage = "own"
    ) -> pa.Table:
        """Return each client's n best items of those that it has not; see ``experiments.recommending.recommended``."""
        members = self.members(clients)
        if stage == "own":
            self._finish(members)
        return recommended(self.data, members, partial(self.model, stage=stage), n)

    def full_ranking(
        self,
        split: str = "test",
        *,
        ks: Sequence[int] | None = None,
        liked: float | None = None,
        clients: Iterable[str | int] | None = None,
        stage: Stage = "own",
    ) -> FullRanking:
        """Return how a split's items stand among all; see ``experiments.recommending.full_ranking``.

        Args:
            split: ``valid`` or ``test``.
            ks: lengths of lists; None: those of the run's configuration (``ranking.ks``), else 5, 10 and 20.
            liked: of ratings, the least that counts; None: that of the configuration (``ranking.liked``), if it has
                one. −inf: every rated item does.
            clients: their ids; by default all that take part in federation.
            stage: which of their models, see ``Stage``.

        Raises:
            ConfigError, DataError, MethodError: as there.
        """
        members, models = self.members(clients), partial(self.model, stage=stage)
        if stage == "own":
            self._finish(members)
        ks = self.ranking.ks if ks is None else ks
        liked = self.ranking.liked if liked is None else liked
        return full_ranking(self.data, members, models, split, ks=ks, liked=liked)

    def export(
        self, folder: Path | str, clients: Iterable[str | int] | None = None, *, onnx: bool = False
    ) -> list[str]:
        """Write clients' models, as ``evaluate`` judges them, into a new folder, which ``load_model`` reads.

        Args:
            folder: must not exist.
            clients: their ids; by default of all that took part in federation.
            onnx: write each client's model as ONNX too, computed by onnxruntime and compared with torch's numbers.

        Returns:
            The clients' ids.

        Raises:
            RunError: the folder exists or cannot be written.
            MethodError: the method's models cannot be written to files.
            DataError: there is no such client.
            ConfigError: a client was held out of federation and was not fitted; a package for ONNX is missing.
        """
        from fedkeep.experiments.personalize.exported import export_models

        return export_models(self, folder, clients, onnx=onnx)

    def save(self, folder: Path | str) -> None:
        """Write the run into a new folder, as ``simulate(out=...)`` would have: ``fedkeep.load_run`` reads it.

        Raises:
            RunError: the folder is not empty or cannot be written.
            ConfigError: the run has differential privacy, or is made of another one's values.
        """
        if self.writer is None:
            raise ConfigError("This run was made of another one's values. Save that one.")
        self.writer(self, expanded(folder))

    def sent(self, client: str | int) -> Sent:
        """Return what the server would send a client now, given the client's id.

        Raises:
            DataError: there is no such client.
            ConfigError: the server is elsewhere, and has published nothing for this client.
        """
        name = self._name(client)
        if self.published is None:
            with raising(
                MethodError,
                "The server of {method!r} has a part for each client that trained, and none for {client!r}. Train a "
                "method that sends all clients the same.",
                *([] if self.roster is None else [DataError]),
                method=self.method.name,
                client=name,
            ):
                return self.method.server.sent(self.whole, name)
        found = self.published.get(name, self.published.get(ALL))
        if found is None:
            raise ConfigError(
                "What was published is for {published}, and not for {name!r}. Ask the server's "
                "owner for it: fedkeep flower publish RUN --client {name}.",
                published=", ".join(map(repr, self.published)),
                name=name,
            )
        return found

    def own(self, client: str | int, *, stage: Stage = "own") -> Params:
        """Return what is a client's own, by name, its state as ``client/NAME``; of one never trained the default."""
        name = self._name(client)
        if stage == "own":
            self._finish([name])
        if stage == "own" and name in self.fitted:
            return dict(self.fitted[name])
        if stage == "shared" or not self._has(name):
            return self.private.default(name)
        return {n: v[0] for n, v in self.private.read([self.data.index(name)]).items()}

    def _has(self, client: str) -> bool:
        return self.data.ids.position(client) >= 0

    def _name(self, client: str | int) -> str:
        """Return the id of a client of the data, or of one that was fitted on other data."""
        name = as_id(client)
        return name if name in self.fitted else str(self.data.ids[self.data.index(name)])

    def kept(self, client: str | int) -> Kept:
        """Return what a client kept in federation, its values and its state apart."""
        return Kept.of(self.own(client, stage="before"))

    @property
    def epoch(self) -> float:
        """Passes over the training data that the finished rounds make."""
        return self.round / self.rounds_per_epoch


def labelled(data: FederatedData, method: Method) -> FederatedData:
    """Return data with a column ``label``, which is judged: the one that the method's losses take, where it has another name.

    The columns are not copied. Data of several tasks name their labels themselves.

    Raises:
        DataError: the column holds no labels of the data's task.
    """
    if "label" in data.columns or data.meta.get("tasks"):
        return data
    named = {name for name in _labels_in(describe(method)) if name in data.columns}
    if len(named) != 1:
        return data
    columns = {**data.columns, "label": data.columns[named.pop()]}
    return FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta)


def _labels_in(description: Any) -> Iterator[str]:
    """Yield the columns that a method's description takes labels from."""
    if isinstance(description, Mapping):
        for key, inner in description.items():
            if key == "label" and isinstance(inner, str):
                yield inner
            yield from _labels_in(inner)
    elif isinstance(description, list | tuple):
        for inner in description:
            yield from _labels_in(inner)


def parted(data: FederatedData, method: Method) -> FederatedData:
    """Return data that are split; those that are not are for a client's own step: examples of ``train``, see ``Run.on``."""
    if data.bounds is not None:
        return data
    if any(phase.early_stopping for phase in method.adapt.phases):
        return data.split_per_user((0.8, 0.2, 0.0))
    start, end = data.offsets[:-1], data.offsets[1:]
    bounds = np.stack([start, end, end, end], 1)
    return FederatedData(data.columns, data.offsets, data.ids, bounds, data.meta, check=False)
