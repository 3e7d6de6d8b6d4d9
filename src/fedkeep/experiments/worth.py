"""What personalisation was worth: finished runs, compared from their folders alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.analyses import write_analyses
from fedkeep.experiments.counting import counting_side
from fedkeep.metrics import CLASS_METRICS
from fedkeep.report.groups import Configuration, configurations
from fedkeep.report.pairing import own_side, reference_side
from fedkeep.report.runs import read_run
from fedkeep.report.worth import Comparison, comparisons, limits, recognised, sentences, subjects, tenths


def worth_of(
    runs: Sequence[Path],
    against: Sequence[Path] = (),
    metric: str | None = None,
    *,
    references: bool = False,
    data_folder: Path | None = None,
) -> list[Comparison]:
    """Compare personalised models with references, on the same test examples.

    Each model is taken at its round that was best on validation. Runs that differ in their seed only are one model. Its
    references are the shared part alone, where the runs kept that (``evaluate_shared``), and ``against``; where that is
    empty, those among ``runs`` that are FedAvg, local training, or FedAvg with fine-tuning.

    Args:
        runs: folders of runs.
        against: folders of the references' runs, with the same seeds.
        metric: ``accuracy`` or ``loss``; None: accuracy, for a regression the loss.
        references: compare with counting too, see ``fedkeep.experiments.counting``. It reads the data; what it finds is
            kept in the folder of a model's first run, for its page.
        data_folder: the folder of real data, for ``references``.

    Raises:
        RunError: a folder holds no run, or something in it is damaged.
        ConfigError: data, test examples or seeds differ, the metric has no value for a single example, or there is
            nothing to compare with.
    """
    if metric in CLASS_METRICS:
        raise ConfigError(
            f"{metric} has no value for a single example, so no user is told apart by it. Choose accuracy or loss; "
            f"gains in {metric} over all examples stand in fedkeep report and in --json, of runs with "
            f"run.metrics = ['{metric}']."
        )
    groups = configurations([read_run(Path(folder)) for folder in runs])
    named = [reference_side(g) for g in configurations([read_run(Path(folder)) for folder in against])]
    found: list[Comparison] = []
    for group in groups if named else _personal(groups):
        own = own_side(group)
        others, faults = (named, []) if named else recognised(group, groups)
        counting = [counting_side(own, data_folder)] if references else []
        more, not_made = comparisons(own, [*others, *counting], metric)
        if faults or not_made:
            raise ConfigError([*faults, *not_made][0])
        if references:
            write_analyses(
                group.runs[0].folder, {"counting": _form([c for c in more if c.reference == "counting"])}
            )
        found += more
    return found


def _form(found: Sequence[Comparison]) -> dict[str, Any]:
    """Return comparisons with counting as a table in the form that reports read."""
    rows = [[c.title, " ".join((*sentences(c), *tenths(c), *limits(c.found)))] for c in found]
    note = (
        "Counting predicts a user's most frequent training label, of a regression the mean, of a ranking what all "
        "users took most often; it learns nothing else."
    )
    return {
        "title": "Against counting",
        "note": note,
        "columns": ["model", "what it was worth"],
        "rows": rows,
    }


def _personal(groups: Sequence[Configuration]) -> list[Configuration]:
    found = subjects(groups)
    if not found:
        raise ConfigError(
            f"None of these runs personalises: {', '.join(g.label for g in groups)}. Name a run of another method, or "
            f"what to compare with by --against RUN."
        )
    return found
