"""The best epoch, by hand."""

from __future__ import annotations

import math

from fedkeep.core.records import Record
from fedkeep.experiments.learned import summarize


def history(metric: str, valid: list[float], test: list[float]) -> list[Record]:
    lines = []
    for t, (v, w) in enumerate(zip(valid, test, strict=True), start=1):
        lines.append(Record(t, t / 2, "train", None, "loss", 9.0, 1))
        lines.append(Record(t, t / 2, "valid", None, metric, v, 4))
        lines.append(Record(t, t / 2, "test", None, metric, w, 5))
        lines.append(Record(t, t / 2, "test", None, "loss", float(t), 5))
        lines.append(Record(t, t / 2, "test", "somebody", metric, 1.0, 1))
    return lines


def test_the_best_on_valid_is_shown_on_test_the_earliest_of_equals() -> None:
    found = summarize(history("accuracy", [0.1, 0.7, 0.5, 0.7], [0.9, 0.3, 0.8, 0.2]), "accuracy")
    assert (found.round, found.epoch, found.value) == (2, 1.0, 0.3)
    assert found.valid == {"accuracy": 0.7}
    assert found.test == {"accuracy": 0.3, "loss": 2.0}


def test_an_error_is_best_where_it_is_least() -> None:
    found = summarize(history("rmse", [3.0, 2.0, math.nan], [1.0, 4.0, 5.0]), "rmse", lower_is_better=True)
    assert (found.round, found.value) == (2, 4.0)


def test_without_valid_the_last_evaluation_counts() -> None:
    records = [r for r in history("accuracy", [0.9, 0.1], [0.4, 0.6]) if r.split != "valid"]
    found = summarize(records, "accuracy")
    assert (found.round, found.value) == (2, 0.6)


def test_nothing_judged() -> None:
    assert summarize([Record(1, 1.0, "train", None, "loss", 1.0, 1)], "accuracy") is None


def test_a_metric_that_was_not_measured_is_nan() -> None:
    found = summarize(history("accuracy", [0.9], [0.4]), "auc")
    assert math.isnan(found.value)
