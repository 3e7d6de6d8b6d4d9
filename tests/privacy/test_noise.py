"""Noise on uploads."""

from __future__ import annotations

import pytest
import torch

from fedkeep.core.errors import ConfigError
from fedkeep.core.params import Params
from fedkeep.kernels import values
from fedkeep.privacy import GaussianNoise, RunDraw
from tests.refusals import raises

TENSORS = {"w": torch.ones(300, 300), "b": torch.zeros(5, dtype=torch.float64), "n": torch.tensor(7)}


def noised(sigma: float, tensors: Params = TENSORS, seed: int = 0) -> Params:
    made = GaussianNoise(sigma).encode(tensors, {}, RunDraw(torch.Generator().manual_seed(seed)), {}, {})
    assert (made.state, made.report) == ({}, {})
    return made.tensors


def test_noise_has_the_deviation_asked_for_and_comes_from_its_stream() -> None:
    found = noised(0.25)
    noise = found["w"] - 1
    assert float(noise.std()) == pytest.approx(0.25, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.01)
    assert found["b"].dtype == torch.float64
    assert len(set(found["b"].tolist())) == 5
    assert found["n"] is TENSORS["n"]
    again, other = noised(0.25), noised(0.25, seed=1)
    assert torch.equal(found["w"], again["w"])
    assert not torch.equal(found["w"], other["w"])
    assert GaussianNoise(0.25).decode(found, {}, {}) is found
    turned = noised(0.25, dict(reversed(TENSORS.items())))
    assert all(torch.equal(found[n], turned[n]) for n in TENSORS)
    torch.testing.assert_close(noised(0.5)["w"] - 1, 2 * noise)


def test_no_noise_is_the_same_bits() -> None:
    assert noised(0.0) is TENSORS


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf")])
def test_a_deviation_that_makes_no_sense_is_refused(sigma: float) -> None:
    with raises(ConfigError, name="sigma", got=sigma):
        GaussianNoise(sigma)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2 * values.PIECE, 2 * values.PIECE + 1, 3 * values.PIECE - 1])
def test_numbers_drawn_by_pieces_are_those_drawn_at_once(kind: torch.dtype, size: int) -> None:
    whole, parts = (RunDraw(torch.Generator().manual_seed(7)) for _ in range(2))
    expected = whole.normal((size,), kind)
    by_pieces = [parts.normal(piece.shape, kind) for (piece,) in values.pieces(expected)]
    assert len(by_pieces) > 1
    assert torch.equal(torch.cat(by_pieces), expected)
    assert torch.equal(parts.normal((), kind), whole.normal((), kind))
