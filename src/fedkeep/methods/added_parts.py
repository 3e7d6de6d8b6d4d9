"""What methods add to a model: parts of their own, or a private copy of the whole beside the federated one.

``with_copy`` adds the copy as the submodule ``own``: ``head.weight`` is federated, ``own.head.weight`` private. The
model's ``forward`` computes with the federated values; ``copy_of`` renames, so that it computes with the copy's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedkeep.core.copying import copied
from fedkeep.core.declared import declare, declared
from fedkeep.core.describe import digest
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net, every_tensor, mark_added
from fedkeep.core.params import Batch, Params, under
from fedkeep.core.seeds import DrawWatch, generator
from fedkeep.methods.client import Finish, Finished
from fedkeep.methods.hook_declarations import reveals
from fedkeep.methods.terms import Term
from fedkeep.split import Split

PREFIX = "own."
COPY = Split((f"{PREFIX}*",))


def extended(module: nn.Module, added: Mapping[str, nn.Module | nn.Parameter], copies: str = "") -> nn.Module:
    """Return a copy of a model with further parts, which its own ``forward`` does not meet; see ``core.net``.

    Args:
        module: the model.
        added: parts and parameters by name.
        copies: which of these holds copies of the model's own parts; their tables are looked up by the same columns.

    Raises:
        MethodError: the model has something of such a name already.
    """
    both = copied(module)
    for name, new in added.items():
        if hasattr(module, name):
            raise MethodError(
                "{module} has an attribute {name!r}, where this training method puts a part of its "
                "own; rename it.",
                module=type(module).__name__,
                name=name,
            )
        setattr(both, name, new)
    mark_added(both, list(added))
    tables = declared(module).lookup
    own = {name for name, _ in both.named_parameters() if copies}
    if more := {f"{copies}.{n}": c for n, c in tables.items() if f"{copies}.{n}" in own}:
        declare(both, lookup={**tables, **more})
    return both


def nested(values: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that does nothing but hold parameters of these values, under these names (dots are layers)."""
    whole = nn.Module()
    for name, value in values.items():
        *path, leaf = name.split(".")
        _owner(whole, path).register_parameter(leaf, nn.Parameter(value))
    return whole


def nested_parts(parts: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that holds parts under these names (dots are layers)."""
    whole = nn.Module()
    for name, new in parts.items():
        *path, leaf = name.split(".")
        _owner(whole, path).add_module(leaf, new)
    return whole


def _owner(whole: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the part of a module at a path; what is missing on it is made."""
    for step in path:
        if step not in whole._modules:
            whole.add_module(step, nn.Module())
        whole = whole.get_submodule(step)
    return whole


@contextmanager
def drawn_for(module: nn.Module, purpose: str) -> Iterator[None]:
    """Make new layers inside: their type is the model's, and the model's values name the stream of their own.

    So the same model is extended the same way, whatever was drawn before, and other values give other layers.
    """
    before = torch.get_default_dtype()
    kinds = [v.dtype for v in module.parameters() if v.is_floating_point()]
    with DrawWatch(generator(int(digest(every_tensor(module))[:15], 16), purpose)):
        torch.set_default_dtype(kinds[0] if kinds else before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


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
