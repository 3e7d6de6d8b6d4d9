"""What a sweep has found: for each method the best setting by ``valid``, its test values, and what was spent."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeep.core.files import expanded, write_whole
from fedkeep.core.records import read_records
from fedkeep.experiments.drive import ADAPTED
from fedkeep.experiments.forecast import JobStatus, read_status
from fedkeep.experiments.learned import summarize
from fedkeep.experiments.places import State
from fedkeep.experiments.run_directory import in_use
from fedkeep.experiments.sources import data_folder, located
from fedkeep.experiments.sweeps.plan import JOURNAL, Sweep
from fedkeep.experiments.sweeps.trials import best_of, trial_folder
from fedkeep.experiments.toml import value_text
from fedkeep.report.page import finite
from fedkeep.report.text_tables import TextTable, mean_std, to_csv, to_markdown
from fedkeep.report.wording import count, duration, lower_is_better, metric_inline, spread
from fedkeep.version import NUMERICS

if TYPE_CHECKING:
    import optuna

    from fedkeep.experiments.config import Config


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one method's trials have found.

    Attributes:
        method: its name.
        number: the best trial's, from 0; None: no trial came to its end.
        values: its settings, by dotted key.
        valid, test: its metric with each seed, at the epoch that is best on ``valid``.
        finished, ended, diverged: how many trials came to their end, were ended early, diverged.
        rounds, seconds: of all trials.
        trials: all of them, as plain data.
    """

    method: str
    number: int | None
    values: Mapping[str, Any]
    valid: Sequence[float]
    test: Sequence[float]
    finished: int
    ended: int
    diverged: int
    rounds: int
    seconds: float
    trials: Sequence[Mapping[str, Any]]


def results(sweep: Sweep) -> list[Result]:
    """Return what is found; of the chosen settings alone, test values are read, here and nowhere else."""
    return [_result(sweep, method) for method in sweep.configs]


def _result(sweep: Sweep, method: str) -> Result:
    trials = sweep.study(method).get_trials(deepcopy=False)
    best = best_of(sweep, trials)
    plain: list[dict[str, Any]] = [
        {
            "number": t.number,
            "state": _state(t),
            "value": t.value if t.state.name == "COMPLETE" else None,
            **{key: t.user_attrs.get(key) for key in ("values", "valid", "rounds", "seconds", "diverged")},
        }
        for t in trials
    ]
    states = [one["state"] for one in plain]
    spent: dict[str, Any] = {
        "rounds": sum(one["rounds"] or 0 for one in plain),
        "seconds": sum(one["seconds"] or 0.0 for one in plain),
    }
    return Result(
        method=method,
        number=None if best is None else best.number,
        values={} if best is None else best.user_attrs["values"],
        valid=[] if best is None else best.user_attrs["valid"],
        test=[] if best is None else _test(sweep, method, best.number),
        finished=states.count("finished"),
        ended=states.count("ended early"),
        diverged=states.count("diverged"),
        trials=plain,
        **spent,
    )


def status(sweep: Sweep, states: Mapping[str, State]) -> list[JobStatus]:
    """Return how the trials stand.

    Args:
        sweep: which.
        states: of trials that run elsewhere, by their jobs' names, as of ``Place.states``; a trial that has begun has a number
            of its own, so jobs are told that wait or failed.
    """
    runs = "running" in states.values() or (sweep.out.exists() and in_use(sweep.out))
    jobs, there = list[JobStatus](), (sweep.out / JOURNAL).exists()
    for method, seconds in sweep.ahead.items():
        new = JobStatus(name=method, kind=method, least=seconds * len(sweep.seeds))
        trials = sweep.study(method).get_trials(deepcopy=False) if there else []
        jobs += [_status(sweep, replace(new, name=f"{method}-{t.number}"), t, runs) for t in trials]
        sent = [
            (j, state) for j, state in states.items() if j.startswith(f"{method}, ") and state != "running"
        ]
        jobs += [replace(new, name=job, state=state) for job, state in sent]
        numbers = range(len(trials) + sum(state == "waiting" for _, state in sent), sweep.trials)
        jobs += [replace(new, name=f"{method}-{number}") for number in numbers]
    return jobs


def _status(sweep: Sweep, job: JobStatus, trial: optuna.trial.FrozenTrial, runs: bool) -> JobStatus:
    if trial.state.is_finished():
        rounds, seconds = (trial.user_attrs.get(name, 0) for name in ("rounds", "seconds"))
        return replace(job, state=_state(trial), done=rounds, total=rounds, seconds=seconds)
    folder = trial_folder(sweep, job.kind, trial.number)
    folders = [folder / f"seed-{seed}" for seed in sweep.seeds]
    return read_status(job, lambda: "running" if runs else "stopped", folders)


def _state(trial: optuna.trial.FrozenTrial) -> str:
    return "diverged" if "diverged" in trial.user_attrs else _STATES.get(trial.state.name, "running")


_STATES = {"COMPLETE": "finished", "PRUNED": "ended early"}


def _test(sweep: Sweep, method: str, number: int) -> list[float]:
    """Return the test values of a trial, after adapting where that was judged."""
    found = []
    for seed in sweep.seeds:
        path = trial_folder(sweep, method, number) / f"seed-{seed}" / "records.jsonl"
        records = list(read_records(path))
        best = summarize(records, sweep.metric, lower_is_better(sweep.metric))
        adapted = {
            r.round: r.value
            for r in records
            if (r.split, r.metric, r.client) == (ADAPTED, sweep.metric, None)
        }
        value = math.nan if best is None else adapted.get(best.round, best.value)
        found.append(value)
    return found


def table(sweep: Sweep, found: Sequence[Result]) -> TextTable:
    """Return the results as a table; what every method was given stands below it."""
    metric = metric_inline(sweep.metric)
    rows = [
        (
            r.method,
            ", ".join(f"{key} = {_short(value)}" for key, value in r.values.items()) or "none finished",
            spread(*mean_std(r.valid), sweep.metric),
            spread(*mean_std(r.test), sweep.metric),
            f"{len(r.trials)}: {r.finished} finished, {r.ended} ended early, {r.diverged} diverged",
            f"{r.rounds:,}",
            duration(r.seconds),
        )
        for r in found
    ]
    trials = count(max(len(r.trials) for r in found), "trial")
    seeds = f"seed{'s' if len(sweep.seeds) > 1 else ''} {', '.join(map(str, sweep.seeds))}"
    note = (
        f"Every method had {trials}, each with the {seeds}. Chosen by {metric} on valid, at each run's best epoch; it "
        f"is the best of many, so it flatters. Test values were read once, at the end, of the chosen settings alone."
    )
    if len(sweep.seeds) > 1:
        note += f" ± is the sample standard deviation over {len(sweep.seeds)} seeds."
    note = " ".join([note, *filter(None, map(_unfinished, found))])
    columns = ("method", "chosen", f"valid {metric}", f"test {metric}", "trials", "rounds", "time")
    return TextTable(columns, tuple(rows), note=note, left=2)


def _unfinished(r: Result) -> str:
    """Say why no trial of a method came to its end; empty where one did, or none diverged."""
    why = [one["diverged"] for one in r.trials if one["diverged"]]
    if r.number is not None or not why:
        return ""
    return f"No trial of {r.method} came to its end; the last that diverged: {why[-1]}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value_text(value)


def best_name(method: str) -> str:
    """Return the name of the file with a method's best settings; no system minds it."""
    return f"best-{method.replace(':', '-')}.toml"


def found_beside(config: Config, folder: Path | None, out: Path) -> Config:
    """Return a configuration that, as a file in ``out``, finds the data that it found in ``folder`` so far.

    Relative paths of data and word vectors become relative to ``out``, but for those in FEDKEEP_DATA's folder, which is
    looked up from everywhere.
    """
    if folder is None or folder == data_folder(None):
        return config

    def moved(table: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, str]:
        places = {key: table[key] for key in keys if isinstance(table.get(key), str)}
        return {
            key: Path(os.path.relpath(located(key, place, folder), out.resolve())).as_posix()
            for key, place in places.items()
            if not expanded(place).is_absolute()
        }

    data = config.data.model_copy(update=moved(config.data.options, ("path", "folder", "test_path")))
    model = config.model.model_copy(update=moved(dict(config.model), ("word_vectors",)))
    return config.model_copy(update={"data": data, "model": model})


def write(sweep: Sweep, found: Sequence[Result]) -> Path:
    """Write ``results.md``, ``.csv`` and ``.json``, and ``best-METHOD.toml``; return the path of the first.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    out = sweep.out
    for r in found:
        if r.number is not None:
            config = found_beside(sweep.config(r.method, r.values), sweep.folder, out)
            said = (
                f"# Chosen by fedkeep sweep: the best of {len(r.trials)} trials by {sweep.metric} on valid.\n"
            )
            write_whole(out / best_name(r.method), (said + config.to_toml()).encode())
    keys = list(dict.fromkeys(key for space in sweep.spaces.values() for key in space.ranges))
    rows = [
        {
            "method": r.method,
            "metric": sweep.metric,
            **dict(
                zip(
                    ("valid", "valid_sd", "test", "test_sd"),
                    (*mean_std(r.valid), *mean_std(r.test)),
                    strict=True,
                )
            ),
            "seeds": len(sweep.seeds),
            "trials": len(r.trials),
            "finished": r.finished,
            "ended_early": r.ended,
            "diverged": r.diverged,
            "rounds": r.rounds,
            "seconds": round(r.seconds, 1),
            **{key: r.values.get(key) for key in keys},
        }
        for r in found
    ]
    write_whole(out / "results.csv", to_csv(rows).encode())
    content = {
        "metric": sweep.metric,
        "trials": sweep.trials,
        "seeds": list(sweep.seeds),
        "prune": sweep.prune,
        "numerics": NUMERICS,
        "space": sweep.about()["space"],
        "methods": [
            {
                "method": r.method,
                "best": r.number,
                "values": r.values,
                "valid": list(r.valid),
                "test": [v if math.isfinite(v) else None for v in r.test],
                "rounds": r.rounds,
                "seconds": round(r.seconds, 1),
                "trials": list(r.trials),
            }
            for r in found
        ],
    }
    write_whole(
        out / "results.json",
        (json.dumps(finite(content, value_text), indent=1, allow_nan=False) + "\n").encode(),
    )
    path = out / "results.md"
    write_whole(path, ("# Sweep\n\n" + to_markdown(table(sweep, found))).encode())
    return path
