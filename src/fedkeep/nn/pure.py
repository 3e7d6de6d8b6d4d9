"""The recurrent layers in PyTorch alone: where no native library is in use, on CUDA, and for other number types.

Never a packed sequence: on the CPU it leaves the oneDNN path and costs six times as much. Padding and, for the
backward direction, a copy with each sequence turned around give the same numbers on that path. Pooling over time leaves
padding out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedkeep.core.errors import DataError
from fedkeep.kernels.native import forward_mode
from fedkeep.nn.steps import recurrence

# What is wanted of a layer: all outputs and the last, or one vector per sequence.
OUTPUT, LAST, MEAN, MAX = -1, 0, 1, 2
BAD_LENGTH = "lengths must lie between 1 and {most}, the longest that the inputs have room for"
BAD_ID = "ids must lie between 0 and {last}, the last row of the table"


def masked_mean(x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The mean over each sequence's own steps.

    Args:
        x: (B, L, C); finite also past a sequence's length.
        lengths: (B,) int64 from 1 to L; None: all L.

    Returns:
        (B, C).
    """
    if lengths is None:
        return x.mean(1)
    inside = _inside(x, lengths).to(x.dtype).unsqueeze(1)  # (B, 1, L)
    return (inside @ x).squeeze(1) / lengths.to(x).unsqueeze(-1)  # a product reads x once and copies nothing


def masked_max(x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """The maximum over each sequence's own steps; of equal values the gradient goes to the first.

    Shapes are those of ``masked_mean``.
    """
    if lengths is not None:
        x = torch.where(_inside(x, lengths).unsqueeze(-1), x, -torch.inf)
    return x.max(1).values


def _inside(x: Tensor, lengths: Tensor) -> Tensor:
    steps = torch.arange(x.shape[1], device=x.device)
    return steps < lengths.to(x.device).unsqueeze(-1)  # (B, L)


def run(
    inputs: Tensor,
    ids: Tensor | None,
    lengths: Tensor,
    weights: list[Tensor],
    gru: bool,
    pool: int,
    stepwise: bool,
) -> tuple[Tensor, Tensor]:
    """Returns output (B, L, D*H), whatever ``pool``, and last states, means or maxima (B, D*H).

    The other arguments are those of ``native.forward``.

    Args:
        stepwise: a loop over time (``steps``), which torch.func can transform.

    Raises:
        DataError: a length or an id is out of range (not checked under torch.func, nor ids on CUDA).
    """
    length = (inputs if ids is None else ids).shape[1]
    lengths, exporting = lengths.to(inputs.device), torch.compiler.is_exporting()
    checks = not (stepwise or exporting)
    # On CUDA cuDNN would want training mode and weights in one piece of memory, and has no second derivative. The steps
    # have no forward derivative.
    stepwise = (stepwise or inputs.is_cuda) and not exporting and not forward_mode()
    if checks and lengths.numel() and not bool(((lengths >= 1) & (lengths <= length)).all()):
        raise DataError(BAD_LENGTH, most=length)
    time = torch.arange(length, device=inputs.device)
    inside = time < lengths.unsqueeze(1)  # (B, L)
    if ids is None:
        x = inputs.masked_fill(~inside.unsqueeze(-1), 0.0)
    else:
        ids = ids.masked_fill(~inside, 0)
        rows = inputs.shape[0]
        if checks and not ids.is_cuda and ids.numel() and not bool(((ids >= 0) & (ids < rows)).all()):
            raise DataError(BAD_ID, last=rows - 1)
        x = F.embedding(ids, inputs)
    turned = torch.where(inside, lengths.unsqueeze(1) - 1 - time, time).unsqueeze(-1)  # (B, L, 1)
    end = (lengths - 1).view(-1, 1, 1)
    sources = [x, _along(x, turned)][: len(weights) // 4]
    if stepwise:
        found = _steps(torch.stack(sources), weights, gru).unbind(0)
    else:
        found = tuple(_library(one, weights[4 * d : 4 * d + 4], gru) for d, one in enumerate(sources))
    outputs, lasts = [], []
    for backwards, out in enumerate(found):
        out = out.masked_fill(~inside.unsqueeze(-1), 0.0)
        lasts.append(_along(out, end).squeeze(1))
        outputs.append(_along(out, turned) if backwards else out)
    output = torch.cat(outputs, -1)
    if pool in (MEAN, MAX):
        return output, (masked_mean if pool == MEAN else masked_max)(output, lengths)
    return output, torch.cat(lasts, -1)


def _along(x: Tensor, steps: Tensor) -> Tensor:
    """The given steps (B, S, 1) of x (B, L, C), as (B, S, C); ``take_along_dim`` cannot be exported for any B and L."""
    return x.gather(1, steps.expand(-1, -1, x.shape[-1]))


def _library(x: Tensor, weights: list[Tensor], gru: bool) -> Tensor:
    """One direction by PyTorch's own layer: (B, L, I) to (B, L, H)."""
    start = x.new_zeros(1, x.shape[0], weights[1].shape[1])
    if torch.compiler.is_exporting():
        return _onnx(x, weights, gru)
    if x.shape[0] == 0:  # oneDNN refuses an empty batch
        zero = 0.0 * sum(
            w.sum() for w in weights
        )  # by which weights have gradients: of zeros, as of torch's layer
        return x.new_zeros(0, x.shape[1], weights[1].shape[1]) + zero
    if gru:
        output: Tensor = torch._VF.gru(x, start, weights, True, 1, 0.0, False, False, True)[0]
    else:
        output = torch._VF.lstm(x, (start, start), weights, True, 1, 0.0, False, False, True)[0]
    return output


def _onnx(x: Tensor, weights: list[Tensor], gru: bool) -> Tensor:
    """The same as one operation of ONNX: torch's exporter would write every step by itself, for one length alone."""
    order = (1, 0, 2) if gru else (0, 3, 1, 2)  # of the gates: z r h, and i o f c
    w, r, *biases = (torch.cat([part.chunk(len(order))[k] for k in order]) for part in weights)
    found: Tensor = torch.onnx.ops.symbolic(
        "GRU" if gru else "LSTM",
        (x.transpose(0, 1), w[None], r[None], torch.cat(biases)[None]),
        {"hidden_size": r.shape[1], **({"linear_before_reset": 1} if gru else {})},
        dtype=x.dtype,
        shape=(x.shape[1], 1, x.shape[0], r.shape[1]),
        version=18,
    )
    return found.squeeze(1).transpose(0, 1)


def _steps(x: Tensor, weights: list[Tensor], gru: bool) -> Tensor:
    """All D directions as one loop over time, (D, B, L, I) to (D, B, L, H)."""
    w_ih, w_hh, b_ih, b_hh = (torch.stack(weights[kind::4]) for kind in range(4))
    bias = b_ih if gru else b_ih + b_hh
    flat = torch.baddbmm(bias.unsqueeze(1), x.flatten(1, 2), w_ih.transpose(1, 2))  # (D, B*L, K*H)
    return recurrence(flat.reshape(*x.shape[:3], -1), w_hh, b_hh if gru else None)
