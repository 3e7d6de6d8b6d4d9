"""Training after federation, on the device: a client personalised, or a copy of its whole model fine-tuned with tests.

``fit`` trains what is a client's own from what it is sent; source: FURL, §6 (future work), and the local step of
Federated Reconstruction (Singhal et al., 2021). ``curve`` trains a copy of all, and keeps nothing of it; source: KTEPS
(arXiv 2107.11956), §5.3. Nothing is uploaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from fedkeep.core.errors import ConfigError, MethodError, check_choice, check_range
from fedkeep.core.optim import Kind, Optimizer
from fedkeep.core.params import CLIENT, Params, is_state, prefixed, row, to
from fedkeep.core.seeds import numpy_generator
from fedkeep.engines.batches import Stream
from fedkeep.engines.client_step import Job, outputs
from fedkeep.engines.first_values import trained_initial
from fedkeep.engines.judge import Way, judge
from fedkeep.engines.lanes import LocalRunWatch, local_run
from fedkeep.methods import Adapt, Client, Method, Phase, Recall, Recalls, Sent
from fedkeep.methods.base import Predict
from fedkeep.methods.hook_checks import check_hook
from fedkeep.split import Split
from fedkeep.store import Default, MemoryStore
from fedkeep.tasks.results import Model

NOBODY = "There is no client to adapt."


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """How clients adapt, and what is judged afterwards.

    Attributes:
        adapt: phases, split and start; None: the method's own.
        begin: where a client's own values start: as it ``kept`` them in federation (default ones, if it kept none), as
            ``default`` ones of a new client with copies of what it is sent, or as the model's ``initial`` ones.
        examples: how many of a client's training examples, the first in a seeded order; None: all.
        name: under which the device holds the result: ``adapted``, or ``local`` for a reference to compare with.
        split: the examples that are judged; empty: none are.
        beside: the models that are judged on the same examples.
    """

    adapt: Adapt | None = None
    begin: Literal["kept", "default", "initial"] = "kept"
    examples: int | None = None
    name: Literal["adapted", "local"] = "adapted"
    split: Literal["", "train", "valid", "test"] = "test"
    beside: tuple[Model, ...] = ("own",)

    def __post_init__(self) -> None:
        check_range("[0, inf]", examples=self.examples)
        check_choice("begin must be", self.begin, ("kept", "default", "initial"))


@dataclass(frozen=True)
class Fitting:
    """A client to fit.

    Attributes:
        client: its index in the data.
        sent: what the server sent it.
        rows: the row numbers of the examples to fit on; none leaves the values it starts from.
        start: values to start from, by name, in place of default ones.
    """

    client: int
    sent: Sent
    rows: np.ndarray
    start: Params


@dataclass(frozen=True)
class Adapted:
    """What one client's adaptation gives; nothing of it leaves the client.

    Attributes:
        own: the client's own parameters, by name.
        stopped: for each phase of adaptation the pass (from 1) with the lowest validation loss; 0 without early
            stopping.
    """

    own: Params
    stopped: tuple[int, ...] = ()


Fits = Callable[[Job, Adapt, Sequence[Fitting]], Iterator[Adapted]]
"""Fits clients and yields the results in their order."""


def one_by_one(job: Job, adapt: Adapt, fittings: Sequence[Fitting]) -> Iterator[Adapted]:
    """Fit clients one after the other."""
    for each in fittings:
        yield fit(job, adapt, each)


def fit(job: Job, adapt: Adapt, fitting: Fitting) -> Adapted:
    """Fit what is a client's own; what is federated is not changed.

    Args:
        job: early stopping looks at the client's examples ``valid`` in its data; its seed names the draws.
        adapt: how.
        fitting: the client.

    Raises:
        MethodError: there are no phases of adaptation, or they train federated parameters.
    """
    method, split, data = job.method, own_split(job.method, adapt), job.data
    if not adapt.phases:
        raise MethodError(
            "{method!r} has no phases of adaptation, so there is nothing to personalise.", method=method.name
        )
    name, sent = str(data.ids[fitting.client]), fitting.sent
    own = {**own_default(job, split, sent, name), **fitting.start}
    if adapt.start is not None:
        own |= split.personal(adapt.start({**sent.params, **own}))
    if not len(fitting.rows):
        return Adapted(own)
    own |= counted(job, {**sent.params, **own}, fitting)
    trainable = sorted(job.net.trainable())
    for phase in adapt.phases:
        federated = [n for n in phase.trained_names(split, trainable) if not split.is_private(n)]
        if federated:
            raise MethodError(
                "The adaptation of {method!r} trains the federated {parameter!r}; it must be frozen.",
                method=method.name,
                parameter=federated[0],
            )
    params = {**sent.params, **own}
    draws = Stream(job.seed, f"personalize/{name}", len(fitting.rows), f"Client {name!r}, adapting")
    adapting = Client(phases=adapt.phases, tables=method.client.tables)
    result = local_run(
        job.net,
        split,
        adapting,
        params,
        sent.flat,
        data,
        fitting.rows,
        draws,
        device=job.device,
        valid=job.rows(fitting.client, "valid"),
        falls=adapt.rate_decay == "linear",
    )
    found = {name: value.cpu() for name, value in split.personal(result.params).items()}
    return Adapted(found, tuple(result.stopped))


def counted(job: Job, params: Params, fitting: Fitting) -> Params:
    """Return the state that a client without any makes of the examples it adapts on, where the method says how."""
    hook = job.method.client.start
    if not isinstance(hook, Recalls) or any(map(is_state, fitting.start)):
        return {}
    rows = {"train": fitting.rows, "valid": job.rows(fitting.client, "valid")}
    here = to(params, job.device)
    given = Recall(
        net=job.net, params=here, outputs=lambda function, split: outputs(job, here, rows[split], function)
    )
    with job.net.still():
        state = prefixed(CLIENT, hook.recall(given))
    check_hook(f"recall of {job.method.name!r}", params, state)
    return to(state, "cpu")


def own_split(method: Method, adapt: Adapt | None = None) -> Split:
    """Return which parameters are a client's own while it adapts."""
    return (adapt or method.adapt).split or method.split


def own_default(job: Job, split: Split, sent: Sent, client: str) -> Params:
    """Return a new client's own parameters before it adapts: private defaults, and copies of what it is sent.

    What rounds left frozen and it is to train starts from the module's values.
    """
    values = {**trained_initial(job.net), **sent.params}
    copies = {n: v.detach().cpu().clone() for n, v in split.personal(values).items()}
    return {**copies, **job.store.default(client)}


def kept_values(job: Job, client: int) -> Params:
    """Return a client's private values from federation; none, if it has none or the method keeps none."""
    store = job.store
    if job.method.client.keep.every_round or not store.default.initial or not store.seen([client])[0]:
        return {}
    return row(store.read([client]), 0)


def starting(job: Job, split: Split, begin: str, client: int) -> Params:
    """Return the values that a client's adaptation begins with, where these are not default ones."""
    if begin == "initial":
        return {n: v.cpu() for n, v in split.personal(job.net.initial()).items()}
    return kept_values(job, client) if begin == "kept" else {}


def first_rows(job: Job, client: int, k: int | None) -> np.ndarray:
    """Return k of a client's training rows in a seeded order, so that more examples contain the fewer."""
    draws = numpy_generator(job.seed, "cold_start", str(job.data.ids[client]))
    order = draws.permutation(job.rows(client))
    return order if k is None else order[:k]


@dataclass(frozen=True)
class FineTuning:
    """How clients' whole models are fine-tuned and tested: by the method's own losses and optimisers, at lower rates.

    Attributes:
        ratio: the learning rates, as a multiple of those in federation; 0: nothing is trained, and the first test is
            all of them.
        steps: mini-batches to train on.
        every: mini-batches between two tests.
        optimizer: another kind of optimiser than the method's, e.g. ``"adam"``, at the same rates; None: the method's.
    """

    ratio: float = 0.01
    steps: int = 200
    every: int = 20
    optimizer: Kind | None = None

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            check_choice("The optimiser of personalisation must be", self.optimizer, get_args(Kind))
        if not (self.ratio >= 0 and self.steps >= 1 and self.every >= 1 and self.steps % self.every == 0):
            raise ConfigError(
                "Personalisation wants a ratio of at least 0, and steps that are a multiple of every, both at least "
                "1; got ratio {ratio}, steps {steps} and every {every}.",
                ratio=self.ratio,
                steps=self.steps,
                every=self.every,
            )

    @property
    def tested(self) -> tuple[int, ...]:
        """Mini-batches before each test: 0, every, 2·every, …"""
        return tuple(range(0, self.steps + 1, self.every))

    def phases(self, method: Method, trainable: list[str]) -> tuple[Phase, ...]:
        """Return the phases that fine-tune everything.

        A method of one phase trains all parameters with it. Where a method has several, each trains its own, and they
        take turns on every mini-batch.
        """
        phases = method.client.phases
        return tuple(
            replace(
                phase,
                trains=tuple(phase.trained_names(method.split, trainable)) if len(phases) > 1 else "all",
                optimizer=self._slower(phase.optimizer),
                steps=self.steps,
                batch_size=phases[0].batch_size,
                examples="all",
                early_stopping=None,
            )
            for phase in phases
        )

    def _slower(self, optimizer: Optimizer) -> Optimizer:
        return replace(
            optimizer,
            kind=self.optimizer or optimizer.kind,
            learning_rate=self.ratio * optimizer.learning_rate,
            rates=tuple((pattern, self.ratio * rate) for pattern, rate in optimizer.rates),
            schedule="constant",
        )


def curve(
    job: Job,
    client: int,
    sent: Sent,
    tuning: FineTuning,
    *,
    round: int,
    predicts: Mapping[str, Predict],
    split: str,
) -> dict[str, tuple[float, ...]]:
    """Fine-tune a client from what it is sent and keeps; return its accuracies by prediction: before, and at each test.

    Args:
        job, client, sent, tuning: who, and how.
        round: the run's, which names the draws.
        predicts: what is tested, by name.
        split: on which examples.

    Raises:
        NonFiniteError: fine-tuning broke down to NaN; names the client.
    """
    found: dict[str, list[float]] = {name: [] for name in predicts}

    def test(params: Params) -> None:
        for name, predict in predicts.items():
            found[name].append(accuracy(job, client, sent, params, predict, split))

    name, rows = str(job.data.ids[client]), job.rows(client)
    kept = row(job.store.read([client]), 0)
    start = {n: v.to(job.device) for n, v in {**trained_initial(job.net), **sent.params, **kept}.items()}
    test(start)
    if not tuning.ratio or not len(rows):
        return {way: tuple(values * len(tuning.tested)) for way, values in found.items()}
    phases = tuning.phases(job.method, sorted(job.net.trainable()))
    turns = job.method.client.turns
    if not isinstance(turns, tuple):
        turns = "batches" if len(phases) > 1 else "phases"
    local_run(
        job.net,
        Split("*"),
        Client(phases=phases, turns=turns, tables=job.method.client.tables),
        start,
        sent.flat,
        job.data,
        rows,
        Stream(job.seed, f"personalization/{name}", round, f"Client {name!r}, fine-tuning"),
        device=job.device,
        watch=LocalRunWatch(tuning.every, lambda _, params: test(params)),
    )
    return {way: tuple(values) for way, values in found.items()}


def accuracy(job: Job, client: int, sent: Sent, params: Params, predict: Predict, split: str) -> float:
    """Return a client's accuracy on the first task with a model of its own, given by its whole parameters.

    The client has an example with a label of that task.
    """
    personal = job.method.split.personal(params)
    own = {name: value.unsqueeze(0) for name, value in personal.items()}
    store = MemoryStore(Default(personal), job.data.ids)  # of nothing but these values' names and types
    others = {n: v for n, v in params.items() if n not in personal and not is_state(n)}
    given = Sent(params=others, state=sent.state)  # they have been trained since
    way = Way("own", predict, lambda clients: own)
    judged = judge(replace(job, store=store), [(np.array([client]), given)], split, [way], "examples")
    ((found, _),) = judged[0].of("own").per_client().values()
    return found
