"""What a report is made of: sections of text, tables and figures. The page, Markdown and JSON are made from these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedkeep.report.charts import Chart, Legend
from fedkeep.report.text_tables import TextTable


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and all that stands around it; ``table`` and ``data`` say the same in words and in JSON.

    Attributes:
        panels: its charts, from above to below or, as many as ``columns``, side by side.
        ramp: for a scale of colours: what it means, its lowest and its highest value.
        same_scale: its charts reach from the same lowest to the same highest value.
    """

    title: str
    panels: tuple[Chart, ...]
    caption: str = ""
    legend: tuple[Legend, ...] = ()
    ramp: tuple[str, str, str] | None = None
    table: TextTable | None = None
    data: Any = None
    columns: int = 1
    same_scale: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; ``warning`` sets it off."""

    text: str
    warning: bool = False


Block = Text | TextTable | Figure


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it; ``folded`` ones start closed on the page."""

    key: str
    title: str
    blocks: tuple[Block, ...]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Card:
    """A headline number of one configuration."""

    label: str
    value: str
    spread: str
    note: str
    slot: str


@dataclass(frozen=True, slots=True)
class Content:
    """A whole report; ``summary`` holds the main numbers as plain values, for programs."""

    title: str
    lead: str
    cards: tuple[Card, ...]
    sections: tuple[Section, ...]
    summary: tuple[dict[str, Any], ...]
