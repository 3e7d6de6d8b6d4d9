"""Private state by client: in memory, or in one memory-mapped table with a journal."""

from fedkeep.store.base import Default, PrivateStore
from fedkeep.store.memory import MemoryStore
from fedkeep.store.table import TableStore

__all__ = ["Default", "MemoryStore", "PrivateStore", "TableStore"]
