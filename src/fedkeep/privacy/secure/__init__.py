"""Secure sums: a server adds vectors of which it sees none, and learns the sum alone.

Source: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, figure 4, the
version for a server that is curious and honest. Here are both sides' states and messages, without any transport.
"""

from fedkeep.privacy.secure.ring import FixedPoint
from fedkeep.privacy.secure.secure_client import SecureClient
from fedkeep.privacy.secure.secure_messages import Keys, Revealed, WrongShareError
from fedkeep.privacy.secure.secure_server import SecureServer, Spent, threshold_for

__all__ = [
    "FixedPoint",
    "Keys",
    "Revealed",
    "SecureClient",
    "SecureServer",
    "Spent",
    "WrongShareError",
    "threshold_for",
]
