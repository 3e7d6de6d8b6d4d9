"""Recommendation: which of twenty films did a user watch? A user's vector never leaves, the films' vectors are shared.

Metrics are HR@10 and NDCG@10, one right film among others, as in He et al., Neural Collaborative Filtering, 2017.
"""

from __future__ import annotations

import numpy as np
import torch

import fedkeep
from fedkeep import Phase
from fedkeep.data.leave_one_out import leave_one_out
from fedkeep.models import MatrixFactorization

USERS, FILMS = 40, 120


def watched(each: int = 25) -> fedkeep.FederatedData:
    draw = np.random.default_rng(0)
    taste, kind = draw.standard_normal((USERS, 4)), draw.standard_normal((FILMS, 4))
    seen = [draw.permutation(np.argsort(-taste[u] @ kind.T)[:each]) for u in range(USERS)]
    columns = {
        "item": np.concatenate(seen),
        "time": np.tile(np.arange(each), USERS),
        "label": np.ones(USERS * each, np.float32),
    }
    user, meta = np.repeat(np.arange(USERS), each), {"task": "regression", "items": FILMS}
    return leave_one_out(fedkeep.FederatedData.from_columns(user, columns, None, meta), against=19)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    local = Phase(optimizer=fedkeep.adam(0.05), epochs=2, batch_size=8)
    method = fedkeep.methods.furl(["user", "user_bias"], local=local)
    model = MatrixFactorization(FILMS, 8)
    run = fedkeep.simulate(model, method, watched(), rounds=20, cohort=10, evaluate_every=0)
    found = run.evaluate("test")
    found["shared"] = run.evaluate("test", stage="shared")["hr10"]
    print(
        f"HR@10 {found['hr10']:.3f}, NDCG@10 {found['ndcg10']:.3f}; shared part alone HR@10 {found['shared']:.3f}"
    )
    return found


if __name__ == "__main__":
    main()
