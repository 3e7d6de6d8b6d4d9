"""What happens to an upload between a client and the server: compression, clipping, noise; and what that is worth."""

from fedkeep.privacy.accounting import Release, epsilon
from fedkeep.privacy.budget_ledger import BudgetLedger, BudgetTerms
from fedkeep.privacy.chain import Chain
from fedkeep.privacy.clip_and_noise import GaussianNoise, QuantileClip
from fedkeep.privacy.dp import Adaptive, Clipping, DifferentialPrivacy
from fedkeep.privacy.draws import Draw, Draws, Entropy, RunDraw, RunDraws, SystemDraw, draws
from fedkeep.privacy.link import Encoded, Link
from fedkeep.privacy.projection import Projection
from fedkeep.privacy.topk import TopK

__all__ = [
    "Adaptive",
    "BudgetLedger",
    "BudgetTerms",
    "Chain",
    "Clipping",
    "DifferentialPrivacy",
    "Draw",
    "Draws",
    "Encoded",
    "Entropy",
    "GaussianNoise",
    "Link",
    "Projection",
    "QuantileClip",
    "Release",
    "RunDraw",
    "RunDraws",
    "SystemDraw",
    "TopK",
    "draws",
    "epsilon",
]
