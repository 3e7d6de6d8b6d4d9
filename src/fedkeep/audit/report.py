"""What an audit found, as a value, and as what a command prints and writes as a page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fedkeep.audit.findings import NOT_COVERED, WORDS, Finding, Leaving
from fedkeep.core.records import by_key
from fedkeep.report.blocks import Content, Section, Text
from fedkeep.report.page import to_markdown_page
from fedkeep.report.text_tables import TextTable
from fedkeep.report.wording import size


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit found.

    Attributes:
        name: of the configuration or method.
        rounds, clients: that were run and looked at.
        messages: by kind, how many left the device and their bytes, headers and checksums included.
        left: all that left.
        findings: what of it changes with what must stay.
        sources: what was changed, and what was looked at in vain: not there in this configuration.
        notes: what the reader should know.
        missed: what could not be looked at, though it would leave.
        allow: the allow list.
        searched: by name of a wire, how many bytes that it makes of messages were searched for canaries.
        seconds: that it took.
    """

    name: str
    rounds: int
    clients: int
    messages: dict[str, tuple[int, int]]
    left: tuple[Leaving, ...]
    findings: tuple[Finding, ...]
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    missed: tuple[str, ...]
    allow: tuple[str, ...]
    searched: dict[str, int]
    seconds: float

    @property
    def leaks(self) -> tuple[Finding, ...]:
        """What is on no allow list."""
        return tuple(f for f in self.findings if f.verdict == "leak")

    @property
    def ok(self) -> bool:
        """Whether all was looked at, and nothing leaves but by declared ways."""
        return not self.leaks and not self.missed

    def of(self, leaves: str) -> tuple[Finding, ...]:
        """Return what was found of a thing that left."""
        return tuple(f for f in self.findings if f.leaves == leaves)

    def verdict(self, leaves: str) -> str:
        """Return the worst verdict on a thing that left, in words; ``unchanged``: it tells nothing that must stay."""
        found = {f.verdict for f in self.of(leaves)}
        return next((WORDS[v] for v in ("leak", "declared", "gradients") if v in found), "unchanged")

    def __str__(self) -> str:
        return to_markdown_page(self.content())

    def plain(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {**asdict(self), "ok": self.ok, "leaks": [str(f) for f in self.leaks]}

    def content(self, lead: str = "") -> Content:
        """Return what a command prints and writes as a page; ``lead``: on what it was made."""
        count, allowed = len(self.sources), ", ".join(self.allow) or "nothing"
        verdict = f"{count} things that must stay were changed one by one; allowed besides: {allowed}."
        undeclared = f"Declare what is meant, in {DECLARING}, or mend the method."
        found = [
            Text(WHAT),
            Text(f"{'Nothing leaves undeclared. ' * self.ok}{verdict}"),
            *(Text(f"LEAK: {line}", warning=True) for line in together(self.leaks)),
            *(Text(f"NOT looked at: {text}.", warning=True) for text in self.missed),
            *([Text(undeclared, warning=True)] if self.leaks else []),
            Text(searched(self)),
            *map(Text, self.notes),
        ]
        sections = [
            Section("verdict", "The verdict", tuple(found)),
            Section("left", "What left a device", (table(self),)),
            Section("scope", "What this does not cover", (not_covered(),)),
            Section("words", "What the verdicts mean", tuple(map(Text, MEANS)), folded=True),
        ]
        for verdict in ("declared", "gradients"):
            if lines := together(f for f in self.findings if f.verdict == verdict):
                title = f"What changes, {WORDS[verdict]}"
                sections.insert(2, Section(verdict, title, tuple(map(Text, lines))))
        looked = tuple(Text(f"Changed: {source}.") for source in self.sources)
        sections.append(Section("looked", "What was changed", looked, folded=True))
        title = f"What leaves a device: {self.name}"
        return Content(title, lead, (), tuple(sections), tuple(map(asdict, self.findings)))


def table(report: AuditReport) -> TextTable:
    """Return what left, tensor by tensor."""
    rows = tuple(
        (
            one.label,
            one.type + "".join(f" {n}" if k == 0 else f" × {n}" for k, n in enumerate(one.shape)),
            one.seen_by,
            report.verdict(one.label),
            size(one.bytes),
        )
        for one in report.left
    )
    total = sum(size for _, size in report.messages.values())
    kinds = ", ".join(f"{count} {kind}" for kind, (count, _) in report.messages.items())
    note = f"{report.rounds} rounds, {report.clients} clients on the device; messages: {kinds}; {size(total)} in all."
    columns = ("What", "Numbers", "Seen by", "Changes with what must stay", "Bytes")
    return TextTable(columns, rows, title=f"{report.name}: what left a device", note=note, left=4)


def not_covered() -> TextTable:
    """Return what neither an audit nor a proof looks at."""
    return TextTable(("Not covered", "What it is"), tuple(NOT_COVERED.items()), left=2)


def searched(report: AuditReport) -> str:
    """Say which bytes were searched for canaries."""
    forms = ", ".join(f"{name} ({size(count)})" for name, count in report.searched.items())
    hits = [f for f in report.findings if f.leaves.startswith("wire/")]
    outcome = "some were there, see the leaks" if hits else "none was there that is not in the table"
    return f"The messages' very bytes were searched for canaries, as they travel in {forms}: {outcome}."


def together(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each thing that left, with what it changes with; those that change alike have one line."""
    by_label = by_key((one.leaves, one.told) for one in findings)
    alike = by_key((tuple(told), label) for label, told in by_label.items())
    return [f"{', '.join(labels)} with {'; '.join(_merged(told))}" for told, labels in alike.items()]


def _merged(sources: Iterable[str]) -> list[str]:
    """Return private parameters of which the same is said as one."""
    start, names, others = "private parameter ", dict[str, list[str]](), list[str]()
    for source in sources:
        name, bracket, said = source.removeprefix(start).partition(" (")
        if source.startswith(start):
            names.setdefault(bracket + said, []).append(name)
        else:
            others.append(source)
    return [f"{start[:-1]}{'s' * (len(n) > 1)} {', '.join(n)}{said}" for said, n in names.items()] + others


MEANS = (
    "unchanged: no bit changes with anything that must stay.",
    "through declared gradients: the gradient of a loss of both moved it; private values may still follow from it.",
    "declared: it changes otherwise, and the method or the allow list says so.",
    "LEAK: it changes otherwise, and nobody says so.",
)

DECLARING = "[audit] allow = [...] or by fedkeep.methods.reveals"
WHAT = (
    "Each thing that must stay on a device was replaced by another value, and the device asked the same again. "
    "What then leaves otherwise tells of it."
)
