"""Private state by client, in versions that a ledger names: in memory, or in one SQLite file."""

from fedkeep.store.memory import MemoryStore
from fedkeep.store.private_store import Default, PrivateStore
from fedkeep.store.sqlite import SqliteStore
from fedkeep.store.versions import LedgerLines, Line, Named, VersionLedger

__all__ = [
    "Default",
    "LedgerLines",
    "Line",
    "MemoryStore",
    "Named",
    "PrivateStore",
    "SqliteStore",
    "VersionLedger",
]
