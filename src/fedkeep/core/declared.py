"""What a module declares of itself: tables and their ids, buffers that training updates, rows for each example.

A declaration stands under one name of fedkeep's own, so no attribute of a user's module is read as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import nn

from fedkeep.core.errors import ConfigError, did_you_mean

_DECLARED = "_fedkeep_declared"
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Declared:
    """What ``declare`` was told of a module.

    Attributes:
        lookup: the column of ids that looks up each table, by the table's name.
        updated_buffers: names of the buffers that training updates.
        per_example: names of the parameters that may carry a leading axis of examples.
        takes_bytes: whether it takes images as uint8.
    """

    lookup: Mapping[str, str] = field(default_factory=dict)
    updated_buffers: tuple[str, ...] = ()
    per_example: tuple[str, ...] = ()
    takes_bytes: bool = False


def declare(
    module: M,
    *,
    lookup: Mapping[str, str] | None = None,
    updated_buffers: Sequence[str] | None = None,
    per_example: Sequence[str] | None = None,
    takes_bytes: bool | None = None,
) -> M:
    """Tell fedkeep of a module what it cannot see, and return the module.

    A layer may declare itself at the end of its ``__init__``. Copies and pickles keep what is declared. A later
    declaration takes the place of an earlier one of the same kind; ``None`` leaves it as it is.

    Args:
        module: a model, or a layer of it.
        lookup: of a model, its tables (embeddings) and the column of ids that is all that looks each up, e.g.
            ``{"embedding.weight": "text"}``. A client then trains and sends the rows that its own examples use.
        updated_buffers: of any layer, the buffers that training updates, beside those of normalisation layers and
            spectral norms. They are federated, or private where a pattern says so; other buffers are frozen.
        per_example: of a model, the parameters that may carry a leading axis of examples, each example's own row, where
            they are private.
        takes_bytes: of any layer, whether images come as uint8 as they are stored. By default a model is given them as
            floats from 0 to 1.

    Raises:
        ConfigError: one is of another type, or a name is none of the module's.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError("declare takes a torch.nn.Module; got {got!r}.", got=module)
    if "_parameters" not in vars(module):
        raise ConfigError(
            "{model} declares before super().__init__(). Declare at the end of its __init__.",
            model=type(module).__name__,
        )
    found = declared(module)
    parameters = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    if lookup is not None:
        found = replace(found, lookup=_columns(module, lookup, parameters))
    if updated_buffers is not None:
        buffers = [n for n, _ in module.named_buffers(remove_duplicate=False)]
        found = replace(
            found, updated_buffers=_names(module, "updated_buffers", updated_buffers, buffers, "buffer")
        )
    if per_example is not None:
        found = replace(
            found, per_example=_names(module, "per_example", per_example, parameters, "parameter")
        )
    if takes_bytes is not None:
        found = replace(found, takes_bytes=takes_bytes)
    setattr(module, _DECLARED, found)
    return module


def declared(module: nn.Module) -> Declared:
    """Return what a module declares of itself, not what its layers do."""
    found: Declared = getattr(module, _DECLARED, Declared())
    return found


def _columns(module: nn.Module, given: object, parameters: Sequence[str]) -> dict[str, str]:
    if not isinstance(given, Mapping) or not all(isinstance(c, str) and c for c in given.values()):
        raise ConfigError(
            "lookup of {model} must map names of tables to names of columns, e.g. {example}; got {got!r}.",
            model=type(module).__name__,
            example='{"embedding.weight": "text"}',
            got=given,
        )
    return {n: given[n] for n in _names(module, "lookup", tuple(given), parameters, "parameter")}


def _names(module: nn.Module, what: str, given: object, there: Sequence[str], kind: str) -> tuple[str, ...]:
    if (
        not isinstance(given, Sequence)
        or isinstance(given, str)
        or not all(isinstance(n, str) for n in given)
    ):
        raise ConfigError(
            "{what} of {model} must be a tuple of names, e.g. {example}; got {got!r}.",
            what=what,
            model=type(module).__name__,
            example='("mean",)',
            got=given,
        )
    for name in given:
        if name not in there:
            raise ConfigError(
                "{what} of {model} names {name!r}, which is no {kind} of it.{close} In an __init__, declare last.",
                what=what,
                model=type(module).__name__,
                name=name,
                kind=kind,
                close=did_you_mean(name, there) or f" It has {list(there)}.",
            )
    return tuple(given)
