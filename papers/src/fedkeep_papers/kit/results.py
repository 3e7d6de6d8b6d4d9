"""The form of every reproduction: ``results/NAME.json``, a list of rows, and ``results/NAME.md`` made from it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.files import write_whole
from fedkeep.experiments.environment import commit
from fedkeep.report import text_tables, wording
from fedkeep.version import NUMERICS
from fedkeep_papers.kit.cells import Finished


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a reproduction, beside the published one: of the table that its file is named after, in the row
    ``method``, in the column of ``scene`` and ``metric``.

    Attributes:
        scene: the data set and how it is distributed, e.g. ``zulip_channels``.
        method: the configuration, e.g. ``Personalized FL``.
        metric: e.g. ``accuracy`` or ``auc``; accuracies and AUC are fractions.
        value: the mean over seeds; None where it was not run.
        std: the sample standard deviation over seeds; None with fewer than two.
        seeds: the seeds run.
        published: the paper's number in the same unit; None where it gives none.
        scale: how much was run, e.g. ``quick`` or ``full``.
        commit: the source's commits that computed its cells, sorted, with commas between; empty where none is known.
        numerics: the ``NUMERICS`` of that source, ascending; none where nothing ran.
        seconds: how long its cells took, together and as each of them says; None where one does not say it.
    """

    scene: str
    method: str
    metric: str
    value: float | None
    std: float | None
    seeds: tuple[int, ...]
    published: float | None
    scale: str
    commit: str
    numerics: tuple[int, ...]
    seconds: float | None
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if not all((self.scene, self.method, self.metric, self.scale)):
            raise ValueError("scene, method, metric and scale must be texts that are not empty")
        for name in ("value", "std", "published"):
            _check_number(name, getattr(self, name), self.metric)
        seeds = self.seeds
        if len(set(seeds)) != len(seeds):
            raise ValueError(f"seeds must differ; got {list(seeds)}")
        if (self.value is None) != (not seeds):
            raise ValueError(
                f"a value needs its seeds, and seeds need a value; got {self.value}, {list(seeds)}"
            )
        if (self.std is None) != (len(seeds) < 2):
            raise ValueError(f"std goes with two seeds or more; got {self.std} and {list(seeds)}")
        if list(self.numerics) != sorted(set(self.numerics)) or (seeds and not self.numerics):
            raise ValueError(f"numerics must ascend, and a value needs one; got {list(self.numerics)}")
        if self.seconds is not None and not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds must be finite and not negative, or null; got {self.seconds}")


def over_seeds(
    scene: str,
    method: str,
    metric: str,
    values: Mapping[int, float],
    cells: Collection[Finished[Any]] = (),
    *,
    published: float | None = None,
    scale: str,
) -> Row:
    """Return the row of one number measured once per seed: mean and sample standard deviation.

    Args:
        scene, method, metric, published, scale: the row's.
        values: by seed; NaN is left out: there is no number where training broke down.
        cells: what the values were taken from; none: they needed no training, and today's source code gives them.

    Raises:
        ConfigError: a value is infinite or out of range.
    """
    values = {seed: value for seed, value in sorted(values.items()) if not math.isnan(value)}
    mean, std = text_tables.mean_std(values.values())
    computed = {(cell.commit, cell.numerics) for cell in cells}
    if values and not cells:
        computed = {(commit() or "", NUMERICS)}
    times = [cell.seconds for cell in cells if cell.seconds is not None]
    try:
        return Row(
            scene,
            method,
            metric,
            value=mean if values else None,
            std=std,
            seeds=tuple(values),
            published=published,
            scale=scale,
            commit=", ".join(sorted({name for name, _ in computed} - {""})),
            numerics=tuple(sorted({number for _, number in computed})),
            seconds=round(sum(times), 1) if times and len(times) == len(cells) else None,
        )
    except ValueError as error:
        raise ConfigError(
            "Result {scene}, {method}, {metric}: {why}.", scene=scene, method=method, metric=metric, why=error
        ) from error


def write_results(
    folder: Path,
    name: str,
    rows: Sequence[Row],
    *,
    title: str,
    preamble: str = "",
    figures: Sequence[Path] = (),
) -> tuple[Path, Path]:
    """Write ``NAME.json`` and ``NAME.md``; a crash on the way leaves the older files whole.

    Args:
        folder: made where missing.
        name: letters, digits, ``-`` and ``_``.
        rows: at least one; no two with the same scene, method, metric and scale.
        title: the Markdown's heading.
        preamble: Markdown that says what was run and which data differ from the paper's.
        figures: image files, linked from the Markdown by paths relative to ``folder``.

    Returns:
        The paths of the JSON and the Markdown file.

    Raises:
        ConfigError: the name, a row twice, no row, or a figure that doesn't exist.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ConfigError("Results want a name of letters, digits, '-' and '_'; got {name!r}.", name=name)
    problem = _problem(rows)
    if problem:
        raise ConfigError("Results {name!r}: {problem}.", name=name, problem=problem)
    for figure in figures:
        if not figure.is_file():
            raise ConfigError(
                "Results {name!r}: the figure {figure} doesn't exist.", name=name, figure=figure
            )
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) for row in rows)
    write_whole(folder / f"{name}.json", f"[\n{lines}\n]\n".encode())
    write_whole(
        folder / f"{name}.md", results_markdown(rows, title, preamble, _links(figures, folder)).encode()
    )
    return folder / f"{name}.json", folder / f"{name}.md"


def read_results(path: Path) -> list[Row]:
    """Return the rows of a results file.

    Raises:
        RunError: the file is missing or not JSON, or a row breaks the form; names the file and the row.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        rows = TypeAdapter(list[Row]).validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise RunError("Cannot read the results {file}: {fault}.", file=path, fault=str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        number, field = (*first["loc"], None, None)[:2]
        raise RunError(
            "{file}, row {row}, {field}: {fault}",
            file=path,
            row=number + 1 if isinstance(number, int) else None,
            field=field,
            fault=first["msg"],
        ) from error
    if problem := _problem(rows):
        raise RunError("{file}: {fault}.", file=path, fault=problem)
    return rows


def results_markdown(
    rows: Sequence[Row], title: str, preamble: str = "", figures: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the Markdown of a reproduction: heading, preamble, a table a scene, figures as (caption, link)."""
    parts = [f"# {text_tables.markdown_escape(title)}\n"]
    if preamble:
        parts.append(preamble.strip() + "\n")
    for scene in dict.fromkeys(row.scene for row in rows):
        own = [row for row in rows if row.scene == scene]
        parts.append(text_tables.to_markdown(_without_scene(published_table(own, title=scene)), level=2))
    parts += [f"![{text_tables.markdown_escape(caption)}]({link})\n" for caption, link in figures]
    ran = [row for row in rows if row.seeds]
    seeds = sorted({seed for row in ran for seed in row.seeds})
    commits = {
        commit for row in rows for commit in row.commit.split(", ") if commit
    }  # a row may have several
    parts.append(
        f"Scale: {', '.join(sorted({row.scale for row in rows}))}. Seeds: {', '.join(map(str, seeds)) or 'none'}. "
        f"Commit: {', '.join(sorted(commits)) or 'not known'}. "
        "± is the sample standard deviation over seeds. Differences are in percentage points.\n"
    )
    return "\n".join(parts)


def published_table(
    rows: Sequence[Row], title: str = "", note: str = "", digits: int = 2
) -> text_tables.TextTable:
    """Return results beside the published numbers, with the difference; a line a row, in their order."""
    lines = []
    scales = len({row.scale for row in rows}) > 1
    for row in rows:
        known = row.value is not None and row.published is not None
        gap = row.value - row.published if row.value is not None and row.published is not None else None
        line = [
            row.scene,
            row.method,
            wording.metric_name(row.metric),
            *([row.scale] if scales else []),
            wording.spread(row.value, row.std, row.metric, digits),
            wording.number(row.published, row.metric, digits),
            wording.difference(gap, row.metric, digits) if known else wording.MISSING,
            str(len(row.seeds)),
        ]
        lines.append(tuple(line))
    scale = ("scale",) if scales else ()
    columns = ("scene", "method", "metric", *scale, "ours", "published", "ours − published", "seeds")
    return text_tables.TextTable(columns, tuple(lines), title, note, left=3 + len(scale))


def _check_number(name: str, value: float | None, metric: str) -> None:
    if value is None:
        return
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number or null; got {value!r}")
    if name == "std" and value < 0:
        raise ValueError(f"std must not be negative; got {value}")
    if wording.is_fraction(metric) and not 0 <= value <= 1:
        hint = ". Is it a percentage? Divide it by 100" if 1 < value <= 100 else ""
        raise ValueError(f"{name} of {metric} must be a fraction from 0 to 1; got {value}{hint}")


def _problem(rows: Sequence[Row]) -> str:
    if not rows:
        return "there is no row"
    seen = set()
    for row in rows:
        key = (row.scene, row.method, row.metric, row.scale)
        if key in seen:
            return f"two rows for {', '.join(key)}"
        seen.add(key)
    return ""


def _links(figures: Sequence[Path], folder: Path) -> list[tuple[str, str]]:
    out = []
    for figure in figures:
        try:
            link = (
                os.path.relpath(figure.resolve(), folder.resolve()).replace(os.sep, "/").replace(" ", "%20")
            )
        except ValueError:  # another drive of Windows
            link = figure.resolve().as_uri()
        out.append((figure.stem.replace("-", " ").replace("_", " "), link))
    return out


def _without_scene(table: text_tables.TextTable) -> text_tables.TextTable:
    rows = tuple(row[1:] for row in table.rows)
    return text_tables.TextTable(table.columns[1:], rows, table.title, table.note, left=table.left - 1)
