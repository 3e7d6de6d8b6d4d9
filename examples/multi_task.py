"""One private user vector shared by two tasks: what one task learns of a user helps the other.

Every user has a taste. Both tasks depend on it: which of four labels a text gets, and whether the user clicks on it.
Two users in three never tell a click for training; their vectors come from the labels alone.
"""

from __future__ import annotations

import numpy as np
import torch

import fedkeep
from fedkeep import Phase
from fedkeep.methods import terms
from fedkeep.models import MultiTaskDocument


def two_tasks(users: int, examples: int) -> fedkeep.FederatedData:
    """Add the column ``click`` to generated texts; -1 means that the click is not known."""
    data = fedkeep.data.many_user_text(users=users, examples=examples, classes=4, topics=4, choices=4)
    draw = np.random.default_rng(0)
    owner = data.clients_of(np.arange(data.examples))
    favourite = np.array(
        [np.bincount(data.columns["label"][list(data.rows(u))]).argmax() for u in range(users)]
    )
    click = ((favourite[owner] + data.columns["_topic"]) % 2 == 0) ^ (draw.random(data.examples) < 0.05)
    silent = (owner % 3 != 0) & ~np.isin(np.arange(data.examples), data.split_rows("test"))
    columns = data.columns | {"click": np.where(silent, -1, click)}
    tasks = {
        "click": {"task": "binary", "label": "click"},
        "label": {"task": "multiclass", "label": "label"},
    }
    meta = {**data.meta, "tasks": tasks}
    return fedkeep.FederatedData(columns, data.offsets, data.ids, data.bounds, meta)


def main(users: int = 45, examples: int = 50, epochs: int = 6) -> dict[str, float]:
    data = two_tasks(users, examples)
    sizes = {"embedding_dim": 16, "hidden": 24, "mlp": 32, "pool": "max"}
    losses = {name: terms.cross_entropy(name, task=name) for name in ("click", "label")}
    found = {}
    for name, weights in {"clicks alone": {"label": 0.0}, "both tasks": {}}.items():
        torch.manual_seed(0)
        model = MultiTaskDocument(data.meta["vocabulary"]["size"], {"click": 2, "label": 4}, 8, **sizes)
        method = fedkeep.methods.furl(
            "user",
            local=Phase(
                loss=terms.multi_task(losses, weights),
                optimizer=fedkeep.adam(0.01, rates={"user": 0.1}),
                batch_size=8,
            ),
        )
        run = fedkeep.simulate(model, method, data, epochs=epochs, cohort=10, evaluate_every=0)
        found[name] = run.evaluate("test")["auc/click"]
        print(f"{name:12} AUC of clicks on test {found[name]:.3f}")
    return found


if __name__ == "__main__":
    main()
