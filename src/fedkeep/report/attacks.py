"""What attacks found: findings as tables, sentences and a page, "what keeping parameters home is worth"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedkeep.core.records import by_key
from fedkeep.report.blocks import Block, Content, Section, Text
from fedkeep.report.text_tables import TextTable

TITLES = {
    "who": "Who is she",
    "label": "Which class does she hold",
    "trait": "Which class, by a linear classifier",
    "membership": "Was this example trained on",
    "words": "Which words",
    "image": "Which image",
    "predictions": "The private vector from predictions",
    "upload": "The private vector from one upload",
}
"""Of attacks, by name."""
TITLE = "What keeping parameters home is worth, and what it is not"

SEEN = (
    "plain: everything is federated by FedAvg; the server sees each upload.",
    "split: the configuration's own method, the private part is kept home; the server sees each upload.",
    "found: the whole 95 % interval lies above guessing; nothing: it does not, or the attack is weak.",
    "Intervals are over clients; where several share one guess, as it is made of their sum, over sums.",
)


@dataclass(frozen=True, kw_only=True)
class AttackFinding:
    """One number of one attack against one protection; a higher one is worse for the client.

    Attributes:
        attack: its title.
        measure: what the number is.
        protection: ``plain`` (everything is federated, FedAvg), ``split``, ``dp ε=…`` or ``secure``.
        value: the number; None: the attack does not apply, see ``note``.
        low, high: its 95 % interval, over clients, or over sums where clients share a guess.
        guess: what guessing gives.
        note: how it was measured, or why there is no number.
    """

    attack: str
    measure: str
    protection: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    guess: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """``found``: the whole interval lies above guessing; ``nothing``; or ``–``."""
        if self.value is None or self.low is None or self.guess is None:
            return "–"
        return "found" if self.low > self.guess else "nothing"


def table(found: Sequence[AttackFinding], title: str = "") -> TextTable:
    """Return findings as rows."""
    columns = ("Attack", "Measure", "Protection", "Finds", "95 % interval", "Guessing", "Verdict", "Note")
    rows = tuple(
        (
            f.attack,
            f.measure,
            f.protection,
            _number(f.value),
            _interval(f),
            _number(f.guess),
            f.verdict,
            f.note,
        )
        for f in found
    )
    return TextTable(columns, rows, title=title, left=3)


def sentences(found: Sequence[AttackFinding]) -> tuple[list[str], list[str]]:
    """Return what keeping the private part home is worth, and what it is not: a sentence for each measure."""
    worth: list[str] = []
    rest: list[str] = []
    for (attack, measure), some in _grouped(found).items():
        by = {f.protection: f for f in some}
        plain, split = by.get("plain"), by.get("split")
        if split is None:
            continue
        if split.value is None:
            if plain is not None and plain.verdict == "found":
                worth.append(
                    f"{attack}, {measure}: {_short(plain)} in the plain run; with the split {split.note}"
                )
            continue
        against = "" if plain is None or plain.value is None else f", {_short(plain)} in the plain run"
        said = f"{attack}, {measure}: {_short(split)} with the split{against}; "
        if split.verdict == "–":
            rest.append(
                f"{said}it can't be told from guessing, as there is no interval or nothing to guess from."
            )
            continue
        said += f"guessing gives {_number(split.guess)}."
        stopped = [
            f.protection for f in some if f.protection not in ("plain", "split") and f.verdict == "nothing"
        ]
        helps = (
            f" Nothing is found under {', '.join(stopped)}." if stopped and split.verdict == "found" else ""
        )
        if plain is not None and _less(split, plain):
            worth.append(f"{said}{' Less, and not nothing.' if split.verdict == 'found' else ''}{helps}")
        else:
            rest.append(f"{said}{' Nothing was found.' if split.verdict == 'nothing' else ''}{helps}")
    return worth, rest


def content(
    name: str,
    lead: str,
    found: Sequence[AttackFinding],
    threats: Iterable[tuple[str, str]],
    settings: Sequence[str] = (),
) -> Content:
    """Return the page: sentences, a table for each attack, and what each attacker knows and sees.

    Args:
        name: of the configuration.
        lead: on what it was measured.
        found: the findings.
        threats: by attack's title, its threat model.
        settings: how the protections were set, a line each.
    """
    worth, rest = sentences(found)
    told = dict(threats)
    sections = [
        Section("worth", "What keeping the private part home is worth", _texts(worth, "Nothing was found.")),
        Section("not", "What it is not worth", _texts(rest, "No attack that applies got through.")),
    ]
    sections.append(Section("settings", "The protections", _texts([*SEEN, *settings], "")))
    for attack in dict.fromkeys(f.attack for f in found):
        own = [f for some in _grouped([f for f in found if f.attack == attack]).values() for f in some]
        blocks: list[Block] = [Text(told[attack])] if attack in told else []
        notes = by_key((f.note, f.protection) for f in own if f.note)
        said = [f"{', '.join(dict.fromkeys(names))}: {note}" for note, names in notes.items()]
        shown = table(own)
        cut = TextTable(shown.columns[1:-1], tuple(row[1:-1] for row in shown.rows), left=2)
        sections.append(Section(f"attack-{len(sections)}", attack, (*blocks, cut, *map(Text, said))))
    return Content(f"{TITLE}: {name}", lead, (), tuple(sections), tuple(asdict(f) for f in found))


def plain(found: Sequence[AttackFinding]) -> list[dict[str, Any]]:
    """Return findings as plain values, for programs."""
    return [{**asdict(f), "verdict": f.verdict} for f in found]


def _less(one: AttackFinding, other: AttackFinding) -> bool:
    """Tell whether one number is below another, and neither lies in the other's interval."""
    if one.value is None or one.high is None or other.value is None or other.low is None:
        return False
    return one.value < other.low and one.high < other.value


def _grouped(found: Sequence[AttackFinding]) -> dict[tuple[str, str], list[AttackFinding]]:
    return by_key(((f.attack, f.measure), f) for f in found)


def _texts(lines: Sequence[str], otherwise: str) -> tuple[Block, ...]:
    return tuple(map(Text, lines or (otherwise,)))


def _short(f: AttackFinding) -> str:
    return _number(f.value) + (f" ({_interval(f)})" if _interval(f) else "")


def _interval(f: AttackFinding) -> str:
    return "" if f.low is None or f.high is None else f"{_number(f.low)} to {_number(f.high)}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if abs(value) >= 3 else f"{value:.3f}"
