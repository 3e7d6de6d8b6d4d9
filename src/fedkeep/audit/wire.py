"""The bytes of messages, searched for what was planted: independent of how the rest of the audit reads a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedkeep.audit.canaries import floats_of, replaced, sources
from fedkeep.audit.findings import BY_METHOD
from fedkeep.audit.looking import Looking
from fedkeep.remote.messages import Packet

Wire = Callable[[Packet], bytes]
"""Turns a message into the bytes that travel."""
PLACES = 8
"""Runs of neighbouring values that are searched for, spread over a tensor."""
LENGTH = 8
"""Bytes of a run; of four, one would stand in a message of some megabytes by chance."""
DIGITS = 8
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def look_at_bytes(audit: Looking) -> None:
    """Plant canaries in all that a client keeps and trains on, and search for them in the bytes that leave.

    Each is sought as runs of neighbouring values, in every precision and either byte order, and as decimal digits.
    """
    rows = np.asarray(audit.data.rows(0, "train"), np.int64)
    other = replaced(audit.data, rows, 1)
    for step in audit.steps:
        kept = audit.planted(step, audit.client, step.kept[audit.client])
        own = kept[audit.client]
        wanted = {str(s): [own[n] for n in s.names] for s in sources(own, audit.trainable)}
        wanted["training examples"] = [torch.tensor(floats_of(other, rows))]
        packet = audit.bench.answer(step.work, kept, data=other)
        for name, wire in audit.wires.items():
            content = wire(packet)
            audit.searched[name] = audit.searched.get(name, 0) + len(content)
            for source, values in wanted.items():
                found = [f for (_, s), f in audit.findings.items() if s.startswith(source)]
                told = any("value" in f.how or f.by == BY_METHOD for f in found)
                if not told and any(p in content for value in values for p in patterns(value)):
                    audit.note(f"wire/{name}", source, image="the values themselves")


def patterns(values: Tensor) -> Iterator[bytes]:
    """Yield the bytes that stand in a message if some numbers do."""
    flat = values.detach().reshape(-1)
    if not flat.is_floating_point() or not len(flat):
        return
    most = max(2, len(flat) // 2)  # of a tensor of few values a few are enough
    for place in np.unique(np.linspace(0, max(len(flat) - min(4, most), 0), PLACES).round().astype(int)):
        for dtype in TYPES:
            moved = flat[place : place + min(most, max(2, LENGTH // dtype.itemsize))].to(dtype)
            if len(moved) * dtype.itemsize >= 4 and bool(moved.any()):
                content = moved.view(torch.uint8).numpy()
                yield content.tobytes()
                yield content.reshape(-1, dtype.itemsize)[:, ::-1].tobytes()
        yield repr(float(flat[place])).encode()[:DIGITS]
