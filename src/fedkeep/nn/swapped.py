"""torch's own layers on the native kernels: the same parameters, attributes, calls and results, faster on the CPU.

``accelerate`` gives a layer one of these classes; nothing else of it changes. What a call asks for decides whether the
kernel runs: wherever it cannot, torch's own ``forward`` does, as if the layer had never been swapped.

Shapes: B sequences or images, L longest length, H hidden units, D directions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fedkeep.core.modes import EagerMode
from fedkeep.kernels.native import CHUNK, chunks, forward_mode, lanes
from fedkeep.nn import convolution, linear_layer, native_recurrent, pure
from fedkeep.nn.operation import functorch_active, one_by_one, traced
from fedkeep.nn.pure import OUTPUT

ROWS = range(2, linear_layer.ROWS + 1)
"""Rows of a batch for which the linear kernel is faster; one row is as fast in torch."""


class FastLSTM(nn.LSTM):
    """``torch.nn.LSTM``, by the kernel where the initial states are zeros."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return output and (h_n, c_n), as torch does."""
        found = _recurrent(self, input, hx, False)
        return super().forward(input, hx) if found is None else found


class FastGRU(nn.GRU):
    """``torch.nn.GRU``, by the kernel where the initial state is zeros."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return output and h_n, as torch does."""
        found = _recurrent(self, input, None if hx is None else (hx,), True)
        return super().forward(input, hx) if found is None else found


class FastLinear(nn.Linear):
    """``torch.nn.Linear``, by the kernel for batches of few rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Return W x + b."""
        weight, bias = self.weight, self.bias
        if (
            plain(input, weight, bias)
            and (input.dim(), weight.dim()) == (2, 2)
            and len(input) in ROWS
            and bias.shape == weight.shape[:1]
            and linear_layer.usable(input, weight, bias)
        ):
            with torch._C.DisableTorchFunction():
                return linear_layer.run(input, weight, bias, False)
        return super().forward(input)


class FastSequential(nn.Sequential):
    """``torch.nn.Sequential``; convolution, ReLU and max-pooling that follow each other are one call of the kernel."""

    def forward(self, input: Any) -> Any:
        """Return what the layers make of the input, one after the other."""
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            return super().forward(input)  # type: ignore[no-untyped-call]
        layers, place, packed = list(self._modules.values()), 0, False
        while place < len(layers):
            three = layers[place : place + 3]
            if pools(three) and _takes(input, three[0]):
                conv: Any = three[0]
                behind = layers[place + 3 : place + 4]
                flat = bool(behind) and _flattens(behind[0])
                with torch._C.DisableTorchFunction():
                    input = convolution.run(input, conv.weight, conv.bias, conv.padding[0], flat)
                place, packed = place + 3 + flat, not flat
                continue
            if packed:  # channels lie together; a layer of the user's may rely on torch's order
                input, packed = input.contiguous(), False
            input, place = layers[place](input), place + 1
        return input.contiguous() if packed else input


def hooked(layer: nn.Module) -> bool:
    """Tell whether somebody else looks at what a layer is given or gives, or computes it."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(layer) or any(getattr(layer, name, None) for name in names)


def pools(layers: list[Any]) -> bool:
    """Tell whether three layers are a convolution, a ReLU and a max-pooling that the kernel computes as one."""
    if len(layers) != 3 or [type(layer) for layer in layers] != [nn.Conv2d, nn.ReLU, nn.MaxPool2d]:
        return False
    conv, _, pool = layers
    return bool(
        conv.bias is not None
        and conv.stride == (1, 1)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
        and isinstance(conv.padding, tuple)
        and conv.padding[0] == conv.padding[1]
        and conv.kernel_size[0] == conv.kernel_size[1]
        and all(v in (2, (2, 2)) for v in (pool.kernel_size, pool.stride))
        and pool.padding in (0, (0, 0))
        and pool.dilation in (1, (1, 1))
        and not (pool.ceil_mode or pool.return_indices)
        and not any(map(hooked, layers))
    )


def plain(*tensors: Any) -> bool:
    """Tell whether these are dense tensors, of no subclass, that nobody compiles, casts or watches."""
    changed = torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or _watched()
    return not changed and all(
        type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided for t in tensors
    )


def _watched() -> bool:
    """Tell whether a mode of the user's, of ``make_fx`` say, wants to see every operation; fedkeep's own need not."""
    modes = range(torch._C._len_torch_dispatch_stack())
    return any(not isinstance(torch._C._get_dispatch_stack_at(n), EagerMode) for n in modes)


def _takes(x: Any, conv: Any) -> bool:
    """Tell whether the kernel takes these images; torch says what is wrong with others."""
    weight, bias = conv.weight, conv.bias
    if not plain(x, weight, bias) or x.dim() != 4 or x.dtype != weight.dtype:
        return False
    if weight.shape != (len(bias), x.shape[1], *conv.kernel_size) or bias.dim() != 1:
        return False
    least = conv.kernel_size[0] + 1 - 2 * conv.padding[0]
    return len(x) > 0 and min(x.shape[2:]) >= max(least, 1) and convolution.usable(x, weight, bias)


def _flattens(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1) and not hooked(layer)


def _recurrent(layer: nn.RNNBase, given: Any, hx: Any, gru: bool) -> Any:
    """Return what an LSTM or GRU returns, or None: torch's own must run.

    Whoever watches the calls of torch's functions sees none of those in here.
    """
    with torch._C.DisableTorchFunction():
        return _by_kernel(layer, given, hx, gru)


def _by_kernel(layer: nn.RNNBase, given: Any, hx: Any, gru: bool) -> Any:
    packed = given if isinstance(given, PackedSequence) else None
    data = given if packed is None else packed.data
    names = layer._flat_weights_names
    weights = [getattr(layer, name) for name in names]
    takes = native_recurrent.usable(data, weights) or (functorch_active() and not forward_mode())
    if not (plain(data, *weights) and takes and _fit(layer, weights, gru)):
        return None
    if layer.dropout and layer.training and layer.num_layers > 1:
        return None
    if data.shape[-1] != layer.input_size or data.dim() != (3 if packed is None else 2) or not data.numel():
        return None
    if packed is not None:
        x, lengths = pad_packed_sequence(packed, batch_first=True)
    else:
        x = data if layer.batch_first else data.transpose(0, 1)
        if layer.batch_first and torch.is_grad_enabled():
            x = x.clone()  # torch keeps a copy too, so that the caller may change what it gave
        lengths = torch.full((x.shape[0],), x.shape[1], device="cpu")
    if hx is not None and not _zeros(hx, layer, x):
        return None
    each, states, cells = 4 * (1 + layer.bidirectional), [], []
    for first in range(0, len(weights), each):
        some = weights[first : first + each]
        x, last, cell = _layer(x, lengths, some, gru, packed is not None)
        states.append(last)
        cells.append(cell)
    if packed is not None:
        output: Any = _packed(x, lengths, packed)
    else:
        output = x if layer.batch_first else x.transpose(0, 1).contiguous()
    h = torch.cat(states) if len(states) > 1 else states[0]
    return (output, h) if gru else (output, (h, torch.cat(cells) if len(cells) > 1 else cells[0]))


def _fit(layer: nn.RNNBase, weights: list[Tensor], gru: bool) -> bool:
    """Tell whether weights have the shapes that the kernel reads; torch says what is wrong with others."""
    hidden, directions = layer.hidden_size, 1 + layer.bidirectional
    rows, later = (3 if gru else 4) * hidden, directions * hidden
    wanted = ((rows, later), (rows, hidden), (rows,), (rows,))
    first = ((rows, layer.input_size), *wanted[1:])
    return all(w.shape == (first if n < 4 * directions else wanted)[n % 4] for n, w in enumerate(weights))


def _zeros(hx: Any, layer: nn.RNNBase, x: Tensor) -> bool:
    """Tell whether initial states are zeros of the right shape that nobody differentiates by."""
    shape = (layer.num_layers * (1 + layer.bidirectional), x.shape[0], layer.hidden_size)
    if not isinstance(hx, tuple) or len(hx) != (1 if isinstance(layer, nn.GRU) else 2) or functorch_active():
        return False
    return all(
        isinstance(h, Tensor)
        and h.shape == shape
        and h.dtype == x.dtype
        and not h.requires_grad
        and not h.any()
        for h in hx
    )


def _packed(output: Tensor, lengths: Tensor, like: PackedSequence) -> PackedSequence:
    """Return outputs (B, L, D*H) in the order of time that a packed sequence has."""
    if like.sorted_indices is not None:
        output, lengths = output.index_select(0, like.sorted_indices), lengths[like.sorted_indices.cpu()]
    data = pack_padded_sequence(output, lengths, batch_first=True).data
    return PackedSequence(data, like.batch_sizes, like.sorted_indices, like.unsorted_indices)


def _layer(
    x: Tensor,
    lengths: Tensor,
    weights: list[Tensor],
    gru: bool,
    ragged: bool,
) -> tuple[Tensor, Tensor, Any]:
    """Return outputs (B, L, D*H), last states (D, B, H) and, of an LSTM, last cell states (D, B, H).

    Args:
        x: inputs (B, L, I).
        lengths: of the sequences, (B,).
        weights: four of each direction.
        gru: whether it is a GRU.
        ragged: whether lengths differ.
    """
    if not native_recurrent.usable(x, weights):
        output, last = pure.run(x, None, lengths, weights, gru, OUTPUT, True)
        return output, _by_direction(last, weights), None if gru else last_cells(x, output, lengths, weights)
    if gru:
        output, last = native_recurrent.run(x, None, lengths, weights, gru, OUTPUT)
        return output, _by_direction(last, weights), None
    tensors = (*weights, x, None, lengths)
    if traced() or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        output, last, kept = native_recurrent.PASSES((gru, OUTPUT), *tensors)
        where = _where(lengths, x.shape[1], weights[1].shape[-1], x.dtype, ragged)
        cell = _LastCells.apply(kept, where, lengths, x, output, *weights)  # type: ignore[no-untyped-call]
        return output, _by_direction(last, weights), cell
    parts = []  # what the kernel keeps of a step is large where nobody differentiates: a chunk at a time
    for some, long in zip(torch.split(x, CHUNK), torch.split(lengths, CHUNK), strict=True):
        output, last, kept = native_recurrent.PASSES.forward(
            (*weights, some, None, long), (gru, OUTPUT), False
        )
        where = _where(long, x.shape[1], weights[1].shape[-1], x.dtype, ragged)
        parts.append((output, _by_direction(last, weights), _gathered(kept, where)))
    if len(parts) == 1:
        return parts[0]
    outputs, lasts, found = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(lasts, 1), torch.cat(found, 1)


def _by_direction(last: Tensor, weights: list[Tensor]) -> Tensor:
    """Return (B, D*H) as (D, B, H)."""
    return last.reshape(last.shape[0], len(weights) // 4, -1).transpose(0, 1).contiguous()


class _LastCells(torch.autograd.Function):
    """An LSTM's last cell states, read from what the kernel keeps for its backward pass.

    Their gradient is that of ``last_cells``, which few models ever ask for.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        kept: Tensor, where: Tensor, lengths: Tensor, x: Tensor, output: Tensor, *weights: Tensor
    ) -> Tensor:
        """Return (D, B, H)."""
        return _gathered(kept, where)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradient is made of."""
        _, _, *others = inputs
        ctx.save_for_backward(*others)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, outputs and weights."""
        lengths, x, output, *weights = ctx.saved_tensors
        if grad is None:
            return (None,) * (5 + len(weights))
        parts = torch.func.vjp(
            lambda x, output, *weights: last_cells(x, output, lengths, weights), x, output, *weights
        )
        return (None, None, None, *one_by_one(parts[1], [grad]))


def last_cells(x: Tensor, output: Tensor, lengths: Tensor, weights: Any) -> Tensor:
    """Return an LSTM's last cell states (D, B, H), from its inputs (B, L, I) and all its outputs (B, L, D*H).

    c_t = f_t c_{t-1} + i_t g_t, where the gates f, i and g of all steps follow from inputs and outputs at once.
    """
    hidden, steps, found = weights[1].shape[-1], x.shape[1], []
    inside = torch.arange(steps, device=x.device) < lengths.to(x.device).unsqueeze(1)  # (B, L)
    for d in range(len(weights) // 4):
        w_ih, w_hh, b_ih, b_hh = weights[4 * d : 4 * d + 4]
        states = output[..., d * hidden : (d + 1) * hidden]
        start = torch.zeros_like(states[:, :1])
        before = torch.cat([start, states[:, :-1]] if d == 0 else [states[:, 1:], start], 1)
        gates = x @ w_ih.transpose(0, 1) + before @ w_hh.transpose(0, 1) + (b_ih + b_hh)
        into, keep, new, _ = gates.chunk(4, -1)
        added, kept = into.sigmoid() * new.tanh(), keep.sigmoid()
        cell = torch.zeros_like(start[:, 0])
        for t in range(steps) if d == 0 else range(steps - 1, -1, -1):
            cell = torch.where(inside[:, t : t + 1], kept[:, t] * cell + added[:, t], cell)
        found.append(cell)
    return torch.stack(found)


def _gathered(kept: Tensor, where: Tensor) -> Tensor:
    """Return the numbers (D, B, H) at places (B, H) of what the kernel kept (D, ·); no view, so they may be changed."""
    return kept[:, where]


def _where(lengths: Tensor, longest: int, hidden: int, dtype: torch.dtype, ragged: bool) -> Tensor:
    """Return where the kernel keeps the last cell states of a direction, (B, H); recurrent.h says how these lie."""
    if ragged or functorch_active():
        return _places(lengths, longest, hidden, lanes(dtype))
    return _full(len(lengths), longest, hidden, lanes(dtype))


@lru_cache(maxsize=64)
def _full(sequences: int, longest: int, hidden: int, width: int) -> Tensor:
    with torch.inference_mode(False):
        return _places(torch.full((sequences,), longest, device="cpu"), longest, hidden, width)


def _places(lengths: Tensor, longest: int, hidden: int, width: int) -> Tensor:
    padded = -(-hidden // width) * width
    unit = torch.arange(hidden, device="cpu")
    tile, lane = unit - unit % width, unit % width
    size = -(-len(lengths) // chunks(len(lengths)))
    found = []
    for number, some in enumerate(torch.split(lengths, size)):
        longer = (some.unsqueeze(0) > some.unsqueeze(1)).sum(1)
        alike = some.unsqueeze(0) == some.unsqueeze(1)
        place = longer + alike.tril(-1).sum(1)  # longest first, those of one length in their order
        active = longer + alike.sum(1)  # sequences that have this one's last step
        offset = torch.minimum(some.unsqueeze(0), some.unsqueeze(1) - 1).sum(1)  # rows of all steps before it
        first = number * size * longest * 5 * padded
        row = first + 5 * (offset * padded + place * width) + 4 * width
        found.append(row.unsqueeze(1) + 5 * active.unsqueeze(1) * tile + lane)
    return torch.cat(found)
