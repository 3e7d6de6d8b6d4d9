"""``audit``: what leaves a device, tensor by tensor, and what of it changes with what must stay.

The ground is one comparison: put a canary in the place of something that must stay, ask the device the same again with
everything else equal, and see which bits of what leaves are others. Each thing that changes has a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedkeep.audit.bench import Bench, unmasked
from fedkeep.audit.canaries import floats_of, replaced, small, sources
from fedkeep.audit.examples import look_at_adapting, look_at_examples, look_at_memory, look_at_opt_out
from fedkeep.audit.findings import BY_METHOD, KINDS, PROTOCOL, Allowed
from fedkeep.audit.kept import look_at_clipping, look_at_draws, look_at_kept
from fedkeep.audit.looking import Looking
from fedkeep.audit.report import AuditReport
from fedkeep.core.errors import check_choice, check_range
from fedkeep.core.modes import with_gradients
from fedkeep.core.packet import Packet
from fedkeep.data import FederatedData
from fedkeep.engines.rehearsal import resolve
from fedkeep.methods import Method, PrivateMean
from fedkeep.methods.hook_declarations import revealed

CLIENTS, ROUNDS = 3, 3
Wire = Callable[[Packet], bytes]
"""Turns a message into the bytes that travel."""
WIRES: Mapping[str, Wire] = {"fedkeep's own": Packet.to_bytes}
PLACES = 8
"""Runs of neighbouring values that are searched for, spread over a tensor."""
LENGTH = 8
"""Bytes of a run; of four, one would stand in a message of some megabytes by chance."""
DIGITS = 8
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NOISE = "Noise of differential privacy is added by the server, so it changes nothing of what leaves a device."


@with_gradients
def audit(
    model: nn.Module,
    method: Method,
    data: FederatedData,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    allow: Sequence[str] = PROTOCOL,
    name: str = "",
    wires: Mapping[str, Wire] = WIRES,
) -> AuditReport:
    """Run a few rounds with canaries in all that must stay on a device, and look at every byte that leaves it.

    Args:
        model: the module; it is not changed.
        method: the method.
        data: the data set; a few examples of three clients or more are used, at least two of them on one device.
        rounds: how many, at least 1.
        seed: of the run and of the canaries.
        allow: what may tell of what stays beside gradients: ``KIND``, one of ``loss``, ``judged``, ``clip``, …, or
            ``KIND/PATTERN``, e.g. ``"upload/norm.*"``. It adds to what the method's functions declare
            (``methods.reveals``).
        name: for the report.
        wires: by name, what makes the bytes of a message that travel; they are searched for canaries.

    Returns:
        What left, and a verdict on each thing that changes with what must stay.

    Raises:
        ConfigError: ``rounds`` is below 1, or an entry of ``allow`` is of no kind.
        FedkeepError: model, method and data do not fit, or a round cannot be run.
    """
    check_range("[1, inf]", rounds=rounds)
    for entry in allow:
        check_choice("An entry of allow must begin with", entry.partition("/")[0], KINDS)
    began = time.perf_counter()
    few = small(data, CLIENTS)
    method = resolve(method, model, few)
    bench = Bench(model, unmasked(method), few, seed)
    masked = bench.method is not method
    made = Looking(bench, Allowed(revealed(method), tuple(allow)), rounds, wires, masked=masked)
    if isinstance(method.server.reduce, PrivateMean):
        made.notes[NOISE] = None
    for look in (
        look_at_kept,
        look_at_draws,
        look_at_clipping,
        look_at_examples,
        look_at_bytes,
        look_at_opt_out,
        look_at_adapting,
        look_at_memory,
    ):
        look(made)
    return made.report(name or method.name, time.perf_counter() - began)


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
