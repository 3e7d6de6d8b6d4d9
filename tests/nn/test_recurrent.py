"""The recurrent layers against torch.nn over packed sequences, in value and in every gradient."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import embedding

from fedkeep.core.errors import DataError
from fedkeep.nn import GRU, LSTM, native_recurrent
from tests.nn.recurrent import KINDS, draw, needs_native, packed, relative, scalar
from tests.refusals import raises

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(16, 21, 32, 64), (7, 9, 5, 33), (3, 4, 7, 5), (1, 1, 1, 1), (2, 1, 3, 16), (150, 6, 4, 8)]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_equals_torch(path, kind, shape, bidirectional, dtype, bound) -> None:
    layer, reference, x, lengths = draw(kind, shape, bidirectional, dtype)
    ids = torch.randint(0, 11, shape[:2])
    table = torch.randn(13, shape[2], dtype=dtype, requires_grad=True)
    reference = reference.double()
    x.requires_grad_()
    for use_ids in (False, True):
        source = table if use_ids else x
        found = layer.forward_ids(ids, table, lengths) if use_ids else layer(x, lengths)
        exact = source.detach().double().requires_grad_()
        wanted = packed(reference, embedding(ids, exact) if use_ids else exact, lengths)
        for a, b in zip(found, wanted, strict=True):
            assert relative(a, b) < bound
        grads = torch.autograd.grad(scalar(found), [source, *layer.parameters()])
        expected = torch.autograd.grad(scalar(wanted), [exact, *reference.parameters()])
        for a, b in zip(grads, expected, strict=True):
            assert a.is_contiguous()
            assert relative(a, b) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_initial_state_is_torchs(kind) -> None:
    ours, theirs = KINDS[kind]
    torch.manual_seed(3)
    first = ours(5, 6, True).state_dict()
    after = torch.rand(1)
    torch.manual_seed(3)
    second = theirs(5, 6, batch_first=True, bidirectional=True).state_dict()
    assert torch.equal(after, torch.rand(1))
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_read(path, kind) -> None:
    layer, _, x, lengths = draw(kind, (5, 8, 3, 7), True, torch.float32)
    wanted = scalar(layer(x, lengths))
    expected = torch.autograd.grad(wanted, list(layer.parameters()))
    for b, n in enumerate(lengths.tolist()):
        x[b, n:] = torch.nan
    found = layer(x.requires_grad_(), lengths)
    assert all(not found[0][b, n:].any() for b, n in enumerate(lengths.tolist()))
    grads = torch.autograd.grad(scalar(found), [x, *layer.parameters()])
    assert torch.equal(scalar(found), wanted)
    assert not any(grads[0][b, n:].any() for b, n in enumerate(lengths.tolist()))
    assert all(torch.equal(a, b) for a, b in zip(grads[1:], expected, strict=True))
    ids = torch.randint(0, 4, (5, 8)).masked_fill(torch.arange(8) >= lengths[:, None], -7)
    assert layer.forward_ids(ids, torch.randn(4, 3), lengths)[0].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_lengths_is_full_lengths(path, kind) -> None:
    layer, _, x, _ = draw(kind, (4, 6, 3, 5), True, torch.float32)
    for a, b in zip(layer(x), layer(x, torch.full((4,), 6)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_the_same_numbers(path, kind) -> None:
    layer, _, x, lengths = draw(kind, (70, 6, 3, 5), True, torch.float32)
    with torch.no_grad():
        quick = layer(x, lengths)
    assert not quick[0].requires_grad
    for a, b in zip(layer(x, lengths), quick, strict=True):
        if path == "native":
            assert torch.equal(a, b)
        else:  # oneDNN has one way for inference and another for training
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_only_last_and_only_output(path, kind) -> None:
    layer, reference, x, lengths = draw(kind, (5, 6, 3, 4), True, torch.float64)
    for which in (0, 1):
        grads = torch.autograd.grad(layer(x, lengths)[which].sin().sum(), list(layer.parameters()))
        expected = torch.autograd.grad(
            packed(reference, x, lengths)[which].sin().sum(), list(reference.parameters())
        )
        assert all(relative(a, b) < 1e-12 for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_twice_gives_the_same(path, kind) -> None:
    layer, _, x, lengths = draw(kind, (5, 6, 3, 4), True, torch.float32)
    loss = scalar(layer(x, lengths))
    first = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_strided_arguments(path, kind) -> None:
    layer, _, x, lengths = draw(kind, (5, 6, 3, 4), True, torch.float32)
    wanted = layer(x, lengths)
    found = layer(x.transpose(0, 1).contiguous().transpose(0, 1), lengths.repeat_interleave(2)[::2])
    turned = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in layer.named_parameters()}
    swapped = functional_call(layer, turned, (x, lengths))
    for a, b, c in zip(wanted, found, swapped, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batch(path, kind) -> None:
    layer, _, _, _ = draw(kind, (1, 1, 3, 5), True, torch.float32)
    output, last = layer(torch.zeros(0, 4, 3), torch.zeros(0, dtype=torch.int64))
    assert output.shape == (0, 4, 10)
    assert last.shape == (0, 10)
    grads = torch.autograd.grad(output.sum() + last.sum(), list(layer.parameters()))
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [False, True])
def test_nan_flows_through(path, kind, weight) -> None:
    layer, _, x, lengths = draw(kind, (3, 6, 3, 5), True, torch.float32)
    if weight:
        with torch.no_grad():
            layer.weight_hh_l0[0, 0] = torch.nan
    else:
        x[0, 2, 1] = torch.nan
    output, last = layer(x, lengths)
    assert last[0].isnan().any()
    assert weight or output[1:].isfinite().all()
    assert layer.weight_ih_l0 is not None
    (grad_w,) = torch.autograd.grad(last.sum(), [layer.weight_ih_l0])
    assert grad_w.isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_inputs_saturate(path, kind) -> None:
    layer, _, x, lengths = draw(kind, (3, 6, 3, 5), True, torch.float32)
    for size in (1e3, 1e30, torch.inf):
        output, _ = layer(torch.full_like(x, size), lengths)
        exact, _ = layer.double()(torch.full_like(x, min(size, 1e30)).double(), lengths)
        layer.float()
        if size != torch.inf:
            assert output.isfinite().all()
            assert relative(output, exact) < 1e-6


@pytest.mark.parametrize("lengths", [[1, 7], [0, 3], [-1, 3]])
def test_bad_length(path, lengths) -> None:
    with raises(DataError, said="the longest that the inputs have room for", most=6):
        LSTM(3, 4)(torch.zeros(2, 6, 3), torch.tensor(lengths))


@pytest.mark.parametrize("wrong", [-1, 5])
def test_bad_id(path, wrong) -> None:
    with raises(DataError, text="ids must lie between 0 and 4, the last row of the table"):
        GRU(3, 4).forward_ids(torch.tensor([[0, 1], [wrong, 0]]), torch.zeros(5, 3))


def test_bad_shapes() -> None:
    layer = LSTM(3, 4)
    with pytest.raises(DataError, match=r"expected inputs of shape \(B, L, 3\); got \(2, 6, 4\)"):
        layer(torch.zeros(2, 6, 4))
    with pytest.raises(DataError, match=r"expected a table of shape \(V, 3\); got \(5, 2\)"):
        layer.forward_ids(torch.zeros(2, 6, dtype=torch.int64), torch.zeros(5, 2))
    with raises(DataError, said="ids of shape (B, L); got torch.float", shape=(2, 6)):
        layer.forward_ids(torch.zeros(2, 6), torch.zeros(5, 3))
    with raises(DataError, sequences=2, shape=(2,)):
        layer(torch.zeros(2, 6, 3), torch.ones(2, dtype=torch.int32))


@needs_native
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(16, 21, 32, 64), (150, 6, 4, 8)])
def test_threads_do_not_change_a_bit(kind, shape) -> None:
    layer, _, x, lengths = draw(kind, shape, True, torch.float32)
    ids, table = torch.randint(0, 30, shape[:2]), torch.randn(30, shape[2], requires_grad=True)
    x.requires_grad_()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found = (*layer(x, lengths), *layer.forward_ids(ids, table, lengths))
        results.append([*found, *torch.autograd.grad(scalar(found), [x, table, *layer.parameters()])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def _last(layer: LSTM, x: Tensor) -> list[float]:
    return layer(x)[1].flatten().tolist()


@needs_native
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_works_in_a_forked_child() -> None:
    torch.set_num_threads(2)
    layer, _, x, _ = draw("lstm", (4, 6, 3, 5), True, torch.float32)
    wanted = _last(layer, x)  # the pool has a thread now, which the child does not inherit
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_last, (layer, x)).get(timeout=20) == wanted


@needs_native
def test_custom_operations_pass_torchs_checks() -> None:
    layer = LSTM(3, 4, True)
    weights = [w.detach() for w in layer.parameters()]
    x, lengths = torch.randn(2, 6, 3), torch.tensor([6, 2])
    utils = ("test_schema", "test_faketensor")
    for pool in (native_recurrent.OUTPUT, native_recurrent.MAX):
        tensors, how = [*weights, x, None, lengths], (False, pool)
        torch.library.opcheck(torch.ops.fedkeep.recurrent.default, (tensors, how, False), test_utils=utils)
        *results, kept = torch.ops.fedkeep.recurrent(tensors, how, False)
        back = ([None, torch.randn_like(results[-1])][-len(results) :], kept, tensors, how, False, True)
        torch.library.opcheck(torch.ops.fedkeep.recurrent_backward.default, back, test_utils=utils)
