"""Claim: every method that has a meaning there trains any classifier, and the rest say in one sentence what to do.

    python -m benchmarks.fit [--out results/fit.json] [--only MODEL] [--again]

Each of the methods, made without any argument, on classifiers as strangers bring them: small ones, in plain PyTorch,
with no part named for fedkeep; where ``torchvision`` and ``transformers`` can be imported, theirs too, else their rows
say that they were skipped. Two rounds, three clients, sixteen examples each. A cell holds ``trained``, the loss and the
seconds, or the error's class and its first sentence. Cells that the file has are not run again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import RESULTS
from fedkeep import FederatedData, simulate
from fedkeep.core.errors import FedkeepError
from fedkeep.methods import METHODS

CLIENTS, EXAMPLES, CLASSES, WORDS = 3, 16, 3, 40


def columns(**made: Any) -> FederatedData:
    """Return clients with these columns and a label that depends on chance alone."""
    rng = np.random.default_rng(1)
    owner = np.repeat([f"user-{c}" for c in range(CLIENTS)], EXAMPLES)
    split = (["train"] * (EXAMPLES - 5) + ["valid"] * 2 + ["test"] * 3) * CLIENTS
    label = rng.integers(0, CLASSES, len(owner))
    meta = {"task": "multiclass", "classes": CLASSES}
    return FederatedData.from_columns(owner, {**made, "label": label}, split, meta=meta)


def numbers(*shape: int) -> Callable[[], FederatedData]:
    """Return a maker of data with a column ``x`` of this shape."""
    return lambda: columns(
        x=np.random.default_rng(0).standard_normal((CLIENTS * EXAMPLES, *shape)).astype("f4")
    )


def words(length: int = 7, column: str = "text") -> Callable[[], FederatedData]:
    """Return a maker of data with rows of word numbers."""
    return lambda: columns(
        **{column: np.random.default_rng(0).integers(1, WORDS, (CLIENTS * EXAMPLES, length))}
    )


class Mlp(nn.Module):
    """Three layers, batch norms between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.fc2, self.bn2 = nn.Linear(12, 8), nn.BatchNorm1d(8)
        self.fc3 = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.fc1(x)))
        out: Tensor = self.fc3(torch.relu(self.bn2(self.fc2(x))))
        return out


def sequence() -> nn.Module:
    """A sequence of layers."""
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, CLASSES))


class Cnn(nn.Module):
    """PyTorch's first example: two convolutions, two linear layers, log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 4, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        x = nn.functional.max_pool2d(x, 2).flatten(1)
        return nn.functional.log_softmax(self.fc2(torch.relu(self.fc1(x))), 1)


class Lstm(nn.Module):
    """A language model's parts: embedding, LSTM, decoder of the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.rnn = nn.LSTM(8, 9, batch_first=True)
        self.decoder = nn.Linear(9, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.rnn(self.embedding(text))
        out: Tensor = self.decoder(states[:, -1])
        return out


class Gru(nn.Module):
    """A head at every position, of which the last is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.gru = nn.Embedding(WORDS, 8), nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.out(self.gru(self.emb(text))[0])[:, -1]
        return out


class Conv1d(nn.Module):
    """Convolutions over time that end with one of single points, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU()
        )
        self.score = nn.Conv1d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.body(x)).mean(2)


class Transformer(nn.Module):
    """An encoder of two layers over words, the mean of which is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.place = nn.Parameter(0.02 * torch.randn(1, 7, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cls = nn.Linear(16, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        found = self.layers(self.embed(text) + self.place)
        out: Tensor = self.cls(found.mean(1))
        return out


class Block(nn.Module):
    """A residual block with group normalisation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.GroupNorm(2, width), nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.nb(self.b(torch.relu(self.na(self.a(x))))))


class ResNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.blocks(self.stem(x)).mean((2, 3)))
        return out


class Bag(nn.Module):
    """A mean of word vectors and one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 12, mode="mean")
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.fc(self.words(text))
        return out


class Vgg(nn.Module):
    """Parts called as torchvision calls them: ``features`` and ``classifier``, with a flatten between."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Linear(4 * 9, 10), nn.ReLU(), nn.Dropout(), nn.Linear(10, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x).flatten(1))
        return out


class Graph(nn.Module):
    """Two graph convolutions over a batch of small graphs, with a layer per node, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.lin = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.softmax(x @ x.mT, -1)  # (B, nodes, nodes)
        found = torch.relu(near @ self.second(torch.relu(near @ self.first(x))))
        return self.lin(found).mean(1)


class TabTransformer(nn.Module):
    """Columns as tokens, attended to, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.randn(6, 8))
        self.attend = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(48, 16), nn.GELU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attend(x.unsqueeze(2) * self.columns).flatten(1))
        return out


class Vit(nn.Module):
    """Patches of an image behind a token of the class, whose state a head of zeros classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, 16, 4, 4), nn.Parameter(torch.zeros(1, 1, 16))
        self.place = nn.Parameter(0.02 * torch.randn(1, 5, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.heads = nn.LayerNorm(16), nn.Linear(16, CLASSES)
        nn.init.zeros_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)

    def forward(self, x: Tensor) -> Tensor:
        found = self.patches(x).flatten(2).mT
        found = torch.cat([self.token.expand(len(x), -1, -1), found], 1) + self.place
        out: Tensor = self.heads(self.norm(self.blocks(found))[:, 0])
        return out


class Bert(nn.Module):
    """Words, places and a norm, an encoder, and a pooler of the first state before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16, padding_idx=0), nn.Embedding(7, 16)
        self.norm = nn.LayerNorm(16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler, self.drop = nn.Linear(16, 16), nn.Dropout(0.1)
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        found = self.norm(self.words(text) + self.places.weight[: text.shape[1]])
        found = self.encoder(found, src_key_padding_mask=text == 0)
        out: Tensor = self.classifier(self.drop(torch.tanh(self.pooler(found[:, 0]))))
        return out


class Gpt2(nn.Module):
    """Causal blocks; a score without bias at each position, of which the last word's is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, 16), nn.Embedding(7, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.ln_f, self.score = nn.LayerNorm(16), nn.Linear(16, CLASSES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        steps = text.shape[1]
        ahead = nn.Transformer.generate_square_subsequent_mask(steps, device=text.device)
        found = self.h(self.wte(text) + self.wpe.weight[:steps], mask=ahead, is_causal=True)
        logits: Tensor = self.score(self.ln_f(found))
        last = (text != 0).sum(1).clamp_min(1) - 1
        return logits[torch.arange(len(text), device=text.device), last]


class Logits(nn.Module):
    """Someone's model that takes a column ``x`` and returns an object with ``logits``, or a tensor."""

    def __init__(self, inner: nn.Module, column: str = "") -> None:
        super().__init__()
        self.inner, self.column = inner, column

    def forward(self, x: Tensor) -> Any:
        return self.inner(**{self.column: x}) if self.column else self.inner(x)


def vision(name: str) -> Callable[[], nn.Module]:
    """Return a maker of one of torchvision's, small."""

    def make() -> nn.Module:
        import torchvision.models as known  # type: ignore[import-not-found, unused-ignore]

        if name == "vit":
            return known.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=CLASSES)
        if name == "densenet":
            return known.DenseNet(4, (2, 2), 8, num_classes=CLASSES)
        return getattr(known, name)(num_classes=CLASSES)

    return lambda: Logits(make())


def written(name: str) -> Callable[[], nn.Module]:
    """Return a maker of one of transformers', small."""

    def make() -> nn.Module:
        import transformers as known  # type: ignore[import-not-found, unused-ignore]

        small = {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": 0}
        if name == "bert":
            config = known.BertConfig(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **small
            )
            return known.BertForSequenceClassification(config)
        return known.GPT2ForSequenceClassification(known.GPT2Config(n_embd=16, n_layer=2, n_head=2, **small))

    return lambda: Logits(make(), "input_ids")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], FederatedData]]] = {
    "MLP with batch norm": (Mlp, numbers(6)),
    "nn.Sequential": (sequence, numbers(6)),
    "CNN with log-softmax": (Cnn, numbers(1, 8, 8)),
    "LSTM with decoder": (Lstm, words()),
    "GRU, a head at each position": (Gru, words()),
    "1-D CNN ending with a convolution": (Conv1d, numbers(3, 9)),
    "transformer encoder": (Transformer, words()),
    "ResNet with group norm": (ResNet, numbers(1, 8, 8)),
    "bag of words": (Bag, words()),
    "VGG-like": (Vgg, numbers(1, 8, 8)),
    "graph convolutions": (Graph, numbers(5, 4)),
    "TabTransformer": (TabTransformer, numbers(6)),
    "small ViT": (Vit, numbers(1, 8, 8)),
    "small BERT": (Bert, words()),
    "small GPT-2": (Gpt2, words()),
    "one layer in a sequence": (lambda: nn.Sequential(nn.Linear(6, CLASSES)), numbers(6)),
    "torchvision's ResNet-18": (vision("resnet18"), numbers(3, 32, 32)),
    "torchvision's MobileNetV3": (vision("mobilenet_v3_small"), numbers(3, 32, 32)),
    "torchvision's DenseNet": (vision("densenet"), numbers(3, 32, 32)),
    "torchvision's ViT": (vision("vit"), numbers(3, 32, 32)),
    "transformers' BERT": (written("bert"), words(7, "x")),
    "transformers' GPT-2": (written("gpt2"), words(7, "x")),
}


def cell(make: Callable[[], nn.Module], data: FederatedData, name: str) -> dict[str, Any]:
    """Return what became of a method on a model."""
    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            centralised = name == "asp_mtl"
            run = simulate(
                make(),
                METHODS[name](),
                data,
                rounds=2,
                cohort=CLIENTS,
                centralised=centralised,
                engine="auto" if centralised else "sequential",
                progress=False,
            )
            run.evaluate("test")
    except FedkeepError as error:
        return {"result": "refused", "kind": type(error).__name__, "why": str(error)}
    except Exception as error:  # noqa: BLE001 - what a stranger would see
        return {"result": "failed", "kind": type(error).__name__, "why": str(error)[:300]}
    loss = [r.value for r in run.history if r.metric == "loss" and r.split == "train"]
    return {"result": "trained", "loss": loss[-1], "seconds": round(time.perf_counter() - start, 2)}


def main() -> None:
    """Fill the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "fit.json")
    parser.add_argument("--only", help="the models whose name has this text")
    parser.add_argument("--methods", nargs="*", help="these methods alone")
    parser.add_argument("--again", action="store_true", help="run cells again that the file has")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    rows = found.setdefault("cells", {})
    for model, (make, read) in MODELS.items():
        if given.only and given.only not in model:
            continue
        try:
            make()
        except ImportError as error:
            rows[model] = {"skipped": str(error)}
            continue
        if "skipped" in rows.get(model, {}):
            del rows[model]
        data = read()
        for name in given.methods or METHODS:
            if given.again or name not in rows.get(model, {}):
                rows.setdefault(model, {})[name] = cell(make, data, name)
                given.out.write_text(json.dumps(found, indent=1) + "\n")
    run = [each for row in rows.values() if "skipped" not in row for each in row.values()]
    count = {kind: sum(each["result"] == kind for each in run) for kind in ("trained", "refused", "failed")}
    found["summary"] = count | {
        "cells": len(run),
        "skipped": [m for m, row in rows.items() if "skipped" in row],
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    for model, row in rows.items():
        if "skipped" in row:
            print(f"{model}: skipped ({row['skipped']})")
            continue
        others = [f"{n} ({each['kind']})" for n, each in row.items() if each["result"] != "trained"]
        print(f"{model}: {len(row) - len(others)} of {len(row)}; not: {', '.join(others)}")
    print(count)


if __name__ == "__main__":
    main()
