"""What an audit found: what left, tensor by tensor, and a verdict on each thing that it could tell of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fedkeep.methods.hook_declarations import Reveal

Verdict = Literal["gradients", "declared", "leak"]

PROTOCOL = ("loss", "judged")
"""What every run tells the server, unless a configuration says otherwise: mean training losses, results of judging."""

BY_METHOD = "the method (reveals)"
BUFFER = "the split federates this buffer"
JOINT = "the joint norm of private and federated gradients"
HALVES = "clip_over = 'halves' avoids it, allow = ['clip'] declares it"
NO_OPT_OUT = "none is there, and no client has two to train on"


def made_up(real: bool) -> str:
    """Say that examples were opted out to look at them, as some clients' or, not ``real``, everybody's are none."""
    who = "Some clients have opted no example out" if real else "No example is opted out"
    return f"{who}, so some were, to look at these too."


KINDS = (
    "summary",
    "loss",
    "weight",
    "status",
    "judged",
    "counts",
    "here",
    "rows",
    "sent",
    "report",
    "upload",
    "clip",
    "server",
    "wire",
)
"""Kinds of what can leave, or be told in another way: what an entry of an allow list begins with."""

NOT_COVERED: dict[str, str] = {
    "Timing": "how long a client takes, which examples and branches may change",
    "Sizes on the wire": "lengths of messages, as a link shows them to whoever listens",
    "Taking part": "who answers, when, and who does not",
    "What judging tells": "how good private values are; single values in these sums are looked for, not what many rounds tell",
    "Other shapes and branches": "examples, values and branches that did not come up",
    "What channels are worth": "what an attacker makes of gradients; fedkeep attack measures it",
}
"""What neither an audit nor a proof looks at."""

WORDS: dict[str, str] = {
    "gradients": "through declared gradients",
    "declared": "declared",
    "leak": "LEAK",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A thing that leaves changes with one that stays.

    Attributes:
        leaves: what left, e.g. ``upload/linear.weight``.
        source: what it changes with, e.g. ``private parameter user``.
        verdict: ``"gradients"``: by the gradients of a loss of both, in a parameter that the method federates;
            ``"declared"``: otherwise, and the method or the configuration says so; ``"leak"``: otherwise, and nobody
            says so.
        how: what the change looks like, in words; may be empty.
        by: what declares it.
    """

    leaves: str
    source: str
    verdict: Verdict
    how: str = ""
    by: str = ""

    @property
    def told(self) -> str:
        """What it changes with, what the change looks like, and what declares it."""
        said = ", ".join(word for word in (self.how, self.by) if word)
        return self.source + (f" ({said})" if said else "")

    def __str__(self) -> str:
        how = f" ({self.how})" if self.how else ""
        return f"{self.leaves} changes with {self.source}{how}"


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """Something that left.

    Attributes:
        label: its kind, and its name if it has one: ``upload/NAME``, ``sent/NAME``, ``weight``, ``judged/SPLIT``.
        type: of its numbers.
        shape: of the last one that left.
        bytes: of a client in a round.
        seen_by: who gets it, beside who reads the link.
    """

    label: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    seen_by: str


@dataclass(frozen=True)
class Allowed:
    """The allow list: what the method's functions say (``fedkeep.methods.reveals``), and what the configuration says.

    Attributes:
        method: what it declares, by what leaves and source.
        entries: ``KIND``, e.g. ``loss``, or ``KIND/PATTERN``, e.g. ``upload/norm.*``.
    """

    method: tuple[Reveal, ...]
    entries: tuple[str, ...]

    def by(
        self,
        label: str,
        sources: Iterable[str] = (),
        *,
        of_client: bool = True,
        copied: bool = False,
        direct: bool = True,
    ) -> str:
        """Return what declares a finding; empty: nothing does.

        Args:
            label: what leaves.
            sources: what it tells of, see ``methods.hook_declarations.Reveal``.
            of_client: whether it tells of what the client itself keeps or trains on. Of opted-out examples and other
                clients only an entry with a name gives leave to tell, and of the former ``judged``: they may train
                private values, and judging tells how good these are.
            copied: whether it is a copy, which an entry without a name is no leave for.
            direct: whether it tells of them too where no federated parameter is moved.
        """
        kind = label.partition("/")[0]
        for entry in self.entries:
            whole = "/" in entry
            fits = fnmatchcase(label, entry) if whole else kind == entry
            if fits and (whole or ((of_client or kind == "judged") and not copied)):
                return f"allow = {entry!r}"
        known = list(sources)
        if of_client and any(one.covers(label, known, copied=copied, direct=direct) for one in self.method):
            return BY_METHOD
        return ""
