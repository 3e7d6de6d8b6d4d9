"""Pairs the test examples of a personalised model and of a reference, after checking that they are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkeep.core.errors import ConfigError, check_choice
from fedkeep.metrics import CLASS_METRICS, auc
from fedkeep.metrics.worth.gains import FEW, Paired
from fedkeep.metrics.worth.intervals import Floats, Interval
from fedkeep.metrics.worth.pooled_gains import (
    CLASSES_POOLED,
    pooled_gain,
    shares,
)
from fedkeep.report.groups import Configuration
from fedkeep.report.runs import RunFiles
from fedkeep.report.wording import inline, metric_inline
from fedkeep.tasks import KINDS, Kind
from fedkeep.tasks.kind import LOSS
from fedkeep.tasks.results import ExampleResults, Model, Results

Ints = np.ndarray[Any, Any]
METRICS = ("accuracy", "loss", *CLASS_METRICS)
"""What models are compared by. The last have no value for a single example, and every client a share in them."""
LEAST_OF_A_CLASS = 5
POOLED = frozenset(
    metric.name
    for kind in KINDS.values()
    for metric in kind.shown
    if metric.name not in (*METRICS, kind.right_name)
)
"""Metrics of tasks that have no value for a single example."""
REFERENCES = {
    "local": "local training alone",
    "fine_tuned": "FedAvg with fine-tuning",
    "fedavg": "FedAvg",
}
"""Methods whose runs serve as references where none is named, and how they are called."""
ONE_PLACE = "a pooled model of all rows"
SHARED = "the shared part alone"
MUST_BEAT = ("counting", "local")
"""References that need no federation, as ``Side.reference`` names them."""


@dataclass(frozen=True)
class Side:
    """A model of some runs that differ in their seed only.

    Attributes:
        label: for people.
        runs: one for each seed.
        model: which of the models that the runs keep results of.
        reference: its method, or ``counting``, where it serves as a reference; empty: it is a model in question, or its
            shared part.
    """

    label: str
    runs: tuple[RunFiles, ...]
    model: Model
    reference: str = ""

    def by_seed(self) -> dict[int | None, RunFiles]:
        """Return the runs by seed.

        Raises:
            ConfigError: two have the same seed.
        """
        found = {run.seed: run for run in self.runs}
        if len(found) < len(self.runs):
            raise ConfigError(
                "{label}: two runs have the same seed. Name each seed's run once.", label=self.label
            )
        return found


def own_side(group: Configuration) -> Side:
    """Return a configuration's personalised model: the adapted one where the runs kept it, else the one clients keep.

    Raises:
        ConfigError: a run keeps no results of examples, or of no model of clients' own.
    """
    for run in group.runs:
        models = _models(run)
        if "adapted" not in models and ("own" not in models or _adapts_later(run)):
            raise ConfigError(
                "{run}: {method!r} gives clients models of their own only after adapting, and the run keeps no "
                "results of these. Run it with evaluate_adapted = true.",
                run=run.folder,
                method=run.method,
            )
    adapted = all("adapted" in _models(run) for run in group.runs)
    return Side(group.label, group.runs, "adapted" if adapted else "own")


def shared_side(side: Side) -> Side | None:
    """Return the shared part alone of the same runs, or the model before adapting; None where neither was kept."""
    before = SHARED if not any(map(_is_private, side.runs)) else "the same model before adapting"
    known: tuple[tuple[Model, str], ...] = (("shared", SHARED), ("own", before))
    for model, label in known:
        if model != side.model and all(model in _models(run) for run in side.runs):
            return Side(label, side.runs, model)
    return None


def reference_side(group: Configuration) -> Side:
    """Return a configuration's model as a reference, named by what it is.

    Raises:
        ConfigError: as for ``own_side``.
    """
    side = own_side(group)
    method = group.runs[0].method
    name = REFERENCES.get(method, group.label)
    if group.centralised:
        name = ONE_PLACE if method == "fedavg" else f"{ONE_PLACE} by {group.label}"
    called = "" if group.label.lower() in (name.lower(), method) or group.centralised else f" ({group.label})"
    return Side(name + called, side.runs, side.model, method)


def _models(run: RunFiles) -> tuple[Model, ...]:
    examples = kept(run)
    return examples.models(examples.tasks[0])


def _is_private(run: RunFiles) -> bool:
    return any(row["half"] == "private" for row in run.info.get("split_table") or [])


def _adapts_later(run: RunFiles) -> bool:
    """Tell whether rounds leave nothing with a client, and every one of them adapts as the method's last step."""
    found: Any = run.info.get("identity")
    for key in ("method", "adapt", "everyone"):
        found = found.get(key) if isinstance(found, dict) else None
    return bool(found) and not _is_private(run)


def kept(run: RunFiles) -> ExampleResults:
    """Return the results of a run's examples.

    Raises:
        ConfigError: there are none.
    """
    if run.examples is None:
        if "roster" in run.info:
            why = "It ran across machines, whose devices tell the server sums alone; fedkeep report shows these."
        elif "error" in run.info:
            why = f"It ended in an error: {run.info['error']}"
        else:
            why = "It was never evaluated, or has no finished round; run it with evaluate_every above 0."
        raise ConfigError(
            "{run} keeps no results of single test examples, so it can't be compared with another. {why}",
            run=run.folder,
            why=why,
        )
    return run.examples


def check_comparable(ours: Side, theirs: Side) -> None:
    """Check that two sides were run on the same data, and with the same seeds.

    Raises:
        ConfigError: they were not; names the folders and what differs.
    """
    one, other = ours.by_seed(), theirs.by_seed()
    if one.keys() != other.keys():
        raise ConfigError(
            "Seeds differ between methods: {ours} has {our_seeds}, {theirs} has {their_seeds}. Run both with the same "
            "seeds.",
            ours=ours.label,
            our_seeds=_seeds(one),
            theirs=theirs.label,
            their_seeds=_seeds(other),
        )
    first = ours.runs[0]
    for run in (*ours.runs, *theirs.runs):
        data, wanted = _fingerprint(run), _fingerprint(first)
        if data != wanted:
            differing = sorted(k for k in {*data, *wanted} if data.get(k) != wanted.get(k))
            raise ConfigError(
                "{run} was run on other data than {first}: {differing} differ. Compare runs on the same data; where they "
                "follow the seed, compare one seed at a time.",
                run=run.folder,
                first=first.folder,
                differing=", ".join(differing),
            )


def pair(ours: Side, theirs: Side, task: str | None, metric: str) -> Paired:
    """Return two sides' results of the same test examples.

    Args:
        ours: the personalised model.
        theirs: the reference.
        task: the task's name; None where the data have one.
        metric: ``accuracy`` (right or not, in a ranking: among the first ten or not) or ``loss``, whose sign is
            changed so that more is better; or one of ``CLASS_METRICS``: each client then has one result, its share in
            the number over all examples.

    Raises:
        ConfigError: data, seeds or test examples differ, models can't be compared by the metric, or a run keeps no
            predicted classes.
    """
    check_comparable(ours, theirs)
    check_metric(metric, kept(ours.runs[0])(ours.model, task).kind)
    by_seed = theirs.by_seed()
    sides = [(run, by_seed[run.seed]) for run in ours.runs]
    tests = [(_results(a, ours, task), _results(b, theirs, task)) for a, b in sides]
    first, where = tests[0][0], ours.runs[0].folder
    for (a, b), (run_a, run_b) in zip(tests, sides, strict=True):
        for found, run in ((a, run_a), (b, run_b)):
            _check_same(first, where, found, run)
    client, place = np.unique(first.client, return_inverse=True)
    roster = kept(ours.runs[0]).roster
    known = (
        {}
        if roster is None
        else dict(zip(roster.client.tolist(), zip(roster.ids, roster.trained, strict=True), strict=True))
    )
    clients = tuple(str(known[c][0]) if known else f"client {c}" for c in client.tolist())
    seeds = tuple(-1 if run.seed is None else run.seed for run in ours.runs)
    if metric in CLASS_METRICS:
        rows = zip(tests, sides, strict=True)
        both = [[_shares(r, metric, place, run) for r, run in zip(*row, strict=True)] for row in rows]
        mine, others = (np.stack(side) for side in zip(*both, strict=True))
        return Paired(clients=clients, seeds=seeds, client=np.arange(len(client)), ours=mine, theirs=others)
    return Paired(
        clients=clients,
        seeds=seeds,
        client=place,
        ours=np.stack([_values(a, metric) for a, _ in tests]),
        theirs=np.stack([_values(b, metric) for _, b in tests]),
        trained=np.array([known[c][1] for c in client.tolist()]) if known else None,
        valid=_valid(sides, ours, theirs, task, metric, client),
    )


def check_metric(metric: str, kind: Kind) -> None:
    """Check that models can be compared by a metric of a task of this kind.

    Raises:
        ConfigError: they can't.
    """
    if metric in POOLED:
        loss = "loss" if kind.loss_words == LOSS.words else f"loss, the {inline(kind.loss_words)}"
        choose = loss if kind.right is None else f"accuracy or {loss}"
        if gains := ", ".join(metric_inline(one.name) for one in kind.pooled):
            choose += f"; gains in {gains} stand in the report too"
        raise ConfigError(
            "{metric} has no value for a single example, so clients can't be compared by it. Choose {choose}.",
            metric=metric,
            choose=choose,
        )
    check_choice("The metric must be", metric, METRICS)
    if metric in CLASS_METRICS and not kind.has_classes:
        raise ConfigError(
            "{metric} is of examples that have a class; the task is {kind!r}. Choose another --metric.",
            metric=metric,
            kind=kind.name,
        )
    if metric == "accuracy" and kind.right is None:
        raise ConfigError(
            "A {kind} has no right or wrong answers, so no accuracy. Choose --metric loss.", kind=kind.name
        )


def check_spread(metric: str, label: Ints, client: Ints, names: Sequence[str] = ()) -> None:
    """Check that models can be compared by one of ``CLASS_METRICS``: every class is a label of ten clients.

    Of fewer, the jackknife's interval is too narrow.

    Args:
        metric: its name.
        label: (examples,) classes; below 0: not known.
        client: (examples,) whose they are.
        names: of the classes.

    Raises:
        ConfigError: a class is not.
    """
    pairs = np.unique(np.stack([label, client], 1)[label >= 0], axis=0)
    classes, owners = np.unique(pairs[:, 0], return_counts=True)
    if (owners < FEW).any():
        rarest = int(classes[owners.argmin()])
        shown = repr(str(names[rarest])) if rarest < len(names) else f"{rarest}"
        raise ConfigError(
            "{metric} wants test examples of every class of {least} users at least, so that leaving out one shows what "
            "is chance; of the class {rarest} {users} have some. Choose --metric accuracy or loss.",
            metric=metric,
            least=FEW,
            rarest=shown,
            users=int(owners.min()),
        )


def pooled_gains(
    ours: Side, theirs: Side, task: str | None, client: np.ndarray[Any, Any]
) -> Iterator[tuple[str, Interval]]:
    """Yield gains in numbers that pool all clients' examples, by metric; none with one client.

    Args:
        ours, theirs, task: as for ``pair``, which has checked them.
        client: of what ``pair`` returned.
    """
    if not len(client) or int(client.max()) < 1:
        return
    by_seed = theirs.by_seed()
    pairs = [(_results(run, ours, task), _results(by_seed[run.seed], theirs, task)) for run in ours.runs]

    def gain(number: Any, columns: Any, lower: bool = False) -> Interval:
        a, b = ([columns(side) for side in sides] for sides in zip(*pairs, strict=True))
        return pooled_gain(number, client, a, b, lower_is_better=lower)

    for metric in pairs[0][0].kind.pooled:
        yield metric.name, gain(metric.number, metric.columns, metric.lower)
    if all(r.classes is not None for both in pairs for r in both):
        asked = (ours.runs[0].info.get("identity") or {}).get("metrics") or ()
        for name in (n for n in CLASSES_POOLED if n in asked):
            yield name, gain(CLASSES_POOLED[name], lambda r: r.classes)


def client_aucs(
    ours: Side, theirs: Side, task: str | None, client: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any] | None:
    """Return (2, K) each client's AUC under ours and theirs, the mean over seeds; None unless the task is binary.

    NaN for a client with fewer than five examples of either class. AUCs of single clients are shown and not tested.

    Args:
        ours, theirs, task, client: as for ``pooled_gains``.
    """
    first = _results(ours.runs[0], ours, task)
    if first.label is None:
        return None
    positive = np.bincount(client, first.label)
    able = np.flatnonzero(
        (positive >= LEAST_OF_A_CLASS) & (np.bincount(client) - positive >= LEAST_OF_A_CLASS)
    )
    order = np.argsort(client, kind="stable")
    own = np.split(order, np.cumsum(np.bincount(client))[:-1])  # each client's rows, in their order
    found = np.full((2, len(positive)), np.nan)
    for place, side in enumerate((ours, theirs)):
        tests = [_results(run, side, task) for run in side.runs]
        for k in able:
            found[place, k] = np.mean([auc(one.score[own[k]], first.label[own[k]]) for one in tests])
    return found


def _results(run: RunFiles, side: Side, task: str | None) -> Results:
    return kept(run)(side.model, task)


def _shares(results: Results, metric: str, client: Ints, run: RunFiles) -> Floats:
    if results.classes is None:
        raise ConfigError(
            "{run} keeps no predicted classes, so it can't be compared by {metric}. Run it with run.metrics = "
            "['{metric}'].",
            run=run.folder,
            metric=metric,
        )
    label, predicted = results.classes
    check_spread(metric, label, client)
    return shares(CLASSES_POOLED[metric](client, label, predicted))


def _values(results: Results, metric: str) -> np.ndarray[Any, Any]:
    return results.right.astype(np.int8) if metric == "accuracy" else -results.loss


def _check_same(first: Results, where: Any, found: Results, run: RunFiles) -> None:
    same = np.array_equal(first.row, found.row) and np.array_equal(first.client, found.client)
    if not same:
        raise ConfigError(
            "{run} has results of other test examples than {first}: {got} against {wanted}. Compare runs that judge the "
            "same clients; hold_out leaves out others with every seed.",
            run=run.folder,
            first=where,
            got=_counted(found),
            wanted=_counted(first),
        )


def _counted(results: Results) -> str:
    return f"{len(results.row):,} examples of {len(np.unique(results.client)):,} clients"


def _valid(
    sides: Sequence[tuple[RunFiles, RunFiles]],
    ours: Side,
    theirs: Side,
    task: str | None,
    metric: str,
    client: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any] | None:
    """Return (2, K) each client's mean result on validation, over seeds; None where a run keeps none."""
    if not all(kept(run).valid for pair in sides for run in pair):
        return None
    means = []
    for place, side in enumerate((ours, theirs)):
        found = [kept(pair[place])(side.model, task, "valid") for pair in sides]
        means.append(np.mean([_client_means(one, _values(one, metric), client) for one in found], 0))
    return np.stack(means)


def _client_means(
    results: Results, values: np.ndarray[Any, Any], client: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    chosen = np.isin(results.client, client)
    place = np.searchsorted(client, results.client[chosen])
    count = np.bincount(place, minlength=len(client))
    sums = np.bincount(place, values[chosen], len(client))
    found: np.ndarray[Any, Any] = np.divide(sums, count, out=np.full(len(client), np.nan), where=count > 0)
    return found


def _fingerprint(run: RunFiles) -> dict[str, Any]:
    found = (run.info.get("data") or {}).get("fingerprint")
    return found if isinstance(found, dict) else {}


def _seeds(by_seed: dict[int | None, RunFiles]) -> str:
    return ", ".join(
        "none" if seed is None else str(seed) for seed in sorted(by_seed, key=lambda s: (s is None, s or 0))
    )
