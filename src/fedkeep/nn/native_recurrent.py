"""The native recurrent kernels as an operation of PyTorch.

Shapes: B sequences, L longest length, I inputs, H hidden units, D directions, V rows of the table, K gates (LSTM 4,
GRU 3). With ``cohort`` every tensor has a leading axis of G clients; one that all clients share may be expanded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeep.core.errors import DataError
from fedkeep.kernels import native
from fedkeep.nn import pure
from fedkeep.nn.operation import How, Operation, Tensors, per_client
from fedkeep.nn.pure import LAST, MAX, OUTPUT


def _front(inputs: Tensor, ids: Tensor | None, cohort: bool) -> tuple[tuple[int, ...], torch.Size]:
    """The client axis, if there is one, and (B, L)."""
    shape = (inputs if ids is None else ids).shape
    return ((inputs.shape[0],), shape[1:3]) if cohort else ((), shape[:2])


def _work_size(sequences: int, length: int, hidden: int, pool: int, dtype: torch.dtype) -> int:
    """Numbers kept per direction: for each step four gates and a state; where the greatest stood."""
    padded = -(-hidden // native.lanes(dtype)) * native.lanes(dtype)
    return sequences * padded * (length * 5 + (pool == MAX))


class _Call:
    """The sizes and addresses that both passes share. ``keep`` holds tensors whose addresses are in use."""

    def __init__(self, tensors: Tensors, how: How, cohort: bool) -> None:
        *weights, inputs, ids, lengths = tensors
        gru, pool = how
        _, (self.sequences, self.length) = _front(inputs, ids, cohort)
        self.clients = inputs.shape[0] if cohort else 1
        self.directions = len(weights) // 4
        self.inputs, self.hidden = inputs.shape[-1], weights[1].shape[-1]
        self.rows = inputs.shape[-2] if ids is not None else 0
        self.keep = [per_client(t, cohort) for t in (lengths, inputs, *weights)]
        if ids is not None:
            self.keep.append(per_client(ids, cohort))
        (lengths, lengths_stride), (inputs, stride) = self.keep[:2]
        source = (inputs.data_ptr(), stride)
        pairs = self.keep[2 : 2 + len(weights)]
        unused = [0] * (8 - len(pairs))
        self.words = [
            gru,
            inputs.dtype == torch.float64,
            torch.get_num_threads(),
            native.load().level,
            max(pool, LAST),
            self.clients,
            self.directions,
            self.sequences,
            self.length,
            self.inputs,
            self.hidden,
            self.rows,
            lengths.data_ptr(),
            lengths_stride,
            *(
                (*source, 0, 0, 0, 0)
                if ids is None
                else (0, 0, self.keep[-1][0].data_ptr(), self.keep[-1][1], *source)
            ),
            *[t.data_ptr() for t, _ in pairs],
            *unused,
            *[stride for _, stride in pairs],
            *unused,
        ]

    def run(self, backward: bool, pointers: list[int]) -> None:
        code = native.call("recurrent", backward, self.words + pointers)
        if code == native.BAD_LENGTH:
            raise DataError(pure.BAD_LENGTH, most=self.length)
        if code == native.BAD_ID:
            raise DataError(pure.BAD_ID, last=self.rows - 1)


class _RecurrentPasses(Operation):
    """The settings are whether it is a GRU, and how it is pooled: OUTPUT, LAST, MEAN or MAX.

    The tensors are, for each direction, w_ih (K*H, I), w_hh (K*H, H), b_ih (K*H,) and b_hh (K*H,); the inputs
    (B, L, I), or the table (V, I) where there are ids; ids (B, L) or None; lengths (B,) int64.
    """

    name = "recurrent"
    others = 2

    def forward(self, tensors: Tensors, how: How, cohort: bool, keep: bool = True) -> list[Tensor]:
        """Give last states, means or maxima (B, D*H); before them, if the pool is OUTPUT, all states (B, L, D*H)."""
        found = _results(tensors, how, cohort, keep)
        pointers = [t.data_ptr() for t in found]
        _Call(tensors, how, cohort).run(False, [*[0] * (3 - len(found)), *pointers, *[0] * 11])
        return found

    def backward(
        self, grads: Tensors, kept: Tensor, tensors: Tensors, how: How, cohort: bool, input_grad: bool
    ) -> list[Tensor]:
        """Run the kernel; ``kept`` is what it wants of the forward pass."""
        c = _Call(tensors, how, cohort)
        *weights, inputs, ids, _ = tensors
        grads = [None if g is None else g.contiguous() for g in grads]
        kept = kept.contiguous()
        chunks = native.chunks(c.sequences)
        copies = c.directions * (1 if ids is None else chunks)
        several = () if chunks == 1 else (chunks,)
        found = [torch.empty((*several, *w.shape), dtype=w.dtype, device=w.device) for w in weights]
        if input_grad:
            found.append(torch.empty((copies, *inputs.shape), dtype=inputs.dtype, device=inputs.device))
            unwritten = copies if chunks > 1 else 1  # one chunk writes the same rows of all copies
            found[-1][:unwritten].zero_()
        pointers = [0, 0, kept.data_ptr(), *[0] * (2 - len(grads)), *map(native.address, grads)]
        pointers.append(found[-1].data_ptr() if input_grad else 0)
        pointers += [t.data_ptr() for t in found[: len(weights)]] + [0] * (8 - len(weights))
        c.run(True, pointers)
        if chunks == 1:
            return [*found[: len(weights)], *(t[0] for t in found[len(weights) :])]
        return [t[0] for t in found]

    def empty(self, tensors: Tensors, how: How, cohort: bool) -> list[Tensor]:
        """See ``Operation.empty``."""
        return _results(tensors, how, cohort, True)

    def empty_gradients(self, tensors: Tensors, how: How, cohort: bool, input_grad: bool) -> list[Tensor]:
        """See ``Operation.empty_gradients``."""
        *weights, inputs, _, _ = tensors
        return [t.new_empty(t.shape) for t in [*weights, *([inputs] if input_grad else [])]]

    def pure(self, tensors: Tensors, how: How) -> list[Tensor]:
        """See ``pure.run``."""
        *weights, inputs, ids, lengths = tensors
        gru, pool = how
        found = pure.run(inputs, ids, lengths, weights, bool(gru), pool, True)
        return list(found) if pool == OUTPUT else [found[1]]


def _results(tensors: Tensors, how: How, cohort: bool, keep: bool) -> list[Tensor]:
    *weights, inputs, ids, _ = tensors
    front, (sequences, length) = _front(inputs, ids, cohort)
    directions, hidden = len(weights) // 4, weights[1].shape[-1]
    width, size = directions * hidden, _work_size(sequences, length, hidden, how[1], inputs.dtype)
    states = [inputs.new_empty(*front, sequences, length, width)] if how[1] == OUTPUT else []
    pooled = inputs.new_empty(*front, sequences, width)
    return [*states, pooled, inputs.new_empty(*front, directions, size if keep else 0)]


PASSES = _RecurrentPasses()


def run(
    inputs: Tensor, ids: Tensor | None, lengths: Tensor, weights: list[Tensor], gru: bool, pool: int
) -> Sequence[Tensor]:
    """The layer by its kernel, differentiable, under vmap for a whole cohort; the shapes are those of ``_RecurrentPasses``.

    Returns:
        Last states, means or maxima (B, D*H); before them, if ``pool`` is OUTPUT, all states (B, L, D*H).

    Raises:
        DataError: a length or an id is out of range.
    """
    return PASSES((gru, pool), *weights, inputs, ids, lengths)[: 2 if pool == OUTPUT else 1]


def usable(inputs: Tensor, weights: Sequence[Tensor], *others: Tensor) -> bool:
    """Whether the kernels can take these tensors: on the CPU, all float32 or all float64, and a library in use."""
    dtype = inputs.dtype
    return (
        native.available()
        and native.in_memory(inputs, *weights, *others)
        and dtype in (torch.float32, torch.float64)
        and inputs.device.type == "cpu"
        and all(w.dtype == dtype and w.device.type == "cpu" for w in weights)
    )
