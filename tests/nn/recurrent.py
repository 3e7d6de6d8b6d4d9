"""Recurrent layers, torch's with the same weights, and what their outputs are compared by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fedkeep.kernels.native import status
from fedkeep.nn import GRU, LSTM

KINDS = {"lstm": (LSTM, nn.LSTM), "gru": (GRU, nn.GRU)}
needs_native = pytest.mark.skipif(not status().native, reason=str(status()))


def draw(kind: str, shape: tuple[int, int, int, int], bidirectional: bool, dtype: torch.dtype, seed: int = 0):
    """A layer, torch's with the same weights, inputs and ragged lengths (one of them full)."""
    torch.manual_seed(seed)
    sequences, length, inputs, hidden = shape
    ours, theirs = KINDS[kind]
    layer = ours(inputs, hidden, bidirectional).to(dtype)
    reference = theirs(inputs, hidden, batch_first=True, bidirectional=bidirectional).to(dtype)
    reference.load_state_dict(layer.state_dict())
    lengths = torch.randint(1, length + 1, (sequences,))
    lengths[:1] = length
    return layer, reference, torch.randn(sequences, length, inputs, dtype=dtype), lengths


def packed(reference: nn.RNNBase, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    output, state = reference(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    h = state[0] if isinstance(state, tuple) else state
    output, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
    return output, h.transpose(0, 1).reshape(len(x), -1)


def scalar(found: tuple[Tensor, ...]) -> Tensor:
    """A number that every entry of both outputs moves, each by another amount."""
    return sum((t * torch.arange(1, t.numel() + 1, dtype=t.dtype).cos().view(t.shape)).sum() for t in found)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, as a share of the largest value that is wanted."""
    assert found.shape == wanted.shape
    if not wanted.numel():
        return 0.0
    return float(((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).detach())
