"""The curve of fine-tuning: each client's test accuracy while a copy of its whole model is trained further.

Source: KTEPS (arXiv 2107.11956), §5.3: after the last round, shared and private parameters are fine-tuned on each client
with the method's own loss, a fresh optimiser and a small learning rate; every few steps its test accuracy is taken. Nothing
is uploaded, and the run is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.files import write_of_run
from fedkeep.core.records import Record, read_sealed_records, sealed_records
from fedkeep.core.run_files import read_info
from fedkeep.data import FederatedData
from fedkeep.data.ids import SomeIds
from fedkeep.engines.adapt import FineTuning
from fedkeep.experiments.personalize.cold_start import labels_of
from fedkeep.experiments.progress import make_progress
from fedkeep.methods.base import Predict
from fedkeep.metrics.scores import Personalized, ap
from fedkeep.tasks import tasks_in

if TYPE_CHECKING:
    from fedkeep.experiments.run import Run

SPLIT = "personalization"
FILE = "personalization.jsonl"
OWN = "own"
"""The name of the method's own prediction among several."""


@dataclass(frozen=True)
class Curves:
    """Test accuracies while each client is fine-tuned.

    Attributes:
        steps: mini-batches before each test: 0, every, 2·every, …
        accuracy: by prediction, then by client, one value for each of ``steps``.
        examples: test examples with a label of the first task, by client; of tokens their number.
        round, epoch: of the run when it was fine-tuned.
    """

    steps: tuple[int, ...]
    accuracy: Mapping[str, Mapping[str, tuple[float, ...]]]
    examples: Mapping[str, int]
    round: int
    epoch: float

    def scores(self, predict: str = OWN) -> Personalized:
        """Return Ap of a prediction."""
        return ap(self.accuracy[predict])

    def records(self) -> list[Record]:
        """Return the whole curves: a line per client, step and prediction, split ``personalization/STEP``."""
        lines = []
        for predict, curves in self.accuracy.items():
            metric = "accuracy" if predict == OWN else f"accuracy/{predict}"
            for place, step in enumerate(self.steps):
                where = f"{SPLIT}/{step}"
                for client, curve in curves.items():
                    lines.append(
                        Record(
                            self.round, self.epoch, where, client, metric, curve[place], self.examples[client]
                        )
                    )
        return lines


def personalization_curve(
    run: Run,
    tuning: FineTuning = FineTuning(),
    *,
    predicts: Mapping[str, Predict] | None = None,
    clients: Iterable[str | int] | None = None,
    split: str = "test",
    progress: bool | None = None,
) -> Curves:
    """Fine-tune every client from the run's present state, and test it before, on the way and after.

    Args:
        run: a finished run; it is not changed.
        tuning: how.
        predicts: further ways to predict that are tested at the same steps, by name.
        clients: their ids; by default of all in federation. Those without examples that have a label of the first task
            are left out.
        split: the examples that clients are tested on; ``"valid"`` to choose among methods.
        progress: as for ``simulate``.

    Raises:
        ConfigError: no client has labelled examples to test on, or the task has no classes.
        NonFiniteError: fine-tuning broke down to NaN; names the client.
    """
    check_task(run.data)
    task, named = tasks_in(run.data.meta)[0], run.members(clients).positions
    labels = [
        len(labels_of(run.data, task, np.asarray(run.data.rows(int(c), split), np.int64))) for c in named
    ]
    examples = {str(run.data.ids[c]): n for c, n in zip(named, labels, strict=True) if n}
    chosen = SomeIds(run.data.ids, named[np.array(labels, np.int64) > 0])
    if not len(chosen):
        raise ConfigError(
            "No client has {split} examples with a label of the first task, so there is no personalisation curve.",
            split=split,
        )
    ways = {OWN: run.method.predict, **(predicts or {})}
    found: dict[str, dict[str, tuple[float, ...]]] = {way: {} for way in ways}
    curves = run.local_device().curves(run.orders(chosen), tuning, ways, split)
    with make_progress(progress, "personalisation", len(chosen)) as bar:
        for number, (name, curve) in enumerate(zip(chosen, curves, strict=True), 1):
            for way, accuracies in curve.items():
                found[way][name] = accuracies
            bar.update(number, {})
    return Curves(tuning.tested, found, examples, run.round, run.epoch)


def check_task(data: FederatedData) -> None:
    """Raise ConfigError unless the data's task has an accuracy."""
    task = tasks_in(data.meta)[0]
    if not task.kind.has_classes:
        raise ConfigError(
            "The personalisation curve measures accuracy; this task is a {task}.", task=task.kind.name
        )


def add_curve(run: Run, tuning: FineTuning, progress: bool | None = None) -> None:
    """Add the curve's records to a run's history; with a folder, they are kept there and read when they exist.

    Raises:
        ConfigError, NonFiniteError: as for ``personalization_curve``.
        RunError: the file cannot be written or read, is damaged, or is of another run. One that was made after another
            round is made anew.
    """
    path = None if run.folder is None else run.folder / FILE
    about = {} if run.folder is None else {"run": read_info(run.folder)["run"], "round": run.round}
    if path is not None and path.exists():
        records, of = read_sealed_records(path)
        if of.get("run") != about["run"]:
            raise RunError(
                "{path} is of another run than run.json beside it. Delete it, or restore the run's own.",
                path=path,
            )
        if of.get("round") == run.round:
            run.history += records
            return
    records = personalization_curve(run, tuning, progress=progress).records()
    if path is not None:
        write_of_run(path, sealed_records(records, about))
    run.history += records


def scores_of(records: Iterable[Record]) -> Personalized | None:
    """Return Ap of the method's own prediction from the records of a curve; None where there are none."""
    curves: dict[str, dict[int, float]] = {}
    for r in records:
        split, _, step = r.split.partition("/")
        if split == SPLIT and r.metric == "accuracy" and r.client is not None:
            curves.setdefault(r.client, {})[int(step)] = r.value
    if not curves:
        return None
    return ap({client: [curve[step] for step in sorted(curve)] for client, curve in curves.items()})
