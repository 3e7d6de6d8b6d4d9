"""One self-contained page about runs, with Markdown and JSON beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from fedkeep.core.errors import ConfigError
from fedkeep.core.files import write_whole
from fedkeep.report import facts, measured, stored_analyses, wording, worth_page
from fedkeep.report.blocks import Block, Content, Figure, Section, Text
from fedkeep.report.groups import Configuration, Scene, scenes
from fedkeep.report.runs import RunFiles, read_run
from fedkeep.report.text_tables import TextTable, markdown_escape, to_markdown


def write_report(
    run_folders: Sequence[Path],
    out: Path,
    title: str = "",
    *,
    refresh: int = 0,
) -> Path:
    """Write a report on one run or several, compared.

    Args:
        run_folders: run directories; runs that differ in their seed only are shown together, as mean and deviation.
        out: a folder (the files are ``report.html``, ``.md``, ``.json``) or the page's path ending in ``.html``.
        title: the heading; made from the runs' names where empty.
        refresh: seconds after which a browser reads the page again; 0: it does not.

    Returns:
        The page's path. The same input gives the same bytes.

    Raises:
        ConfigError: no run folder was given.
        RunError: a file of a run is missing or damaged; names the file and the line.
    """
    if not run_folders:
        raise ConfigError("A report needs at least one run folder.")
    runs = [read_run(Path(folder)) for folder in run_folders]
    heading = title or " and ".join(dict.fromkeys(run.name for run in runs))
    short = len(runs) == 1 or len(heading) <= 80
    content = build(runs, heading if short else f"{len(runs)} runs compared")
    return write_content(content, out if out.suffix == ".html" else out / "report.html", refresh)


def write_content(content: Content, page: Path, refresh: int = 0) -> Path:
    """Write a page of this content, with Markdown and JSON beside it, and return the page's path."""
    page.parent.mkdir(parents=True, exist_ok=True)
    for path, text in (
        (page.with_suffix(".json"), to_json(content)),
        (page.with_suffix(".md"), to_markdown_page(content)),
        (page, to_html(content, refresh)),
    ):
        write_whole(path, text.encode(errors="backslashreplace"))  # a folder's name may be no text
    return page


def to_html(content: Content, refresh: int = 0) -> str:
    """Return the page: no file, font or address outside it is needed, and a policy in it forbids any."""
    import jinja2

    from fedkeep.report.drawing import to_svg

    source = resources.files("fedkeep.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(kind=_kind, to_svg=to_svg)
    return environment.from_string(source).render(content=content, refresh=refresh)


def to_markdown_page(content: Content) -> str:
    """Return the report as Markdown: the same tables and texts; figures as their tables."""
    parts = [f"# {markdown_escape(content.title)}\n", markdown_escape(content.lead) + "\n"]
    for section in content.sections:
        parts.append(f"## {markdown_escape(section.title)}\n")
        parts += [_block_markdown(block) for block in section.blocks]
    return "\n".join(parts)


def to_json(content: Content) -> str:
    """Return the report as JSON: main numbers as values, then every section with its tables and figures' data."""
    sections = [
        {"title": s.title, "blocks": [_block_json(block) for block in s.blocks]} for s in content.sections
    ]
    whole = {
        "title": content.title,
        "lead": content.lead,
        "summary": list(content.summary),
        "sections": sections,
    }
    return json.dumps(finite(whole), ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _kind(block: Block) -> str:
    return type(block).__name__


def _block_markdown(block: Block) -> str:
    if isinstance(block, Text):
        return ("**Note.** " if block.warning else "") + markdown_escape(block.text) + "\n"
    if isinstance(block, TextTable):
        return to_markdown(block)
    parts = [f"### {markdown_escape(block.title)}\n"]
    if block.caption:
        parts.append(markdown_escape(block.caption) + "\n")
    if block.table is not None:
        parts.append(to_markdown(block.table, level=4))
    return "\n".join(parts)


def _block_json(block: Block) -> dict[str, Any]:
    if isinstance(block, Figure):
        table = None if block.table is None else _block_json(block.table)
        shown = {"title": block.title, "caption": block.caption, "table": table, "data": block.data}
        return {"kind": "figure", **shown}
    if isinstance(block, TextTable):
        return {"kind": "table", **asdict(block), "bold": sorted(block.bold)}
    return {"kind": "text", **asdict(block)}


def finite(value: Any, other: Callable[[float], str | None] = lambda _: None) -> Any:
    """Return the value for JSON, which lacks NaN and infinities: these as ``other`` has them, or as None."""
    if isinstance(value, Mapping):
        return {k: finite(v, other) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v, other) for v in value]
    return other(value) if isinstance(value, float) and not math.isfinite(value) else value


def build(runs: Sequence[RunFiles], title: str) -> Content:
    """Return the content of a report on these runs."""
    every = scenes(runs)
    groups = [g for scene in every for g in scene.groups]
    named = [(scene, scene.label if len(every) > 1 else "") for scene in every]
    notes = (Text(line, warning=True) for line in facts.attendance(groups))
    sections = [
        Section("results", "Results", (*notes, *measured.results(every))),
        Section("runs", "Every run", (measured.runs_table(every),), folded=len(runs) > 4),
        Section(
            "worth",
            "What personalisation was worth",
            _joined(worth_page.blocks(scene.groups) for scene in every),
        ),
        Section(
            "curves",
            "Learning curves",
            _joined(measured.curves(s.groups, s.metrics, label) for s, label in named),
        ),
        Section(
            "users",
            "Spread over users",
            _joined(measured.users(s.groups, s.metrics, label) for s, label in named),
        ),
        *stored_analyses.sections(groups),
        Section("traffic", "Traffic and time", tuple(facts.traffic(groups))),
        Section("split", "What is federated, what is private", tuple(facts.split(groups))),
        Section("data", "Data", (*facts.partitions(groups), *facts.table_of(groups, "data"))),
        Section("configuration", "Configuration", tuple(facts.configuration(groups))),
        Section("environment", "Environment", tuple(facts.table_of(groups, "environment"))),
    ]
    cards = [card for scene in every for card in measured.cards(scene.groups, scene.metrics[0])]
    filled = tuple(s for s in sections if s.blocks)
    summary = tuple(_summary(g, scene) for scene in every for g in scene.groups)
    return Content(title, _lead(runs, groups), tuple(cards), filled, summary)


def _joined(parts: Iterable[Iterable[Block]]) -> tuple[Block, ...]:
    return tuple(block for part in parts for block in part)


def _lead(runs: Sequence[RunFiles], groups: Sequence[Configuration]) -> str:
    data = [run.info.get("data") or {} for run in runs]
    names = list(dict.fromkeys(wording.printable(run.data_name) for run in runs if run.data_name))
    clients = list(dict.fromkeys(d["clients"] for d in data if isinstance(d.get("clients"), int)))
    created = sorted(str(run.info["created"]) for run in runs if run.info.get("created"))
    words = [wording.count(len(groups), "configuration")]
    words += [wording.count(len(runs), "run")] if len(runs) != len(groups) else []
    words += [f"data {', '.join(names)}"] if names else []
    words += [" or ".join(wording.count(c, "user") for c in clients)] if clients else []
    words += [f"started {wording.printable(created[0][:16].replace('T', ' '))}"] if created else []
    return " · ".join(words)


def _summary(g: Configuration, scene: Scene) -> dict[str, Any]:
    metric = scene.metrics[0]
    value, std = g.selected(metric, metric)
    return {
        "configuration": g.label,
        "data": scene.label,
        "runs": [run.folder.resolve().name for run in g.runs],
        "seeds": [run.seed for run in g.runs],
        "finished": all(run.finished for run in g.runs),
        "centralised": g.centralised,
        "metric": metric,
        "test": None if math.isnan(value) else value,
        "std": std,
        "best_possible": g.best,
        "bytes_down": facts.bytes_each(g.runs[0], "down"),
        "bytes_up": facts.bytes_each(g.runs[0], "up"),
    }
