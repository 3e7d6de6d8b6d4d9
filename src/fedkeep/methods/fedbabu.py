"""FedBABU: only the body is federated; the head keeps its first values until a client fine-tunes.

Source: Oh, Kim and Yun, FedBABU: Towards Enhanced Representation for Federated Image Classification, arXiv 2106.06042,
algorithm 1.
One round: (1) a cohort downloads the body, and joins it with the head's initial values; (2) each client trains the body
on its own examples, the head frozen; (3) it uploads the change of the body; (4) the server averages.
After federation a client fine-tunes everything, or the head alone, from the federated body and that same head.
"""

from __future__ import annotations

from typing import Literal

from fedkeep.core.errors import MethodError, check_choice
from fedkeep.methods.base import Method, private_part
from fedkeep.methods.client import Client
from fedkeep.methods.phase import Patterns, Phase, telling
from fedkeep.methods.server import Server
from fedkeep.split import Split


@telling
def fedbabu(
    private: Patterns = "head.*",
    *,
    tunes: Literal["all", "head"] = "all",
    local: Phase = Phase(),
    server: Server = Server(),
) -> Method:
    """Return FedBABU. The head is frozen in rounds: part of the model, in no upload, average or client's store.

    With no pattern its rounds are FedAvg's. A head of zeros, through which no gradient comes to the body, is drawn anew.

    Args:
        private: name patterns of the head, a client's own once it fine-tunes.
        tunes: what fine-tuning trains, 10 passes over all own examples: ``"all"`` or the ``"head"``.
        local: the body's phase.
        server: see ``methods``.
    """
    check_choice("tunes must be", tunes, ("all", "head"), MethodError)
    own = Split("*" if tunes == "all" else private)
    return Method(
        name="fedbabu",
        split=Split(frozen=private),
        client=Client(phases=(local,)),
        server=server,
        adapt=private_part(local).but(split=own, everyone=True),
    )
