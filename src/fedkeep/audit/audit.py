"""``audit``: what leaves a device, tensor by tensor, and what of it changes with what must stay.

The ground is one comparison: put a canary in the place of something that must stay, ask the device the same again with
everything else equal, and see which bits of what leaves are others. Each thing that changes has a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import nn

from fedkeep.audit.bench import Bench, unmasked
from fedkeep.audit.canaries import small
from fedkeep.audit.examples import look_at_adapting, look_at_examples, look_at_memory, look_at_opt_out
from fedkeep.audit.findings import KINDS, PROTOCOL, Allowed
from fedkeep.audit.kept import look_at_clipping, look_at_draws, look_at_kept
from fedkeep.audit.looking import Looking
from fedkeep.audit.report import AuditReport
from fedkeep.audit.wire import Wire, look_at_bytes
from fedkeep.core.errors import check_choice, check_range
from fedkeep.core.modes import with_gradients
from fedkeep.data import FederatedData
from fedkeep.engines.rehearsal import fit
from fedkeep.methods import Method
from fedkeep.methods.declared import revealed
from fedkeep.remote.messages import Packet

CLIENTS, ROUNDS = 3, 3
WIRES: Mapping[str, Wire] = {"fedkeep's own": Packet.to_bytes}


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
    method = fit(method, model, few)
    bench = Bench(model, unmasked(method), few, seed)
    masked = bench.method is not method
    made = Looking(bench, Allowed(revealed(method), tuple(allow)), rounds, wires, masked=masked)
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
