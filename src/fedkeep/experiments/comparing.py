"""Comparisons of methods: every method with every seed is a cell, a run in a folder of its own.

A finished cell is never run again and an interrupted one goes on, so a comparison that was stopped, or is given more
methods or seeds, runs what is missing::

    compare.json        what is compared: data and their hashes
    trials/METHOD-N/    runs of which the best on valid gave the method's settings, where trials are asked for
    tuned.json          all trials, and what was chosen
    runs/METHOD-SEED/   a run's folder, or of one that diverged with ``fault.txt``
    report.html         the page, with .md and .json
    tables/  figures/   for papers

Of several data sets each has such a folder in the comparison's, and page and tables there are of all.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.describe import describe, differences
from fedkeep.core.errors import ConfigError, FedkeepError, NonFiniteError, RoundError, RunError, raising
from fedkeep.core.files import is_free, write_whole
from fedkeep.core.run_files import numerics_of, read_commit, read_info
from fedkeep.core.sealed import check_format
from fedkeep.data import FederatedData
from fedkeep.data.readers.cells import CLASS, ID
from fedkeep.data.readers.load_table import load_table
from fedkeep.experiments.analyses import add_ranking
from fedkeep.experiments.build import ahead_of, build_data, run_config, simulation_of
from fedkeep.experiments.config import Config, WrittenConfig
from fedkeep.experiments.forecast import JobStatus, read_status
from fedkeep.experiments.learned import still_improving, summarize
from fedkeep.experiments.load import load_run
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.personalize.kept import share_adapted
from fedkeep.experiments.places import Place, State, WrittenJob, WrittenPath
from fedkeep.experiments.progress import Stand
from fedkeep.experiments.run_directory import damaged_plan, in_use
from fedkeep.experiments.sources import build_source
from fedkeep.experiments.tuning import Settings, told, trials
from fedkeep.experiments.variants import Variant, every_method, variant_of, with_method
from fedkeep.experiments.worth import counting_side
from fedkeep.methods import METHODS
from fedkeep.metrics import CLASS_METRICS
from fedkeep.report import wording
from fedkeep.report.across import by_group, plain_side_by_side, side_by_side, write_across
from fedkeep.report.groups import configurations
from fedkeep.report.pairing import check_metric, check_spread, own_side
from fedkeep.report.runs import RunFiles, read_run, read_sealed_analyses
from fedkeep.report.standings import RANKING, FoundComparison, find, write
from fedkeep.report.text_tables import TextTable
from fedkeep.report.wording import lower_is_better
from fedkeep.tasks import tasks_in
from fedkeep.version import NUMERICS

REFERENCES = ("local", "fine_tuned")
"""Methods that every comparison has as references; the shared part alone and counting need no run of their own."""
EVERY = "all"
"""In place of methods' names: all of them."""
UNTUNED = (
    "Methods share the settings of the configuration, but for those with a configuration of their own. None was tuned "
    "here: other settings may suit one of them better."
)
TUNED = (
    "Methods share the settings of the configuration, but for those with a configuration of their own. Each had {number} "
    "trials of rates, and of its own strength where it has one, with seed {seed}; the best on valid was taken."
)
GROUP = replace(CLASS, read=lambda cell: "" if cell in (None, "") else CLASS.read(cell))
"""A group's name, or nothing."""
FORMAT = 1
"""Of a comparison's folder."""
PLAN, TRIALS, FAULT, TRIED = "compare.json", "tuned.json", "fault.txt", "trials"


@dataclass(frozen=True)
class Cell(WrittenJob):
    """One method with one seed.

    Attributes:
        label: the method's name.
        config: what is run.
        folder: the run's folder.
        data: the folder of real data.
        among: the data set's name, where there are several.
    """

    label: str
    config: WrittenConfig
    folder: WrittenPath
    data: WrittenPath | None
    among: str = ""

    @property
    def name(self) -> str:
        """For progress; no two cells of a comparison have the same."""
        own = f"trial {self.folder.name}" if self.folder.parent.name == TRIED else self.folder.name
        return f"{self.among}/{own}" if self.among else own

    @property
    def finished(self) -> bool:
        """Whether it is there, or diverged."""
        if (self.folder / FAULT).exists():
            return True
        return self.begun and read_info(self.folder).get("status") == "finished"

    @property
    def begun(self) -> bool:
        """Whether its folder holds a run."""
        return (self.folder / "run.json").exists()

    @property
    def stand(self) -> Stand | None:
        """How far its run has come, as its folder tells; None: it has not begun."""
        if not self.begun:
            return None
        info = read_info(self.folder)
        done = round(read_commit(self.folder, info).round + share_adapted(self.folder), 2)
        return Stand("rounds", done, info["rounds"])

    def check(self) -> None:
        """Check that a run that is there was made with these settings, and under today's ``NUMERICS``.

        Raises:
            ConfigError: it was not.
            RunError: its folder is damaged.
        """
        if not self.begun:
            return
        info = read_info(self.folder)
        lines = differences(_settings(describe(self.config.model_dump())), _settings(info.get("config")))
        if lines:
            raise ConfigError(
                "{outer} holds another comparison: {name} was run with other settings "
                "({lines}). Name another folder with --out, or delete {folder}.",
                outer=self.folder.parent.parent,
                name=self.name,
                lines="; ".join(lines[:3]),
                folder=self.folder,
            )
        if (there := numerics_of(info)) != NUMERICS:
            raise ConfigError(
                "{name} was run by a fedkeep whose numbers may differ from this one's (NUMERICS {there} there, "
                "{numerics} here). Delete {folder}, and it is run again, or name another folder with --out.",
                name=self.name,
                there=there,
                numerics=NUMERICS,
                folder=self.folder,
            )

    def __call__(self, *, alone: bool, progress: bool | None) -> None:
        """Run it, or go on with it; one whose loss becomes NaN, or that loses all clients, leaves ``fault.txt``."""
        workers = None if alone or self.config.run.centralised else 1
        try:
            run_config(
                self.config,
                folder=self.data,
                out=self.folder,
                resume=self.begun,
                progress=progress,
                workers=workers,
            )
        except (NonFiniteError, RoundError) as error:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / FAULT, f"{error}\n".encode())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A comparison that is to be run.

    Attributes:
        out: its folder.
        variants: an experiment for each method, under a name of its own.
        seeds: that each is run with.
        data: the data of all.
        folder: the folder of real data.
        references: whether methods are compared with references.
        metric: ``accuracy``, ``loss``, or one of ``CLASS_METRICS``; None: accuracy, for a regression the loss.
        title: what the experiment is called.
        left_out: of all methods those that do not fit, each with the reason.
        trials: by method, what is tried before, and which settings it has; none: methods have their settings already.
        chosen: by method, the settings that its trials gave.
        among: the data set's name, where there are several.
        groups: by what users are grouped, each user's group by id; see ``read_groups``.
        ahead: by method that has runs to do, the seconds of one of them, by estimate.
    """

    out: Path
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    data: FederatedData
    folder: Path | None
    references: bool
    metric: str | None
    title: str
    left_out: tuple[str, ...] = ()
    trials: Mapping[str, tuple[tuple[Cell, Settings], ...]] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)
    among: str = ""
    groups: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ahead: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long all rounds that are missing would take, run after run, by estimate."""
        return sum(job.left for job in status([self], {}))

    @property
    def missing(self) -> list[Cell]:
        """What is to be run, trials first."""
        tried = [cell for own in self.trials.values() for cell, _ in own]
        return [cell for cell in (*tried, *self.cells) if not cell.finished]

    @property
    def cells(self) -> list[Cell]:
        """Every method with every seed; all methods with one seed come before those with the next."""
        return [
            _cell(v, seed, self.out, self.folder, self.among) for seed in self.seeds for v in self.variants
        ]


def plan(
    configs: Sequence[Config],
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    folder: Path | None = None,
    references: bool = True,
    metric: str | None = None,
    tune: int = 0,
    among: str = "",
    groups: Mapping[str, Mapping[str, str]] | None = None,
) -> Plan:
    """Return what is to be run, checked before anything is: every method fits, and the folder is free or holds this.

    Args:
        configs: experiments on the same data. One whose method is named among ``methods`` is run as it is.
        methods: names; the others have the settings of the first configuration. Empty: those of ``configs``. ``all``
            alone: every method that fits; the others are left out, and noted.
        seeds: of the runs; where data are drawn, it is by the first configuration's seed for all.
        out: the comparison's folder.
        folder: the folder of real data.
        references: whether local training and fine-tuning are run along, and all compared with these.
        metric: see ``Plan``.
        tune: trials of each method, with the first seed; the best on ``valid`` gives the settings for all seeds. 0: none.
        among: the data set's name, where there are several.
        groups: users' groups, whose numbers are shown apart, as of ``read_groups``.

    Raises:
        ConfigError: there are fewer than two methods, data differ or have no test examples, or trials none to be judged by, a name is not known, the folder is another comparison's, models can't be compared by
            the metric, methods do not fit model and data, or a run would be refused; each method is named.
    """
    first = configs[0]
    source = build_source(first.data, first.seed, folder)
    data = source.prepared(first.preparation)
    if not data.counts("test").any():
        raise ConfigError(
            "Methods are compared on test examples, and no client has one. Hold some out, e.g. data.split = "
            "{ fractions = [0.8, 0.1, 0.1] }."
        )
    if tune and not data.counts("valid").any():
        raise ConfigError(
            "Trials are judged on valid, and no client has an example there. Hold some out, e.g. data.split = "
            "{ fractions = [0.8, 0.1, 0.1] }."
        )
    for task in tasks_in(data.meta):
        check_metric(metric or task.kind.compared_by, task.kind)
        if metric is not None and metric in CLASS_METRICS:
            rows = data.split_rows("test")
            label = np.asarray(data.columns[task.label])[rows]
            check_spread(metric, label, data.clients_of(rows), data.meta.get("label_names") or ())
    for config in configs[1:]:
        lines = differences(build_data(config, folder).fingerprint(), data.fingerprint())
        if lines:
            raise ConfigError(
                "{config} is on other data than {first} ({line}). One table compares methods on "
                "the same data; ``plans`` takes several data sets.",
                config=_named(config),
                first=_named(first),
                line=lines[0],
            )
    settled = source.settled(data)
    every = list(methods) == [EVERY]
    named = every_method(*configs) if every else methods
    chosen = [c.model_copy(update={"data": settled}) for c in _chosen(configs, named, references)]
    for config in chosen:
        _check_judged(config, seeds, metric)
    variants, misfits, before = list[Variant](), list[ConfigError](), dict[str, float]()
    for config in chosen:
        try:
            variant = variant_of(config, data, folder)
            if not all(_cell(variant, seed, out, folder).finished for seed in seeds):
                before[variant.config.name] = _rehearse(variant.config, data, folder)
            variants.append(variant)
        except ConfigError as error:
            misfits.append(error)
    if every and variants:
        misfits, left_out = [], tuple(map(str, misfits))
    else:
        left_out = ()
    if misfits[1:]:
        listed = "".join(f"\n- {error}" for error in misfits)
        raise ConfigError(
            "{count} of {chosen} methods do not fit:{listed}",
            count=len(misfits),
            chosen=len(chosen),
            listed=listed,
        )
    if misfits:
        raise misfits[0]
    if len(variants) < 2:
        raise ConfigError(
            "A comparison wants two methods at least; got {got}. Name another with --methods, or leave the references in.",
            got=", ".join(variant.config.name for variant in variants),
        )
    title = wording.printable(first.name or data.meta.get("name") or "Comparison")
    made = Plan(
        out=out,
        variants=tuple(variants),
        seeds=tuple(seeds),
        data=data,
        folder=folder,
        references=references,
        metric=metric,
        title=title,
        left_out=left_out,
        among=among,
        groups=groups or {},
        ahead=before,
    )
    _check_groups(made)
    if tune:
        made = replace(made, trials={v.config.name: tuple(_trials(made, v, tune)) for v in variants})
    _check_folder(made)
    return made


Experiment = tuple[str, Config, Path | None]
"""A name for people, what is run, and the folder of real data."""


def data_sets(experiments: Sequence[Experiment]) -> dict[str, list[Experiment]]:
    """Return experiments by their data, each data set under the name of the first on it, good for a folder.

    Raises:
        ConfigError: data are not there, or do not fit their configuration.
    """
    prints, found, used = list[Any](), dict[str, list[Experiment]](), set[str]()
    for one in experiments:
        name, config, folder = one
        own = build_data(config, folder).fingerprint() if experiments[1:] else None
        if own in prints:
            [*found.values()][prints.index(own)].append(one)
        else:
            prints.append(own)
            name = _folder_name(_unused(name, used))
            used.add(name.lower())
            found[name] = [one]
    return found


def plans(
    sets: Mapping[str, Sequence[Experiment]],
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    **more: Any,
) -> list[Plan]:
    """Return a plan for each data set, all with the same methods; of several each has a folder in ``out``.

    Args:
        sets: what ``data_sets`` returned. The first experiment on each gives its settings.
        methods: names; empty: those of all experiments.
        seeds, out, more: as for ``plan``.

    Raises:
        ConfigError: as for ``plan``; or ``out`` holds another kind of comparison.
    """
    kinds = list(methods) or list(dict.fromkeys(c.method.kind for own in sets.values() for _, c, _ in own))
    several = len(sets) > 1
    if several and (before := _plan_in(out)) is not None and "data_sets" not in before:
        raise ConfigError(
            "{out} holds a comparison on one data set. Name another folder with --out.", out=out
        )
    return [
        plan(
            [config for _, config, _ in own],
            kinds,
            seeds,
            out / name if several else out,
            folder=own[0][2],
            among=name if several else "",
            **more,
        )
        for name, own in sets.items()
    ]


def run(
    plan: Plan, jobs: int = 1, progress: bool | None = None, on: Place | None = None
) -> tuple[FoundComparison, Path]:
    """Run what is missing, ``jobs`` cells at a time, and write page, tables and figures.

    Args:
        plan: what is compared.
        jobs, progress, on: as for ``run_long_jobs``.

    Returns:
        What was found, and the page's path.

    Raises:
        FedkeepError: a cell failed, after those that ran beside it.
    """
    ((made, page),) = _run([plan], jobs, progress, on)
    return made, page


def run_all(
    plans: Sequence[Plan], jobs: int = 1, progress: bool | None = None, on: Place | None = None
) -> tuple[dict[str, FoundComparison], Path]:
    """Do what ``run`` does for several data sets, and write a page and a table of all in the folder that holds theirs.

    Returns:
        What was found, by the data set's name, and the page's path.

    Raises:
        FedkeepError: as for ``run``.
    """
    out = plans[0].out.parent
    out.mkdir(parents=True, exist_ok=True)
    write_whole(
        out / PLAN,
        (json.dumps({"format": FORMAT, "data_sets": [p.among for p in plans]}, indent=1) + "\n").encode(),
    )
    made = {plan.among: each for plan, (each, _) in zip(plans, _run(plans, jobs, progress, on), strict=True)}
    return made, write_across(made, out)


def _run(
    plans: Sequence[Plan], jobs: int, progress: bool | None, on: Place | None
) -> list[tuple[FoundComparison, Path]]:
    for plan in plans:
        plan.out.mkdir(parents=True, exist_ok=True)
        write_whole(plan.out / PLAN, (json.dumps(_about(plan), indent=1) + "\n").encode())
    trials = [c for plan in plans for own in plan.trials.values() for c, _ in own if not c.finished]
    later = [_kind(cell) for plan in plans for cell in plan.cells if trials and not cell.finished]
    run_long_jobs(trials, jobs, progress, kind=_kind, later=later, on=on, stand=lambda cell: cell.stand)
    plans = [_tuned(plan) for plan in plans]
    for plan in plans:
        _check_folder(plan)
    cells = [cell for plan in plans for cell in plan.cells if not cell.finished]
    run_long_jobs(cells, jobs, progress, kind=_kind, on=on, stand=lambda cell: cell.stand)
    made = [(found(plan), plan.out) for plan in plans]
    return [(each, write(each, out)) for each, out in made]


def found(plan: Plan) -> FoundComparison:
    """Return a comparison whose cells are finished; methods that diverged are left out, and noted.

    Raises:
        ConfigError: fewer than two methods are left, or their data differ.
    """
    notes, left = [f"Left out as it does not fit, {line}" for line in plan.left_out], []
    for v in plan.variants:
        name = v.config.name
        faults = {
            c.config.seed: c.folder / FAULT
            for c in plan.cells
            if c.label == name and (c.folder / FAULT).exists()
        }
        for seed, path in faults.items():
            why = path.read_text(encoding="utf-8").strip()
            notes.append(f"{name} is left out: with seed {seed} its training broke down. {why}")
        left += [] if faults else [name]
    for cell in (c for c in plan.cells if c.label in left):
        _rank(cell, plan.data)
    runs = [read_run(cell.folder) for cell in plan.cells if cell.label in left]
    if more := list(dict.fromkeys(run.name for run in runs if _improving(run, plan))):
        notes.append(
            f"Still improving at the last round, so more rounds may change their places: {', '.join(more)}."
        )
    groups = sorted(configurations(runs), key=lambda g: left.index(g.runs[0].name))
    if not groups:
        raise RunError("No method is left to compare. {notes}", notes=" ".join(notes))
    counting = None
    if plan.references and any(task.kind.counting is None for task in tasks_in(plan.data.meta)):
        notes.append("Counting is left out: it counts a user's labels, and each token has one here.")
    elif plan.references:
        counting = counting_side(own_side(groups[0]), plan.folder)
    number = max(map(len, plan.trials.values()), default=0)
    tuned = TUNED.format(number=number, seed=plan.seeds[0]) if number else UNTUNED
    how = [tuned, *(v.note for v in plan.variants if v.note)]
    title = f"{plan.title}: {wording.count(len(groups), 'method')} compared"
    made = find(
        title, groups, counting, plan.metric, references=plan.references, notes=notes, how=" ".join(how)
    )
    known = {v.config.name: v.config.method.kind for v in plan.variants}
    names = {label: published(kind) for label, kind in known.items() if label == kind and kind in METHODS}
    further = dict(_by_groups(plan, made))
    return replace(made, chosen=plan.chosen, published=names, further=further)


def _rank(cell: Cell, data: FederatedData) -> None:
    """Rank all items by a finished cell's models as it asks, unless that was done: it may have asked for another, or none."""
    asked = cell.config.ranking
    if asked is None:
        return
    known, _ = read_sealed_analyses(cell.folder / "analyses.json")
    if known.get(RANKING, {}).get("asked") != {"ks": list(asked.ks), "liked": asked.liked}:
        add_ranking(load_run(cell.folder, data=data, data_folder=cell.data), asked)


def read_groups(path: Path) -> dict[str, dict[str, str]]:
    """Return users' groups: of a table with a row a user, whose first column names the user, every other one.

    An empty cell is no group.

    Raises:
        DataError: the file is missing or malformed.
        ConfigError: it has one column, or a user twice.
    """
    table = load_table(path, None)
    first, *others = table.columns
    if not others:
        raise ConfigError(
            "{path} has one column, {first!r}. Wanted a row a user: a column of ids, and one or more with the user's group.",
            path=path,
            first=first,
        )
    users = table.each(first, ID)
    if twice := [user for user, n in Counter(users).items() if n > 1]:
        raise ConfigError(
            "{path} names {twice!r} more than once in its column {first!r}. Wanted a row a user.",
            path=path,
            twice=twice[0],
            first=first,
        )
    return {name: {u: g for u, g in zip(users, table.each(name, GROUP), strict=True) if g} for name in others}


def _check_groups(plan: Plan) -> None:
    if plan.groups and plan.metric in CLASS_METRICS:
        raise ConfigError(
            "{metric} is over all examples, so groups of users have none of their own. Leave out --groups.",
            metric=plan.metric,
        )
    known = set(plan.data.ids)
    for name, group in plan.groups.items():
        if not known & group.keys():
            raise ConfigError(
                "--groups: its first column must hold users' ids as the data have them, such as {client!r}; it "
                "holds {member!r}, so no user has a {name!r}.",
                client=plan.data.ids[0],
                member=next(iter(group), None),
                name=name,
            )


def _by_groups(
    plan: Plan, made: FoundComparison
) -> Iterator[tuple[str, tuple[TextTable, list[dict[str, Any]]]]]:
    """Yield a table for each task and each way in which users are grouped."""
    for c in made.compared:
        for name, group in plan.groups.items():
            columns = by_group(c, group)
            left = c.users - sum(own.users for own in columns.values())
            shown = side_by_side(columns, rank=False)
            note = f"{shown.note} {wording.count(left, 'user')} without a group." if left else shown.note
            tail = f", {wording.printable(c.task)}" if c.task else ""
            shown = replace(shown, title=f"By {wording.printable(name)}{tail}", note=note)
            rows = plain_side_by_side(columns)
            yield f"by-{_folder_name(name)}{f'-{_folder_name(c.task)}' if c.task else ''}", (shown, rows)


def published(kind: str) -> str:
    """Return the name under which a method of fedkeep's was published: its module's docstring begins with it."""
    return (sys.modules[METHODS[kind].__module__].__doc__ or kind).partition(":")[0]


def _improving(run: RunFiles, plan: Plan) -> bool:
    task = tasks_in(plan.data.meta)[0]
    best = summarize(run.records, task.headline, lower_is_better(task.headline))
    return best is not None and still_improving(run.records, best)


def status(plans: Sequence[Plan], states: Mapping[str, State]) -> list[JobStatus]:
    """Return how each trial and run stands.

    Args:
        plans: what is compared.
        states: of those that run elsewhere, by name, as of ``Place.states``.
    """
    cells = [(plan, c) for plan in plans for own in plan.trials.values() for c, _ in own]
    cells += [(plan, cell) for plan in plans for cell in plan.cells]
    return [
        read_status(
            JobStatus(name=cell.name, kind=_kind(cell), least=plan.ahead.get(cell.label, 0.0)),
            partial(_how, cell, states.get(cell.name)),
            [cell.folder],
        )
        for plan, cell in cells
    ]


def _how(cell: Cell, state: State | None) -> str:
    if (cell.folder / FAULT).exists():
        return "diverged"
    if cell.finished:
        return "finished"
    if cell.begun and state not in ("running", "waiting") and in_use(cell.folder):
        return "running"
    return state or ("stopped" if cell.begun else "not begun")


def _kind(cell: Cell) -> str:
    """Return what cells have in common that take about as long: method and data set."""
    return f"{cell.among}/{cell.label}"


def _cell(variant: Variant, seed: int, out: Path, data: Path | None, among: str = "") -> Cell:
    config = variant.config.model_copy(update={"seed": seed})
    return Cell(config.name, config, out / "runs" / f"{_folder_name(config.name)}-{seed}", data, among)


def _trials(plan: Plan, variant: Variant, number: int) -> Iterator[tuple[Cell, Settings]]:
    """Yield a method's trials, each a run in a folder of its own."""
    config = variant.config.model_copy(
        update={"seed": plan.seeds[0], "personalization": None, "ranking": None}
    )
    method = simulation_of(config, plan.data, plan.folder).method
    bounds = config.method.optimizer.bounds if config.method.optimizer else ()  # a method's own come again
    optimizer = replace(method.client.phases[0].optimizer, bounds=bounds)
    for n, (tried, settings) in enumerate(trials(config, optimizer, number)):
        folder = plan.out / TRIED / f"{_folder_name(config.name)}-{n}"
        yield Cell(config.name, tried, folder, plan.folder, plan.among), settings


def _tuned(plan: Plan) -> Plan:
    """Return a plan in which every method has the settings of its best trial; all trials are finished."""
    if not plan.trials:
        return plan
    metric = tasks_in(plan.data.meta)[0].headline
    variants, chosen, about = list[Variant](), dict[str, str](), dict[str, Any]()
    for variant in plan.variants:
        name = variant.config.name
        own = plan.trials[name]
        values = [_on_valid(cell, metric) for cell, _ in own]
        sign = 1 if lower_is_better(metric) else -1
        best = min(range(len(own)), key=lambda n: math.inf if values[n] is None else sign * values[n])  # type: ignore[operator]
        cell, settings = own[best]
        variants.append(
            replace(variant, config=variant.config.model_copy(update={"method": cell.config.method}))
        )
        chosen[name] = told(settings)
        tried = [{**one, "valid": value} for (_, one), value in zip(own, values, strict=True)]
        about[name] = {"trials": tried, "chosen": dict(settings)}
    found = {"metric": metric, "seed": plan.seeds[0], "methods": about}
    write_whole(plan.out / TRIALS, (json.dumps(found, indent=1) + "\n").encode())
    return replace(plan, variants=tuple(variants), chosen=chosen)


def _on_valid(cell: Cell, metric: str) -> float | None:
    """Return the best value of a trial on ``valid``; None: it diverged, or there was no number."""
    if (cell.folder / FAULT).exists():
        return None
    best = summarize(read_run(cell.folder).records, metric, lower_is_better(metric))
    value = math.nan if best is None else best.valid.get(metric, math.nan)
    return value if math.isfinite(value) else None


def _rehearse(config: Config, data: FederatedData, folder: Path | None) -> float:
    """Return the seconds of a run, by estimate; raise ConfigError, with the method's name, where it would be refused."""
    with raising(ConfigError, "{name}: {why}", FedkeepError, name=config.name):
        return ahead_of(simulation_of(config, data, folder), config).seconds


def _chosen(configs: Sequence[Config], methods: Sequence[str], references: bool) -> Iterator[Config]:
    kinds = list(dict.fromkeys(methods)) or list(dict.fromkeys(c.method.kind for c in configs))
    for config in configs[1:]:
        if config.method.kind not in kinds:
            raise ConfigError(
                "The method of {config} is {method!r}, which --methods does not name. Name it, or "
                "leave the configuration out.",
                config=_named(config),
                method=config.method.kind,
            )
    every = [*kinds, *(r for r in REFERENCES if references and r not in kinds)]
    by_kind = {kind: [c for c in configs if c.method.kind == kind] for kind in every}
    used = {_folder_name(kind).lower() for kind, own in by_kind.items() if len(own) < 2}
    for kind, own in by_kind.items():
        for config in own or [with_method(configs[0], kind)]:
            name = kind if len(own) < 2 else _unused(config.name or kind, used)
            used.add(_folder_name(name).lower())
            yield config.model_copy(update={"name": name})


def _unused(name: str, used: set[str]) -> str:
    choices = (name, *(f"{name[:70]} {i}" for i in range(2, len(used) + 3)))  # of a folder's name 80 are kept
    return next(n for n in choices if _folder_name(n).lower() not in used)


def _check_judged(config: Config, seeds: Sequence[int], metric: str | None) -> None:
    if metric in CLASS_METRICS and metric not in (config.run.metrics or ()):
        raise ConfigError(
            "--metric {metric} wants every run's predicted classes. Add --set \"run.metrics=['{metric}']\", or "
            "metrics = ['{metric}'] under [run].",
            metric=metric,
        )
    if config.run.evaluate_every == 0:
        raise ConfigError(
            "run.evaluate_every = 0 judges nothing, so there is nothing to compare. Leave it out."
        )
    if config.run.hold_out and len(seeds) > 1:
        raise ConfigError(
            "run.hold_out holds out other users with every seed, so seeds would be judged on other test examples. "
            "Leave it out, or compare with one seed."
        )


def _check_folder(plan: Plan) -> None:
    out = plan.out
    if (before := _plan_in(out)) is None:
        return
    if "data_sets" in before:
        raise ConfigError(
            "{out} holds a comparison on several data sets. Name another folder with --out.", out=out
        )
    try:
        lines = differences(json.loads(json.dumps(_about(plan)))["data"], before["data"])
        other = bool(before["tune"]) != bool(plan.trials)
    except (KeyError, TypeError) as error:
        raise damaged_plan(out / PLAN) from error
    if lines:
        raise ConfigError(
            "{out} holds another comparison: its data are others ({lines}). Name another folder with --out.",
            out=out,
            lines="; ".join(lines[:3]),
        )
    if other:
        had = "with trials (--tune)" if before["tune"] else "without trials"
        raise ConfigError("{out} holds a comparison {had}. Name another folder with --out.", out=out, had=had)
    if plan.trials and not plan.chosen:  # the methods' settings are not known yet
        cells = [cell for own in plan.trials.values() for cell, _ in own]
    else:
        cells = plan.cells
    for cell in cells:
        cell.check()


def _plan_in(out: Path) -> dict[str, Any] | None:
    """Return what a folder says of the comparison in it; None: it is free."""
    if not out.exists():
        return None
    if not out.is_dir() or (not is_free(out) and not (out / PLAN).exists()):
        raise ConfigError(
            "{out} is not empty and holds no comparison. Name another folder with --out.", out=out
        )
    if not (out / PLAN).exists():
        return None
    try:
        before = json.loads((out / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged_plan(out / PLAN) from error
    if not isinstance(before, dict):
        raise damaged_plan(out / PLAN)
    check_format(out / PLAN, before.get("format"), FORMAT, anew="compare again in another folder")
    return before


def _about(plan: Plan) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "data": plan.data.fingerprint(),
        "methods": [v.config.name for v in plan.variants],
        "seeds": list(plan.seeds),
        "tune": max(map(len, plan.trials.values()), default=0),
    }


def _settings(config: Any) -> Any:
    """Return what decides a run's numbers, as it stands in a file."""
    plain = json.loads(json.dumps(config or {}))
    plain.get("run", {}).pop("workers", None)
    plain.pop("ranking", None)  # it is made of finished runs
    return plain


def _named(config: Config) -> str:
    return repr(config.name or config.method.kind)


def _folder_name(name: str) -> str:
    return (
        "".join(c if (c.isalnum() and c.isascii()) or c in "_." else "-" for c in name)[:80].strip("-.")
        or "method"
    )
