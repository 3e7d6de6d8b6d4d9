"""Attention of many clients at once is that of one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep.engines import Sequential, Vectorised
from tests.engines.vectorised.cohorts import RAGGED, close, cohort, furl
from tests.tiny import job


class Blind(nn.Module):
    """Attention over the features by a mask of numbers or truth values, in which some examples see nothing."""

    def __init__(self, numbers: bool) -> None:
        super().__init__()
        self.numbers = numbers
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.wide, self.out = nn.Linear(1, 4), nn.Linear(12, 3)
            self.user = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.wide(x.unsqueeze(-1))  # (B, 3, 4)
        mask = torch.zeros_like(x).masked_fill(x < 0.5, -torch.inf) if self.numbers else x >= 0.5
        mask = mask.unsqueeze(1).expand(-1, 3, -1)
        found = F.scaled_dot_product_attention(seen, seen, seen, attn_mask=mask)
        return self.out(found.flatten(1)) + self.user  # type: ignore[no-any-return]


@pytest.mark.parametrize("numbers", [True, False])
def test_a_place_that_sees_nothing_by_a_mask_gets_nothing(numbers: bool) -> None:
    rows = RAGGED.batch(RAGGED.rows(1, "train"))["x"]
    assert (rows < 0.5).all(1).any()
    assert not (rows < 0.5).all(1).all()
    ours, theirs = (
        cohort(job(Blind(numbers).double(), furl(), RAGGED), e) for e in (Vectorised(), Sequential())
    )
    close(ours, theirs)
    assert all(result.fault is None for result in ours)
