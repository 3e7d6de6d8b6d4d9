"""Local: every client trains a model of its own; nothing leaves it.

The baseline without collaboration ("Indiv" in KTEPS, "Local" in the mixture of experts): FURL's split with
everything private.
"""

from __future__ import annotations

from fedkeep.methods.base import Adapt, Method
from fedkeep.methods.client import Client
from fedkeep.methods.phase import Phase, telling
from fedkeep.split import Split


@telling
def local(*, local: Phase = Phase()) -> Method:
    """Return local training: all parameters private, started from the module's values, trained on all own examples."""
    phase = local.but(examples="all")
    return Method(
        name="local",
        split=Split("*"),
        client=Client(phases=(phase,)),
        adapt=Adapt(phases=(phase,)),
        predict_shared=None,
    )
