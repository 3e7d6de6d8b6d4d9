"""Trials: settings that are proposed, run, and told; the runs of those that fall behind are ended."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedkeep.core.errors import NonFiniteError, RoundError, first_line
from fedkeep.core.records import Record
from fedkeep.core.seeds import stream
from fedkeep.data import FederatedData
from fedkeep.experiments.build import build_data, run_config
from fedkeep.experiments.config import Config
from fedkeep.experiments.learned import summarize
from fedkeep.experiments.long_jobs import run_long_jobs
from fedkeep.experiments.places import Place, WrittenJob
from fedkeep.experiments.sweeps.plan import RANDOM, Sweep, held
from fedkeep.experiments.trackers import EndRun, Facts
from fedkeep.report.wording import lower_is_better

if TYPE_CHECKING:
    import optuna


def run(sweep: Sweep, jobs: int = 1, progress: bool | None = None, on: Place | None = None) -> None:
    """Run the trials that are missing, ``jobs`` at a time; ``on``: where, None: here.

    Raises:
        RunError: the folder is of another sweep, or in use.
        FedkeepError: a trial failed in another way than by diverging.
    """
    with held(sweep):
        waiting = {method: list(_waiting(sweep, method)) for method in sweep.configs}
        turns = max(map(len, waiting.values()))
        tasks = [own[turn] for turn in range(turns) for own in waiting.values() if turn < len(own)]
        run_long_jobs(tasks, jobs, progress, kind=lambda task: task.method, on=on)


def _waiting(sweep: Sweep, method: str) -> Iterator[TrialJob]:
    """Yield a method's trials that are to run: those in the middle first."""
    trials = sweep.study(method).get_trials(deepcopy=False)
    for trial in trials:
        if not trial.state.is_finished():
            yield TrialJob(sweep, method, trial.number, trial.number)
    for number in range(len(trials), sweep.trials):
        yield TrialJob(sweep, method, number, None)


@dataclass(frozen=True)
class TrialJob(WrittenJob):
    """A trial that is to run.

    Attributes:
        sweep, method: whose.
        place: for people; side by side, trials may begin in another order.
        known: the number of a trial in the middle; None: a new one.
    """

    sweep: Sweep
    method: str
    place: int
    known: int | None

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.method}, trial {self.place + 1} of {self.sweep.trials}"

    def __call__(self, *, alone: bool, progress: bool | None) -> None:
        """Run it and tell Optuna; of trials that are finished, the runs of the best alone are kept."""
        import optuna

        sweep, study = self.sweep, self.sweep.study(self.method)
        if self.known is None:
            trial = study.ask()
        else:
            known = study.get_trials(deepcopy=False)[self.known]
            trial = optuna.trial.Trial(study, known._trial_id)
        # A sampler of the trial's own, so that a sweep that was stopped proposes what one never stopped would.
        seed = stream(sweep.configs[self.method].seed, "sweep", self.method, trial.number) % 2**32
        study.sampler = optuna.samplers.TPESampler(n_startup_trials=RANDOM, constant_liar=True, seed=seed)
        ranges = sweep.spaces[self.method].ranges
        values = {key: one.suggest(trial, key) for key, one in ranges.items()}
        trial.set_user_attr("values", values)
        began, before = time.monotonic(), float(trial.user_attrs.get("seconds", 0.0))
        valid: list[float] = []
        try:
            self._run(trial, sweep.config(self.method, values), valid, alone, progress)
        except (NonFiniteError, RoundError) as error:
            trial.set_user_attr("diverged", first_line(error))
        finally:
            trial.set_user_attr("seconds", before + time.monotonic() - began)
        if len(valid) == len(sweep.seeds):
            study.tell(trial, math.fsum(valid) / len(valid))
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        _forget(sweep, self.method)

    def _run(
        self, trial: optuna.Trial, config: Config, valid: list[float], alone: bool, progress: bool | None
    ) -> None:
        """Add the best value on ``valid`` with each seed, until the trial is ended early."""
        sweep, rounds, steps = self.sweep, 0, 0
        for seed in sweep.seeds:
            own = config.model_copy(update={"seed": seed, "personalization": None, "ranking": None})
            out = trial_folder(sweep, self.method, trial.number) / f"seed-{seed}"
            watch = TrialWatch(trial, sweep.metric, valid, steps)
            try:
                made = run_config(
                    own,
                    data=_data(own, sweep.folder),
                    folder=sweep.folder,
                    out=out,
                    resume=(out / "run.json").exists(),
                    progress=progress,
                    workers=None if alone or own.run.centralised else 1,
                    trackers=[watch],
                )
            finally:  # what a run that breaks down has spent counts too
                rounds, steps = rounds + watch.rounds, watch.steps
                trial.set_user_attr("rounds", rounds)
            if watch.ended:
                return
            best = summarize(made.history, sweep.metric, lower_is_better(sweep.metric))
            value = math.nan if best is None else best.valid.get(sweep.metric, math.nan)
            if not math.isfinite(value):
                raise NonFiniteError("{metric} on valid was never a number.", metric=sweep.metric)
            valid.append(value)
            trial.set_user_attr("valid", list(valid))


def trial_folder(sweep: Sweep, method: str, number: int) -> Path:
    """Return where the runs of a trial are."""
    return sweep.out / "trials" / f"{method.replace(':', '-')}-{number}"


def _forget(sweep: Sweep, method: str) -> None:
    """Delete the runs of a method's finished trials, but for those of the best."""
    trials = sweep.study(method).get_trials(deepcopy=False)
    best = best_of(sweep, trials)
    for trial in trials:
        if trial.state.is_finished() and (best is None or trial.number != best.number):
            shutil.rmtree(trial_folder(sweep, method, trial.number), ignore_errors=True)


def best_of(sweep: Sweep, trials: Sequence[optuna.trial.FrozenTrial]) -> optuna.trial.FrozenTrial | None:
    """Return the trial that is best on ``valid``, the first of equals; None where none came to its end."""
    sign = 1.0 if lower_is_better(sweep.metric) else -1.0
    complete = [t for t in trials if t.state.name == "COMPLETE" and t.value is not None]
    return min(complete, key=lambda t: (sign * float(t.value or 0.0), t.number), default=None)


_DATA: dict[str, FederatedData] = {}


def _data(config: Config, folder: Path | None) -> FederatedData:
    """Return an experiment's data; those of the last few seeds are kept in this process."""
    key = json.dumps([config.model_dump(mode="json", include={"data", "preparation", "seed"}), str(folder)])
    if key not in _DATA:
        if len(_DATA) >= 4:
            _DATA.clear()
        _DATA[key] = build_data(config, folder)
    return _DATA[key]


class TrialWatch:
    """Tells a trial of the best value on ``valid`` so far, and ends a run whose trial falls behind.

    It counts the run's finished rounds, ``rounds``, also of one that breaks down.

    What is told after each evaluation is the mean of the best values with the seeds so far.

    Args:
        trial: of Optuna.
        metric: on ``valid``.
        before: the best values with earlier seeds.
        steps: how often it was evaluated with these.
    """

    name = "sweep"

    def __init__(
        self, trial: optuna.Trial, metric: str, before: Sequence[float] = (), steps: int = 0
    ) -> None:
        self.trial, self.metric, self.before, self.first = trial, metric, tuple(before), steps
        self.sign = -1.0 if lower_is_better(metric) else 1.0
        self.values: dict[int, float] = {}  # by round
        self.ended, self.rounds = False, 0
        self.known = set(trial.storage.get_trial(trial._trial_id).intermediate_values)

    @property
    def steps(self) -> int:
        """How often the trial was evaluated."""
        return self.first + len(self.values)

    def started(self, facts: Facts) -> None:
        """Take note of what a run that goes on has measured."""
        self.recorded(facts.history)

    def recorded(self, records: Sequence[Record]) -> None:
        """Take note of a round.

        Raises:
            EndRun: the trial falls behind.
        """
        self.rounds = max([self.rounds, *(r.round for r in records)])
        new = {
            r.round: r.value
            for r in records
            if (r.split, r.metric, r.client) == ("valid", self.metric, None) and r.round not in self.values
        }
        for round in sorted(new):
            self.values[round] = new[round]
            finite = [self.sign * v for v in self.values.values() if math.isfinite(v)]
            if finite and self.steps - 1 not in self.known:
                seeds = [*self.before, self.sign * max(finite)]
                self.trial.report(math.fsum(seeds) / len(seeds), self.steps - 1)
                self.known.add(self.steps - 1)
        if new and self.steps - 1 == max(self.known, default=-1) and self.trial.should_prune():
            self.ended = True
            raise EndRun

    def finished(self, how: str) -> None:
        """Do nothing: who runs the trial tells Optuna of its end."""
