"""The script ``fedkeep``: it answers Ctrl-C from the first instant, also while the libraries are being loaded.

A module of its own, as importing anything of the package ``fedkeep`` loads torch first, which takes a second or two.
"""

import os
import signal


def main() -> None:
    """Run the command line."""
    # Not as KeyboardInterrupt: half-loaded extension modules turn that into errors of their own. Nothing is open yet.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup and scripts may ignore it
    if heeded:
        signal.signal(signal.SIGINT, _stop)
    from fedkeep.cli.app import main as command

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


def _stop(*_: object) -> None:
    os.write(2, b"Stopped.\n")
    os._exit(130)
