"""Which columns of a batch a function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fedkeep.core.errors import MethodError, did_you_mean

ALONG = (nn.RNNBase, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
"""Layers that look along a sequence."""


class Takes:
    """The columns that a function takes: by the names of its arguments, or with ``**columns`` all there are.

    A module of torch's own, such as a sequence of layers, names its argument itself. It takes the features ``x``, or
    else the only column beside the label; layers that look along a sequence want one for each example.

    Args:
        who: the function's name in messages.
        function: what is called with columns.

    Raises:
        MethodError: it takes arguments by position alone.
    """

    def __init__(self, who: str, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.who, self.names = who, [p.name for p in parameters if p.kind in kinds]
        self.needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
        self.all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.torchs = getattr(function, "__module__", "").startswith(("torch.", "fedkeep.nn."))
        owner = getattr(function, "__self__", None)
        self.mixes = isinstance(owner, nn.Module) and any(isinstance(m, ALONG) for m in owner.modules())
        placed = (
            inspect.Parameter.POSITIONAL_ONLY,
            *(() if self.all else (inspect.Parameter.VAR_POSITIONAL,)),
        )
        if nameless := [p for p in parameters if p.kind in placed]:
            raise MethodError(
                f"{who} takes {str(nameless[0])!r} by position alone, but columns are given by name. "
                f"Name each argument as its column, e.g. forward(self, x), without '/' and '*'."
            )

    def of(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of the columns.

        Raises:
            MethodError: one is missing that has no default.
        """
        for name in self.needed:
            if name not in columns:
                others = sorted(columns.keys() - {"label", "client", "time", "opted_in"})
                if self.torchs and len(self.needed) == 1 and (len(others) == 1 or "x" in others):
                    return {name: self._apart("x" if "x" in others else others[0], columns)}
                advice = "Put it into a module whose forward names" if self.torchs else "Name the argument as"
                raise MethodError(
                    "{who} wants the column {column!r}; the data have {columns}.{near} {advice} the column.",
                    who=self.who,
                    column=name,
                    columns=sorted(columns),
                    near=did_you_mean(name, columns),
                    advice=advice,
                )
        return dict(columns) if self.all else {name: columns[name] for name in self.names if name in columns}

    def _apart(self, name: str, columns: Mapping[str, Tensor]) -> Tensor:
        """Return a column, unless all of its examples would be one sequence."""
        if self.mixes and columns[name].dim() < 3:
            raise MethodError(
                "{who} would take the column {column!r}, (examples, features), as one sequence, and mix "
                "examples. Put it into a module that makes (examples, steps, features) of it.",
                who=self.who,
                column=name,
            )
        return columns[name]
