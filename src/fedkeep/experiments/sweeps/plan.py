"""Sweeps that are planned and checked, and their folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedkeep.core.describe import check_same, describe, differences
from fedkeep.core.errors import ConfigError, FedkeepError, RunError, raising
from fedkeep.core.files import is_free, write_whole
from fedkeep.core.sealed import check_format
from fedkeep.data import FederatedData
from fedkeep.experiments.ahead import Ahead
from fedkeep.experiments.build import ahead_of, build_data, simulation_of
from fedkeep.experiments.config import Config, WrittenConfig, parse_config
from fedkeep.experiments.places import WrittenPath
from fedkeep.experiments.run_directory import damaged_plan, locked
from fedkeep.experiments.sweeps.space import Space
from fedkeep.experiments.toml import value_text
from fedkeep.experiments.variants import variant_of, with_method
from fedkeep.report.wording import lower_is_better
from fedkeep.tasks import tasks_in
from fedkeep.version import NUMERICS

if TYPE_CHECKING:
    import optuna

FORMAT = 1
"""Of a sweep's folder."""
PLAN, JOURNAL = "sweep.json", "journal.log"
Prune = Literal["median", "halving", "none"]
"""The rule by which a trial ends early."""
RANDOM = 5
"""Trials of a method that are drawn at random before TPE learns from them; likewise before any is ended early."""
SPARED = 1
"""Evaluations of a trial before it may be ended early."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep that is checked.

    Attributes:
        out: its folder.
        configs: by method, the experiment with what is fixed for it.
        spaces: by method, what its trials choose.
        trials: of each method; those ended early and those that diverged count.
        seeds: every trial runs with each of them.
        prune: how trials are ended early.
        metric: chosen by, on ``valid``.
        folder: of real data.
        data: the data's fingerprint, with the first seed.
        ahead: by method, seconds of its longest run among those at the ends of its space, by estimate.
    """

    out: WrittenPath
    configs: Mapping[str, WrittenConfig]
    spaces: Mapping[str, Space]
    trials: int
    seeds: tuple[int, ...]
    prune: Prune
    metric: str
    folder: WrittenPath | None
    data: Mapping[str, Any]
    ahead: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long all trials would take at most, run after run, by estimate."""
        return self.trials * len(self.seeds) * sum(self.ahead.values())

    def study(self, method: str) -> optuna.Study:
        """Return Optuna's study of a method."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = str(self.out / JOURNAL)
        storage = JournalStorage(JournalFileBackend(path, JournalFileOpenLock(path)))
        if all(known.study_name != method for known in storage.get_all_studies()):  # else this writes, too
            optuna.create_study(
                study_name=method,
                storage=storage,
                direction="minimize" if lower_is_better(self.metric) else "maximize",
                load_if_exists=True,
            )
        pruners = {
            "median": optuna.pruners.MedianPruner(n_startup_trials=RANDOM, n_warmup_steps=SPARED),
            "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=SPARED + 1, reduction_factor=3),
            "none": optuna.pruners.NopPruner(),
        }
        return optuna.load_study(
            study_name=method,
            storage=storage,
            pruner=pruners[self.prune],
            sampler=optuna.samplers.RandomSampler(),
        )

    def config(self, method: str, values: Mapping[str, Any]) -> Config:
        """Return the experiment of a method with values by dotted key."""
        where = f"the sweep's {method}"
        return parse_config(
            self.configs[method].to_toml(), where, {key: value_text(v) for key, v in values.items()}
        )

    def about(self) -> dict[str, Any]:
        """Return what decides the trials, but for their number."""
        configs = {m: describe(c.model_dump(exclude={"name"})) for m, c in self.configs.items()}
        for config in configs.values():
            config["run"].pop("workers")
            config["run"].pop("trackers")
        return {
            "format": FORMAT,
            "space": {m: s.plain() for m, s in self.spaces.items()},
            "seeds": list(self.seeds),
            "prune": self.prune,
            "data": describe(dict(self.data)),
            "numerics": NUMERICS,
            "settings": configs,
        }


def plan(
    config: Config,
    spaces: Mapping[str, Space],
    out: Path,
    *,
    trials: int,
    seeds: int = 1,
    prune: Prune = "median",
    folder: Path | None = None,
) -> Sweep:
    """Return a sweep, checked before anything is trained: every setting is known, and its bounds are allowed.

    Args:
        config: the experiment.
        spaces: by method; the other settings of each are the experiment's, as far as the method knows them.
        out: the sweep's folder.
        trials: of each method.
        seeds: how many seeds each trial runs with: the experiment's and those after it.
        prune: how trials are ended early.
        folder: of real data.

    Raises:
        ConfigError: a setting is not known, a bound is not allowed, or nothing is judged on ``valid``.
    """
    data = build_data(config, folder)
    if not data.counts("valid").any():
        raise ConfigError(
            "A sweep chooses by valid, and no client has an example there. Hold some out, e.g. data.split = "
            "{ fractions = [0.8, 0.1, 0.1] }."
        )
    if config.run.evaluate_every == 0:
        raise ConfigError(
            "run.evaluate_every = 0 judges nothing, so there is nothing to choose by. Leave it out."
        )
    task = tasks_in(data.meta)[0]
    configs = {}
    for method, space in spaces.items():
        own = with_method(config, method) if method != config.method.kind else config
        own = parse_config(own.to_toml(), f"the space of {method}", space.fixed)
        made = variant_of(own, data, folder).config
        run = replace(made.run, evaluate_shared=config.run.evaluate_shared)
        configs[method] = made.model_copy(update={"run": run})
    sweep = Sweep(
        out=out,
        configs=configs,
        spaces=spaces,
        trials=trials,
        seeds=tuple(range(config.seed, config.seed + seeds)),
        prune=prune,
        metric=task.headline,
        folder=folder,
        data=data.fingerprint(),
    )
    ahead = dict.fromkeys(spaces, 0.0)
    for method, space in spaces.items():
        first = {key: one.ends[0] for key, one in space.ranges.items()}
        for key, one in space.ranges.items():
            for value in one.ends:
                took = _check(sweep, method, {**first, key: value}, data).seconds
                ahead[method] = max(ahead[method], took)
    return replace(sweep, ahead=ahead)


def _check(sweep: Sweep, method: str, values: Mapping[str, Any], data: FederatedData) -> Ahead:
    """Return what a run with these values has before it; raise ConfigError where it would be refused."""
    with raising(ConfigError, "The space does not fit {method}: {why}", FedkeepError, method=method):
        config = sweep.config(method, values)
        return ahead_of(simulation_of(config, data, sweep.folder), config)


@contextmanager
def held(sweep: Sweep) -> Iterator[None]:
    """Hold the sweep's folder, which is made, or was made for this sweep."""
    out, path = sweep.out, sweep.out / PLAN
    if out.exists() and not path.exists() and not (out.is_dir() and is_free(out, "lock")):
        raise RunError("{out} is not empty and holds no sweep. Name another folder with --out.", out=out)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        about = json.loads(json.dumps(sweep.about()))
        if path.exists():
            _check_same(out, about)
        else:
            write_whole(path, (json.dumps(about, indent=1) + "\n").encode())
        journal = out / JOURNAL
        (out / f"{JOURNAL}.lock").unlink(missing_ok=True)  # of a process that was killed
        if journal.exists():
            content = journal.read_bytes()
            write_whole(journal, content[: content.rfind(b"\n") + 1])  # what it was writing is no line
        yield


def _check_same(out: Path, about: Mapping[str, Any]) -> None:
    try:
        before = json.loads((out / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged_plan(out / PLAN) from error
    found = before.get("format") if isinstance(before, dict) else None
    check_format(out / PLAN, found, FORMAT, anew="sweep again in another folder")
    check_same(
        [line.replace(" in the run,", " there,") for line in differences(about, before)],
        RunError,
        "{out} holds another sweep, so it cannot go on with this one:\n  {lines}\nUse the space and settings it was "
        "made with, or name another folder with --out.",
        out=out,
    )
