"""The recurrent layers in PyTorch alone: where no native library is in use, on CUDA, and for other number types.

Never a packed sequence: on the CPU it leaves the oneDNN path and costs six times as much. Padding and, for the
backward direction, a copy with each sequence turned around give the same numbers on that path.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedkeep.core.errors import DataError


def run(
    inputs: Tensor, ids: Tensor | None, lengths: Tensor, weights: list[Tensor], gru: bool, stepwise: bool
) -> tuple[Tensor, Tensor]:
    """Returns output (B, L, D*H) and last (B, D*H); arguments as in ``native.forward``.

    Args:
        stepwise: a loop over time from elementary operations, which torch.func can transform.

    Raises:
        DataError: a length or an id is out of range (not checked under torch.func, nor ids on CUDA).
    """
    length = (inputs if ids is None else ids).shape[1]
    lengths = lengths.to(inputs.device)
    if not stepwise and lengths.numel() and not bool(((lengths >= 1) & (lengths <= length)).all()):
        raise DataError(f"lengths must lie between 1 and {length}, the longest that the inputs have room for")
    time = torch.arange(length, device=inputs.device)
    inside = time < lengths.unsqueeze(1)  # (B, L)
    if ids is None:
        x = inputs.masked_fill(~inside.unsqueeze(-1), 0.0)
    else:
        ids = ids.masked_fill(~inside, 0)
        rows = inputs.shape[0]
        if not stepwise and not ids.is_cuda and ids.numel() and not bool(((ids >= 0) & (ids < rows)).all()):
            raise DataError(f"ids must lie between 0 and {rows - 1}, the last row of the table")
        x = F.embedding(ids, inputs)
    turned = torch.where(inside, lengths.unsqueeze(1) - 1 - time, time).unsqueeze(-1)  # (B, L, 1)
    end = (lengths - 1).view(-1, 1, 1)
    outputs, lasts = [], []
    for first in range(0, len(weights), 4):
        backwards = first > 0
        source = torch.take_along_dim(x, turned, 1) if backwards else x
        out = (_steps if stepwise else _library)(source, weights[first : first + 4], gru)
        out = out.masked_fill(~inside.unsqueeze(-1), 0.0)
        lasts.append(torch.take_along_dim(out, end, 1).squeeze(1))
        outputs.append(torch.take_along_dim(out, turned, 1) if backwards else out)
    return torch.cat(outputs, -1), torch.cat(lasts, -1)


def _library(x: Tensor, weights: list[Tensor], gru: bool) -> Tensor:
    """One direction by PyTorch's own layer: (B, L, I) to (B, L, H)."""
    start = x.new_zeros(1, x.shape[0], weights[1].shape[1])
    if x.shape[0] == 0:  # oneDNN refuses an empty batch
        return x.new_zeros(0, x.shape[1], weights[1].shape[1]) + 0.0 * sum(w.sum() for w in weights)
    if gru:
        output: Tensor = torch._VF.gru(x, start, weights, True, 1, 0.0, False, False, True)[0]
    else:
        output = torch._VF.lstm(x, (start, start), weights, True, 1, 0.0, False, False, True)[0]
    return output


def _steps(x: Tensor, weights: list[Tensor], gru: bool) -> Tensor:
    """One direction as a loop; the equations are those of torch.nn.LSTM and torch.nn.GRU."""
    w_ih, w_hh, b_ih, b_hh = weights
    h = c = torch.zeros_like(x[:, 0, :1]) * w_hh[0]  # (B, H); vmap gives it both tensors' client axes
    projected = x @ w_ih.transpose(0, 1) + b_ih  # (B, L, K*H)
    outputs = []
    for t in range(x.shape[1]):
        hidden = h @ w_hh.transpose(0, 1) + b_hh
        if gru:
            xr, xz, xn = projected[:, t].chunk(3, -1)
            hr, hz, hn = hidden.chunk(3, -1)
            reset, update = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            fresh = torch.tanh(xn + reset * hn)
            h = fresh + update * (h - fresh)
        else:
            i, f, g, o = (projected[:, t] + hidden).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs, 1)
