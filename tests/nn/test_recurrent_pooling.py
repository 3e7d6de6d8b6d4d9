"""Sequences pooled to a vector each: the last state, the mean, the maximum."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import embedding

from fedkeep.core.errors import ConfigError
from fedkeep.nn import GRU, LSTM, masked_max, masked_mean
from tests.nn.recurrent import KINDS, draw, packed, relative, scalar
from tests.refusals import raises

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("how", ["last", "mean", "max"])
@pytest.mark.parametrize("shape", [(5, 9, 3, 7), (70, 6, 3, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_pooled_equals_pooling_of_the_outputs(path, kind, shape, how) -> None:
    layer, reference, _, lengths = draw(kind, shape, True, torch.float64)
    ids, table = torch.randint(0, 11, shape[:2]), torch.randn(11, 3, dtype=torch.float64)
    output, last = packed(reference, embedding(ids, table), lengths)
    rows = [o[:n] for o, n in zip(output, lengths.tolist(), strict=True)]
    wanted = {
        "last": last,
        "mean": torch.stack([r.mean(0) for r in rows]),
        "max": torch.stack([r.max(0).values for r in rows]),
    }[how]
    expected = torch.autograd.grad(scalar((wanted,)), list(reference.parameters()))
    for found in (
        layer.pooled_ids(ids, table, lengths, how),
        layer.pooled(embedding(ids, table), lengths, how),
    ):
        assert relative(found, wanted) < 1e-12
        grads = torch.autograd.grad(scalar((found,)), list(layer.parameters()))
        assert all(relative(a, b) < 1e-12 for a, b in zip(grads, expected, strict=True))
    with torch.no_grad():
        assert relative(layer.pooled_ids(ids, table, lengths, how), wanted) < 1e-12


def test_maximum_of_equal_values_is_the_first_and_nan_wins(path) -> None:
    layer = GRU(2, 3, bidirectional=True)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
    x = torch.zeros(1, 5, 2, requires_grad=True)  # all states are 0: at every step the same
    (grad_x,) = torch.autograd.grad(layer.pooled(x, how="max").sum(), [x])
    assert not grad_x.any()
    (grad_bias,) = torch.autograd.grad(layer.pooled(x, how="max").sum(), [layer.bias_ih_l0])
    assert grad_bias.tolist() == [0.0] * 6 + [0.5] * 3  # n of the first step alone: 1 - z = 1/2
    (grad_bias,) = torch.autograd.grad(layer.pooled(x, how="max").sum(), [layer.bias_ih_l0_reverse])
    assert grad_bias[6:].tolist() == [0.96875] * 3  # the first in time is the last of 5 steps: 1 - 1/2^5
    broken = x.detach().clone()
    broken[0, 3] = torch.nan
    assert layer.pooled(broken, how="max").isnan().all()


def test_unknown_pooling() -> None:
    with raises(ConfigError, text="a sequence is pooled by 'last', 'mean' or 'max'; got 'sum'"):
        LSTM(2, 3).pooled(torch.zeros(1, 2, 2), how="sum")


@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 1])])
def test_pooling(lengths) -> None:
    x = torch.tensor([[[1.0, -5.0], [2.0, -3.0], [6.0, -1.0]], [[4.0, -2.0], [9.0, 9.0], [9.0, 9.0]]])
    if lengths is None:
        x, mean, most = x[:1], [[3.0, -3.0]], [[6.0, -1.0]]
    else:
        mean, most = [[3.0, -3.0], [4.0, -2.0]], [[6.0, -1.0], [4.0, -2.0]]
    assert masked_mean(x, lengths).tolist() == mean
    assert masked_max(x, lengths).tolist() == most
