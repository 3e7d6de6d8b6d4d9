"""What is known of a storage, and of numbers that left tensors for Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """What a storage holds.

    Attributes:
        what: the operation, and the module that it was computed in; of a beginning its label.
        labels: a bit for each label.
        parents: what it was made of.
    """

    what: str
    labels: int
    parents: tuple[Node, ...] = ()

    def path(self, label: int) -> list[str]:
        """Return the operations by which a label came here, from its beginning."""
        found, node = [self.what], self
        while (before := next((p for p in node.parents if p.labels & label), None)) is not None:
            node = before
            if node.what != found[-1]:
                found.append(node.what)
        return found[::-1]


@dataclass(frozen=True)
class Crossing:
    """Numbers that left tensors for Python, or came from there.

    Attributes:
        node: what they may depend on.
        what: how they left.
        site: the function, with its module.
        told: the channel that they go to, or empty: nobody says where they go.
    """

    node: Node
    what: str
    site: str
    told: str = ""


def made(what: str, parents: tuple[Node, ...], more: int) -> Node:
    """Return what is known of something that was made of parents; ``more``: labels of its own."""
    labels = more
    for parent in parents:
        labels |= parent.labels
    return Node(what, labels, parents)
