"""Reads and checks analyses.json; the package's docstring gives its form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkeep.core.errors import RunError
from fedkeep.core.sealed import read_sealed


def read_sealed_analyses(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the analyses, checked, and of which run and round they are; both empty where the file doesn't exist.

    Raises:
        RunError: the file is damaged or an analysis breaks the form; names the file and the place.
    """
    if not path.exists():
        return {}, {}
    content = read_sealed(path)
    about = content.pop("about", {})
    del content["format"]
    try:
        check_analyses(content)
    except ValueError as error:
        raise RunError(f"{path}: {error}.") from error
    return content, dict(about)


def check_analyses(content: Any) -> None:
    """Check the form of analyses; whoever writes analyses.json may call it first.

    Raises:
        ValueError: names the place, what was wanted and what was got.
    """
    if not isinstance(content, dict):
        raise ValueError(f"wanted an object of analyses, got {type(content).__name__}")
    checks = {"embedding_map": _check_map, "cold_start": _check_cold_start, "aggregation_time": _check_time}
    for name, analysis in content.items():
        if not isinstance(analysis, dict):
            raise ValueError(f"{name}: wanted an object, got {type(analysis).__name__}")
        for key in ("title", "note"):
            if not isinstance(analysis.get(key, ""), str):
                raise ValueError(f"{name}.{key}: wanted text, got {analysis[key]!r}")
        checks.get(name, _check_table)(name, analysis)


def _check_map(name: str, analysis: Mapping[str, Any]) -> None:
    kind = analysis.get("trait_kind", "categorical")
    if kind not in ("categorical", "continuous"):
        raise ValueError(f"{name}.trait_kind: wanted 'categorical' or 'continuous', got {kind!r}")
    _number(f"{name}.linear_cka", analysis.get("linear_cka"))
    for i, panel in enumerate(_list(name, analysis, "panels")):
        place = f"{name}.panels[{i}]"
        if not isinstance(panel, dict) or not isinstance(panel.get("name"), str):
            raise ValueError(f"{place}: wanted an object with a name and points")
        numbers = panel.get("numbers", {})
        if not isinstance(numbers, dict):
            raise ValueError(f"{place}.numbers: wanted an object, got {type(numbers).__name__}")
        for key, value in numbers.items():
            _number(f"{place}.numbers.{key}", value)
        for j, point in enumerate(_list(place, panel, "points")):
            _check_point(f"{place}.points[{j}]", point, kind)


def _check_point(place: str, point: Any, kind: str) -> None:
    if not isinstance(point, dict) or not isinstance(point.get("client"), str):
        raise ValueError(f"{place}: wanted an object with client, x, y and trait")
    for key in ("x", "y"):
        if point.get(key) is None:
            raise ValueError(f"{place}.{key}: wanted a number, got null")
        _number(f"{place}.{key}", point[key])
    for key in ("value", "n"):
        _number(f"{place}.{key}", point.get(key))
    if kind == "continuous":
        _number(f"{place}.trait", point.get("trait"))
    elif not isinstance(point.get("trait"), str | int | None):
        raise ValueError(f"{place}.trait: wanted text or an integer, got {point['trait']!r}")


def _check_cold_start(name: str, analysis: Mapping[str, Any]) -> None:
    k = _list(name, analysis, "k")
    for value in k:
        if value != "all" and (type(value) is not int or value < 0):
            raise ValueError(f"{name}.k: wanted numbers of examples or 'all', got {value!r}")
    if not isinstance(analysis.get("metric", "accuracy"), str):
        raise ValueError(f"{name}.metric: wanted text, got {analysis['metric']!r}")
    _number(f"{name}.users", analysis.get("users"))
    for i, series in enumerate(cold_start_series(analysis)):
        place = f"{name}.series[{i}]" if "series" in analysis else name
        if not isinstance(series, dict) or not isinstance(series.get("name", ""), str):
            raise ValueError(f"{place}: wanted an object with name, mean and std")
        for key in ("mean", "std"):
            if key == "mean" or series.get(key) is not None:
                _numbers(place, series, key, len(k))
    for i, change in enumerate(cold_start_changes(analysis)):
        if change is not None:
            _numbers(name, {f"changes[{i}]": change}, f"changes[{i}]", 3)
    if "changes" in analysis and len(analysis["changes"]) != len(k):
        raise ValueError(f"{name}.changes: wanted {len(k)} changes, got {len(analysis['changes'])}")


def cold_start_series(analysis: Mapping[str, Any]) -> list[Any]:
    """Return the curves of a cold-start analysis: its ``series``, or the one it is itself."""
    if "series" in analysis:
        return _list("cold_start", analysis, "series")
    return [{"name": "", "mean": analysis.get("mean"), "std": analysis.get("std")}]


def cold_start_changes(analysis: Mapping[str, Any]) -> list[Any]:
    """Return a cold-start analysis's changes from the k before, [mean, low, high] or None; empty where not measured."""
    return _list("cold_start", analysis, "changes") if "changes" in analysis else []


def _check_time(name: str, analysis: Mapping[str, Any]) -> None:
    cohort = _list(name, analysis, "cohort")
    _numbers(name, analysis, "cohort", len(cohort))
    _numbers(name, analysis, "seconds", len(cohort))


def _check_table(name: str, analysis: Mapping[str, Any]) -> None:
    if "columns" not in analysis or "rows" not in analysis:
        raise ValueError(
            f"{name}: not embedding_map, cold_start or aggregation_time, so it must be a table with columns and rows"
        )
    columns = _list(name, analysis, "columns")
    for i, row in enumerate(_list(name, analysis, "rows")):
        if not isinstance(row, list) or len(row) != len(columns):
            raise ValueError(f"{name}.rows[{i}]: wanted a list of {len(columns)} cells")


def _list(place: str, analysis: Mapping[str, Any], key: str) -> list[Any]:
    value = analysis.get(key)
    if not isinstance(value, list):
        raise ValueError(
            f"{place}.{key}: wanted a list, got {'nothing' if value is None else type(value).__name__}"
        )
    return value


def _numbers(place: str, analysis: Mapping[str, Any], key: str, length: int) -> None:
    values = _list(place, analysis, key)
    if len(values) != length:
        raise ValueError(f"{place}.{key}: wanted {length} numbers, got {len(values)}")
    for i, value in enumerate(values):
        _number(f"{place}.{key}[{i}]", value)


def _number(place: str, value: Any) -> None:
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise ValueError(f"{place}: wanted a number or null, got {value!r}")
