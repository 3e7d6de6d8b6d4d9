"""The forms of what a report reads, checked by pydantic: ``run.json``, and analyses as the package's docstring says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedkeep.core.errors import RunError

Number = float | None
"""Null where it is not known."""
Count = Annotated[int, Field(ge=0)]
Change = Annotated[list[Number], Field(min_length=3, max_length=3)]


class Form(BaseModel):
    """An object whose fields have exactly these kinds; it may hold more."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class Analysis(Form):
    """What every analysis may carry."""

    title: str = ""
    note: str = ""


class Point(Form):
    """A user on a map."""

    client: str
    x: float
    y: float
    value: Number = None
    n: Number = None


class CategoricalPoint(Point):
    """One whose trait is a name, or a number that stands for one."""

    trait: str | int | None = None


class ContinuousPoint(Point):
    """One whose trait is a quantity."""

    trait: Number = None


P = TypeVar("P", bound=Point)


class Panel(Form, Generic[P]):
    """A map of users."""

    name: str
    points: list[P]
    numbers: dict[str, Number] = {}


class CategoricalMap(Analysis):
    """``embedding_map`` by names."""

    trait_kind: Literal["categorical", "continuous"] = "categorical"
    linear_cka: Number = None
    panels: list[Panel[CategoricalPoint]]


class ContinuousMap(Analysis):
    """``embedding_map`` by a quantity."""

    linear_cka: Number = None
    panels: list[Panel[ContinuousPoint]]


class Curve(Form):
    """A way of ``cold_start``, a value for each k."""

    name: str = ""
    mean: list[Number]
    std: list[Number] | None = None


class ColdStart(Analysis):
    """``cold_start``."""

    k: list[Count | Literal["all"]]
    metric: str = "accuracy"
    users: Number = None
    mean: list[Number] | None = None
    std: list[Number] | None = None
    series: list[Curve] | None = None
    changes: list[Change | None] | None = None

    @model_validator(mode="after")
    def _has_a_value_for_each_k(self) -> Self:
        curves = [Curve(mean=self.mean or [], std=self.std)] if self.series is None else self.series
        columns = [values for c in curves for values in (c.mean, c.std)] + [self.changes]
        if any(values is not None and len(values) != len(self.k) for values in columns):
            raise ValueError(f"wanted {len(self.k)} values of each curve and of changes, one for each k")
        return self


class AggregationTime(Analysis):
    """``aggregation_time``."""

    cohort: list[Number]
    seconds: list[Number]

    @model_validator(mode="after")
    def _has_pairs(self) -> Self:
        if len(self.cohort) != len(self.seconds):
            raise ValueError(
                f"wanted {len(self.cohort)} seconds, as many as cohorts; got {len(self.seconds)}"
            )
        return self


class PlainTable(Analysis):
    """Any other analysis."""

    columns: list[Any]
    rows: list[list[Any]]

    @model_validator(mode="after")
    def _has_full_rows(self) -> Self:
        if wrong := [i for i, row in enumerate(self.rows) if len(row) != len(self.columns)]:
            raise ValueError(f"wanted rows of {len(self.columns)} cells; row {wrong[0]} has other")
        return self


FORMS: dict[str, type[Analysis]] = {"cold_start": ColdStart, "aggregation_time": AggregationTime}


class Dealing(Form):
    """How many examples of each class each client got, (clients, classes), and which clients opted out."""

    clients: list[Any]
    classes: list[Any]
    counts: list[list[Count]]
    opted_out: list[Count]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        clients, classes = len(self.clients), len(self.classes)
        if len(self.counts) != clients or any(len(row) != classes for row in self.counts):
            raise ValueError(f"wanted {classes} counts for each of {clients} clients")
        if any(client >= clients for client in self.opted_out):
            raise ValueError(f"there are {clients} clients; who opted out is none of them")
        return self


class Parameter(Form):
    """A line of ``split_table``."""

    name: Any
    half: Any
    bytes: float = 0


class Info(Form):
    """What ``run.json`` may hold under keys that a report reads; null where it is not known."""

    environment: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    identity: dict[str, Any] | None = None
    initial: dict[str, Any] | None = None
    analyses: list[Any] | None = None
    bytes_down: Number = None
    bytes_up: Number = None
    best: Number = None
    best_global: Number = None
    partition_counts: Dealing | None = None
    split_table: list[Parameter] | None = None


def check_analyses(content: dict[str, Any], file: Path) -> None:
    """Check the form of analyses, by name.

    Raises:
        RunError: names the file and the place.
    """
    for name, analysis in content.items():
        form = FORMS.get(name, PlainTable)
        if name == "embedding_map":
            continuous = isinstance(analysis, dict) and analysis.get("trait_kind") == "continuous"
            form = ContinuousMap if continuous else CategoricalMap
        check(form, analysis, file, name)


def check(form: type[Form], content: Any, file: Path, name: str = "") -> None:
    """Check the form of what stands in a file under a name.

    Raises:
        RunError: names the file and the place.
    """
    try:
        form.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = _place(name, first["loc"], content).removeprefix(".")
        raise RunError(
            "{file} is damaged: {place}: {fault}", file=file, place=place, fault=first["msg"]
        ) from error


def _place(name: str, loc: tuple[int | str, ...], here: Any) -> str:
    """Return where in the file a fault is: pydantic's path, without the kinds that a value might have had."""
    for part in loc:
        if isinstance(part, int):
            name, here = f"{name}[{part}]", here[part]
        elif isinstance(here, dict):
            name, here = f"{name}.{part}", here.get(part)
    return name
