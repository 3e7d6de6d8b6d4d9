"""What a round does to every number of an upload: the kernel against PyTorch, on every instruction set."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedkeep.kernels import native, values
from fedkeep.kernels.native import status

KINDS = (torch.float32, torch.float64)
SIZES = (1, 3, 8, 17, 64, 129, values.PIECE + 5)
LEVELS = ("0", "portable", "avx2", "avx512")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Compute in PyTorch alone, then by every instruction set that there is."""
    monkeypatch.setenv("FEDKEEP_NATIVE", request.param)
    native.load.cache_clear()
    if request.param != "0" and not status().native:
        pytest.skip(str(status()))
    yield request.param
    native.load.cache_clear()


def drawn(size: int, kind: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_found_wherever_it_stands(level, kind, bad) -> None:
    for size in (1, 3, 8, 17, 64, 129):
        x = drawn(size, kind)
        assert values.is_finite(x)
        for place in range(size):
            one = x.clone()
            one[place] = bad
            assert not values.is_finite(one), (size, place)
    many = drawn(3 * values.PIECE, kind)
    many[-1] = bad
    assert not values.is_finite(many)


@pytest.mark.parametrize("kind", KINDS)
def test_finite_numbers_whose_sum_is_not_are_finite(level, kind) -> None:
    assert values.is_finite(torch.full((64,), torch.finfo(kind).max, dtype=kind))


def fold(total, given, weight, held=None, share=0.0) -> torch.Tensor:
    return values.fold([(total, given, weight, held, share)])[0]


def test_hand_computed_sums(level) -> None:
    first, second, third = (torch.tensor(v) for v in ([1.0, -2.0], [0.5, 4.0], [8.0, 0.25]))
    total = fold(None, second, 3.0, first, 2.0)  # 2 · first + 3 · second
    assert total.dtype == torch.float64
    assert total.tolist() == [3.5, 8.0]
    again = fold(total, third, 4.0)
    assert again is total
    assert total.tolist() == [35.5, 9.0]
    assert values.mean(total, 9.0, torch.float32).tolist() == torch.tensor([35.5 / 9, 1.0]).tolist()
    assert fold(None, first, 5.0).tolist() == [5.0, -10.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_sums_of_whole_weights_are_exact_to_the_bit(level, kind, size) -> None:
    a, b, c = (drawn(size, torch.float32, seed).to(kind) for seed in range(3))
    wanted = 0.0 + 7.0 * a.double() + 130.0 * b.double() + 1600.0 * c.double()
    found = fold(fold(None, b, 130.0, a, 7.0), c, 1600.0)
    assert torch.equal(found, wanted)
    assert torch.equal(fold(fold(fold(None, a, 7.0), b, 130.0), c, 1600.0), wanted)
    for out in KINDS:
        assert torch.equal(values.mean(found, 1737.0, out), (wanted / 1737.0).to(out))


def test_minus_zero_is_summed_as_from_zeros(level) -> None:
    minus = torch.tensor([-0.0] * 9)
    for found in (fold(None, minus, 2.0), fold(None, minus, 2.0, minus, 1.0)):
        assert not torch.signbit(found).any()


def test_tensors_with_gaps_and_of_other_types_are_summed_too(level) -> None:
    turned = drawn(12, torch.float32).view(3, 4).T
    assert torch.equal(fold(None, turned, 3.0), 3.0 * turned.double())
    assert not values.is_finite(torch.tensor([[1.0, 2.0], [math.nan, 3.0]])[:, 0])
    half = drawn(12, torch.float32).half()
    assert torch.equal(fold(None, half, 2.0, half, 1.0), 3.0 * half.double())
    mixed = fold(None, drawn(5, torch.float64), 1.0, torch.ones(5), 1.0)
    assert torch.equal(mixed, 1.0 + drawn(5, torch.float64))
    assert values.mean(torch.ones(4, dtype=torch.float64), 2.0, torch.bfloat16).tolist() == [0.5] * 4
    assert fold(None, torch.ones(0), 1.0).shape == (0,)
    assert values.is_finite(torch.ones(0))


def test_hand_computed_sums_of_rows(level) -> None:
    """Rows 0 and 2 get more, row 3 is the first of whatever is there; row 1 stays."""
    sums = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [math.nan, 7.0]], dtype=torch.float64)
    given = torch.tensor([[1.0, -1.0], [0.5, 0.0], [-0.0, 2.0]])
    values.fold_rows(sums, torch.tensor([2, 0, 3]), given, 2.0, 3)
    assert sums.tolist() == [[2.0, 2.0], [3.0, 4.0], [7.0, 4.0], [0.0, 4.0]]
    assert not torch.signbit(sums[3]).any()


@pytest.mark.parametrize("weight", [1.0, 37.0, 0.3, float(values.WHOLE)])
@pytest.mark.parametrize("kind", [*KINDS, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (6, 2, 9), (4, 0), (0, 8)])
def test_sums_of_rows_are_those_of_pytorch(level, shape, kind, weight) -> None:
    rows, generator = shape[0], torch.Generator().manual_seed(0)
    given = torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)
    sums = torch.randn((2 * rows, *shape[1:]), generator=generator, dtype=torch.float64)
    places = torch.randperm(2 * rows, generator=generator)[:rows]
    wanted = sums.clone()
    wanted[places[places >= rows]] = 0
    wanted.index_add_(0, places, given.double(), alpha=weight)
    values.fold_rows(sums, places, given, weight, rows)
    assert torch.equal(sums, wanted)
    values.fold_rows(sums, places, given.mT.contiguous().mT if given.dim() > 1 else given, weight, 2 * rows)
    assert torch.equal(sums, wanted.index_add_(0, places, given.double(), alpha=weight))


@pytest.mark.skipif(not status().native, reason=str(status()))
def test_threads_change_no_bit() -> None:
    before, found = torch.get_num_threads(), []
    x, y = drawn(values.PIECE + 5, torch.float32), drawn(values.PIECE + 5, torch.float32, 1)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(fold(None, x, 0.3, y, 0.7))
            rows = torch.zeros(len(x), 1, dtype=torch.float64)
            values.fold_rows(rows, torch.arange(len(x)).flip(0), x.view(-1, 1), 3.0, 9)
            assert torch.equal(rows.view(-1), 3.0 * x.double().flip(0))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="PyTorch sums in another order there"
)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 511])
def test_a_norm_by_pieces_has_the_bits_of_pytorchs(kind, size) -> None:
    x = drawn(3 * values.PIECE + size, kind, size)
    for one in (x, x[1:], x[: 2 * values.PIECE].view(4, -1), x[: 2 * values.PIECE].view(4, -1).T, x[:size]):
        assert values.norm(one) == float(torch.linalg.vector_norm(one, dtype=torch.float64))


def test_a_norm_of_large_numbers_is_finite_and_of_no_numbers_is_none() -> None:
    assert values.norm(torch.full((2 * values.PIECE,), 1e38)) == pytest.approx(
        1e38 * math.sqrt(2 * values.PIECE)
    )
    bad = torch.ones(2 * values.PIECE)
    bad[-3] = math.nan
    assert math.isnan(values.norm(bad))
