"""What a model under vmap is told of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkeep.core.mapped import AsAlone


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
