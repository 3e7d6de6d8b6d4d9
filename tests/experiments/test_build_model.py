"""From a configuration to a model: sizes, first values, word vectors, and models within a model."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedkeep import models
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.data import FederatedData, many_user_text, toy
from fedkeep.experiments.build import build_data, build_model, sizes_of
from tests.experiments.configs import CLASSIFIER, PICTURES, REVIEWS, config, shops
from tests.refusals import raises


class Mine(nn.Module):
    """A module of the user's own."""

    def __init__(self, features: int, classes: int, width: int = 5) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(features, width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x))  # type: ignore[no-any-return]


SQUARED = {"kind": "furl", "loss": {"kind": "squared_error"}}


def test_sizes_come_from_the_data() -> None:
    text = many_user_text(users=4, examples=8, classes=6)
    assert sizes_of(text) == {"vocabulary": text.meta["vocabulary"]["size"], "classes": 6}
    assert sizes_of(toy(features=7, classes=4)) == {"classes": 4, "features": 7}
    numbers = FederatedData.from_columns(["a"], {"x": np.zeros((1, 2)), "label": np.array([0.5])}, ["train"])
    assert sizes_of(numbers) == {"classes": 1, "features": 2}
    assert build_model(config(method=SQUARED), numbers)(torch.zeros(3, 2)).shape == (3,)
    model = build_model(config(model={"kind": "document", "user_dim": 5, "hidden": 3, "pool": "max"}), text)
    assert isinstance(model, models.DocumentModel)
    assert model.embedding.num_embeddings == text.meta["vocabulary"]["size"]
    assert model.user.shape == (5,)
    assert model.pool == "max"


def test_initial_values_follow_the_seed_and_disturb_nothing() -> None:
    data = toy()
    before = torch.random.get_rng_state()
    first, same, other = (build_model(config(seed=s), data).state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first["linear.weight"], same["linear.weight"])
    assert not torch.equal(first["linear.weight"], other["linear.weight"])


def test_a_module_of_ones_own() -> None:
    model = build_model(config(model={"kind": f"{__name__}:Mine", "width": 7}), toy())
    assert type(model).__name__ == "Mine"
    assert model.hidden.out_features == 7  # type: ignore[union-attr]


def test_word_vectors_fill_the_embedding(tmp_path: Path) -> None:
    wanted = config(data=REVIEWS, model=CLASSIFIER, seed=3)
    data = build_data(wanted, shops(tmp_path))
    assert data.meta["vocabulary"]["symbols"] == ["good", "tea", "bad"]
    model = build_model(wanted, data, tmp_path)
    assert isinstance(model, models.TextClassifier)
    weight = model.embedding.weight
    assert weight.requires_grad
    assert weight[[0, 2]].tolist() == [[0, 0], [1, 2]]
    assert (weight[[1, 3, 4]].abs() <= 0.1).all()
    again = build_model(wanted, data, tmp_path).get_parameter("embedding.weight")
    other = build_model(wanted.model_copy(update={"seed": 4}), data, tmp_path).get_parameter(
        "embedding.weight"
    )
    assert torch.equal(weight, again)
    assert not torch.equal(weight, other)
    rest = build_model(
        wanted.model_copy(update={"model": wanted.model.model_copy(update={"word_vectors": None})}), data
    )
    assert torch.equal(rest.get_parameter("encoder.weight_ih_l0"), model.encoder.weight_ih_l0)  # drawn alike


def test_word_vectors_may_be_longer_or_left_out(tmp_path: Path) -> None:
    wanted = config(data=REVIEWS, model=CLASSIFIER, seed=3)
    data = build_data(wanted, shops(tmp_path))
    found = {}
    for name, change in (
        ("as given", {}),
        ("longer", {"word_vectors_scale": 2.5}),
        ("none", {"word_vectors": ""}),
    ):
        settings = config(data=REVIEWS, model={**CLASSIFIER, **change}, seed=3)
        found[name] = build_model(settings, data, tmp_path).get_parameter("embedding.weight")
    assert found["longer"][2].tolist() == [2.5, 5.0]
    assert torch.equal(
        found["longer"][[0, 1, 3, 4]], found["as given"][[0, 1, 3, 4]]
    )  # drawn ones as they are
    assert (found["none"].abs() <= 0.1).all()


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf")])
def test_a_scale_of_word_vectors_that_is_none(scale: float) -> None:
    with pytest.raises(ValidationError, match="word_vectors_scale"):
        config(model={**CLASSIFIER, "word_vectors_scale": scale})


def test_word_vectors_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build_data(config(data=REVIEWS), shops(tmp_path))
    with raises(ConfigError, name="embedding.weight", path="vectors.txt", width=2):
        build_model(config(data=REVIEWS, model={**CLASSIFIER, "embedding_dim": 3}), data, tmp_path)
    words = many_user_text(users=4, examples=8, classes=6)
    with raises(ConfigError, kind="char"):
        build_model(config(model=CLASSIFIER), words, tmp_path)
    with raises(ConfigError, said="model.word_vectors: Linear declares no", model="Linear"):
        build_model(config(model={"kind": "linear", "word_vectors": "vectors.txt"}), toy(), tmp_path)
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    with raises(DataError, said="model.word_vectors wants a folder of data."):
        build_model(config(data=REVIEWS, model=CLASSIFIER), data)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kind": "lineer"}, "model.kind: there is no model 'lineer'."),
        ({"kind": "linear", "classes": "3"}, "model.classes: wanted a whole number; got '3'."),
        ({"kind": "linear", "width": 3}, "model.width: unknown key. "),
        ({"kind": "document"}, "model: missing vocabulary."),
        (
            {"kind": "linear", "features": -1},
            "model.features: wanted 4, as the data have; got -1. Leave it out to take the data's.",
        ),
        (
            {"kind": "torch.nn:Linear", "in_features": 4, "out_features": -1},
            "model: 'torch.nn:Linear' cannot be made of {'in_features': 4, 'out_features': -1}: ",
        ),
        (
            {"kind": "torch.nn:MultiheadAttention", "embed_dim": 6, "num_heads": 4},
            "model: 'torch.nn:MultiheadAttention' cannot be made of {'embed_dim': 6, 'num_heads': 4}: embed_dim must be",
        ),
        (
            {"kind": "nowhere.at_all:Net"},
            "model.kind: 'nowhere.at_all:Net' cannot be imported: No module named 'nowhere'. Name the folder of",
        ),
        ({"kind": "torch.nn:Linaer"}, "model.kind: 'torch.nn:Linaer' cannot be imported: "),
        (
            {"kind": "os:system"},
            "model.kind: 'os:system' is no class of torch.nn.Module, nor a function that says `-> torch",
        ),
        (
            {"kind": "builtins:dict"},
            "model.kind: 'builtins:dict' is no class of torch.nn.Module, nor a function that says",
        ),
    ],
)
def test_models_that_cannot_be_made(model: dict[str, Any], message: str) -> None:
    with raises(ConfigError, said=message):
        build_model(config(model=model), toy())


def test_a_function_that_says_it_makes_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(features: int, classes: int, bias: bool = True) -> nn.Module:
        return nn.Linear(features, classes, bias)

    def silent(features: int):  # type: ignore[no-untyped-def]
        return nn.Linear(features, 2)

    here = types.ModuleType("a_module_of_functions")
    here.layer, here.silent = layer, silent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, here.__name__, here)
    made = build_model(config(model={"kind": "a_module_of_functions:layer", "bias": False}), toy())
    assert isinstance(made, nn.Linear)
    assert made.bias is None
    assert made.in_features == 4
    with pytest.raises(ConfigError, match="^model.kind:.*'a_module_of_functions:silent'"):
        build_model(config(model={"kind": "a_module_of_functions:silent"}), toy())


def test_sizes_of_images() -> None:
    made = FederatedData(
        {"image": np.zeros((2, 3, 16, 16), np.uint8), "label": np.array([0, 2])}, [0, 2], ["a"]
    )
    assert sizes_of(made) == {"classes": 3, "channels": 3, "side": 16}
    model = build_model(config(model={"kind": "cnn", "widths": [2, 3], "hidden": [5, 4]}), made)
    assert model(torch.from_numpy(np.asarray(made.columns["image"]))).shape == (2, 3)


def test_models_within_a_model() -> None:
    tables = {
        "kind": "mixture_of_experts",
        "global_expert": {"kind": "cnn", "widths": [3, 4], "hidden": [16, 8]},
        "local_expert": {"kind": "cnn"},
        "gate": {
            "kind": "confidence_gate",
            "network": {"kind": "gate", "network": {"kind": "cnn", "classes": 1}},
        },
    }
    made = build_model(config(model=tables), PICTURES)
    assert isinstance(made, models.MixtureOfExperts)
    assert made.global_expert.out.out_features == made.local_expert.out.out_features == 4  # type: ignore[union-attr]
    assert made.global_expert.conv1.out_channels == 3  # type: ignore[union-attr]
    assert made.gate.network.network.out.out_features == 1  # type: ignore[union-attr]
    assert torch.equal(made.gate.weigh.weight, torch.zeros(1, 5))  # type: ignore[union-attr]
    again = build_model(config(model=tables), PICTURES)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"kind": "mixture_of_experts", "global_expert": {"kind": "cnn"}, "local_expert": {"kind": "cnm"}},
            "model.local_expert.kind: there is no model 'cnm'. Did you mean 'cnn'?",
        ),
        (
            {"kind": "mixture_of_experts", "global_expert": {"kind": "cnn", "wdith": 3}},
            "model.global_expert.wdith: unknown key. Did you mean model.global_expert.widths?",
        ),
        (
            {"kind": "mixture_of_experts", "global_expert": {"kind": "cnn"}},
            "model: missing local_expert, gate.",
        ),
        (
            {"kind": "mixture_of_experts", "global_expert": {"kind": 3}},
            "model.global_expert.kind: wanted a name; got 3.",
        ),
        (
            {"kind": "gate", "network": 3},
            "model.network: wanted a Module; got 3.",
        ),
    ],
)
def test_models_within_a_model_that_cannot_be_made(model: dict[str, Any], message: str) -> None:
    with raises(ConfigError, said=message):
        build_model(config(model=model), PICTURES)


def test_a_module_that_imports_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there, and the advice was to name its folder."""
    (tmp_path / "imports_gone.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with raises(ConfigError, kind="imports_gone:Net", place="model.kind"):
        build_model(config(model={"kind": "imports_gone:Net"}), toy())
