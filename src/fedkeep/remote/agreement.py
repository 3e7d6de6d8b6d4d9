"""What a device and a server agree on before the first order: in what it takes part, and what a run has for good.

And how it refuses: of an error its owner hears all, the server nothing that may hold data or a path.
"""

from __future__ import annotations

import site
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedkeep
from fedkeep.core.describe import describe
from fedkeep.core.errors import BusyError, ConfigError, DataError, FedkeepError, StoreError, UploadError
from fedkeep.core.packet import Packet
from fedkeep.data import FederatedData
from fedkeep.engines import Job
from fedkeep.engines.lanes import made_of_all
from fedkeep.methods import Method
from fedkeep.remote import fingerprint
from fedkeep.remote.messages import PROTOCOL, UNFIT, Encode, Hello, Refused, packet_of


def other_fedkeep(header: Mapping[str, Any]) -> str:
    """Return why a first message, whatever else it holds, is of another fedkeep than ours, or an empty text."""
    protocol, code, ours = header.get("protocol"), header.get("code"), fingerprint.code()
    if type(protocol) is int and protocol != PROTOCOL:
        return f"The server speaks protocol {protocol}, this device {PROTOCOL}. Install the same fedkeep on both."
    if isinstance(code, str) and code != ours:
        return (
            f"The server runs fedkeep {_short(code)}, this device {_short(ours)}. Install the same on both."
        )
    return ""


def fault_of(hello: Hello, signed: Mapping[str, Any] | None) -> str:
    """Return why no device takes part in a run, or an empty text.

    Args:
        hello: the server's first message.
        signed: by the text of each experiment that may be trained, what is signed beside it (``device_tally.SignedWords``); None: any
            may be.
    """
    if fault := other_fedkeep(vars(hello)):
        return fault
    if signed is None:
        return ""
    if hello.experiment not in signed:
        what = "experiment"
    elif (hello.summarise, hello.secure) != (
        signed[hello.experiment].preparation,
        signed[hello.experiment].secure,
    ):
        what = "preparation"
    else:
        return ""
    return (
        f"This device trains only what a key that it trusts has signed, and the {what} that the server names is not in "
        f"the signed project. Put the configuration into the project and sign it."
    )


def agreement(
    message: Encode, parts: Mapping[str, str], job: Job, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what was agreed on, as a device keeps it: a process that starts later goes on with it.

    Names of private values that opted-out examples may have made stay, from what was agreed on ``before``.
    ``left_to_adapting`` names those that rounds do not train: until a client adapts they are no model of it.
    """
    method, trainable = job.method, sorted(job.net.trainable())
    made = made_of_all(method.client.phases, method.split, job.net, job.data) | {*before.get("opted_out", ())}
    return {
        "hello": asdict(message.hello),
        "fingerprint": dict(parts),
        "encoding": parts["encoding"],
        "encoded": message.encoding,
        "accept": describe(method.client.accept),
        "opted_out": sorted(made),
        "left_to_adapting": method.left_to_adapting(trainable),
    }


def told_counts(data: FederatedData, method: Method) -> NDArray[np.int64]:
    """Return for each client how many training examples the server gets to know of: those that are opted in.

    Where private phases use all of them, a client that opted out wholly trains too, and tells of one.
    """
    counts, opted = data.counts("train"), data.columns.get("opted_in")
    if opted is None:
        return counts
    rows = data.split_rows("train")
    inside = np.bincount(data.clients_of(rows[np.asarray(opted)[rows].astype(bool)]), minlength=len(data))
    alone = any(phase.examples == "all" for phase in method.client.phases) & (counts > 0)
    return np.maximum(inside, alone)


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return which parts of two agreements differ that a run has for good; fedkeep may be another version later."""
    first, second = (
        {**one["fingerprint"], "seed": str(one["hello"]["seed"]), "code": ""} for one in (before, now)
    )
    return fingerprint.differing(first, second)


def _short(code: str) -> str:
    version, _, source = code.partition(" ")
    return f"{version[:20]} (source {source[:8]})"


OURS = Path(fedkeep.__file__).parent
INSTALLED = {
    site.getusersitepackages(),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
}
"""Folders of Python's own library and of packages that were installed."""


class RefusalError(FedkeepError):
    """A node does not serve a message; the text goes to the server."""


def is_ours(error: BaseException) -> bool:
    """Tell whether an error's text is fedkeep's alone: it was raised there, and for no error but such a one."""
    return raised_here(error) and (error.__cause__ is None or is_ours(error.__cause__))


def raised_here(error: BaseException) -> bool:
    """Tell whether fedkeep raised an error, and no code of a method or a model."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and OURS in Path(frames[-1].filename).parents


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class that a server may hear: of the first that a method or a model cannot name."""
    known = ("builtins", "torch", "numpy", "fedkeep")
    return next(one.__name__ for one in type(error).__mro__ if one.__module__.partition(".")[0] in known)


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
    if isinstance(error, RefusalError | StoreError | UploadError) and raised_here(error):
        reason = str(error)
    elif isinstance(error, DataError):
        reason = UNFIT
    elif isinstance(error, ConfigError):
        reason = "Its configuration cannot be used. Its own log says more."
    else:
        reason, failed = f"It has failed with {kind_of(error)}. Its own log says more.", True
    run = str(packet.header.get("run", ""))[:64]
    return packet_of(Refused(run=run, reason=reason, busy=isinstance(error, BusyError), failed=failed))
