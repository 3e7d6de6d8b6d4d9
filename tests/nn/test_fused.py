"""The recurrence on CUDA as one kernel, against the loop over steps in double precision.

Without a GPU the kernels run in Triton's interpreter, where TRITON_INTERPRET=1 is set and Triton is installed.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap

from fedkeep.nn import steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or steps.INTERPRETED),
    reason="Triton's kernels need a GPU, or TRITON_INTERPRET=1 and Triton",
)
SHAPES = [
    (1, 1, 1, 1),
    (3, 4, 6, 5),
    (2, 17, 3, 16),
    (2, 33, 9, 20),
    (4, 8, 12, 64),
    (1, 16, 4, 50),
]  # N, B, L, H


def draw(kind: str, shape: tuple[int, int, int, int]) -> list[Tensor]:
    """What the inputs add, the weights, and a GRU's bias, in double precision."""
    torch.manual_seed(0)
    n, b, length, hidden = shape
    k = 4 if kind == "lstm" else 3
    sizes = [(n, b, length, k * hidden), (n, k * hidden, hidden), *([(n, k * hidden)] if k == 3 else [])]
    found = [torch.randn(size, dtype=torch.float64, device=DEVICE) for size in sizes]
    found[1] *= hidden**-0.5
    return found


def run(projected: Tensor, w_hh: Tensor, b_hh: Tensor | None = None) -> Tensor:
    return steps.recurrence(projected, w_hh, b_hh)


def scalar(states: Tensor) -> Tensor:
    weights = (
        torch.arange(states.numel(), dtype=states.dtype, device=states.device).reshape(states.shape).sin()
    )
    return (states.square() * weights + states * weights.cos()).sum()


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    assert (
        float((found.double() - wanted).detach().abs().max() / wanted.detach().abs().max().clamp_min(1e-30))
        < 2e-6
    )


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_loop_in_states_and_in_every_gradient(kind: str, shape: tuple[int, int, int, int]) -> None:
    inputs = [t.requires_grad_() for t in draw(kind, shape)]
    single = [t.detach().float().requires_grad_() for t in inputs]
    assert steps.fused(single[0], single[1]) is not None
    assert steps.fused(inputs[0], inputs[1]) is None  # the loop is the reference
    states, wanted = run(*single), run(*inputs)
    close(states, wanted)
    found = torch.autograd.grad(scalar(states), single)
    for ours, theirs in zip(found, torch.autograd.grad(scalar(wanted), inputs), strict=True):
        close(ours, theirs)


def test_more_units_than_a_program_holds_go_through_the_loop() -> None:
    projected, w_hh, _ = (t.float() for t in draw("gru", (1, 2, 3, 65)))
    assert steps.fused(projected, w_hh) is None


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_inputs_that_are_not_contiguous(kind: str) -> None:
    inputs = draw(kind, (2, 5, 7, 8))
    wanted = run(*inputs)
    turned = [t.float().transpose(0, -1).contiguous().transpose(0, -1) for t in inputs]
    close(run(*turned), wanted)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_vmap_over_clients_and_second_derivatives(kind: str) -> None:
    several = [torch.stack([t, t.flip(0)]) for t in draw(kind, (2, 3, 5, 4))]
    single = [t.float() for t in several]

    def slope(*given: Tensor) -> Tensor:
        return scalar(run(*given))

    for order in (slope, lambda *given: grad(slope)(*given).square().sum()):
        ours, theirs = vmap(grad(order, argnums=1))(*single), vmap(grad(order, argnums=1))(*several)
        close(ours, theirs)


def test_tensors_without_values_go_through_the_loop() -> None:
    projected, w_hh, _ = (t.float() for t in draw("gru", (1, 2, 3, 4)))
    with FakeTensorMode() as mode:
        assert steps.fused(mode.from_tensor(projected), mode.from_tensor(w_hh)) is None
    assert steps.fused(projected, w_hh) is not None


def test_great_numbers_saturate() -> None:
    """No infinity over infinity in tanh, no overflow in the sigmoid."""
    for kind in ("lstm", "gru"):
        inputs = draw(kind, (1, 2, 3, 4))
        inputs[0] *= 1e3
        single = [t.float() for t in inputs]
        close(run(*single), run(*inputs))
