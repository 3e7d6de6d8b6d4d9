"""What a device says of an error: to its owner all, to the server nothing that may hold data or a path."""

from __future__ import annotations

import site
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

import fedkeep
from fedkeep.core.errors import BusyError, ConfigError, DataError, FedkeepError, StoreError, UploadError
from fedkeep.remote.messages import UNFIT, Packet, Refused, told

OURS = Path(fedkeep.__file__).parent
INSTALLED = {
    site.getusersitepackages(),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
}
"""Folders of Python's own library and of packages that were installed."""


class RefusalError(FedkeepError):
    """A node does not serve a message; the text goes to the server."""


def is_ours(error: BaseException) -> bool:
    """Tell whether an error's text is fedkeep's alone: it was raised there, and not for another error."""
    frames = traceback.extract_tb(error.__traceback__)
    return error.__cause__ is None and bool(frames) and OURS in Path(frames[-1].filename).parents


def place_of(error: BaseException) -> str:
    """Return where in the user's own code an error was raised, or an empty text: `` (mine.py, line 3, in finish)``."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        folders = Path(frame.filename).parents
        if OURS in folders:
            break
        frozen = frame.filename.startswith("<frozen ")  # Python's own, too
        if not frozen and INSTALLED.isdisjoint(map(str, folders)):
            return f" ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"
    return ""


def refusal(error: Exception, packet: Packet, tell: Callable[[str], None]) -> Packet:
    """Return the answer to a packet that cannot be served.

    The error's text goes to ``tell`` in full; it leaves the device only where it holds neither data nor a path.
    """
    tell(f"{type(error).__name__}: {error}{place_of(error)}")
    failed = False
    if isinstance(error, RefusalError | StoreError | UploadError):
        reason = str(error)
    elif isinstance(error, DataError):
        reason = UNFIT
    elif isinstance(error, ConfigError):
        reason = "Its configuration cannot be used. Its own log says more."
    else:
        reason, failed = f"It has failed with {type(error).__name__}. Its own log says more.", True
    run = str(packet.header.get("run", ""))[:64]
    return told(Refused(run=run, reason=reason, busy=isinstance(error, BusyError), failed=failed))
