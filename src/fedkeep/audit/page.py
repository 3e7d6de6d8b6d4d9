"""An audit as a page."""

from __future__ import annotations

from dataclasses import asdict

from fedkeep.audit.findings import WORDS
from fedkeep.audit.report import AuditReport, grouped, searched, table
from fedkeep.report.blocks import Block, Content, Section, Text

MEANS = (
    "unchanged: no bit changes with anything that must stay.",
    "through declared gradients: the gradient of a loss of both moved it; private values may still follow from it.",
    "declared: it changes otherwise, and the method or the allow list says so.",
    "LEAK: it changes otherwise, and nobody says so.",
)

WHAT = (
    "Each thing that must stay on a device was replaced by another value, and the device asked the same again. "
    "What then leaves otherwise tells of it."
)


def content(report: AuditReport, lead: str) -> Content:
    """Return the page.

    Args:
        report: the audit's.
        lead: on what it was made.
    """
    count, allowed = len(report.sources), ", ".join(report.allow) or "nothing"
    verdict = f"{count} things that must stay were changed one by one; allowed besides: {allowed}."
    outcome: list[Block] = [Text(("Nothing leaves undeclared. " if report.ok else "") + verdict)]
    outcome.insert(0, Text(WHAT))
    outcome += [Text(f"LEAK: {line}", warning=True) for line in grouped(report.leaks)]
    outcome += [Text(f"NOT looked at: {text}", warning=True) for text in report.missed]
    sections = [
        Section("verdict", "The verdict", (*outcome, Text(searched(report)))),
        Section("left", "What left a device", (table(report),)),
        Section("words", "What the verdicts mean", tuple(map(Text, MEANS))),
    ]
    for verdict in ("declared", "gradients"):
        lines = grouped(f for f in report.findings if f.verdict == verdict)
        if lines:
            title = f"What changes, {WORDS[verdict]}"
            sections.append(Section(verdict, title, tuple(map(Text, lines))))
    looked = (*(Text(f"Changed: {source}.") for source in report.sources), *map(Text, report.notes))
    sections.append(Section("looked", "What was changed", looked, folded=True))
    return Content(
        f"What leaves a device: {report.name}", lead, (), tuple(sections), tuple(map(asdict, report.findings))
    )
