"""LSTM and GRU layers with the parameters and numbers of ``torch.nn``'s, faster on the CPU.

One layer, batch first, optionally bidirectional, over sequences of different lengths: padding costs nothing and
never reaches a result. On the CPU they run the native kernels (``fedkeep.kernels.native.status()`` says which), else pure
PyTorch. ``torch.func.vmap`` over stacked parameters runs a whole cohort of clients in one call of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.nn import native_recurrent, pure
from fedkeep.nn.operation import functorch_active
from fedkeep.nn.pure import LAST, MAX, MEAN, OUTPUT

Pool = Literal["last", "mean", "max"]
_POOLS = {None: OUTPUT, "last": LAST, "mean": MEAN, "max": MAX}


class _Layer(nn.RNNBase):
    """What both layers are beside their kind; it comes before torch's own class in their order of bases."""

    def __init__(self, input_size: int, hidden_size: int, bidirectional: bool = False) -> None:
        super().__init__(input_size, hidden_size, batch_first=True, bidirectional=bidirectional)  # type: ignore[arg-type, call-arg]

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Runs the layer.

        Args:
            x: (B, L, I); values past a sequence's length are not read.
            lengths: (B,) int64 from 1 to L; None: all L.

        Returns:
            output (B, L, D*H), zero past each length, and last (B, D*H): the forward direction's state at the
            last step, then the backward direction's at step 0.

        Raises:
            DataError: a shape, a type or a length is wrong.
        """
        output, last = self._run(x, None, lengths)
        return output, last

    def forward_ids(self, ids: Tensor, table: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``forward(embedding(ids, table), lengths)``, faster: only the table rows in use are multiplied, once.

        Args:
            ids: (B, L) int64 rows of the table; ids past a sequence's length are not read.
            table: (V, I).
            lengths: as in ``forward``.

        Raises:
            DataError: a shape, a type, a length or an id is wrong.
        """
        output, last = self._run(table, ids, lengths)
        return output, last

    def pooled(self, x: Tensor, lengths: Tensor | None = None, how: Pool = "last") -> Tensor:
        """One vector per sequence, faster than pooling the outputs, which are never written.

        Args:
            x: as in ``forward``.
            lengths: as in ``forward``.
            how: ``"last"`` as ``forward``'s second result, or the ``"mean"`` or ``"max"`` of the outputs over time.

        Returns:
            (B, D*H).

        Raises:
            ConfigError: ``how`` is none of these.
            DataError: as in ``forward``.
        """
        return self._run(x, None, lengths, how)[-1]

    def pooled_ids(
        self, ids: Tensor, table: Tensor, lengths: Tensor | None = None, how: Pool = "last"
    ) -> Tensor:
        """``pooled(embedding(ids, table), lengths, how)``; see ``forward_ids`` and ``pooled``."""
        return self._run(table, ids, lengths, how)[-1]

    def _run(
        self, inputs: Tensor, ids: Tensor | None, lengths: Tensor | None, how: Pool | None = None
    ) -> Sequence[Tensor]:
        if ids is None:
            if inputs.dim() != 3 or inputs.shape[-1] != self.input_size:
                raise DataError(
                    "expected inputs of shape (B, L, {wanted}); got {got}",
                    wanted=self.input_size,
                    got=tuple(inputs.shape),
                )
        elif ids.dim() != 2 or ids.dtype != torch.int64:
            raise DataError(
                "expected int64 ids of shape (B, L); got {dtype} of shape {shape}",
                dtype=ids.dtype,
                shape=tuple(ids.shape),
            )
        elif inputs.dim() != 2 or inputs.shape[-1] != self.input_size:
            raise DataError(
                "expected a table of shape (V, {wanted}); got {got}",
                wanted=self.input_size,
                got=tuple(inputs.shape),
            )
        if how not in _POOLS:
            raise ConfigError("a sequence is pooled by 'last', 'mean' or 'max'; got {got!r}", got=how)
        # By attribute, not from _flat_weights: torch.func.functional_call swaps attributes.
        weights = [getattr(self, name) for name in self._flat_weights_names]
        sequences, length = (inputs if ids is None else ids).shape[:2]
        if lengths is None:
            lengths = torch.full((sequences,), length, device=inputs.device)
        elif lengths.shape != (sequences,) or lengths.dtype != torch.int64:
            raise DataError(
                "lengths must be int64 of shape ({sequences},), one per sequence; got {dtype} of shape "
                "{shape}",
                sequences=sequences,
                dtype=lengths.dtype,
                shape=tuple(lengths.shape),
            )
        gru, pool = isinstance(self, nn.GRU), _POOLS[how]
        if native_recurrent.usable(inputs, weights, lengths, *(() if ids is None else (ids,))):
            return native_recurrent.run(inputs, ids, lengths.cpu(), weights, gru, pool)
        return pure.run(inputs, ids, lengths, weights, gru, pool, functorch_active())


class LSTM(_Layer, nn.LSTM):  # type: ignore[misc]
    """Long short-term memory; weights, gate order and initial values are those of ``torch.nn.LSTM``.

    Args:
        input_size: I.
        hidden_size: H.
        bidirectional: D is 2, else 1.
    """


class GRU(_Layer, nn.GRU):  # type: ignore[misc]
    """Gated recurrent unit, made as ``LSTM``; weights, gate order and initial values are those of ``torch.nn.GRU``."""
