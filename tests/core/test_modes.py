"""Modes of torch: no compiler is loaded, and vmap answers as a model alone would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint

from fedkeep.core.modes import OTHER, REENTRANT, AsAlone, EagerMode, Keeping, Sized
from fedkeep.core.net import Net, PooledNet


def test_tensors_say_under_vmap_what_they_say_alone() -> None:
    trained, frozen, x = torch.ones(3, 2, requires_grad=True), torch.ones(3, 2), torch.ones(3, 2)
    said: list[list[tuple[bool, bool]]] = []

    def look(trained: Tensor, frozen: Tensor, x: Tensor) -> Tensor:
        out = trained * x
        with torch.no_grad():
            still = trained * x
        each = (trained, frozen, x, out, out.detach(), frozen * x, still)
        said.append([(t.requires_grad, t.is_leaf) for t in each])
        return out.sum()

    look(trained, frozen, x)
    with AsAlone():
        torch.func.vmap(look)(trained, frozen, x)
    leaf, made = (True, True), (True, False)
    assert (
        said == [[leaf, (False, True), (False, True), made, (False, True), (False, True), (False, True)]] * 2
    )


def test_inside_of_a_gradient_of_torch_func_its_arguments_require_one() -> None:
    said: list[bool] = []

    def square(w: Tensor) -> Tensor:
        said.extend([w.requires_grad, w.detach().requires_grad])
        return (w * w).sum()

    with AsAlone():
        slope = torch.func.vmap(torch.func.grad(square))(torch.tensor([[1.0], [3.0]]))
    assert slope.tolist() == [[2.0], [6.0]]
    assert said == [True, False]


RUN = """
import sys
import torch
import fedkeep, fedkeep.nn
from fedkeep.engines.vectorised.costs import step_cost
from tests.tiny import Logits, classes, job
for engine in ("sequential", "vectorised", "auto"):
    data = fedkeep.data.toy(users=4)
    run = fedkeep.simulate(fedkeep.models.Linear(4, 3), fedkeep.methods.fedavg(), data, rounds=1, engine=engine)
    assert engine in (run.engine, "auto")
assert step_cost(job(Logits(), fedkeep.methods.fedavg(), classes(counts=(4, 4), kind="f4")), 0).flops > 0
layer = fedkeep.nn.LSTM(3, 4)
own = {n: torch.stack([v.detach()] * 2).requires_grad_() for n, v in layer.named_parameters()}
run = torch.func.vmap(lambda p, x: torch.func.functional_call(layer, p, (x,))[1].sum())
run(own, torch.ones(2, 1, 5, 3)).sum().backward()
assert own["weight_hh_l0"].grad.abs().sum() > 0
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
tables = ['data = { reader = "many_user_text", users = 3, examples = 12 }', 'model = { kind = "bag_of_words" }']
tables += ['method = { kind = "furl" }', 'run = { rounds = 1, cohort = 2 }']
run_config(parse_config(chr(10).join(tables), ""))
print({"torch._dynamo", "sympy"} & set(sys.modules))
"""
"""``step_cost`` is how ``auto`` chooses for larger runs than this; an LSTM of many clients has kernels of its own, of which
a custom operation would load TorchDynamo."""


def test_a_run_loads_neither_torchs_compiler_nor_sympy() -> None:
    """They take seconds and 130 MB, in each process."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False, cwd=root)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_mode_sees_operations_that_are_not_compiled() -> None:
    class Seen(EagerMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: object = None
        ) -> object:  # type: ignore[type-arg, override]
            names.append(str(func))
            return func(*args)  # type: ignore[operator]

    names: list[str] = []
    with Seen():
        torch.ones(2) + torch.ones(2)
    assert "aten.add.Tensor" in names


def test_a_tensor_that_does_not_fit_is_not_made() -> None:
    with pytest.raises(MemoryError, match=r"8\.0 GB or more, and here at most 2\.0 GB fit"), Sized(2 * 10**9):
        torch.empty(2 * 10**9)


class Words(nn.Module):
    """The sum of words' vectors, of a table with a row of padding."""

    def __init__(self, padding_idx: int, functional: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, None if functional else padding_idx)
        self.padding_idx, self.functional = padding_idx, functional

    def forward(self, text: Tensor) -> Tensor:
        if self.functional:
            return F.embedding(text, self.table.weight, padding_idx=self.padding_idx).sum(1)
        return self.table(text).sum(1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("padding_idx", [0, 3, -1])
@pytest.mark.parametrize("functional", [False, True])
def test_pooled_private_tables_leave_padding_alone(padding_idx: int, functional: bool) -> None:
    net, pooled = (
        kind(Words(padding_idx, functional))
        for kind in (Net, lambda m: PooledNet(m, frozenset({"table.weight"})))
    )
    owner, text = torch.tensor([2, 0, 2, 1]), torch.tensor([[0, 3, 4], [4, 1, 3], [3, 0, 0], [2, 4, 0]])
    table = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = pooled({"table.weight": table}, {"text": text, "client": owner})
    alone = torch.cat(
        [
            net({"table.weight": table[c]}, {"text": row[None]})
            for c, row in zip(owner.tolist(), text, strict=True)
        ]
    )
    assert torch.equal(found, alone)
    slopes = [torch.autograd.grad(out.square().sum(), table)[0] for out in (found, alone)]
    torch.testing.assert_close(*slopes)
    assert not slopes[0][:, padding_idx].any()
    assert slopes[0].any()


@pytest.mark.parametrize("kinds", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("nested", [False, True])
def test_torchs_checkpoints_are_back_when_the_last_of_several_contexts_ends(
    kinds: tuple[bool, bool], nested: bool
) -> None:
    """Threads that train side by side end theirs in any order."""
    before = {name: vars(checkpoint)[name] for name in (REENTRANT, OTHER)}
    one, other = map(Keeping, kinds)
    one.__enter__()
    other.__enter__()
    first, last = (other, one) if nested else (one, other)
    first.__exit__()
    assert vars(checkpoint)[REENTRANT] is not before[REENTRANT]
    assert (vars(checkpoint)[OTHER] is before[OTHER]) == (OTHER not in last.names)
    last.__exit__()
    assert {name: vars(checkpoint)[name] for name in before} == before
