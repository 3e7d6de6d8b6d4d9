"""The script ``fedkeep``: it answers Ctrl-C from the first instant, also while the libraries are being loaded."""

import os
import signal
import sys
from types import FrameType

_ready = False
"""Whether the command line is loaded; torch is loaded later, by the commands that need it."""


def main() -> None:
    """Run the command line."""
    global _ready
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and scripts may ignore it
        signal.signal(signal.SIGINT, _stop)
    from fedkeep.cli.app import main as command

    _ready = True
    command()


def _stop(number: int, frame: FrameType | None) -> None:
    """Stop at once while something is being loaded: half-loaded extension modules turn a KeyboardInterrupt into errors
    of their own, and nothing is open yet. Else raise it.
    """
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if not _ready or getattr(spec, "_initializing", False):
        os.write(2, b"Stopped.\n")
        os._exit(130)
    signal.default_int_handler(number, frame)
