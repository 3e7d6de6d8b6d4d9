"""A private copy of the whole model beside the federated one, for methods that train both.

``with_copy`` adds the copy as the submodule ``own``: ``head.weight`` is federated, ``own.head.weight`` private. The
model's ``forward`` computes with the federated values; ``copy_of`` renames, so that it computes with the copy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params, under
from fedkeep.methods.client import Finish, Finished
from fedkeep.methods.features import extended
from fedkeep.methods.hook_declarations import reveals
from fedkeep.methods.terms import Term
from fedkeep.split import Split

PREFIX = "own."
COPY = Split((f"{PREFIX}*",))


def with_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with a further copy of it in the submodule ``own``; see ``extended``."""
    return extended(module, {"own": copied(module)}, copies="own")


def copy_of(params: Params) -> Params:
    """Return the private copy's values under the model's own names."""
    return under(PREFIX, params)


@dataclass(frozen=True)
class OnCopy(Term):
    """A term of the private copy v instead of the federated w; a comparison with what was received is v − w^t.

    Attributes:
        term: the term.
    """

    term: Term

    @property
    def reads_parameters(self) -> bool | None:
        """True if the term does, or if it compares: a row of v that no example looks up differs from w^t."""
        return self.term.reads_received or self.term.reads_parameters

    @property
    def reads_received(self) -> bool:
        """True if the term does."""
        return self.term.reads_received

    def __call__(self, net: Net, params: Params, batch: Batch, received: Mapping[str, Tensor]) -> Tensor:
        return self.term(net, copy_of(params), batch, received)


@reveals("loss", of=(f"private {PREFIX}*",))
@dataclass(frozen=True)
class PulledCopy(OnCopy):
    """A term that holds the private copy near what was received: the training loss tells how far it is."""


def predict_copy(net: Net, params: Params, batch: Batch) -> Any:
    """Predict with the private copy."""
    return net(copy_of(params), batch)


@reveals("upload/*", of=(f"private {PREFIX}*", "examples"))
def publish_own(done: Finish) -> Finished:
    """Upload the private copies in the places of the federated parameters."""
    return Finished(params={n: v for n, v in copy_of(done.trained).items() if n in done.sent.params})
