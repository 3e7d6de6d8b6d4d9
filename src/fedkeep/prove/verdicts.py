"""From labels to verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fedkeep.audit.findings import Allowed
from fedkeep.prove.falsifier import AGREES, CHANGES, OPT_OUT_CHANGES
from fedkeep.prove.findings import VERDICTS, Claim, Item, Verdict
from fedkeep.prove.nodes import Node
from fedkeep.prove.rounds import CLIP, GRADIENTS, HELD, OPEN, OPTED_OUT, Rounds, Taken
from fedkeep.prove.rules import OUTSIDE
from fedkeep.prove.sites import DATA

Seen = Sequence[tuple[Node, Taken | None]]
"""What is known of a value that leaves, for each client and round; None: of what is told by all."""
STATUS = "every run tells whether training broke down"
BUFFER, SENDS = "the split federates this buffer", "training examples, by Client.sends"
JOINT = "the joint norm of private and federated gradients"


class Judge:
    """Gives verdicts on what was traced.

    Args:
        made: the rounds.
        allowed: what may leave otherwise.
        falsified: what the falsifier found, by what leaves.
    """

    def __init__(self, made: Rounds, allowed: Allowed, falsified: Mapping[str, str]) -> None:
        self.made, self.allowed, self.falsified = made, allowed, falsified
        tracer = self.tracer = made.tracer
        self.open = OUTSIDE | tracer.bits(*OPEN)
        self.strict = OUTSIDE | tracer.bit(OPTED_OUT) | tracer.bit(HELD)
        self.buffers = {name for name, _ in made.job.net.module.named_buffers()}
        crossings = [*tracer.crossings.values()]
        loose = [c for c in crossings if not c.told]
        self.loose = 0
        for crossing in loose:
            self.loose |= crossing.node.labels
        self.told = {told: [c.node for c in crossings if c.told == told] for told in ("loss", "status")}
        reasons = [f"{c.what} in {c.site}" for c in loose] + [made.error] * bool(made.error)
        if not made.stable and not made.error:
            reasons.append("labels still spread in the last round")
        self.reasons = tuple(dict.fromkeys(reasons))

    def items(self) -> list[Item]:
        """Return a verdict on each thing that leaves."""
        found: dict[str, list[tuple[Node, Taken | None]]] = {}
        for taken in self.made.taken:
            for label, node in taken.nodes.items():
                found.setdefault(label, []).append((node, taken))
        found |= {"weight": []} | {told: [(n, None) for n in nodes] for told, nodes in self.told.items()}
        found |= {label: [(node, None)] for label, node in self.made.server.items()}
        by, text = self._declared("judged"), "what it is made for; not traced"
        judged = (
            Item(leaves="judged", verdict="declared", by=(text, by)) if by else _undeclared("judged", text)
        )
        return [*(self.item(label, seen) for label, seen in found.items()), judged]

    def item(self, label: str, seen: Seen) -> Item:
        """Return the verdict on one thing."""
        mask, said = 0, self.falsified.get(label, "not tried")
        for node, _ in seen:
            mask |= node.labels
        by = STATUS if label == "status" else self._declared(label)
        if by and label != "status" and any(self._beyond(n, t) & ~self._own(t) for n, t in seen):
            by = ""  # it is no leave to tell of opted-out examples, or of other clients
        if mask & OUTSIDE or self.reasons:
            if by and "/" in label and not (mask | self.loose) & self.strict:
                return Item(leaves=label, verdict="declared", by=(by,), path=self.reasons, falsifier=said)
            why = [n.path(OUTSIDE)[0] for n, _ in seen if n.labels & OUTSIDE]
            return Item(
                leaves=label,
                verdict="unknown",
                path=tuple(dict.fromkeys([*self.reasons, *why])),
                falsifier=said,
            )
        tracer = self.tracer
        words = ["federated gradients"] * bool(mask & tracer.bit(GRADIENTS))
        if mask & tracer.bit(CLIP) and not by:
            if not (clip := self._declared("clip")):
                what = "clip_over = 'halves' avoids it, allow = ['clip'] declares it"
                return _undeclared(label, JOINT, what, by=words, falsifier=said)
            words.append(f"{JOINT} ({clip})")
        beyond = next(((n, b) for n, t in seen if (b := self._beyond(n, t))), None)
        examples = tracer.bits(DATA) if label.startswith(("upload/", "sent/")) else 0
        raw = next(((n, b) for n, _ in seen if (b := n.labels & examples)), None)  # not by a gradient
        if beyond is None and raw is not None:
            by = by or (
                SENDS
                if label.startswith("sent/")
                else BUFFER * (label.removeprefix("upload/") in self.buffers)
            )
        if (found := beyond or raw) is not None and not by:
            node, which = found
            return _undeclared(label, *node.path(_lowest(which)), label, by=words, falsifier=said)
        if beyond is None and said == CHANGES:
            return _undeclared(label, "it changes, with the channels replayed", by=words, falsifier=said)
        words += [by] * (found is not None)
        verdict: Verdict = "declared" if words else "independent"
        return Item(leaves=label, verdict=verdict, by=tuple(words), falsifier=said)

    def claims(self) -> tuple[Claim, ...]:
        """Return what holds of the round as a whole."""
        tracer = self.tracer
        reads, opted = list(self.reasons), list(self.reasons)
        for taken in self.made.taken:
            others = self._others(taken)
            for label, node in taken.nodes.items():
                reads += [node.path(OUTSIDE)[0]] * bool(node.labels & OUTSIDE)
                opted += [label] * bool(node.labels & tracer.bit(OPTED_OUT))
            masks = {**{n: node.labels for n, node in taken.nodes.items()}, **taken.after}
            reads += [f"{n} depends on {tracer.words(m & others)[0]}" for n, m in masks.items() if m & others]
        for node in self.told["loss"]:
            whose = {tracer.owners[n] for n in tracer.words(node.labels & tracer.bits(DATA))}
            reads += [f"loss depends on examples of {' and '.join(sorted(whose))}"] * (len(whose) > 1)
        opted += ["loss"] * any(node.labels & tracer.bit(OPTED_OUT) for node in self.told["loss"])
        opted += [label for label, said in self.falsified.items() if said == OPT_OUT_CHANGES]
        keeps = [" → ".join(n.path(_lowest(n.labels & ~self.open))) for n in self.made.elsewhere]
        return (
            Claim(says="a client's round reads what it is given alone", against=_few(reads)),
            Claim(says="no tensor but what it keeps holds private values afterwards", against=_few(keeps)),
            Claim(
                says="neither values nor numbers of opted-out examples reach what leaves", against=_few(opted)
            ),
        )

    def _declared(self, label: str) -> str:
        return self.allowed.by(label, of_client=True, copied=False)

    def _beyond(self, node: Node, taken: Taken | None) -> int:
        """Return the labels that may not leave as such: of what must stay, and of other clients' examples."""
        return node.labels & (~self.open | self._others(taken))

    def _others(self, taken: Taken | None) -> int:
        """Return the labels of what other clients keep and train on; None: of no client."""
        return 0 if taken is None else self._labels(lambda owner: owner != self._who(taken))

    def _own(self, taken: Taken | None) -> int:
        """Return the labels of what a client keeps; None: of what any keeps."""
        return self._labels(lambda owner: taken is None or owner == self._who(taken)) & ~self.open

    def _who(self, taken: Taken) -> str:
        return self.made.job.data.ids[taken.work.client]

    def _labels(self, of: Callable[[str], bool]) -> int:
        return sum(self.tracer.bit(label) for label, owner in self.tracer.owners.items() if of(owner))


def worst(found: Sequence[Sequence[Item]]) -> tuple[Item, ...]:
    """Return of each thing that leaves the worst verdict of several traces, and the falsifier's worst word."""
    by: dict[str, list[Item]] = {}
    for one in (item for items in found for item in items):
        by.setdefault(one.leaves, []).append(one)
    rank, said = list(VERDICTS), ("not tried", AGREES, CHANGES, OPT_OUT_CHANGES)
    return tuple(
        replace(
            max(items, key=lambda one: rank.index(one.verdict)),
            falsifier=max((one.falsifier for one in items), key=said.index),
        )
        for items in by.values()
    )


def joined(found: Sequence[Sequence[Claim]]) -> tuple[Claim, ...]:
    """Return the claims of several traces: against each speaks what speaks against it in any."""
    return tuple(
        Claim(says=same[0].says, against=_few(why for one in same for why in one.against))
        for same in zip(*found, strict=True)
    )


def _undeclared(label: str, *path: str, by: Iterable[str] = (), falsifier: str = "not tried") -> Item:
    return Item(leaves=label, verdict="path named", by=tuple(by), path=path, falsifier=falsifier)


def _lowest(bits: int) -> int:
    return bits & -bits


def _few(words: Iterable[str], most: int = 4) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))[:most]
