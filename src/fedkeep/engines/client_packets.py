"""An order to train a client, and what comes of it, as packets: to and from another process or machine of this run.

To worker processes their tensors go through shared memory, to a cluster as bytes.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from fedkeep.core import errors
from fedkeep.core.errors import FedkeepError, UploadError, WorkerError
from fedkeep.core.packet import Packet
from fedkeep.core.params import Params, prefixed, under
from fedkeep.engines.client_step import ClientResult, ClientToTrain, Job, train_client
from fedkeep.split import Split


def order_packet(each: ClientToTrain, kept: Params, round: int, progress: float, *, alike: bool) -> Packet:
    """Return the order to train a client, with what it kept; and with what it was sent, unless all were sent the same."""
    tensors = prefixed("kept:", kept) | prefixed("sent:", {} if alike else each.sent)
    return Packet({"client": each.client, "round": round, "progress": progress}, tensors)


def obey(job: Job, order: Packet, sent: Params | None) -> Packet:
    """Train a client as ordered, and return what its training gives; ``sent``: what all clients were sent alike."""
    about, given = order.header, order.tensors
    sent = under("sent:", given) if sent is None else sent
    kept = under("kept:", given)
    result = train_client(job, sent, kept, about["client"], about["round"], about["progress"])
    if result.fault is not None:
        return Packet({"fault": _written(result.fault)})
    assert result.upload is not None
    assert result.kept is not None
    parts = {"deltas": result.upload.deltas, "rows": result.upload.rows, "kept": result.kept}
    values = {f"{part}:{n}": v for part, tensors in parts.items() for n, v in tensors.items()}
    said = {"loss": repr(result.loss), "weight": result.upload.weight}  # it may be NaN, which JSON has not
    return Packet({**said, "note": result.note, "moves": result.moves}, values)


def failed(error: BaseException) -> Packet:
    """Return what comes of a client whose training raised an error."""
    return Packet({"error": _written(error)})


def result_of(packet: Packet, split: Split, client: int) -> ClientResult:
    """Return what a client's training gave.

    Raises:
        BaseException: what was raised where the client was trained.
    """
    about = packet.header
    if "error" in about:
        raise _read(about["error"])
    if "fault" in about:
        fault: Any = _read(about["fault"])
        return ClientResult(client, fault=fault)
    deltas, rows, kept = (under(f"{part}:", packet.tensors) for part in ("deltas", "rows", "kept"))
    try:
        upload = split.arrived(deltas, about["weight"], rows)
    except UploadError as error:
        return ClientResult(client, fault=error)
    loss = float(about["loss"])
    return ClientResult(client, upload, kept, loss, note=about["note"], moves=about["moves"])


def together(packets: Sequence[Packet]) -> Packet:
    """Return packets as one, which ``apart`` takes apart again."""
    tensors = {f"{number}:{n}": v for number, one in enumerate(packets) for n, v in one.tensors.items()}
    return Packet({"packets": [one.header for one in packets]}, tensors)


def apart(packet: Packet) -> list[Packet]:
    """Return the packets that ``together`` was given."""
    found = [Packet(header, {}) for header in packet.header["packets"]]
    for name, value in packet.tensors.items():
        number, _, rest = name.partition(":")
        found[int(number)].tensors[rest] = value
    return found


def _written(error: BaseException) -> str:
    """Return an error as JSON, of Python's kind: its facts may be NaN."""
    plain = all(isinstance(a, str | int | float | bool | None) for a in error.args)
    facts = error.facts if isinstance(error, FedkeepError) else {}
    return json.dumps(
        {
            "module": type(error).__module__,
            "type": type(error).__qualname__,
            "args": list(error.args) if plain else [str(error)],
            "text": str(error),
            "facts": {
                n: v if isinstance(v, str | int | float | bool | None) else str(v) for n, v in facts.items()
            },
            "trace": "".join(traceback.format_exception(error)),
        }
    )


def _read(text: str) -> BaseException:
    """Return the error that ``_written`` described: of the same type and message, where that can be made again."""
    what = json.loads(text)
    module = errors if what["module"] == errors.__name__ else sys.modules.get(what["module"])
    kind: Any = getattr(module, what["type"], None)
    error: BaseException | None = None
    if isinstance(kind, type) and issubclass(kind, BaseException):
        try:
            error = kind(*what["args"])
        except Exception:  # noqa: BLE001 - a constructor with a mind of its own
            error = None
    if error is None or str(error) != what["text"]:
        error = WorkerError("{kind}: {why}", kind=what["type"], why=what["text"])
    elif isinstance(error, FedkeepError):
        error.facts = what["facts"]
    error.add_note(f"In the worker process:\n{what['trace']}")
    return error
