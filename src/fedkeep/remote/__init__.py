"""A federation across machines, without its transport: what server and devices say to each other, and what each keeps.

``fedkeep.flower`` carries the packets over Flower; another transport takes its place by ``Transport``.
"""

from fedkeep.core.packet import Packet
from fedkeep.remote.policy import RoundPolicy
from fedkeep.remote.transport import Reply, Transport

__all__ = ["Packet", "Reply", "RoundPolicy", "Transport"]
