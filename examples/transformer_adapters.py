"""A frozen transformer with low-rank adapters: what leaves is one small factor of them, the other stays with its user.

Twenty users write token sequences, and each labels them in a way of their own. The transformer is torch's; a model of
the package transformers works alike, e.g. with ``on=["*.query", "*.value"]``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import Phase

WORDS, TOKENS, CLASSES = 40, 8, 3


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.encoder(self.embedding(input_ids)).mean(1))
        return logits


def labelled(users: int = 20, each: int = 60) -> fedkeep.FederatedData:
    draw, rows = np.random.default_rng(0), users * each
    user, ids = np.repeat(np.arange(users), each), draw.integers(1, WORDS, (rows, TOKENS))
    label = ((ids < WORDS // 3).sum(1) // 2 + user % CLASSES) % CLASSES
    return fedkeep.FederatedData.from_columns(user, {"input_ids": ids, "label": label}).split_per_user()


def main() -> dict[str, tuple[float, float]]:
    torch.manual_seed(0)
    model = fedkeep.adapters(Classifier(), rank=4, on="*.linear*", alpha=8, train="classifier.*")
    local = Phase(optimizer=fedkeep.adam(0.01), epochs=2, batch_size=10)
    found = {}
    for name, method in {
        "all adapters federated (FedIT)": fedkeep.methods.fedavg(local=local),
        "B and the head private": fedkeep.methods.furl(["*.lora_B.*", "classifier.*"], local=local),
    }.items():
        run = fedkeep.simulate(model, method, labelled(), rounds=8, cohort=10, evaluate_every=0)
        sent = next(r.value for r in run.history if r.metric == "upload_bytes")
        found[name] = run.evaluate("test")["accuracy"], sent
        print(f"{name:32} accuracy on test {found[name][0]:.3f}, {sent / 1000:.1f} kB a client and round")
    return found


if __name__ == "__main__":
    main()
