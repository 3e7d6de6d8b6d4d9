"""How numbers and names are written: the same in tables, on charts and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkeep.tasks import Metric

MISSING = "–"
BY_FIRST_TASK = "Of several tasks this is at the round that is best on valid by the first one."
"""What is kept by user or by example is of one round, whereas each task's results stand at a best round of its own."""
_NAMES = {
    "accuracy_ag": "Ag",
    "accuracy_ap": "Ap",
    "accuracy_ap_last": "Ap, last test",
    "accuracy_ap_max": "Ap, each client's best test",
    "balanced_accuracy_user_mean": "Balanced accuracy, mean over users",
    "macro_f1": "Macro-F1",
    "macro_f1_user_mean": "Macro-F1, mean over users",
    "mean_iou": "Mean IoU",
    "mean_iou_user_mean": "Mean IoU, mean over users",
    "knn_agreement": "k-NN agreement",
    "chance_agreement": "agreement by chance",
    "knn_r2": "k-NN R²",
    "linear_cka": "linear CKA",
}
_OF_LISTS = {"hr": "HR", "ndcg": "NDCG", "recall": "Recall", "mrr": "MRR"}
"""Metrics of lists of items: ``ndcg@10``, and ``mrr`` of the whole list."""
_LOWER = ("loss", "error", "mse", "seconds", "bytes")
_FRACTIONS = (
    "accuracy_",
    "auc_",
    "balanced_accuracy",
    "macro_f1",
    "mean_iou",
    "knn_agreement",
    "chance_agreement",
)
_NO_PERCENT = ("silhouette", "linear_cka", "knn_r2")


@cache
def _of_tasks() -> dict[str, Metric]:
    """Return the metrics of tasks by name. Tables load torch, and not every command writes a metric."""
    from fedkeep.tasks import KINDS

    return {metric.name: metric for kind in KINDS.values() for metric in kind.shown}


def base(metric: str) -> str:
    """Return a metric's name without the task's: ``accuracy/topic`` -> ``accuracy``."""
    return metric.split("/", 1)[0]


def user_mean(metric: str) -> str:
    """Return the name of a metric's mean over users: ``accuracy/topic`` -> ``accuracy_user_mean/topic``."""
    name, slash, task = metric.partition("/")
    return f"{name}_user_mean{slash}{task}"


def is_fraction(metric: str) -> bool:
    """Say whether a metric is a fraction in [0, 1] that is written in percent."""
    name = base(metric)
    return (
        name.startswith(_FRACTIONS)
        or bool(_of_list(name))
        or (name in _of_tasks() and _of_tasks()[name].fraction)
    )


def _of_list(name: str) -> str:
    """Return a metric of a list of items for people: ``ndcg@10`` -> ``NDCG@10``; empty of another."""
    kind, at, k = name.partition("@")
    return _OF_LISTS[kind] + at + k if kind in _OF_LISTS else ""


def lower_is_better(metric: str) -> bool:
    """Say whether smaller values of a metric are better."""
    lower = (*_LOWER, *(name for name, of_task in _of_tasks().items() if of_task.lower))
    return any(base(metric) == word or base(metric).endswith("_" + word) for word in lower)


def metric_name(metric: str) -> str:
    """Return a metric's name for people: ``accuracy_user_mean`` -> ``Accuracy, mean over users``."""
    name, _, task = metric.partition("/")
    words = name.replace("_", " ")
    known = _of_tasks()[name].words if name in _of_tasks() else _NAMES.get(name) or _of_list(name)
    return (known or words[:1].upper() + words[1:]) + (f" of {printable(task)}" if task else "")


def metric_inline(metric: str) -> str:
    """Return a metric's name inside a sentence: ``accuracy``, ``AUC``."""
    return inline(metric_name(metric))


def inline(name: str) -> str:
    """Return a name inside a sentence: ``Squared error`` -> ``squared error``; ``HR@10`` stays."""
    return name if name[:2].isupper() else name[:1].lower() + name[1:]


def number(value: float | None, metric: str = "", digits: int = 1) -> str:
    """Write a value: a fraction metric as percent (``62.4 %``), anything else with three digits."""
    if value is None or not math.isfinite(value):
        return MISSING
    if is_fraction(metric):
        return _sign(f"{_percent(value):.{digits}f} %")
    if base(metric) in _NO_PERCENT:
        return _sign(f"{value:.2f}")
    return plain(value)


def plain(value: float) -> str:
    """Write any finite number with about three significant digits, and integers in full, up to 15 digits."""
    if abs(value) >= 1e15:
        return _sign(f"{value:.3g}")
    if value == int(value):
        return _sign(f"{int(value):,}")
    if abs(value) >= 999.5:  # three digits of it are 1e+03
        return _sign(f"{value:,.0f}")
    if abs(value) < 1e-3:
        return _sign(f"{value:.2g}")
    return _sign(f"{value:.3g}")


def on_axis(ticks: Sequence[float], metric: str = "") -> Callable[[float], str]:
    """Return how the round values at an axis are written: exactly, percent with no more decimals than that takes."""
    if not is_fraction(metric):
        return lambda value: _sign(f"{value:,.10g}")
    exact = (d for d in range(10) if all(abs(100 * t - round(100 * t, d)) < 1e-9 for t in ticks))
    return partial(number, metric=metric, digits=next(exact, 10))


def spread(mean: float | None, std: float | None, metric: str = "", digits: int = 1) -> str:
    """Write mean ± standard deviation, or the mean alone where there is no deviation."""
    text = number(mean, metric, digits)
    if text == MISSING or std is None or not math.isfinite(std):
        return text
    if is_fraction(metric):
        return f"{text.removesuffix(' %')} ± {_percent(std):.{digits}f} %"
    return f"{text} ± {number(std, metric)}"


def difference(value: float | None, metric: str = "", digits: int = 1) -> str:
    """Write a difference with its sign: in points for a fraction metric (``+3.1 points``)."""
    if value is None or not math.isfinite(value):
        return MISSING
    if is_fraction(metric):
        text = f"{_percent(value):+.{digits}f}"
        return _sign((text if float(text) else text[1:]) + " points")
    return _sign(("+" if value > 0 else "") + plain(value))


def interval(mean: float, low: float, high: float, metric: str = "") -> str:
    """Write a difference and its interval: ``+3.1 points (+1.9 to +4.3)``."""
    ends = [difference(end, metric).removesuffix(" points") for end in (low, high)]
    return f"{difference(mean, metric)} ({' to '.join(ends)})"


def size(nbytes: float | None) -> str:
    """Write bytes in powers of 1000: ``86.2 kB``."""
    if nbytes is None or not math.isfinite(nbytes):
        return MISSING
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 999.95 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:,.0f} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def duration(seconds: float | None) -> str:
    """Write a time: ``340 µs``, ``12 ms``, ``4.2 s``, ``3 min 05 s``, ``2 h 10 min``, ``12 days``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 0.0009995:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 3 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{plain(round(whole / 86400))} days"


def count(value: float, noun: str) -> str:
    """Write a number of things: ``1 user``, ``1,200 users``."""
    return f"{plain(value)} {noun}{'' if value == 1 else 's'}"


def printable(text: Any) -> str:
    """Return a value as one line of text; what doesn't print (line ends, terminal codes) is spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _percent(value: float) -> float:
    """Return a fraction in percent without its last digits: they hang on the order of a sum, and would round a half."""
    return round(100 * value, 9)


def _sign(text: str) -> str:
    return text.replace("-", "−")
