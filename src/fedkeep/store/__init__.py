"""Private state by client, in versions that a ledger names: in memory, or in one SQLite file."""

from fedkeep.store.base import Default, PrivateStore
from fedkeep.store.memory import MemoryStore
from fedkeep.store.sqlite import SqliteStore
from fedkeep.store.versions import Line, Lines, Named, VersionLedger

__all__ = ["Default", "Line", "Lines", "MemoryStore", "Named", "PrivateStore", "SqliteStore", "VersionLedger"]
