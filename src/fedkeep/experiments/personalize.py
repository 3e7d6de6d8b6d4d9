"""Cold start: fit what is a client's own on its own device, with everything else frozen.

Source: FURL, §6 (future work); the local step of Federated Reconstruction (Singhal et al., 2021). Nothing is uploaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.core.params import Params
from fedkeep.core.records import Record
from fedkeep.core.seeds import numpy_generator
from fedkeep.data import FederatedData
from fedkeep.engines import Stream, judge, local_run, tasks_of, to_records
from fedkeep.experiments.drive import HEADLINE
from fedkeep.experiments.progress import make_progress
from fedkeep.experiments.run import Run
from fedkeep.methods import Client
from fedkeep.split import Split
from fedkeep.store import Default, MemoryStore

DEFAULT_K: tuple[int | None, ...] = (0, 1, 2, 5, 10, 20, 50, None)


@dataclass(frozen=True)
class ColdStart:
    """A metric against the number k of own examples.

    Attributes:
        metric: the metric of ``pooled``: accuracy, AUC or RMSE.
        user_metric: the metric of ``mean`` and ``std``; accuracy for a binary task, as a user's few examples may
            all have one label, which leaves no AUC.
        k: the numbers of examples; None means all.
        mean, std: mean over clients (each counted once) and deviation between clients.
        pooled: the metric over all clients' test examples.
        clients: how many clients were measured.
        records: a line per k, split ``cold_start``; ``n`` is the number of test examples, ``metric`` carries k.
    """

    metric: str
    user_metric: str
    k: tuple[int | None, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pooled: tuple[float, ...]
    clients: int
    records: tuple[Record, ...]


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


def fit_private(run: Run, client: int, rows: np.ndarray, data: FederatedData | None = None) -> Params:
    """Fit what is a client's own, from its default values, on some of the client's examples.

    What is its own: the private parameters, or what ``Adapt.split`` names; a federated parameter among these
    starts from the server's value, and the client's copy is fitted.

    Args:
        run: gives the federated part, which is not changed.
        client: the client's index in ``data``.
        rows: the examples' row numbers; none leaves the default values.
        data: by default the run's data.

    Returns:
        The client's own parameters, by name. Nothing else leaves this function.

    Raises:
        MethodError: the method has no adaptation, or its adaptation trains federated parameters.
    """
    return adapt_client(run, client, rows, data=data).own


def adapt_client(
    run: Run,
    client: int,
    rows: np.ndarray,
    *,
    data: FederatedData | None = None,
    start: Params | None = None,
) -> Adapted:
    """Fit what is a client's own, as ``fit_private``, from given values, and say when phases stopped.

    Args:
        run, client, rows, data: as for ``fit_private``; early stopping looks at the client's split ``valid``.
        start: values to start from, by name, in place of default ones.

    Raises:
        MethodError: as for ``fit_private``.
    """
    method, split, source = run.method, own_split(run), data or run.data
    if not method.adapt.phases:
        raise MethodError(f"{method.name!r} has no phases of adaptation, so there is nothing to personalise.")
    name = source.ids[client]
    own = {**own_default(run, name), **(start or {})}
    if method.adapt.start is not None:
        own |= split.personal(method.adapt.start({**run.sent(name).params, **own}))
    if not len(rows):
        return Adapted(own)
    trainable = sorted(run.net.trainable())
    for phase in method.adapt.phases:
        federated = [n for n in phase.trained_names(split, trainable) if not split.is_private(n)]
        if federated:
            raise MethodError(
                f"The adaptation of {method.name!r} trains the federated {federated[0]!r}; it must be frozen."
            )
    sent = run.sent(name)
    params = {**sent.params, **{n: v.to(run.device) for n, v in own.items()}}
    draws = Stream(numpy_seed(run), f"personalize/{name}", len(rows), f"Client {name!r}, adapting")
    held = source.rows(client, "valid")
    adapting = Client(phases=method.adapt.phases, tables=method.client.tables)
    result = local_run(
        run.net, split, adapting, params, sent.flat, source, rows, draws, device=run.device,
        valid=np.arange(held.start, held.stop),
    )  # fmt: skip
    found = {name: value.cpu() for name, value in split.personal(result.params).items()}
    return Adapted(found, tuple(result.stopped))


def own_split(run: Run) -> Split:
    """Return which parameters are a client's own while it adapts."""
    return run.method.adapt.split or run.method.split


def own_default(run: Run, client: str) -> Params:
    """Return a new client's own parameters before it adapts: private defaults, and copies of what it is sent.

    What rounds left frozen and it is to train starts from the module's values.
    """
    trained = run.net.trainable()
    values = {n: v for n, v in run.net.initial().items() if n in trained} | run.sent(client).params
    copies = {n: v.detach().cpu().clone() for n, v in own_split(run).personal(values).items()}
    return {**copies, **run.private.default(client)}


def own_store(run: Run) -> MemoryStore:
    """Return an empty store of what is a client's own while it adapts."""
    return MemoryStore(Default(own_default(run, str(run.data.ids[0]))), run.data.ids)


def numpy_seed(run: Run) -> int:
    """Return the seed that the run's private defaults were drawn with."""
    return run.private.default.seed


def cold_start(
    run: Run,
    clients: Sequence[int] | None = None,
    ks: Sequence[int | None] = DEFAULT_K,
    *,
    split: str = "test",
    progress: bool | None = None,
) -> ColdStart:
    """Measure a metric against the number of own examples, on clients that were not in federation.

    Args:
        run: a finished run.
        clients: indices; by default the clients that the run held out.
        ks: numbers of training examples of each client; None means all. A client that has fewer uses all.
        split: where to measure.
        progress: as for ``simulate``.

    Raises:
        ConfigError: there is no client to measure, or k is negative.
    """
    chosen = [int(c) for c in (run.held_out if clients is None else clients)]
    if not chosen:
        raise ConfigError(
            "No client was held out of this run. Run with hold_out=0.1, or name clients to measure."
        )
    if any(k is not None and k < 0 for k in ks):
        raise ConfigError(f"k must be at least 0, or None for all; got {list(ks)}.")
    task = tasks_of(run.data)[0]
    metric = task.metric(HEADLINE[task.kind])
    user_metric = task.client_metric
    mean, std, pooled, records = [], [], [], []
    with make_progress(progress, "cold start", len(ks) * len(chosen)) as bar:
        for number, k in enumerate(ks):
            store = own_store(run)
            for position, client in enumerate(chosen):
                own = fit_private(run, client, first_examples(run, client, k))
                store.write([client], {n: v.unsqueeze(0) for n, v in own.items()})
                bar.update(number * len(chosen) + position + 1, {})
            judged = judge(run.method, run.net, run.whole, store, run.data, chosen, split, device=run.device)
            each = np.array([value for value, _ in judged[0].per_client().values()])
            mean.append(float(each.mean()))
            std.append(float(each.std()))
            pooled.append(judged[0].metrics()[metric])
            name = f"cold_start/{'all' if k is None else k}"
            records += to_records(judged, run.data, run.round, run.epoch, name, per_client=True)
    return ColdStart(
        metric, user_metric, tuple(ks), tuple(mean), tuple(std), tuple(pooled), len(chosen), tuple(records)
    )


def first_examples(run: Run, client: int, k: int | None) -> np.ndarray:
    """Return k of a client's training rows in a seeded order, so that more examples contain the fewer."""
    rows = run.data.rows(client, "train")
    all_rows = np.arange(rows.start, rows.stop)
    order = numpy_generator(numpy_seed(run), "cold_start", str(run.data.ids[client])).permutation(all_rows)
    return order if k is None else order[:k]


def personalize_client(run: Run, client: str | int, k: int | None = None) -> tuple[Params, dict[str, float]]:
    """Fit one client's own parameters on k of its own examples, and judge them on its test examples.

    The client is named by its id.

    Returns:
        The client's own parameters, and the metrics before (``before_...``) and after fitting.
    """
    index = run.data.index(client)
    own = fit_private(run, index, first_examples(run, index, k))
    out: dict[str, float] = {}
    for prefix, values in (("before_", own_default(run, str(run.data.ids[index]))), ("", own)):
        store = own_store(run)
        store.write([index], {n: torch.as_tensor(v).unsqueeze(0) for n, v in values.items()})
        judged = judge(run.method, run.net, run.whole, store, run.data, [index], "test", device=run.device)
        out |= {f"{prefix}{name}": value for name, value in judged[0].metrics().items()}
    return own, out
