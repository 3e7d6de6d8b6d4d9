"""What personalisation was worth: finished runs, compared from their folders alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedkeep.core.errors import ConfigError
from fedkeep.report.groups import Configuration, configurations
from fedkeep.report.runs import read_run
from fedkeep.report.worth import Comparison, comparisons, recognised, subjects


def worth_of(
    runs: Sequence[Path], against: Sequence[Path] = (), metric: str | None = None
) -> list[Comparison]:
    """Compare personalised models with references, on the same test examples.

    Each model is taken at its round that was best on validation. Runs that differ in their seed only are one model. Its
    references are the shared part alone, where the runs kept that (``evaluate_shared``), and ``against``; where that is
    empty, those among ``runs`` that are FedAvg, local training, or FedAvg with fine-tuning.

    Args:
        runs: folders of runs.
        against: folders of the references' runs, with the same seeds.
        metric: ``accuracy`` or ``loss``; None: accuracy, for a regression the loss.

    Raises:
        RunError: a folder holds no run, or something in it is damaged.
        ConfigError: data, test examples or seeds differ, the metric has no value for a single example, or there is
            nothing to compare with.
    """
    groups = configurations([read_run(Path(folder)) for folder in runs])
    named = configurations([read_run(Path(folder)) for folder in against])
    found: list[Comparison] = []
    for group in groups if named else _personal(groups):
        more, faults = comparisons(group, named or recognised(group, groups), metric)
        if faults:
            raise ConfigError(faults[0])
        found += more
    return found


def _personal(groups: Sequence[Configuration]) -> list[Configuration]:
    found = subjects(groups)
    if not found:
        raise ConfigError(
            f"None of these runs personalises: {', '.join(g.label for g in groups)}. Name a run of another method, or "
            f"what to compare with by --against RUN."
        )
    return found
