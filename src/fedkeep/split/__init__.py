"""The split into private, federated and frozen halves, and the checker of FURL's constraints."""

from fedkeep.split.can_move import immovable
from fedkeep.split.constraint_check import CheckReport, check_split
from fedkeep.split.halves import Frozen, Halves, updated_buffers
from fedkeep.split.joint import Joint, joint_from_loss
from fedkeep.split.probe import Violation
from fedkeep.split.split import Split, Upload, check_rows, check_upload

__all__ = [
    "CheckReport",
    "Frozen",
    "Halves",
    "Joint",
    "Split",
    "Upload",
    "Violation",
    "check_rows",
    "check_split",
    "check_upload",
    "immovable",
    "joint_from_loss",
    "updated_buffers",
]
