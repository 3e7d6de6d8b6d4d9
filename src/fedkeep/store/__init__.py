"""Private state by client, in staged, prepared and accepted versions: in memory, or in one SQLite file."""

from fedkeep.store.base import Default, PrivateStore
from fedkeep.store.by_id import for_clients
from fedkeep.store.memory import MemoryStore
from fedkeep.store.sqlite import SqliteStore

__all__ = ["Default", "MemoryStore", "PrivateStore", "SqliteStore", "for_clients"]
