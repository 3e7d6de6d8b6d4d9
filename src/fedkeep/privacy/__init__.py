"""What happens to an upload between a client and the server's average: compression, noise."""

from fedkeep.privacy.base import Transform
from fedkeep.privacy.noise import GaussianNoise
from fedkeep.privacy.projection import Projection

__all__ = ["GaussianNoise", "Projection", "Transform"]
