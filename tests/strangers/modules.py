"""Modules as strangers write them, none made for fedkeep, each with a small federation that it fits: one table for all."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from fedkeep import FederatedData, declare
from fedkeep.methods.terms import Term, cross_entropy, squared_error

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
        return self.fc3(torch.relu(self.bn2(self.fc2(x))))


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
        return self.decoder(states[:, -1])


class Gru(nn.Module):
    """A head at every position, of which the last is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.gru = nn.Embedding(WORDS, 8), nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        return self.out(self.gru(self.emb(text))[0])[:, -1]


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
        return self.cls(found.mean(1))


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
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class Bag(nn.Module):
    """A mean of word vectors and one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 12, mode="mean")
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        return self.fc(self.words(text))


class Vgg(nn.Module):
    """Parts called as torchvision calls them: ``features`` and ``classifier``, with a flatten between."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Linear(4 * 9, 10), nn.ReLU(), nn.Dropout(), nn.Linear(10, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


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
        return self.mlp(self.attend(x.unsqueeze(2) * self.columns).flatten(1))


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
        return self.heads(self.norm(self.blocks(found))[:, 0])


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
        return self.classifier(self.drop(torch.tanh(self.pooler(found[:, 0]))))


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


def trained_norms(module: nn.Module) -> nn.Module:
    """Return a module whose batch norms have some bias, as trained ones have.

    At 0 a channel that is the same in all examples is a rounding error around the corner of a ReLU, so that the order
    of a sum decides whether it has a gradient.
    """
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.bias, 0.2, 0.1)
    return module


def vision(name: str) -> Callable[[], nn.Module]:
    """Return a maker of one of torchvision's, small."""

    def make() -> nn.Module:
        import torchvision.models as known  # type: ignore[import-not-found, unused-ignore]

        if name == "vit":
            return known.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=CLASSES)
        if name == "densenet":
            return known.DenseNet(4, (2, 2), 8, num_classes=CLASSES)
        if name == "mobilenet v3":
            return trained_norms(known.mobilenet_v3_small(num_classes=CLASSES))
        if name == "mobilenet":
            net = trained_norms(known.mobilenet_v2(width_mult=0.1))
            net.features = net.features[:4]
            net.classifier = nn.Linear(net.features[-1].out_channels, CLASSES)
            return net
        if name.startswith("resnet"):  # its first stages, as who has small pictures takes them
            net = known.resnet18(num_classes=CLASSES, zero_init_residual=name == "resnet, zeros")
            net.layer3, net.layer4, net.fc = nn.Identity(), nn.Identity(), nn.Linear(128, CLASSES)
            return net
        raise ValueError(name)

    return lambda: Logits(make())


def written(name: str, column: str = "input_ids") -> Callable[[], nn.Module]:
    """Return a maker of one of transformers', small."""

    def make() -> nn.Module:
        import transformers as known  # type: ignore[import-not-found, unused-ignore]

        small = {"vocab_size": WORDS, "num_labels": CLASSES, "pad_token_id": 0}
        if name == "bert":
            config = known.BertConfig(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **small
            )
            return known.BertForSequenceClassification(config)
        if name == "vit":
            vit = known.ViTConfig(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                image_size=8,
                patch_size=4,
                num_channels=1,
                num_labels=CLASSES,
            )
            return known.ViTForImageClassification(vit)
        if name == "whisper":
            heard = known.WhisperConfig(
                d_model=16,
                encoder_layers=1,
                encoder_attention_heads=2,
                encoder_ffn_dim=32,
                num_mel_bins=8,
                max_source_positions=8,
                num_labels=CLASSES,
                classifier_proj_size=16,
            )
            return known.WhisperForAudioClassification(heard)
        return known.GPT2ForSequenceClassification(known.GPT2Config(n_embd=16, n_layer=2, n_head=2, **small))

    return lambda: Logits(make(), column)


class Two(nn.Module):
    """Two layers on six numbers, and whatever ``more`` makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.more()

    def more(self) -> None:
        """Add to the layers."""

    def inner(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Packed(nn.Module):
    """An LSTM over texts of unequal lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lstm = nn.Embedding(WORDS, 8, padding_idx=0), nn.LSTM(8, 6, batch_first=True)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, text: Tensor, length: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.emb(text), length.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.lstm(packed)
        return self.fc(last[-1])


class UNet(nn.Module):
    """Down, up, and a shortcut between; the mean over the picture is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        return self.out(torch.cat([self.up(self.down2(first)), first], 1)).mean((2, 3))


class WeightNorm(Two):
    """Weights of torch's new weight norm."""

    def more(self) -> None:
        parametrizations.weight_norm(self.a)


class OldWeightNorm(Two):
    """Weights of torch's old weight norm, by a hook."""

    def more(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(self.a)


class Spectral(Two):
    """A spectral norm, whose vectors are buffers."""

    def more(self) -> None:
        parametrizations.spectral_norm(self.a)


class OldSpectral(Two):
    """The old one, by a hook."""

    def more(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.spectral_norm(self.a)


class Orthogonal(Two):
    """An orthogonal weight."""

    def more(self) -> None:
        parametrizations.orthogonal(self.a)


class Pruned(Two):
    """A third of the weights is masked."""

    def more(self) -> None:
        prune.l1_unstructured(self.a, "weight", amount=0.3)


class Recomputed(Two):
    """A checkpoint of the newer kind."""

    reentrant = False

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda h: self.b(torch.tanh(h)), self.a(x), use_reentrant=self.reentrant)


class Reentrant(Recomputed):
    """One of the older kind."""

    reentrant = True


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        (x,) = ctx.saved_tensors
        return slopes[0] * (x.abs() < 1)


class Binary(Two):
    """An own function with a straight-through gradient, in the older form."""

    def forward(self, x: Tensor) -> Any:
        return self.b(_Sign.apply(self.a(x)))  # type: ignore[no-untyped-call]


class StraightThrough(Two):
    """The same by ``detach``."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return self.b(h + (h.round() - h).detach())


class Ema(Two):
    """A slow copy in buffers that follows under ``no_grad``."""

    def more(self) -> None:
        self.register_buffer("slow", self.a.weight.detach().clone())

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.slow.mul_(0.9).add_(self.a.weight, alpha=0.1)
        return self.b(torch.tanh(self.a(x)) + torch.tanh(F.linear(x, self.slow)))


class EmaAssigned(Ema):
    """The same, assigned."""

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.slow = self.slow * 0.9 + self.a.weight.detach() * 0.1
        return self.b(torch.tanh(self.a(x)) + torch.tanh(F.linear(x, self.slow)))


class Byol(Two):
    """A target network, whose parameters are frozen and follow under ``no_grad``."""

    def more(self) -> None:
        self.target = nn.Linear(6, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.a.parameters(), strict=True):
                    slow.copy_(0.9 * slow + 0.1 * fast)
        return self.b(torch.tanh(self.a(x)) + torch.tanh(self.target(x)))


class ByolData(Byol):
    """The same by ``.data``, which torch does not see."""

    def forward(self, x: Tensor) -> Any:
        if self.training:
            for slow, fast in zip(self.target.parameters(), self.a.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.b(torch.tanh(self.a(x)) + torch.tanh(self.target(x)))


class Moco(Two):
    """A queue of keys with a pointer."""

    def more(self) -> None:
        self.register_buffer("queue", torch.randn(12, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        near = torch.softmax(h @ self.queue.clone().T, 1) @ self.queue.clone()
        if self.training:
            with torch.no_grad():
                rows = (self.place + torch.arange(len(x))) % 12
                self.queue[rows] = h.detach()
                self.place[0] = (self.place + len(x)) % 12
        return self.b(h + near)


class Vq(Two):
    """A codebook whose entries are moving means, and a straight-through gradient."""

    def more(self) -> None:
        self.register_buffer("code", torch.randn(5, 8))
        self.register_buffer("count", torch.ones(5))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        hot = F.one_hot(torch.cdist(h, self.code).argmin(1), 5).to(h.dtype)
        found = hot @ self.code
        if self.training:
            with torch.no_grad():
                self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.code.mul_(0.9).add_((hot.T @ h) / self.count[:, None], alpha=0.1)
        return self.b(h + (found - h).detach())


class Mixed(nn.Module):
    """A table of 16 bits before layers of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8, dtype=torch.bfloat16)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        return self.fc(self.table(text).float().mean(1))


class MixedFrozen(nn.Module):
    """A frozen body of 16 bits, a head of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8).bfloat16().requires_grad_(False)
        self.head_ = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head_(self.body(x.bfloat16()).float())


class Autocast(Two):
    """Layers under autocast."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


class Pair(nn.Module):
    """Two inputs, one of them numbers and one of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(WORDS, 6), nn.Linear(6, 6)
        self.last = nn.Linear(12, CLASSES)

    def forward(self, text: Tensor, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.words(text).mean(1), torch.relu(self.numbers(x))], 1))


class OptionalMask(Two):
    """An argument with a default that the data do not have."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.inner(x if mask is None else x * mask)


class Keywords(Two):
    """All columns by keyword."""

    def forward(self, **columns: Tensor) -> Any:
        return self.inner(columns["x"])


class Positional(Two):
    """Arguments by position alone."""

    def forward(self, *given: Tensor) -> Any:
        return self.inner(given[0])


class DictOut(Two):
    """A dict of logits."""

    def forward(self, x: Tensor) -> Any:
        return {"main": self.inner(x)}


class TupleOut(Two):
    """Logits and hidden values."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return self.b(h), h


class Named(NamedTuple):
    """Hidden values, and logits."""

    hidden: Tensor
    logits: Tensor


class NamedOut(Two):
    """A named tuple, in which the logits come second."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return Named(h, self.b(h))


class ObjectOut(Two):
    """An object of the author's own."""

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.inner(x))


class LossInside(Two):
    """Takes the label too, as transformers' do, and returns the loss beside the logits."""

    def forward(self, x: Tensor, label: Tensor | None = None) -> Any:
        logits = self.inner(x)
        loss = None if label is None else F.cross_entropy(logits, label)
        return SimpleNamespace(loss=loss, logits=logits)


class Closure(Two):
    """A closure over itself."""

    def more(self) -> None:
        self.run = lambda x: self.b(torch.tanh(self.a(x)))

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class Listed(Two):
    """A weight in a plain list, too."""

    def more(self) -> None:
        self.again = [self.a]

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.again[0](x)))


class Sparse(nn.Module):
    """A table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(WORDS, 8, sparse=True), nn.Linear(8, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        return self.fc(self.table(text).mean(1))


class MaxNorm(nn.Module):
    """A table whose rows are shortened as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(WORDS, 8, max_norm=1.0), nn.Linear(8, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        return self.fc(self.table(text).mean(1))


class Tied(nn.Module):
    """A language model with tied tables, which tells the next word's class."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.lm = nn.Linear(8, WORDS, bias=False)
        self.lm.weight = self.wte.weight

    def forward(self, text: Tensor) -> Tensor:
        return self.lm(self.rnn(self.wte(text))[0][:, -1])


class Siamese(nn.Module):
    """One encoder for two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.tell = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.tell((torch.tanh(self.encode(x)) - torch.tanh(self.encode(y))).abs())


class Counter(Two):
    """Anneals by a plain number of its own."""

    def more(self) -> None:
        self.steps = 0

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.steps += 1
        return self.inner(x) * (1 + 0.1 * self.steps)


class CounterBuffer(Two):
    """Anneals by a count in a buffer."""

    def more(self) -> None:
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.steps += 1
        return self.inner(x) * (1 + 0.1 * self.steps)


class HiddenBuffer(Ema):
    """A buffer that is not persistent."""

    def more(self) -> None:
        self.register_buffer("slow", self.a.weight.detach().clone(), persistent=False)


class Stateful(nn.Module):
    """An LSTM that goes on with its last state, kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, CLASSES)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is not None and self.state[0].shape[1] != len(x):
            self.state = None
        found, state = self.lstm(x, self.state)
        self.state = tuple(s.detach() for s in state)
        return self.fc(found[:, -1])


class Cell(nn.Module):
    """A loop over an LSTM's cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.LSTMCell(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 6)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.fc(h)


class Noise(Two):
    """Draws by torch's generator in training."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(x + 0.1 * torch.randn_like(x) if self.training else x)


class Vae(Two):
    """A sampled code."""

    def forward(self, x: Tensor) -> Any:
        mean, spread = self.a(x), 0.1
        return self.b(mean + spread * torch.randn(mean.shape, dtype=mean.dtype))


class Depth(Two):
    """Leaves a layer out at random."""

    def more(self) -> None:
        self.mid = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        if not self.training or torch.rand(1).item() < 0.5:
            h = h + self.mid(h)
        return self.b(h)


class NumpyInside(Two):
    """Counts words with numpy."""

    def forward(self, x: Tensor) -> Any:
        scale = np.abs(x.detach().cpu().numpy()).mean(1, keepdims=True)
        return self.inner(x / torch.from_numpy(scale).to(x))


class Branches(Two):
    """Control flow that depends on values."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        while h.norm() > 1:
            h = h / 2
        return self.b(h if h.sum() > 0 else -h)


class Gated(nn.Module):
    """Experts, of which the two best are asked."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList([nn.Linear(6, 8) for _ in range(4)])
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(1).topk(2, 1)
        h = x.new_zeros(len(x), 8)
        for k, expert in enumerate(self.experts):
            rows, place = (chosen == k).nonzero(as_tuple=True)
            if len(rows):
                h = h.index_add(0, rows, weight[rows, place, None] * expert(x[rows]))
        return self.out(torch.tanh(h))


class Fourier(nn.Module):
    """Complex weights on frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.fc = nn.Linear(3 * 9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.irfft(torch.fft.rfft(x) * self.mix, n=9)
        return self.fc(found.flatten(1))


class Instance(nn.Module):
    """An instance norm that tracks statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.norm(self.conv(x))).amax(2))


class FrozenNorm(nn.Module):
    """A batch norm that ``train`` leaves in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


class CumulativeNorm(nn.Module):
    """A batch norm whose statistics are plain means."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.norm = nn.BatchNorm1d(8, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.norm(self.fc1(x))))


class OwnNorm(Two):
    """A batch norm written by its author."""

    def more(self) -> None:
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        mean, var = self.mean, self.var
        if self.training:
            mean, var = h.mean(0), h.var(0, unbiased=False)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.var.lerp_(var, 0.1)
        return self.b(torch.relu((h - mean) / (var + 1e-5).sqrt()))


class Gpt(nn.Module):
    """A decoder with a causal mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(WORDS, 8), nn.Embedding(7, 8)
        self.qkv, self.proj, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.lm = nn.Linear(8, CLASSES, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(7, 7)))

    def forward(self, text: Tensor) -> Tensor:
        x = self.tok(text) + self.pos(torch.arange(text.shape[1], device=text.device))
        q, k, v = self.qkv(self.norm(x)).split(8, 2)
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(self.mask == 0, float("-inf"))
        x = x + self.proj(scores.softmax(-1) @ v)
        return self.lm(x[:, -1])


class Mixer(nn.Module):
    """Layers over patches and over channels, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 4, 4)
        self.across, self.along = nn.Linear(4, 4), nn.Linear(8, 8)
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = x + F.gelu(self.across(self.norm(x).mT)).mT
        return self.fc((x + F.gelu(self.along(self.norm(x)))).mean(1))


class DeepFm(nn.Module):
    """A factorisation machine over columns of numbers of words, with a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Embedding(WORDS, CLASSES), nn.Embedding(WORDS, 4)
        self.deep = nn.Sequential(nn.Linear(28, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, text: Tensor) -> Tensor:
        found = self.table(text)
        pairs = (found.sum(1) ** 2 - (found**2).sum(1)).sum(1, keepdim=True) / 2
        return self.first(text).sum(1) + pairs + self.deep(found.flatten(1))


class Radial(nn.Module):
    """Distances from centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.width = nn.Parameter(torch.randn(7, 6)), nn.Parameter(torch.zeros(7))
        self.fc = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.exp(-torch.cdist(x, self.centre) * self.width.exp()))


class Hyper(nn.Module):
    """A layer that makes another's weights for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.inner = nn.Linear(6, 6 * CLASSES), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(x).view(-1, CLASSES, 6)
        return torch.einsum("bci,bi->bc", weight, torch.tanh(self.inner(x)))


class InnerCall(Two):
    """Calls a layer functionally with other weights."""

    def forward(self, x: Tensor) -> Any:
        other = {"weight": self.a.weight * 2, "bias": self.a.bias}
        return self.b(torch.tanh(torch.func.functional_call(self.a, other, (x,))))


class GradInside(Two):
    """Takes a gradient within forward."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.a(x)).sum(), x, create_graph=True)
        return self.inner(x + slope)


class FrozenBody(Two):
    """A body under ``no_grad``, frozen."""

    def more(self) -> None:
        self.a.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            h = torch.tanh(self.a(x))
        return self.b(h)


class Forgotten(Two):
    """A body under ``no_grad`` that is not frozen."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            h = torch.tanh(self.a(x))
        return self.b(h)


class Unused(Two):
    """A layer that forward does not use."""

    def more(self) -> None:
        self.aside = nn.Linear(6, 6)


class Hooks(Two):
    """Forward hooks, and a hook on a parameter."""

    def more(self) -> None:
        self.a.register_forward_hook(lambda _, __, output: output * 2)
        self.register_forward_pre_hook(lambda _, given: (given[0] + 1,) if given else None)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class SlopeHook(Two):
    """A hook on a gradient, made in forward."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda slope: slope.clamp(-0.01, 0.01))
        return self.b(h)


class BackwardHook(Two):
    """A full backward hook on a layer."""

    def more(self) -> None:
        self.b.register_full_backward_hook(lambda _, given, __: tuple(g * 0.5 for g in given))


class OwnCall(Two):
    """A call of its own."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x * 3)


class InPlace(Two):
    """Scales its input in place."""

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.mul_(0.5))


class Merging(Two):
    """Adapters that evaluation merges into a frozen weight."""

    def more(self) -> None:
        self.a.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.merged = False

    def train(self, mode: bool = True) -> Any:
        if mode == self.merged:
            self.a.weight.data += (-1 if mode else 1) * (self.up.weight @ self.down.weight).data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x) if self.merged else self.a(x) + self.up(self.down(x))
        return self.b(torch.tanh(h))


class Lists(nn.Module):
    """Lists and dicts of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2)])
        self.dict = nn.ParameterDict({"out": nn.Parameter(torch.randn(6, CLASSES) / 3)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.list:
            x = torch.tanh(x @ weight)
        return x @ self.dict["out"]


class TakenNames(Two):
    """Attributes called as fedkeep's own are."""

    def more(self) -> None:
        self.lookup, self.per_example, self.updated_buffers = {"a": 1}, True, ["b"]


class Heads(nn.Module):
    """Parts called ``features`` and ``head``, and a method ``predict``."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def predict(self, x: Tensor) -> Tensor:
        """Return classes."""
        return self.forward(x).argmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.features(x)))


class Ratings(nn.Module):
    """Numbers of people and things, and how they get on."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(WORDS, 6), nn.Parameter(torch.zeros(1))

    def forward(self, text: Tensor) -> Tensor:
        found = self.words(text)
        return (found[:, 0] * found[:, 1]).sum(1) + self.bias


class Lora(nn.Module):
    """A frozen layer and one of low rank, of which one side is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, CLASSES).requires_grad_(False)
        self.low, self.high = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(CLASSES, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.low.T @ self.high.T


class Attend(nn.Module):
    """Torch's attention with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, 8, padding_idx=0)
        self.attend, self.fc = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        x = self.emb(text)
        found, _ = self.attend(x, x, x, key_padding_mask=text == 0)
        return self.fc(found.mean(1))


class TwoStage(nn.Module):
    """An encoder and a decoder of torch's transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, 8)
        self.both = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        x = self.emb(text)
        return self.fc(self.both(x, x[:, :1])[:, 0])


def lazy() -> nn.Module:
    """Layers that have seen no input yet."""
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(CLASSES))


def seen() -> nn.Module:
    """Lazy layers after a first batch."""
    module = lazy()
    module(torch.zeros(2, 6))
    return module


def scripted() -> nn.Module:
    """A module of TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)))  # type: ignore[no-any-return]


def traced() -> nn.Module:
    """A traced one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(Two().double(), torch.zeros(2, 6).double())  # type: ignore[no-any-return]


def graph() -> nn.Module:
    """What ``torch.fx`` makes of a module."""
    return torch.fx.symbolic_trace(Two())


def exported() -> nn.Module:
    """What ``torch.export`` makes of a module."""
    batch = torch.export.Dim("batch", min=1, max=99)
    given = (torch.zeros(4, 6).double(),)
    return torch.export.export(Two().double(), given, dynamic_shapes={"x": {0: batch}}).module()


def quantised() -> nn.Module:
    """Dynamic quantisation of linear layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        return torch.ao.quantization.quantize_dynamic(Two(), {nn.Linear}, torch.qint8)


def compiled() -> nn.Module:
    """A compiled module; the backend leaves its operations as they are."""
    return torch.compile(Two(), backend="eager")  # type: ignore[return-value]


def compiled_layer() -> nn.Module:
    """A module of which one layer is compiled, in place."""
    module = Two()
    module.a.compile(backend="eager")
    return module


def distributed() -> nn.Module:
    """A module in ``DistributedDataParallel``, in a group of one."""
    if not torch.distributed.is_initialized():
        file = Path(tempfile.mkdtemp()) / "group"
        torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(Two().double())


def inference() -> nn.Module:
    """A module made in inference mode."""
    with torch.inference_mode():
        return Two()


def averaged() -> nn.Module:
    """Torch's averaged model around one."""
    return torch.optim.swa_utils.AveragedModel(Two())


def lightning() -> nn.Module:
    """A module of Lightning's."""
    import lightning as known  # type: ignore[import-not-found, unused-ignore]

    class Lit(known.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
        """As in its first tutorial."""

        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> Any:
            """Return a loss."""
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            """Return Adam."""
            return torch.optim.Adam(self.parameters())

    return Lit()


def texts() -> FederatedData:
    """Return texts with their lengths; 0 pads."""
    rng = np.random.default_rng(0)
    length = rng.integers(1, 8, CLIENTS * EXAMPLES)
    text = rng.integers(1, WORDS, (CLIENTS * EXAMPLES, 7))
    return columns(text=np.where(np.arange(7) < length[:, None], text, 0), length=length)


def pairs() -> FederatedData:
    """Return words and numbers side by side."""
    rng = np.random.default_rng(0)
    rows = CLIENTS * EXAMPLES
    x, y = rng.standard_normal((2, rows, 6)).astype("f4")
    return columns(text=rng.integers(1, WORDS, (rows, 7)), x=x, y=y)


def ratings() -> FederatedData:
    """Return words with a number to be told."""
    found = words(2)()
    found.columns["label"] = np.random.default_rng(2).standard_normal(CLIENTS * EXAMPLES).astype("f4")
    return FederatedData.from_columns(
        np.repeat([f"user-{c}" for c in range(CLIENTS)], EXAMPLES),
        dict(found.columns),
        (["train"] * (EXAMPLES - 5) + ["valid"] * 2 + ["test"] * 3) * CLIENTS,
        meta={"task": "regression"},
    )


def alone(module: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """Call a module with the only column that it takes."""
    return module(batch["x"] if "x" in batch else batch["text"])


@dataclass(frozen=True)
class Stranger:
    """A module, its data, and how its author would compute its loss.

    Attributes:
        make, read: make the module, and its federation.
        call: calls it with a batch.
        answer: takes the logits from what the module returns.
        loss: fedkeep's loss; the author's is the same of torch, ``plain``.
        draws: whether it draws random numbers in training; then no loop of others draws the same.
        wide: whether it can be made one of 64 bits.
        rounds: whether it rounds to 16.
    """

    make: Callable[[], nn.Module]
    read: Callable[[], FederatedData]
    answer: Callable[[Any], Tensor] = lambda output: output
    loss: Term = cross_entropy()
    plain: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    draws: bool = False
    wide: bool = True
    rounds: bool = False
    call: Callable[[nn.Module, Mapping[str, Tensor]], Any] = alone


def logits(output: Any) -> Tensor:
    """Return an output's field."""
    return output.logits


def declaring(make: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    """Return a maker of a module with what a refusal asks for: the buffers that training updates."""
    return lambda: declare(make(), updated_buffers=names)


SIX, PICTURE, PHOTO = numbers(6), numbers(1, 8, 8), numbers(3, 32, 32)

STRANGERS: dict[str, Stranger] = {
    "MLP with batch norm": Stranger(Mlp, SIX),
    "nn.Sequential": Stranger(sequence, SIX, draws=True),
    "CNN with log-softmax": Stranger(Cnn, PICTURE),
    "LSTM with decoder": Stranger(Lstm, words()),
    "GRU, a head at each position": Stranger(Gru, words()),
    "1-D CNN ending with a convolution": Stranger(Conv1d, numbers(3, 9)),
    "transformer encoder": Stranger(Transformer, words(), draws=True),
    "ResNet with group norm": Stranger(ResNet, PICTURE),
    "bag of words": Stranger(Bag, words()),
    "VGG-like": Stranger(Vgg, PICTURE, draws=True),
    "graph convolutions": Stranger(Graph, numbers(5, 4)),
    "TabTransformer": Stranger(TabTransformer, SIX),
    "small ViT": Stranger(Vit, PICTURE),
    "small BERT": Stranger(Bert, words(), draws=True),
    "small GPT-2": Stranger(Gpt2, words(), draws=True),
    "one layer in a sequence": Stranger(lambda: nn.Sequential(nn.Linear(6, CLASSES)), SIX),
    "torchvision's ResNet-18": Stranger(vision("resnet"), PHOTO),
    "torchvision's MobileNetV2": Stranger(vision("mobilenet"), PHOTO),
    "torchvision's DenseNet": Stranger(vision("densenet"), PHOTO),
    "torchvision's ViT": Stranger(vision("vit"), PHOTO),
    "transformers' BERT": Stranger(written("bert"), words(7, "x"), logits, draws=True),
    "transformers' GPT-2": Stranger(written("gpt2"), words(7, "x"), logits, draws=True),
    "torchvision's ResNet, zero gamma": Stranger(vision("resnet, zeros"), PHOTO),
    "transformers' ViT": Stranger(written("vit", "pixel_values"), PICTURE, logits),
    "transformers' Whisper": Stranger(written("whisper", "input_features"), numbers(8, 16), logits),
    "Lightning module": Stranger(lightning, SIX),
    "packed LSTM": Stranger(Packed, texts, call=lambda m, b: m(b["text"], b["length"])),
    "U-Net": Stranger(UNet, PICTURE),
    "weight norm": Stranger(WeightNorm, SIX),
    "old weight norm": Stranger(OldWeightNorm, SIX),
    "spectral norm": Stranger(Spectral, SIX),
    "old spectral norm": Stranger(OldSpectral, SIX),
    "orthogonal weight": Stranger(Orthogonal, SIX),
    "pruned": Stranger(Pruned, SIX),
    "checkpoint": Stranger(Recomputed, SIX),
    "reentrant checkpoint": Stranger(Reentrant, SIX),
    "own autograd.Function": Stranger(Binary, SIX),
    "straight-through": Stranger(StraightThrough, SIX),
    "EMA in a buffer": Stranger(Ema, SIX),
    "EMA, assigned": Stranger(EmaAssigned, SIX),
    "BYOL's target": Stranger(Byol, SIX),
    "BYOL's target by .data": Stranger(ByolData, SIX),
    "MoCo's queue": Stranger(Moco, SIX),
    "VQ codebook": Stranger(Vq, SIX),
    "16-bit table": Stranger(Mixed, words(), wide=False),
    "16-bit frozen body": Stranger(MixedFrozen, SIX, wide=False),
    "autocast": Stranger(Autocast, SIX, wide=False, rounds=True),
    "two inputs": Stranger(Pair, pairs, call=lambda m, b: m(b["text"], b["x"])),
    "optional mask": Stranger(OptionalMask, SIX),
    "keywords": Stranger(Keywords, SIX, call=lambda m, b: m(x=b["x"])),
    "by position": Stranger(Positional, SIX),
    "dict output": Stranger(DictOut, SIX, lambda output: output["main"], cross_entropy(task="main")),
    "tuple output": Stranger(TupleOut, SIX, lambda output: output[0]),
    "named tuple": Stranger(NamedOut, SIX, logits),
    "object output": Stranger(ObjectOut, SIX, logits),
    "loss inside": Stranger(LossInside, SIX, logits),
    "closure": Stranger(Closure, SIX),
    "layer in a list": Stranger(Listed, SIX),
    "sparse gradients": Stranger(Sparse, words()),
    "max_norm": Stranger(MaxNorm, words()),
    "tied tables": Stranger(Tied, words()),
    "Siamese": Stranger(Siamese, pairs, call=lambda m, b: m(b["x"], b["y"])),
    "plain counter": Stranger(Counter, SIX),
    "counter in a buffer": Stranger(CounterBuffer, SIX),
    "buffer that is not persistent": Stranger(HiddenBuffer, SIX),
    "stateful LSTM": Stranger(Stateful, numbers(5, 4)),
    "LSTM cell": Stranger(Cell, numbers(5, 4)),
    "noise": Stranger(Noise, SIX, draws=True),
    "VAE": Stranger(Vae, SIX, draws=True),
    "stochastic depth": Stranger(Depth, SIX, draws=True),
    "numpy inside": Stranger(NumpyInside, SIX),
    "control flow by values": Stranger(Branches, SIX),
    "top-2 experts": Stranger(Gated, SIX),
    "complex weights": Stranger(Fourier, numbers(3, 9), wide=False),
    "instance norm": Stranger(Instance, numbers(3, 9)),
    "frozen batch norm": Stranger(FrozenNorm, SIX),
    "cumulative batch norm": Stranger(CumulativeNorm, SIX),
    "own batch norm": Stranger(OwnNorm, SIX),
    "GPT from scratch": Stranger(Gpt, words()),
    "MLP-Mixer": Stranger(Mixer, PICTURE),
    "DeepFM": Stranger(DeepFm, words()),
    "radial basis": Stranger(Radial, SIX),
    "hypernetwork": Stranger(Hyper, SIX),
    "functional call inside": Stranger(InnerCall, SIX),
    "gradient inside": Stranger(GradInside, SIX),
    "frozen body": Stranger(FrozenBody, SIX),
    "no_grad, not frozen": Stranger(Forgotten, SIX),
    "unused layer": Stranger(Unused, SIX),
    "forward hooks": Stranger(Hooks, SIX),
    "hook on a gradient": Stranger(SlopeHook, SIX),
    "backward hook": Stranger(BackwardHook, SIX),
    "own __call__": Stranger(OwnCall, SIX),
    "input in place": Stranger(InPlace, SIX),
    "merging adapters": Stranger(Merging, SIX),
    "lists of parameters": Stranger(Lists, SIX),
    "taken names": Stranger(TakenNames, SIX),
    "features and head": Stranger(Heads, SIX),
    "ratings": Stranger(Ratings, ratings, loss=squared_error(), plain=F.mse_loss),
    "LoRA": Stranger(Lora, SIX),
    "attention with a mask": Stranger(Attend, texts),
    "nn.Transformer": Stranger(TwoStage, words()),
    "lazy": Stranger(lazy, SIX, wide=False),
    "lazy, seen": Stranger(seen, SIX),
    "ScriptModule": Stranger(scripted, SIX),
    "traced": Stranger(traced, SIX),
    "fx": Stranger(graph, SIX),
    "torch.export": Stranger(exported, SIX, wide=False),
    "quantised": Stranger(quantised, SIX, wide=False),
    "compiled": Stranger(compiled, SIX),
    "compiled layer": Stranger(compiled_layer, SIX),
    "DDP": Stranger(distributed, SIX),
    "DataParallel": Stranger(lambda: nn.DataParallel(Two()), SIX),
    "inference mode": Stranger(inference, SIX, wide=False),
    "EMA in a buffer, declared": Stranger(declaring(Ema, "slow"), SIX),
    "EMA, assigned, declared": Stranger(declaring(EmaAssigned, "slow"), SIX),
    "MoCo's queue, declared": Stranger(declaring(Moco, "queue", "place"), SIX),
    "VQ codebook, declared": Stranger(declaring(Vq, "code", "count"), SIX),
    "counter in a buffer, declared": Stranger(declaring(CounterBuffer, "steps"), SIX),
    "own batch norm, declared": Stranger(declaring(OwnNorm, "mean", "var"), SIX),
    "averaged model": Stranger(averaged, SIX),
}
