"""Users who never took part: fit only their private vector, on a few examples of their own, and send nothing."""

from __future__ import annotations

import torch

import fedkeep
from fedkeep import Phase
from fedkeep.experiments.personalize import cold_start
from fedkeep.models import DocumentModel


def main(users: int = 60, epochs: int = 10) -> dict[int | None, float]:
    data = fedkeep.data.many_user_text(users=users, examples=60, classes=6, topics=4, choices=4)
    torch.manual_seed(0)
    vocabulary = data.meta["vocabulary"]["size"]
    sizes = {"user_dim": 8, "embedding_dim": 16, "hidden": 24, "mlp": 32}
    model = DocumentModel(vocabulary, data.meta["classes"], pool="max", **sizes)
    method = fedkeep.methods.furl(
        "user", local=Phase(optimizer=fedkeep.adam(0.01, rates={"user": 0.1}), batch_size=8, clip_norm=5.0)
    )
    run = fedkeep.simulate(model, method, data, epochs=epochs, cohort=10, hold_out=0.2, evaluate_every=0)
    print(f"{len(run.clients)} users in federation: {run.evaluate('test')['accuracy']:.3f} accuracy on test")
    result = cold_start(run, ks=(0, 2, 5, 10, 20, None))
    for k, mean, std, share in zip(result.k, result.mean, result.std, result.frequent, strict=True):
        examples = "all" if k is None else k
        counted = "" if share is None else f"; the most frequent label of these: {share:.3f}"
        print(
            f"{result.clients} new users, {examples:>3} own examples: {mean:.3f} ± {std:.3f} between users{counted}"
        )
    return dict(zip(result.k, result.mean, strict=True))


if __name__ == "__main__":
    main()
