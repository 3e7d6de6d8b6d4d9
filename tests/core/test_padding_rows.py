"""Rows of padding, where every example has a table of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.core.net import Net, PooledNet


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
