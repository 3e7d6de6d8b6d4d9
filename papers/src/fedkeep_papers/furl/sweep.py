"""The learning rates of FURL's Table 3, swept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedkeep.experiments.reproductions import Request
from fedkeep.experiments.run_directory import read_info
from fedkeep.version import NUMERICS
from fedkeep_papers.furl import jobs
from fedkeep_papers.furl.jobs import JobSpec
from fedkeep_papers.furl.scenes import SWEPT, changes_of, read, result_name, specs_of
from fedkeep_papers.kit.cells import Finished, runs_of
from fedkeep_papers.kit.results import Row, over_seeds, write_results

FACTORS = (0.25, 0.5, 1.0, 2.0)


def sweep(request: Request) -> Path:
    """Multiply all learning rates of every configuration; the value is the best epoch's metric on ``valid``.

    Raises:
        DataError: the folder of data is not named.
        ConfigError: runs are chosen that it does not have.
    """
    runs = runs_of(request.out) / f"furl-sweep-{request.scale}"
    lines: dict[tuple[str, str], dict[float, dict[int, JobSpec]]] = {}
    for scene in SWEPT:
        source = read(scene, request).meta.get("source", {})
        for (name, seed), spec in specs_of(scene, request, runs, source).items():
            line = lines.setdefault((scene.name, name), {factor: {} for factor in FACTORS})
            for factor in FACTORS:
                line[factor][seed] = _multiplied(spec, factor)
    specs = [spec for line in lines.values() for of_seeds in line.values() for spec in of_seeds.values()]
    request.check([spec.name for spec in specs])

    def write() -> Path:
        metrics = {scene.name: scene.metric for scene in SWEPT}
        rows, best = [], []
        for (scene, name), line in lines.items():
            own = [
                _row(scene, f"{name}, rates × {factor:g}", metrics[scene], of_seeds, request.scale)
                for factor, of_seeds in line.items()
            ]
            rows += own
            values = [row.value for row in own if row.value is not None]
            first = [row for row in own if values and row.value == max(values)]
            best += first if len(first) == 1 else []
        _, markdown = write_results(
            request.out,
            result_name("furl-sweep", request.scale),
            rows,
            title="FURL: learning rates swept",
            preamble=_preamble(request.scale, best),
        )
        return markdown

    jobs.run_jobs(
        [s for s in specs if request.wants(s.name)], request.jobs, request.progress, write, request.on
    )
    return write()


def _multiplied(spec: JobSpec, factor: float) -> JobSpec:
    """Return a run with all learning rates of its clients multiplied, those by name too."""
    optimizer = spec.resolved().method.optimizer
    assert optimizer is not None  # the papers' configurations name all
    rates = ", ".join(f"{json.dumps(name)} = {rate * factor!r}" for name, rate in optimizer.rates)
    changed = (
        ("method.optimizer.learning_rate", repr(optimizer.learning_rate * factor)),
        ("method.optimizer.rates", f"{{ {rates} }}"),
    )
    name = jobs.folder_name(spec.name, "rates", f"{factor:g}")
    return replace(spec, overrides=(*spec.overrides, *changed), name=name)


def _row(scene: str, method: str, metric: str, specs: Mapping[int, JobSpec], scale: str) -> Row:
    """Return the row of the runs that are finished; one that broke down has no value."""
    found = {seed: _finished(spec.folder) for seed, spec in specs.items() if jobs.is_finished(spec.folder)}
    return over_seeds(
        scene,
        method,
        metric,
        {seed: f.result.valid for seed, f in found.items()},
        found.values(),
        scale=scale,
    )


def _finished(folder: Path) -> Finished[jobs.Outcome]:
    """Return what a run left; it is of today's numerics, as its folder is."""
    commit = (read_info(folder).get("environment") or {}).get("commit") or ""
    return Finished(result=jobs.outcome(folder), numerics=NUMERICS, commit=commit)


def _preamble(scale: str, best: Sequence[Row]) -> str:
    text = """
The learning rates of every packaged configuration, those by name too, times 1/4, 1/2, 1 and 2. The value is the best
epoch's metric on the validation examples. A run that broke down (its loss became NaN) has no value. Rates that are
best in a short run need not be best in a long one.

What the scale changes in the configurations:
"""
    text += "".join(f"\n- {scene.name}: {changes_of(scene, scale)}" for scene in SWEPT)
    return (
        text + "\n\nBest here, where one was:\n" + "".join(f"\n- {row.scene}: {row.method}" for row in best)
    )
