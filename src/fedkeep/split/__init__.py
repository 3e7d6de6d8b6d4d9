"""The split into federated and private parameters, and the checker of FURL's constraints."""

from fedkeep.split.check import CheckReport, Joint, Violation, check_split
from fedkeep.split.split import Split, Upload, check_rows, check_upload

__all__ = [
    "CheckReport",
    "Joint",
    "Split",
    "Upload",
    "Violation",
    "check_rows",
    "check_split",
    "check_upload",
]
