"""A comparison of methods as files: a page, tables for papers, and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedkeep.core.files import write_whole
from fedkeep.metrics import CLASS_METRICS
from fedkeep.report import facts, measured, standings, wording, worth_blocks
from fedkeep.report.blocks import Block, Content, Figure, Section, Text
from fedkeep.report.groups import Configuration, Scene, main_metrics
from fedkeep.report.page import write_content
from fedkeep.report.pairing import Side, own_side, reference_side
from fedkeep.report.standings import Compared
from fedkeep.report.tables import Table, to_csv, to_latex, to_markdown
from fedkeep.report.worth import Comparison, few, limits

FACTS = (1, 2, 3, 7)  # of the table of traffic: down, up, private, time
REFERENCE = ("local", "fine_tuned", "fedavg")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A comparison that is to be shown.

    Attributes:
        title: the page's heading.
        groups: methods, each with all its seeds.
        compared: of each task how they stand; references that learn nothing are in it too.
        gains: each federated method against its references; empty where these are not wanted.
        notes: what a reader must know, e.g. of methods that diverged.
        how: how methods came to their settings.
    """

    title: str
    groups: tuple[Configuration, ...]
    compared: tuple[Compared, ...]
    gains: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    how: str = ""


def find(
    title: str,
    groups: Sequence[Configuration],
    counting: Side | None = None,
    metric: str | None = None,
    *,
    references: bool = True,
    notes: Sequence[str] = (),
    how: str = "",
) -> Found:
    """Compare finished runs.

    Args:
        title, notes, how: as of ``Found``.
        groups: methods, each with all its seeds.
        counting: counting as a method of its own.
        metric: as of ``pairing.pair``; None: accuracy, for a regression the loss.
        references: whether each method is compared with references too: those among the groups, and counting.

    Raises:
        ConfigError: data, seeds or test examples differ, or models can't be compared by the metric.
    """
    own = [own_side(g) for g in groups]
    counted = [counting] if counting else []
    known = [reference_side(g) for g in groups if g.runs[0].method in REFERENCE and not g.centralised]
    federated = [own_side(g) for g in groups if g.runs[0].method != "local" and not g.centralised]
    return Found(
        title=title,
        groups=tuple(groups),
        compared=tuple(standings.compared([*own, *counted], metric)),
        gains=tuple(standings.against_references(federated, [*known, *counted], metric))
        if references
        else (),
        notes=tuple(notes),
        how=how,
    )


def content(found: Found) -> Content:
    """Return the page's content."""
    groups, metrics = found.groups, main_metrics([run for g in found.groups for run in g.runs])
    told = [c for c in found.gains if c.metric not in CLASS_METRICS]
    every = measured.runs_table([Scene("", groups, tuple(metrics))])
    sections = [
        Section("comparison", "Comparison", tuple(_comparison(found))),
        Section("references", "Against the references", tuple(_references(found))),
        Section("curves", "Learning curves", (*measured.curves(groups, metrics), *_adapting(groups))),
        Section("worth", "Who gains, who loses", tuple(_worth(told)), folded=True),
        Section(
            "users", "Spread over users", (*measured.users(groups, metrics), *_adapting(groups)), folded=True
        ),
        Section("traffic", "Traffic and time", tuple(facts.traffic(groups))),
        Section("runs", "Every run", (every, *_adapting(groups)), folded=True),
        Section("split", "What is federated, what is private", tuple(facts.split(groups)), folded=True),
        Section("data", "Data", (*facts.partitions(groups), *facts.table_of(groups, "data"))),
        Section("configuration", "Configuration", tuple(facts.configuration(groups)), folded=True),
        Section("environment", "Environment", tuple(facts.table_of(groups, "environment")), folded=True),
    ]
    first = found.compared[0]
    lead = " · ".join(
        (
            wording.count(len(groups), "method"),
            wording.count(len(first.seeds), "seed"),
            wording.count(first.users, "user"),
            f"data {wording.printable(groups[0].runs[0].data_name)}",
        )
    )
    summary = tuple(row for c in found.compared for row in standings.plain_rows(c))
    return Content(found.title, lead, (), tuple(s for s in sections if s.blocks), summary)


def write(found: Found, folder: Path) -> Path:
    """Write ``report.html`` (.md, .json), ``tables/`` and ``figures/`` into a folder; return the page's path."""
    from fedkeep.report.drawing import write_figure

    made = content(found)
    tables: dict[str, tuple[Table, str]] = {}
    figures: dict[str, Figure] = {}
    for c in found.compared:
        tail = _file_name(c.task)
        tables[f"comparison{tail}"] = (_table(found, c), to_csv(standings.plain_rows(c)))
        figures[f"comparison{tail}"] = standings.ranks_figure(c)
    if found.gains:
        tables["gains"] = (standings.gains_table(found.gains), to_csv(standings.plain_gains(found.gains)))
        for i, figure in enumerate(standings.gains_figures(found.gains), 1):
            figures[f"gains-{i}{_file_name(figure.title.removeprefix('Gain over '))}"] = figure
    curves = [b for s in made.sections if s.key == "curves" for b in s.blocks]
    figures |= {f"curves-{i}": b for i, b in enumerate(curves, 1) if isinstance(b, Figure)}
    for name, (table, rows) in tables.items():
        (folder / "tables").mkdir(parents=True, exist_ok=True)
        for suffix, text in (("md", to_markdown(table)), ("tex", to_latex(table)), ("csv", rows)):
            write_whole(folder / "tables" / f"{name}.{suffix}", text.encode())
    for name, figure in figures.items():
        write_figure(figure, folder / "figures", name)
    return write_content(made, folder / "report.html")


def _file_name(text: str | None) -> str:
    words = "".join(c if c.isalnum() and c.isascii() else " " for c in (text or "").lower()).split()
    return "".join(f"-{word}" for word in words)[:60]


def _table(found: Found, c: Compared) -> Table:
    (traffic,) = facts.traffic(found.groups)
    assert isinstance(traffic, Table)
    by_label = {row[0]: [row[i] for i in FACTS] for row in traffic.rows}
    more = [by_label.get(label, [wording.MISSING] * len(FACTS)) for label in c.labels]
    return standings.table(c, more, [traffic.columns[i] for i in FACTS])


def _adapting(groups: Sequence[Configuration]) -> list[Block]:
    later = [g.label for g in groups if own_side(g).model == "adapted"]
    return [Text(f"Before they adapt, unlike in the comparison: {', '.join(later)}.")] if later else []


def _comparison(found: Found) -> list[Block]:
    out: list[Block] = [Text(note, warning=True) for note in found.notes]
    for c in found.compared:
        out += [Text(standings.said(c)), _table(found, c), standings.ranks_figure(c)]
    first = found.compared[0]
    lines = [*few(first.users, len(first.seeds)), *([found.how] if found.how else [])]
    return [*out, Text(" ".join(lines))] if lines else out


def _references(found: Found) -> list[Block]:
    if not found.gains:
        return []
    out: list[Block] = [Text(line, warning=True) for line in standings.not_beating(found.gains)]
    if said := standings.beating(found.gains):
        out.append(Text(said))
    return [*out, standings.gains_table(found.gains), *standings.gains_figures(found.gains)]


def _worth(gains: Sequence[Comparison]) -> list[Block]:
    if not gains:
        return []
    said = dict.fromkeys(line for c in gains for line in limits(c.found))
    out: list[Block] = [Text(" ".join(said))] if said else []
    out += [worth_blocks.table(gains), worth_blocks.fairness_table(gains)]
    return [*out, worth_blocks.pooled_table(gains)] if any(c.pooled for c in gains) else out
