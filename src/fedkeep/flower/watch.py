"""Starts a node, passes on what it says, and says in one line why it could not. Knows Python's own library alone.

It is run as a file, so that the process that watches holds no torch: ``python watch.py COMMAND …``.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from types import FrameType

WRONG_USE = 2
# What Flower 1.41 writes, and what that means; the first that is found is told.
REASONS = {
    "Public key not valid": "its key is no key that Flower takes",
    "No SuperNode found with the given public key": (
        "the link does not know this node's key. Register it there: flwr supernode register NAME.pub"
    ),
    "Node not found": "the link does not know this node's key. Register it there: flwr supernode register NAME.pub",
    "already active": "a node with this key is there already. Give each node a key of its own",
    "Invalid SuperNode authentication": (
        "the link does not take this node's signature. Its key is not registered, or its clock is wrong"
    ),
    "certificate verify failed": "the link's certificate is not signed by the authority that this node trusts",
    "CERTIFICATE_VERIFY_FAILED": "the link's certificate is not signed by the authority that this node trusts",
    "address already in use": "its port is in use. Name another: link.port",
    "version": "the link runs another version of Flower",
}


def main(command: list[str]) -> int:
    """Run a command; return its exit code, or 2 where it could not join."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    said: list[str] = []
    joined = False
    assert process.stdout is not None  # it is a pipe
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        joined = joined or "SuperNode ID:" in line
        said = [*said[-40:], line]
    code = process.wait()
    if joined or code in (0, -signal.SIGTERM, -signal.SIGINT):
        return code
    sys.stderr.write(f"Error: the node could not join: {reason(''.join(said))}.\n")
    return WRONG_USE


def reason(said: str) -> str:
    """Return why, from what Flower wrote; else its last line."""
    for words, meaning in REASONS.items():
        if words in said:
            return meaning
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it said nothing")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
