"""What a proof says: a verdict on each thing that leaves, and on what a client's round reads and keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedkeep.audit.report import not_covered
from fedkeep.core.records import by_key
from fedkeep.report.blocks import Content, Section, Text
from fedkeep.report.text_tables import TextTable

Verdict = Literal["independent", "declared", "path named", "unknown"]
VERDICTS: dict[Verdict, str] = {
    "independent": (
        "nothing that must stay reaches it, and an upload is reached by training examples through federated gradients "
        "alone, with these shapes and on the branches that were taken"
    ),
    "declared": "what must stay reaches it by the channels that are named alone",
    "path named": "what must stay reaches it otherwise: by these operations",
    "unknown": "values went where they cannot be followed, or came from where nobody declared them",
}
HIDDEN = (
    "Proven never means hidden. FURL's user vector reaches uploads by declared gradients alone. For one example the "
    "gradient of the first linear layer is g (text, user), and that of its bias is g: divided, they are the vector. "
    "fedkeep attack measures what channels are worth. Losses, weights and results of judging are made of examples. "
    "Single numbers and sums of examples are looked for in these, and in what a client sends along."
)


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something that leaves a client.

    Attributes:
        leaves: what, e.g. ``upload/linear.weight``.
        verdict: see ``VERDICTS``.
        by: the channels by which what must stay reaches it, and what declares them.
        path: the operations by which it comes otherwise, from its beginning; or why nothing is known.
        falsifier: whether other values of what must stay changed it, with the channels replayed.
    """

    leaves: str
    verdict: Verdict
    by: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    falsifier: str = "not tried"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence about the whole round; ``against``: what speaks against it, none where it is proved."""

    says: str
    against: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proved of a configuration.

    Attributes:
        name: of the configuration.
        items: what leaves.
        claims: what holds of the round as a whole.
        notes: what the reader should know.
        rounds, clients, storages: what was traced.
        seconds: that it took.
    """

    name: str
    items: tuple[Item, ...]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]
    rounds: int
    clients: int
    storages: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether everything that leaves is independent or declared, and nothing speaks against a claim."""
        return all(i.verdict in ("independent", "declared") for i in self.items) and not any(
            c.against for c in self.claims
        )

    def verdict(self, leaves: str) -> Verdict:
        """Return the verdict on a thing that leaves; of what never left, as rounds broke off, nothing is known."""
        return next((i.verdict for i in self.items if i.leaves == leaves), "unknown")

    def plain(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {**asdict(self), "ok": self.ok}

    def content(self, lead: str = "") -> Content:
        """Return what a command prints and writes as a page; ``lead``: on what it was made."""
        claimed = [
            Text(line, warning=bool(c.against)) for c, line in zip(self.claims, claims(self), strict=True)
        ]
        named = [Text(f"LEAK: {line}", warning=True) for line in paths(self.items)]
        words = tuple(Text(f"{v}: {why}.") for v, why in VERDICTS.items())
        sections = (
            Section("leaves", "What leaves", (Text(WHAT), table(self.items), *named)),
            Section("claims", "The round", (*claimed, *map(Text, self.notes))),
            Section("hidden", "What this does not say", (Text(HIDDEN), not_covered())),
            Section("words", "What the verdicts mean", words, folded=True),
        )
        said = f"{lead} · {summary(self)}" if lead else summary(self)
        return Content(f"What is proved of {self.name}", said, (), sections, (self.plain(),))


WHAT = (
    "A few rounds were run with labels on all that must stay on a device. Labels travel with every operation, and "
    "show by which ways it reaches what leaves. The falsifier changes what must stay, and looks whether what leaves "
    "changes too."
)


def summary(proof: Proof) -> str:
    """Return a line on what was traced and found."""
    count = Counter(i.verdict for i in proof.items)
    found = ", ".join(f"{count[v]} {v}" for v in VERDICTS if count[v])
    return f"{found}; {proof.rounds} rounds of {proof.clients} clients, {proof.storages} blocks of memory followed."


def table(items: Sequence[Item], title: str = "") -> TextTable:
    """Return what leaves as rows; what has the same verdict for the same reason is in one."""

    def reason(one: Item) -> tuple[str, ...]:
        why = "; ".join(one.by) or (" → ".join(one.path) if one.verdict != "path named" else "")
        return one.leaves.partition("/")[0], one.verdict, why, one.falsifier

    groups = by_key((reason(one), one.leaves) for one in items)
    rows = tuple((_names(names), *key[1:]) for key, names in groups.items())
    return TextTable(("What leaves", "Verdict", "By", "Falsifier"), rows, title=title, left=4)


def paths(items: Sequence[Item]) -> list[str]:
    """Return a line for each path by which what must stay leaves undeclared, with what leaves by it."""
    groups = by_key((one.path, one.leaves) for one in items if one.verdict == "path named")
    return [f"{_names(names)}: {' → '.join(path)}" for path, names in groups.items()]


SCOPE = "of this model, with these shapes and branches, on the channels in the table"


def claims(proof: Proof) -> list[str]:
    """Return the claims in words, each with its scope."""
    return [
        f"{'Not proved' if c.against else 'Proved'} {SCOPE}: {'; '.join((c.says, *c.against))}."
        for c in proof.claims
    ]


def _names(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
