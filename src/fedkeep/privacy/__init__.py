"""What happens to an upload between a client and the server's average: compression, noise."""

from fedkeep.privacy.base import Transform

__all__ = ["Transform"]
