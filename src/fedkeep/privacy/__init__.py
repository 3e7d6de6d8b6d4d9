"""What happens to an upload between a client and the server: compression, clipping, noise."""

from fedkeep.privacy.base import Encoded, Link
from fedkeep.privacy.chain import Chain
from fedkeep.privacy.clip import QuantileClip
from fedkeep.privacy.draws import Draw, Draws, Entropy, RunDraw, RunDraws, SystemDraw, draws
from fedkeep.privacy.noise import GaussianNoise
from fedkeep.privacy.projection import Projection
from fedkeep.privacy.topk import TopK

__all__ = [
    "Chain",
    "Draw",
    "Draws",
    "Encoded",
    "Entropy",
    "GaussianNoise",
    "Link",
    "Projection",
    "QuantileClip",
    "RunDraw",
    "RunDraws",
    "SystemDraw",
    "TopK",
    "draws",
]
