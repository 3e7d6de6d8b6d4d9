"""Which clients are whose where the owner of a run has listed them by node: then nothing else counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Listed:
    """The clients of nodes.

    Attributes:
        clients: names of clients and globs, by what stands for a node's key at the link (``Transport.key``).
    """

    clients: Mapping[str, Sequence[str]]

    def keys(self, client: str) -> tuple[str, ...]:
        """Return the keys that a client is listed for: by its name if anywhere, else by globs. It is whose it is if one."""
        by_name = tuple(key for key, names in self.clients.items() if client in names)
        return by_name or tuple(
            key for key, globs in self.clients.items() if any(fnmatchcase(client, glob) for glob in globs)
        )

    def key(self, client: str) -> str | None:
        """Return the one key that a client is listed for; None: it is for none, or for several."""
        found = self.keys(client)
        return found[0] if len(found) == 1 else None

    def instead(self, client: str) -> str:
        """Return for whom a client is listed, where it is not for the node that claims it."""
        return ("no node", "another node", "several nodes")[min(2, len(self.keys(client)))]
