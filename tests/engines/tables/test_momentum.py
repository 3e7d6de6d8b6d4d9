"""Rows that move under momentum only when they are looked up, against moving all of them at every step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedkeep.engines.tables.lazy_rows import FEW, MovingRows
from fedkeep.kernels import native

LEVELS = ["0", "portable", "avx2", "avx512"]
SHAPES = [(9, 7), (12, 2, 3), (3,), (5, 1), (40, 16), (600, 21)]
FAST = [((9, 7), 1), ((12, 2, 3), 2)]


@pytest.fixture(params=LEVELS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Pure PyTorch, or at most one of the instruction sets."""
    if request.param != "0" and not native.available():
        pytest.skip(f"no native kernels here: {native.status().reason}")
    monkeypatch.setenv("FEDKEEP_NATIVE", request.param)
    native.load.cache_clear()
    yield request.param
    monkeypatch.undo()
    native.load.cache_clear()


def drawn(rng: torch.Generator, size: int, at_most: int) -> Tensor:
    """Some rows in rising order, now and then all."""
    count = int(torch.randint(1, at_most + 1, (1,), generator=rng))
    return torch.randperm(size, generator=rng)[:count].sort().values


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("pull", [0.0, 0.2])
@pytest.mark.parametrize(
    ("shape", "threads"),
    [
        pytest.param(shape, threads, marks=() if (shape, threads) in FAST else pytest.mark.slow)
        for shape in SHAPES
        for threads in (1, 2)
    ],
)
def test_equal_to_moving_every_row(
    path: str, shape: tuple[int, ...], threads: int, pull: float, momentum: float
) -> None:
    """Against torch.optim on the whole table, whose gradient everywhere holds the proximal term's."""
    rng = torch.Generator().manual_seed(1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weights = torch.randn(shape, dtype=torch.float64, generator=rng)
        anchor = torch.randn(shape, dtype=torch.float64, generator=rng) if pull else torch.zeros_like(weights)
        rows = MovingRows(
            weights.clone(), torch.zeros_like(weights), 0.3, momentum, anchor if pull else None, pull
        )
        assert rows._native is (path != "0")
        dense = weights.clone().requires_grad_()
        optimizer = torch.optim.SGD([dense], 0.3, momentum=momentum)
        for step in range(2 * FEW + 5):  # powers of the momentum are computed anew twice
            used = drawn(rng, shape[0], shape[0] if step % 5 == 0 else max(1, shape[0] // 4))
            seen = rows.look_up(used)
            torch.testing.assert_close(seen, dense.detach()[used], rtol=1e-12, atol=1e-12)
            apart = dense.detach() - anchor
            others = apart.index_fill(0, used, 0).square().sum()
            assert float(rows.penalty(used)) == pytest.approx(
                0.5 * pull * float(others), rel=1e-10, abs=1e-14
            )
            grads = torch.randn(seen.shape, dtype=torch.float64, generator=rng)
            dense.grad = (pull * apart).index_add_(0, used, grads)
            optimizer.step()
            rows.move(used, seen, grads + pull * apart[used])
        rows.finish()
        rows.finish()  # once is enough
        torch.testing.assert_close(rows.table, dense.detach(), rtol=1e-12, atol=1e-12)
        assert float(rows.penalty(used)) == pytest.approx(
            0.5 * pull * float((dense.detach() - anchor).index_fill(0, used, 0).square().sum()),
            rel=1e-10,
            abs=1e-14,
        )
        if momentum:
            velocity = optimizer.state[dense]["momentum_buffer"]
            torch.testing.assert_close(rows.velocity, velocity, rtol=1e-12, atol=1e-12)
    finally:
        torch.set_num_threads(before)


def test_single_precision_by_hand(path: str) -> None:
    """μ = 1/2, η = 1: a row with v = 8 that waits for two steps has moved by −8 (1/2 + 1/4) and goes on with v = 2."""
    rows = MovingRows(torch.zeros(2, 17), torch.zeros(2, 17), rate=1.0, momentum=0.5)
    first, second = torch.tensor([0]), torch.tensor([1])
    rows.move(first, rows.look_up(first), torch.full((1, 17), 8.0))
    for _ in range(2):
        rows.move(second, rows.look_up(second), torch.zeros(1, 17))
    assert rows.look_up(first).tolist() == [[-8.0 - 6.0] * 17]
    assert rows.table[0].tolist() == [-8.0] * 17  # looking changes nothing
    rows.move(first, rows.look_up(first), torch.full((1, 17), 4.0))
    assert rows.velocity[0].tolist() == [0.5 * 2.0 + 4.0] * 17
    assert rows.table[0].tolist() == [-14.0 - 5.0] * 17


def test_a_proximal_row_by_hand(path: str) -> None:
    """μ = 1/2, η = 1, λ = 1/4, r = 0: from w = 8, v = 0 a step that forgets the row gives v = 2, w = 6; the next one
    v = 1 + 3/2, w = 7/2. Beside a row that is looked up, ½ λ w² is 32 / 4, then 18 / 4, then 49/4 / 8."""
    rows = MovingRows(
        torch.tensor([[8.0], [0.0]]),
        torch.zeros(2, 1),
        rate=1.0,
        momentum=0.5,
        anchor=torch.zeros(2, 1),
        pull=0.25,
    )
    other, found = torch.tensor([1]), []
    for _ in range(2):
        found.append(float(rows.penalty(other)))
        rows.move(other, rows.look_up(other), torch.zeros(1, 1))
    assert rows.look_up(torch.tensor([0])).tolist() == [[3.5]]
    assert [*found, float(rows.penalty(other))] == [8.0, 4.5, 49 / 32]
    rows.finish()
    assert (rows.table.tolist(), rows.velocity.tolist()) == ([[3.5], [0.0]], [[2.5], [0.0]])


def test_gradients_need_not_be_contiguous(path: str) -> None:
    rows = MovingRows(torch.zeros(2, 3), torch.zeros(2, 3), rate=1.0, momentum=0.5)
    every = torch.arange(2)
    rows.move(every, rows.look_up(every), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).T)
    assert rows.table.tolist() == [[-1.0, -3.0, -5.0], [-2.0, -4.0, -6.0]]


def test_a_table_that_is_not_contiguous_is_moved_by_pytorch(path: str) -> None:
    table = torch.zeros(3, 2).T
    rows = MovingRows(table, torch.zeros_like(table), rate=1.0, momentum=0.5)
    assert not rows._native
    rows.move(torch.tensor([1]), rows.look_up(torch.tensor([1])), torch.tensor([[1.0, 2.0, 3.0]]))
    assert table.tolist() == [[0.0, 0.0, 0.0], [-1.0, -2.0, -3.0]]
