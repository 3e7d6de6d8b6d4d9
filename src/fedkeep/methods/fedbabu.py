"""FedBABU: only the body is federated; the head keeps its first values until a client fine-tunes.

Source: Oh, Kim and Yun, FedBABU: Towards Enhanced Representation for Federated Image Classification, arXiv 2106.06042,
algorithm 1.
One round: (1) a cohort downloads the body, and joins it with the head's initial values; (2) each client trains the body
on its own examples, the head frozen; (3) it uploads the change of the body, never the head; (4) the server averages.
After federation a client fine-tunes everything, or the head alone, from the federated body and that same head.
"""

from __future__ import annotations

from typing import Literal

from fedkeep.core.errors import MethodError
from fedkeep.methods.base import Adapt, Method, private_part
from fedkeep.methods.client import Client
from fedkeep.methods.phase import Patterns, Phase
from fedkeep.methods.server import Server
from fedkeep.split import Split


def fedbabu(
    private: Patterns = "head.*",
    *,
    tunes: Literal["all", "head"] = "all",
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return FedBABU. Everybody's head is the same during federation, so the shared part can predict, and is judged.

    With no private pattern its rounds are FedAvg's.

    Args:
        private: name patterns of the head.
        tunes: what fine-tuning trains, 10 passes over all own examples: ``"all"`` or the ``"head"``.
        local: the body's phase.
        server: what the server does.
    """
    if tunes not in ("all", "head"):
        raise MethodError(f"tunes must be 'all' or 'head'; got {tunes!r}.")
    adapt = private_part(local)
    if tunes == "all":
        adapt = Adapt(phases=(adapt.phases[0].but(trains="all"),), split=Split("*"))
    return Method(
        name="fedbabu", split=Split(private), client=Client(phases=(local.but(trains="federated"),)), server=server,
        adapt=adapt,
    )  # fmt: skip
