"""``Server``: what a method does on the server, in four slots: its state, what it sends, reduction and update.

Source of the slots: TensorFlow Federated's distributor, client work, aggregator and finaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from fedkeep.core.describe import check_kind
from fedkeep.core.errors import MethodError, check_choice
from fedkeep.core.net import Net
from fedkeep.core.optim import Optimizer, OptimizerState, sgd
from fedkeep.core.params import SERVER, Params, State
from fedkeep.methods.aggregate import MeansByGroup, Reduced, RunningMean, spread
from fedkeep.methods.client import Sent, zeros_like_trainable
from fedkeep.methods.hook_checks import called, check_all, check_numbers, check_tensors
from fedkeep.methods.phase import OPTIMIZERS, Changeable
from fedkeep.split import Upload


class Roster(Protocol):
    """Who takes part: ids, and each one's place among them."""

    def __len__(self) -> int:
        """Return how many clients there are."""

    def index(self, client: str) -> int:
        """Return a client's place, 0 .. len − 1."""


@dataclass(frozen=True, kw_only=True)
class Global(Changeable):
    """All that a server has between two rounds.

    Attributes:
        params: federated parameters and buffers, by name.
        state: the method's own, by name.
        links: the upload chain's own, see ``privacy.Chain``.
        optimizer: the server optimiser's state.
        round: finished rounds.
        progress: the finished part of the run in [0, 1), for schedules.
        trainable: which of ``params`` are parameters; the others are buffers.
        clients: all there are; some may be held out of federation or have no example to train on.
        population: N, how many of them cohorts are drawn from.
    """

    params: Params
    state: State = field(default_factory=dict)
    links: State = field(default_factory=dict)
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    round: int = 0
    progress: float = 0.0
    trainable: frozenset[str] = frozenset()
    clients: Roster = ()
    population: int = 0


class Sum(Protocol):
    """Uploads of one round, added up.

    Attributes:
        held_bytes: bytes of the uploads that it keeps; 0 where it keeps sums alone.
    """

    held_bytes: int

    def add(self, client: str, upload: Upload) -> None:
        """Add a client's (decoded, checked) upload."""

    def skip(self, client: str) -> None:
        """Note that a client's upload will not come."""

    def merge(self, other: Any) -> None:
        """Take over what another one of the same round holds."""

    def value(self) -> Reduced:
        """Return the result; UploadError where there is none."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How a round's uploads become one result; subclasses are frozen values with ``begin``.

    Attributes:
        alike: whether every client that has any example weighs 1; else each weighs its examples.
        is_sum: whether the result follows from a sum over clients, so that the server needs to see no single upload.
        counts_empty: whether a round without any upload has a result too.
        keeps: what the server keeps of each single client, e.g. ``"the last model of each client"``; empty: nothing.
        masked: whether uploads come as masked vectors, in which the server finds no parameter by name.
    """

    alike: ClassVar[bool] = False
    is_sum: ClassVar[bool] = False
    counts_empty: ClassVar[bool] = False
    keeps: ClassVar[str] = ""
    masked: ClassVar[bool] = False

    def weight(self, examples: float) -> float:
        """Return an upload's weight, given the client's number of examples."""
        return float(examples > 0) if self.alike else examples

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> Sum:
        """Return the empty sum of a round.

        Args:
            server: what the server has.
            start: what uploads are changes of; what clients send along stands there as zeros under ``server/NAME``.
            cohort: the ids of those who were asked.
        """
        raise TypeError(f"{type(self).__name__} is no reduction: it lacks begin.")

    def traffic(self, upload: Upload, sent: Params, start: Params) -> tuple[int, int]:
        """Return the bytes that leave a client and that reach it.

        Args:
            upload: what it makes, encoded.
            sent: what it is sent, tables whole.
            start: as for ``begin``.
        """
        return upload.nbytes, upload.cut_bytes(sent)


@dataclass(frozen=True, kw_only=True)
class WeightedMean(Reduction):
    """The weighted mean of changes: Σ c_k d_k / Σ c_k (FURL eq. 4 and 5).

    Attributes:
        by: ``"examples"`` (c_k counts the examples that train what leaves) or ``"uniform"`` (1 / m).
        missing_rows: a table's row that a client doesn't hold counts as ``"unchanged"``, with the client's weight, or
            the mean is over ``"owners_only"``.
    """

    by: Literal["examples", "uniform"] = "examples"
    missing_rows: Literal["unchanged", "owners_only"] = "unchanged"

    is_sum: ClassVar[bool] = True  # of weighted changes, and of weights

    def __post_init__(self) -> None:
        check_choice("by must be", self.by, ("examples", "uniform"), MethodError)
        check_choice("missing_rows must be", self.missing_rows, ("unchanged", "owners_only"), MethodError)

    def weight(self, examples: float) -> float:
        """Return the number of examples, or 1 for a client that has any."""
        return float(examples > 0) if self.by == "uniform" else examples

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> RunningMean:
        """Return the empty mean."""
        return RunningMean(start, cohort, self.missing_rows)


@dataclass(frozen=True, kw_only=True)
class WeighedBy(Reduction):
    """A reduction whose weights are those of a mean.

    Attributes:
        mean: which one.
    """

    mean: WeightedMean

    def weight(self, examples: float) -> float:
        """Return the mean's weight."""
        return self.mean.weight(examples)


@dataclass(frozen=True, kw_only=True)
class MeanByGroup(WeighedBy):
    """A weighted mean for each group of clients: of group 0 as changes, of others as state. It looks at every upload.

    Attributes:
        group: what clients send along to say which group they are of, a whole number.
        groups: how many there are.
    """

    group: str
    groups: int
    mean: WeightedMean = WeightedMean()

    def begin(self, server: Global, start: Params, cohort: Sequence[str]) -> MeansByGroup:
        """Return the empty means."""
        rows = self.mean.missing_rows
        return MeansByGroup(start, cohort, rows, group=SERVER + self.group, groups=self.groups)


@dataclass(frozen=True, kw_only=True)
class Optimize:
    """The server's optimiser on the mean change as a pseudo-gradient (FedOpt, Reddi et al., 2021).

    Buffers are moved by plain averaging; integer counters take the uploaded value.

    Attributes:
        optimizer: ``sgd(1.0)`` is plain averaging.
    """

    optimizer: Optimizer = sgd(1.0)

    def __post_init__(self) -> None:
        check_kind("optimizer", self.optimizer, Optimizer, OPTIMIZERS)

    def __call__(self, server: Global, reduced: Reduced) -> Global:
        """Return the server with its next parameters; its optimiser's state goes on."""
        params = dict(server.params)
        optimizer, slopes, few = self.optimizer, Params(), Params()
        scale = optimizer.scale(server.progress)
        rows = reduced.rows
        for name, change in reduced.changes.items():
            start = params[name]
            change = change.to(start.device)
            if name in rows:
                if name in server.trainable and optimizer.rests:
                    params[name], few[name] = start.clone(), change
                    continue
                change = spread(change, rows[name].to(start.device), start)
            if not change.is_floating_point():
                params[name] = change
            elif name not in server.trainable or (optimizer.rests and optimizer.rate(name) * scale == 1):
                params[name] = start + change  # the very step, in one pass
            else:
                params[name], slopes[name] = start.clone(), -change
        if reduced.changes.keys() & server.trainable:
            optimizer.update(params, slopes, server.optimizer, scale)
        for name, change in few.items():
            rate = optimizer.rate(name) * scale
            params[name].index_add_(0, rows[name].to(change.device), change, alpha=rate)
        return server.but(params=params)


def no_state(net: Net, clients: Roster) -> State:
    """Return nothing: the server keeps no state beside the parameters."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Server(Changeable):
    """What a method does on the server; the defaults are FedAvg's.

    Attributes:
        state: what it begins with beside the parameters, by name, given the model and who takes part.
        send: what a client gets, given what the server has and the client's id; None: parameters and state, the same
            for everybody.
        reduce: makes one result of a round's uploads.
        update: gives the server's next values from these and the result. It may change only ``params``, ``state`` and
            ``optimizer``; names, shapes and types stay.
        synchronous: whether it assumes that all uploads of a round began with what the server has now, e.g. as clients
            and server keep states in step; buffered rounds refuse it.
    """

    state: Callable[[Net, Roster], State] = no_state
    send: Callable[[Global, str], Sent] | None = None
    reduce: Reduction = WeightedMean()
    update: Callable[[Global, Reduced], Global] = Optimize()
    synchronous: bool = False

    def __post_init__(self) -> None:
        check_kind("reduce", self.reduce, Reduction, "a reduction, e.g. fedkeep.WeightedMean()")

    def sent(self, server: Global, client: str) -> Sent:
        """Return what a client gets.

        Raises:
            MethodError: ``send`` draws, writes into what the server has, or gives parameters of other names, shapes or
                types.
            NonFiniteError: it gives a NaN or an infinity.
        """
        send = self.send
        if send is None:
            return Sent(params=server.params, state=server.state)
        who = f"send of the server to client {client!r} in round {server.round}"
        sent = called(who, lambda: send(server, client), server.params, server.state, kind=Sent)
        check_all(who, server.params, sent.params)
        check_tensors(who, sent.state)
        check_numbers(who, sent.params, server.params)
        check_numbers(who, sent.state, server.state)
        return sent


def averaging(optimizer: Optimizer = sgd(1.0), by: Literal["examples", "uniform"] = "examples") -> Server:
    """Return a server that averages changes and steps with an optimiser (FedOpt).

    Args:
        optimizer: ``sgd(1.0)`` is plain averaging.
        by: ``"examples"`` weighs each client by its number of examples, as FedAvg does; ``"uniform"`` counts each once,
            as the papers of APFL, FedBN, FedDyn, FedRep, IFCA, MR-MTL, Per-FedAvg, pFedHN, pFedMe and SCAFFOLD do.
    """
    return Server(reduce=WeightedMean(by=by), update=Optimize(optimizer=optimizer))


def check_uniform(method: str, server: Server) -> Server:
    """Return the server of a method whose formulas count every client alike.

    Raises:
        MethodError: its mean is weighted by examples, or it is no mean.
    """
    if server.reduce != WeightedMean(by="uniform"):
        raise MethodError(
            "{method!r} counts every client alike: weighting must be 'uniform'; got {reduce}. "
            "Use server=averaging(optimizer, by='uniform').",
            method=method,
            reduce=server.reduce,
        )
    return server


def zeros_on_server(net: Net, clients: Roster) -> State:
    """Return zeros shaped like the model's trainable parameters, as a server's first state."""
    return zeros_like_trainable(net)
