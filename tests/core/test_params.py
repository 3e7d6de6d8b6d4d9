"""Arithmetic on parameters, by numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedkeep.core import params as p
from fedkeep.core.errors import MethodError, NonFiniteError, UploadError
from tests.refusals import raises


def tree(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values)}


def test_weighted_mean_by_hand() -> None:
    mean = p.weighted_mean([tree(1.0, 0.0), tree(4.0, -2.0), tree(10.0, 8.0)], [1, 2, 3])
    assert mean["w"].tolist() == pytest.approx([(1 + 8 + 30) / 6, (0 - 4 + 24) / 6])
    assert mean["w"].dtype == torch.float32


def test_weighted_mean_takes_counters_from_one_tree() -> None:
    trees = [{"w": torch.tensor(float(k)), "n": torch.tensor(k)} for k in (3, 5)]
    mean = p.weighted_mean(trees, [1, 3])
    assert mean["n"].dtype == torch.int64
    assert (float(mean["w"]), int(mean["n"])) == (4.5, 3)
    mean["n"] += 1
    assert int(trees[0]["n"]) == 3


def test_weighted_mean_matches_names_not_positions() -> None:
    mean = p.weighted_mean(
        [{"a": torch.ones(1), "b": torch.zeros(1)}, {"b": torch.zeros(1), "a": torch.ones(1)}], [1, 1]
    )
    assert (float(mean["a"]), float(mean["b"])) == (1.0, 0.0)


def test_weighted_mean_sums_in_double_precision() -> None:
    trees = [tree(1.0)] + [tree(2.0**-26)] * 1024  # in single precision each addition after the first is lost
    total = float(p.weighted_mean(trees, [1.0] * 1025)["w"]) * 1025
    assert total == pytest.approx(1 + 1024 * 2.0**-26, rel=2e-7)


@pytest.mark.parametrize(
    ("trees", "weights"), [([], []), ([tree(1.0)], [0.0]), ([tree(1.0)], [float("nan")])]
)
def test_weighted_mean_of_nothing(trees: list[dict[str, Tensor]], weights: list[float]) -> None:
    with pytest.raises(UploadError) as error:
        p.weighted_mean(trees, weights)
    total = float(sum(weights))
    assert (
        str(error.value)
        == f"An average needs at least one upload of positive weight; got {len(trees)} of total {total}."
    )


def test_a_weight_of_zero_counts_nothing() -> None:
    assert float(p.weighted_mean([tree(7.0), tree(2.0)], [0, 4])["w"]) == 2.0


def test_add_by_name() -> None:
    a, b = {"x": torch.tensor(3.0), "y": torch.tensor(1.0)}, {"x": torch.tensor(2.0)}
    assert {n: float(v) for n, v in p.add(a, b, 0.5).items()} == {"x": 4.0, "y": 1.0}


def test_bytes() -> None:
    assert (
        p.nbytes({"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.int64), "c": torch.zeros(())})
        == 24 + 40 + 4
    )


def test_a_clone_shares_nothing() -> None:
    leaf = torch.ones(2, requires_grad=True)
    copy = p.clone({"a": leaf})
    copy["a"] += 1
    assert not copy["a"].requires_grad
    assert leaf.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finiteness_names_the_tensor(bad: float) -> None:
    good: dict[str, Tensor] = {"n": torch.tensor(1), "a": torch.ones(3)}
    p.check_finite(good, "The update")
    with raises(NonFiniteError, name="b"):
        p.check_finite({**good, "b": torch.tensor([0.0, bad])}, "The update")


def test_difference_of_names() -> None:
    assert p.difference_of_names(["a", "b"], ["b", "a"]) == ""
    assert p.difference_of_names(["b", "a"], ["c"]) == "missing ['a', 'b'], unknown ['c']"


def test_misfit() -> None:
    wanted = {"a": torch.ones(2), "b": torch.ones(2, 3)}
    assert p.misfit(wanted, {"b": torch.zeros(2, 3), "a": torch.zeros(2)}) == ""
    assert p.misfit(wanted, {"a": torch.zeros(2)}) == "missing ['b']"
    assert p.misfit(wanted, {"a": torch.zeros(2), "b": torch.zeros(3, 2)}) == "'b' wants (2, 3), is (3, 2)"


def test_gradients_are_those_of_torch_autograd_and_what_it_refuses_is_refused() -> None:
    table, w, idle = (torch.randn(s, requires_grad=True) for s in ((4, 3), (3,), (2,)))
    leaves = {"table": table, "w": w, "idle": idle}

    def loss() -> Tensor:
        rows = torch.nn.functional.embedding(torch.tensor([1, 1, 3]), table, sparse=True)
        return (rows @ w).tanh().sum()

    wanted = torch.autograd.grad(loss(), [table, w, idle], allow_unused=True)
    for found in (p.gradients(loss(), leaves), p.gradients(loss(), leaves, create_graph=True)):
        assert found.keys() == {"table", "w"}
        assert torch.equal(found["table"], wanted[0].to_dense())
        assert torch.equal(found["w"], wanted[1])
    assert all(leaf.grad is None for leaf in leaves.values())
    for several in (w * 2, w.sum().to(torch.complex64)):
        with raises(MethodError, said="scalar"):
            p.gradients(several, {"w": w})
    written = w.exp()
    total = written.sum()
    with torch.no_grad():
        written.mul_(2)
    with raises(MethodError, said="y.clone()"):
        p.gradients(total, {"w": w})


def test_gradients_are_seen_by_whoever_sees_torchs_functions() -> None:
    seen = list[str]()

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    w = torch.ones(3, requires_grad=True)
    with Sees():
        p.gradients((w * w).sum(), {"w": w})
    assert "grad" in seen
