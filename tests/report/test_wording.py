import math

import pytest

from fedkeep.report import wording


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [
        (0.6241, "accuracy", "62.4 %"),
        (0.5, "auc/topic", "50.0 %"),
        (math.nan, "accuracy", "–"),
        (None, "loss", "–"),
        (1.23456, "loss", "1.23"),
        (-0.25, "silhouette", "−0.25"),
        (12345.6, "", "12,346"),
        (999.4, "", "999"),
        (999.6, "", "1,000"),
        (0.00012, "", "0.00012"),
        (7.0, "", "7"),
        (1e32, "loss", "1e+32"),
        (-2.5e15, "loss", "−2.5e+15"),
        (123456789.0, "", "123,456,789"),
    ],
)
def test_numbers(value: float | None, metric: str, text: str) -> None:
    assert wording.number(value, metric) == text


def test_spread_and_difference() -> None:
    assert wording.spread(0.6241, 0.0123, "accuracy") == "62.4 ± 1.2 %"
    assert wording.spread(0.6241, None, "accuracy") == "62.4 %"
    assert wording.spread(2.5, 0.125, "loss") == "2.5 ± 0.125"
    assert wording.difference(-0.0517, "accuracy") == "−5.2 points"
    assert wording.difference(0.0372, "accuracy", 2) == "+3.72 points"
    assert wording.difference(-0.0001, "accuracy") == "0.0 points"
    halves = (0.2125, math.nextafter(0.2125, 0), math.nextafter(0.2125, 1), 0.7 - 0.4875)
    assert {wording.difference(half, "accuracy") for half in halves} == {"+21.2 points"}
    assert {wording.number(half, "accuracy") for half in halves} == {"21.2 %"}
    assert wording.difference(0.5, "loss") == "+0.5"
    assert wording.difference(None) == "–"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (86_216, "86.2 kB"), (999_960, "1.0 MB"), (None, "–")],
)
def test_sizes(nbytes: float | None, text: str) -> None:
    assert wording.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00034, "340 µs"),
        (0.0123, "12.3 ms"),
        (4.21, "4.2 s"),
        (59.99, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
        (math.nan, "–"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


def test_names() -> None:
    assert wording.metric_name("accuracy_user_mean/topic") == "Accuracy, mean over users of topic"
    assert wording.metric_inline("auc") == "AUC"
    assert wording.metric_inline("accuracy") == "accuracy"
    assert wording.user_mean("accuracy/topic") == "accuracy_user_mean/topic"
    assert wording.lower_is_better("loss/topic")
    assert not wording.lower_is_better("accuracy")
    assert wording.count(1, "user") == "1 user"
    assert wording.count(1200, "user") == "1,200 users"


def test_what_does_not_print_is_spelled_out() -> None:
    assert wording.printable("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
