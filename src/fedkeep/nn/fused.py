# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-not-found"
"""The recurrence of LSTM and GRU on CUDA as one kernel a pass, written in Triton, which PyTorch for CUDA brings along.

``steps`` calls some ten operations a step and pass, and texts have hundreds of steps: a GPU would wait for their
launches nearly all the time. Here one program takes some sequences of one weight through all steps, and keeps state and
weights on the chip. The numbers are those of ``steps`` but for rounding.

Shapes as in ``steps``: N weights, B sequences, L steps, H hidden units, K gates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SEQUENCES = 16  # of a program: the least that a matrix product of Triton takes


def forward(projected: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run all steps; see ``steps.forward``."""
    weights, sequences, steps, width = *projected.shape[:3], w_hh.shape[2]
    projected, w_hh = projected.contiguous(), w_hh.contiguous()
    states = projected.new_empty(weights, sequences, steps, width)
    sizes = (sequences, steps, width)
    grid, blocks = (weights, -(-sequences // SEQUENCES)), _blocks(width)
    with torch.cuda.device_of(projected):
        if b_hh is not None:
            _gru[grid](projected, w_hh, b_hh.contiguous(), states, *sizes, **blocks)
            return states, states.new_empty(weights, 0)
        cells = torch.empty_like(states)
        _lstm[grid](projected, w_hh, states, cells, *sizes, **blocks)
    return states, cells


def gru_back(grad: Tensor, slopes: Tensor, update: Tensor, w_hh: Tensor) -> Tensor:
    """Run a GRU's steps back.

    Args:
        grad: (N, B, L, H), of the states.
        slopes: (N, B, L, 3*H), contiguous, of what stands before each gate by the state; multiplied in place by what
            arrives there.
        update: (N, B, L, H), the update gates.
        w_hh: (N, 3*H, H).

    Returns:
        What arrives at each state, (N, B, L, H).
    """
    flows = torch.empty_like(update, memory_format=torch.contiguous_format)
    weights, *sizes = flows.shape
    given = (grad.contiguous(), slopes, update.contiguous(), w_hh.contiguous(), flows)
    with torch.cuda.device_of(grad):
        _gru_back[weights, -(-sizes[0] // SEQUENCES)](*given, *sizes, **_blocks(sizes[-1]))
    return flows


def lstm_back(grad: Tensor, slopes: Tensor, through: Tensor, forget: Tensor, w_hh: Tensor) -> None:
    """Run an LSTM's steps back.

    Args:
        grad: (N, B, L, H), of the states.
        slopes: (N, B, L, 4*H), contiguous, of what stands before each gate, by the cell and for the last gate by the
            state; multiplied in place by what arrives there.
        through: (N, B, L, H), the slopes of the states by the cells.
        forget: (N, B, L, H), the forget gates.
        w_hh: (N, 4*H, H).
    """
    weights, *sizes = grad.shape
    given = (grad.contiguous(), slopes, through.contiguous(), forget.contiguous(), w_hh.contiguous())
    with torch.cuda.device_of(grad):
        _lstm_back[weights, -(-sizes[0] // SEQUENCES)](*given, *sizes, **_blocks(sizes[-1]))


def tried(device: torch.device, gates: int, width: int) -> None:
    """Run both passes once, on zeros; raises whatever does not run on a device."""
    many, one = (torch.zeros(1, 1, 1, n * width, device=device) for n in (gates, 1))
    w_hh = torch.zeros(1, gates * width, width, device=device)
    if gates == 3:
        forward(many, w_hh, torch.zeros(1, gates * width, device=device))
        gru_back(one, many, one, w_hh)
    else:
        forward(many, w_hh, None)
        lstm_back(one, many, one, one, w_hh)


def _blocks(width: int) -> dict[str, int]:
    units = max(16, triton.next_power_of_2(width))
    return {"rows": SEQUENCES, "units": units, "num_warps": 4 if units <= 32 else 8}


@triton.jit
def _sigmoid(x):
    falling = tl.exp(-tl.abs(x))
    return tl.where(x < 0, falling, 1.0) / (1.0 + falling)


@triton.jit
def _tanh(x):
    falling = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - falling) / (1.0 + falling)
    return tl.where(x < 0, -size, size)


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="tf32x3")  # three parts of each number: single precision


@triton.jit
def _weight(w_hh, gate, width, units: tl.constexpr, turned: tl.constexpr):
    """One gate's weights (units, inputs), or turned (inputs, units); zero beyond the width."""
    down, across = tl.arange(0, units)[:, None], tl.arange(0, units)[None, :]
    unit, inner = (across, down) if turned else (down, across)
    return tl.load(
        w_hh + (gate * width + unit) * width + inner, mask=(unit < width) & (inner < width), other=0.0
    )


@triton.jit(do_not_specialize=["sequences", "steps"])
def _gru(projected, w_hh, b_hh, states, sequences, steps, width, rows: tl.constexpr, units: tl.constexpr):
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, unit = part * rows + tl.arange(0, rows), tl.arange(0, units)
    known = (row[:, None] < sequences) & (unit[None, :] < width)
    first = (n * sequences + row.to(tl.int64)[:, None]) * steps
    inward, outward = projected + first * 3 * width + unit[None, :], states + first * width + unit[None, :]
    w_hh, b_hh = w_hh + n * 3 * width * width, b_hh + n * 3 * width
    to_r = _weight(w_hh, 0, width, units, True)
    to_z = _weight(w_hh, 1, width, units, True)
    to_n = _weight(w_hh, 2, width, units, True)
    b_r = tl.load(b_hh + unit, mask=unit < width, other=0.0)[None, :]
    b_z = tl.load(b_hh + width + unit, mask=unit < width, other=0.0)[None, :]
    b_n = tl.load(b_hh + 2 * width + unit, mask=unit < width, other=0.0)[None, :]
    h = tl.zeros((rows, units), tl.float32)
    for _ in range(steps):
        of_r = tl.load(inward, mask=known, other=0.0)
        of_z = tl.load(inward + width, mask=known, other=0.0)
        of_n = tl.load(inward + 2 * width, mask=known, other=0.0)
        r = _sigmoid(of_r + b_r + _product(h, to_r))
        z = _sigmoid(of_z + b_z + _product(h, to_z))
        fresh = _tanh(of_n + r * (b_n + _product(h, to_n)))
        h = tl.where(known, fresh + z * (h - fresh), 0.0)
        tl.store(outward, h, mask=known)
        inward += 3 * width
        outward += width


@triton.jit(do_not_specialize=["sequences", "steps"])
def _lstm(projected, w_hh, states, cells, sequences, steps, width, rows: tl.constexpr, units: tl.constexpr):
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, unit = part * rows + tl.arange(0, rows), tl.arange(0, units)
    known = (row[:, None] < sequences) & (unit[None, :] < width)
    first = (n * sequences + row.to(tl.int64)[:, None]) * steps
    inward, outward = projected + first * 4 * width + unit[None, :], first * width + unit[None, :]
    w_hh = w_hh + n * 4 * width * width
    to_i = _weight(w_hh, 0, width, units, True)
    to_f = _weight(w_hh, 1, width, units, True)
    to_g = _weight(w_hh, 2, width, units, True)
    to_o = _weight(w_hh, 3, width, units, True)
    h, c = tl.zeros((rows, units), tl.float32), tl.zeros((rows, units), tl.float32)
    for _ in range(steps):
        i = _sigmoid(tl.load(inward, mask=known, other=0.0) + _product(h, to_i))
        f = _sigmoid(tl.load(inward + width, mask=known, other=0.0) + _product(h, to_f))
        g = _tanh(tl.load(inward + 2 * width, mask=known, other=0.0) + _product(h, to_g))
        o = _sigmoid(tl.load(inward + 3 * width, mask=known, other=0.0) + _product(h, to_o))
        c = tl.where(known, f * c + i * g, 0.0)
        h = o * _tanh(c)
        tl.store(cells + outward, c, mask=known)
        tl.store(states + outward, h, mask=known)
        inward += 4 * width
        outward += width


@triton.jit(do_not_specialize=["sequences", "steps"])
def _gru_back(
    grad, slopes, update, w_hh, flows, sequences, steps, width, rows: tl.constexpr, units: tl.constexpr
):
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, unit = part * rows + tl.arange(0, rows), tl.arange(0, units)
    known = (row[:, None] < sequences) & (unit[None, :] < width)
    last = (n * sequences + row.to(tl.int64)[:, None] + 1) * steps - 1
    place, gates = last * width + unit[None, :], slopes + last * 3 * width + unit[None, :]
    w_hh = w_hh + n * 3 * width * width
    by_r = _weight(w_hh, 0, width, units, False)
    by_z = _weight(w_hh, 1, width, units, False)
    by_n = _weight(w_hh, 2, width, units, False)
    dh = tl.zeros((rows, units), tl.float32)
    for _ in range(steps):
        flow = tl.load(grad + place, mask=known, other=0.0) + dh
        tl.store(flows + place, flow, mask=known)
        r = tl.load(gates, mask=known, other=0.0) * flow
        z = tl.load(gates + width, mask=known, other=0.0) * flow
        new = tl.load(gates + 2 * width, mask=known, other=0.0) * flow
        tl.store(gates, r, mask=known)
        tl.store(gates + width, z, mask=known)
        tl.store(gates + 2 * width, new, mask=known)
        dh = flow * tl.load(update + place, mask=known, other=0.0)
        dh += _product(r, by_r) + _product(z, by_z) + _product(new, by_n)
        place -= width
        gates -= 3 * width


@triton.jit(do_not_specialize=["sequences", "steps"])
def _lstm_back(
    grad, slopes, through, forget, w_hh, sequences, steps, width, rows: tl.constexpr, units: tl.constexpr
):
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, unit = part * rows + tl.arange(0, rows), tl.arange(0, units)
    known = (row[:, None] < sequences) & (unit[None, :] < width)
    last = (n * sequences + row.to(tl.int64)[:, None] + 1) * steps - 1
    place, gates = last * width + unit[None, :], slopes + last * 4 * width + unit[None, :]
    w_hh = w_hh + n * 4 * width * width
    by_i = _weight(w_hh, 0, width, units, False)
    by_f = _weight(w_hh, 1, width, units, False)
    by_g = _weight(w_hh, 2, width, units, False)
    by_o = _weight(w_hh, 3, width, units, False)
    dh, dc = tl.zeros((rows, units), tl.float32), tl.zeros((rows, units), tl.float32)
    for _ in range(steps):
        flow = tl.load(grad + place, mask=known, other=0.0) + dh
        dc += flow * tl.load(through + place, mask=known, other=0.0)
        i = tl.load(gates, mask=known, other=0.0) * dc
        f = tl.load(gates + width, mask=known, other=0.0) * dc
        g = tl.load(gates + 2 * width, mask=known, other=0.0) * dc
        o = tl.load(gates + 3 * width, mask=known, other=0.0) * flow
        tl.store(gates, i, mask=known)
        tl.store(gates + width, f, mask=known)
        tl.store(gates + 2 * width, g, mask=known)
        tl.store(gates + 3 * width, o, mask=known)
        dh = _product(i, by_i) + _product(f, by_f) + _product(g, by_g) + _product(o, by_o)
        dc = dc * tl.load(forget + place, mask=known, other=0.0)
        place -= width
        gates -= 4 * width
