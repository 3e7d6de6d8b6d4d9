"""From a configuration to data, model and method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep import Phase, averaging, methods, models
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.optim import sgd
from fedkeep.data import PARTITIONS, FederatedData, ImageSet, cifar10, majority, many_user_text, opt_out, toy
from fedkeep.experiments.build import (
    MODELS,
    build_data,
    build_loss,
    build_method,
    build_model,
    data_folder,
    run_config,
    sizes_of,
)
from fedkeep.experiments.builtin import builtin_config
from fedkeep.experiments.config import AdaptConfig, Config, LossConfig, MethodConfig, parse_config
from fedkeep.experiments.load import load_run
from fedkeep.experiments.readers import READERS
from fedkeep.methods import EarlyStopping, terms
from fedkeep.methods.augment import Augmented


class Mine(nn.Module):
    """A module of the user's own."""

    def __init__(self, features: int, classes: int, width: int = 5) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(features, width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x))  # type: ignore[no-any-return]


def config(**tables: Any) -> Config:
    content: dict[str, Any] = {
        "data": {"reader": "toy"},
        "model": {"kind": "linear"},
        "method": {"kind": "furl"},
        "run": {"rounds": 2, "cohort": 2},
    }
    return Config.model_validate(content | tables)


# --- data


def test_generated_data_take_the_seed_unless_they_name_their_own() -> None:
    drawn = build_data(config(seed=5))
    assert drawn.fingerprint() == toy(seed=5).fingerprint()
    fixed = build_data(config(seed=5, data={"reader": "toy", "seed": 2, "users": 3}))
    assert fixed.fingerprint() == toy(users=3, seed=2).fingerprint()


def test_a_split_of_its_own() -> None:
    split = {"fractions": [0.5, 0.25, 0.25], "seed": 3}
    made = build_data(config(data={"reader": "toy", "seed": 0, "split": split}))
    expected = toy(seed=0).split_per_user((0.5, 0.25, 0.25), seed=3)
    assert made.fingerprint() == expected.fingerprint()


def test_data_without_a_split_are_split(tmp_path: Path) -> None:
    whole = FederatedData({"x": np.ones((20, 2)), "label": np.arange(20) % 2}, [0, 10, 20], ["a", "b"])
    whole.save(tmp_path / "mine")
    made = build_data(config(seed=4, data={"reader": "saved", "folder": "mine"}), tmp_path)
    assert made.fingerprint() == whole.split_per_user(seed=4).fingerprint()
    assert [made.count(0, s) for s in ("train", "valid", "test")] == [8, 1, 1]


def test_a_place_is_looked_up_in_the_folder_of_data(tmp_path: Path) -> None:
    toy(users=3).save(tmp_path / "mine")
    relative, absolute = (
        {"reader": "saved", "folder": "mine"},
        {"reader": "saved", "folder": str(tmp_path / "mine")},
    )
    assert len(build_data(config(data=relative), tmp_path)) == 3
    assert len(build_data(config(data=relative), tmp_path / "mine")) == 3  # the data set's own folder
    assert len(build_data(config(data=absolute))) == 3


@pytest.mark.parametrize(
    ("data", "folder", "kind", "message"),
    [
        ({"reader": "toi"}, None, ConfigError, "data.reader: there is no reader 'toi'; there are "),
        (
            {"reader": "table"},
            ".",
            ConfigError,
            "data.path: missing. It says where in the folder of data to read.",
        ),
        ({"reader": "table", "path": 3}, ".", ConfigError, "data.path: wanted a path as text; got 3."),
        ({"reader": "movielens"}, None, DataError, "The reader 'movielens' wants a folder of data."),
        ({"reader": "movielens"}, "none", DataError, "The folder of data none does not exist."),
        ({"reader": "movielens"}, __file__, DataError, f"The folder of data {__file__} is no folder."),
        ({"reader": "toy", "split": {"order": 1}}, None, ConfigError, "data.split.order: wanted str; got 1."),
        (
            {"reader": "toy", "split": {"odrer": "x"}},
            None,
            ConfigError,
            "data.split.odrer: unknown key. Did you mean 'order'?",
        ),
    ],
)
def test_data_that_cannot_be_read(
    data: dict[str, Any], folder: str | None, kind: type[Exception], message: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as error:
        build_data(config(data=data), None if folder is None else Path(folder))
    assert str(error.value).startswith(message)


def test_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    assert data_folder(None) is None
    monkeypatch.setenv("FEDKEEP_DATA", "there")
    assert data_folder(None) == Path("there")
    assert data_folder(Path("here")) == Path("here")


# --- model


def test_sizes_come_from_the_data() -> None:
    text = many_user_text(users=4, examples=8, classes=6)
    assert sizes_of(text) == {"vocabulary": text.meta["vocabulary"]["size"], "classes": 6}
    assert sizes_of(toy(features=7, classes=4)) == {"classes": 4, "features": 7}
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


REVIEWS = {"reader": "reviews", "folder": "shops"}
CLASSIFIER = {"kind": "text_classifier", "embedding_dim": 2, "hidden": 3, "word_vectors": "vectors.txt"}


def shops(path: Path, vectors: str = "good 1 2\nnew 3 4\n") -> Path:
    (path / "shops").mkdir(exist_ok=True)
    for name in ("a", "b"):
        for part in ("train", "test"):
            text = "text,label\ngood tea,1\nbad tea,0\ngood,1\n,0\n"
            (path / "shops" / f"{name}.{part}.csv").write_text(text)
    (path / "vectors.txt").write_text(vectors)
    return path


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


def test_word_vectors_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = build_data(config(data=REVIEWS), shops(tmp_path))
    with pytest.raises(ConfigError) as error:
        build_model(config(data=REVIEWS, model={**CLASSIFIER, "embedding_dim": 3}), data, tmp_path)
    assert str(error.value) == (
        "model.word_vectors: the vectors of vectors.txt have 2 numbers each, but 'embedding.weight' is 3 wide. Set "
        "model.embedding_dim = 2."
    )
    words = many_user_text(users=4, examples=8, classes=6)
    with pytest.raises(ConfigError) as error:
        build_model(config(model=CLASSIFIER), words, tmp_path)
    assert str(error.value) == "model.word_vectors: the data's vocabulary must be one of words; it is 'char'."
    with pytest.raises(ConfigError) as error:
        build_model(config(model={"kind": "linear", "word_vectors": "vectors.txt"}), toy(), tmp_path)
    assert str(error.value) == (
        "model.word_vectors: Linear names no table, or several, for the column 'text' in `lookup`, so it is not known "
        "which to fill."
    )
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    with pytest.raises(DataError) as error:
        build_model(config(data=REVIEWS, model=CLASSIFIER), data)
    assert str(error.value) == (
        "model.word_vectors wants a folder of data. Name it with --data DIR or the variable FEDKEEP_DATA; 'vectors.txt' is "
        "looked up in it."
    )


@pytest.mark.parametrize(
    ("personalization", "task", "message"),
    [
        (
            {"steps": 3, "every": 2},
            {},
            "Personalisation wants a ratio of at least 0, and steps that are a multiple ",
        ),
        (
            {},
            {"task": "regression"},
            "The personalisation curve measures accuracy; this task is a regression.",
        ),
    ],
)
def test_a_personalisation_that_cannot_be_is_refused_before_anything_is_trained(
    personalization: dict[str, int], task: dict[str, str], message: str, tmp_path: Path
) -> None:
    toys = {"reader": "toy", "users": 4, "examples": 6, "features": 3, "classes": 3, **task}
    linear = {"kind": "linear", "features": 3, "classes": 3}
    wanted = config(data=toys, model=linear, personalization=personalization)
    with pytest.raises(ConfigError, match=f"^{message}"):
        run_config(wanted, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_whole_run_of_reviews_with_a_personalisation_curve(tmp_path: Path) -> None:
    wanted = config(
        data=REVIEWS, model=CLASSIFIER, method={"kind": "fedavg", "batch_size": 2},
        run={"rounds": 2, "cohort": 2, "evaluate_shared": True}, personalization={"ratio": 0.5, "steps": 4, "every": 2},
    )  # fmt: skip
    run = run_config(wanted, folder=shops(tmp_path), out=tmp_path / "run")
    curve = [r for r in run.history if r.split.startswith("personalization/")]
    assert {(r.split, r.client) for r in curve} == {
        (f"personalization/{step}", client) for step in (0, 2, 4) for client in ("a", "b")
    }
    shared = [r for r in run.history if r.split == "test/shared"]
    assert {r.round for r in shared} == {1, 2}
    assert {r.client for r in shared if r.round == 2} == {None, "a", "b"}
    again = run_config(wanted, folder=tmp_path, out=tmp_path / "run", resume=True)
    assert again.history == run.history  # read, not measured once more
    in_memory = run_config(wanted, folder=tmp_path)
    assert [r for r in in_memory.history if r.split.startswith("personalization/")] == curve
    loaded = load_run(tmp_path / "run", data_folder=tmp_path)
    assert torch.equal(loaded.server["embedding.weight"], run.server["embedding.weight"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kind": "lineer"}, "model.kind: there is no model 'lineer'; there are document, "),
        ({"kind": "linear", "classes": "3"}, "model.classes: wanted int; got '3'."),
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
        ({"kind": "nowhere.at_all:Net"}, "model.kind: 'nowhere.at_all:Net' cannot be imported: "),
        ({"kind": "torch.nn:Linaer"}, "model.kind: 'torch.nn:Linaer' cannot be imported: "),
        ({"kind": "os:system"}, "model.kind: 'os:system' is no class of torch.nn.Module."),
        ({"kind": "builtins:dict"}, "model.kind: 'builtins:dict' is no class of torch.nn.Module."),
    ],
)
def test_models_that_cannot_be_made(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_model(config(model=model), toy())
    assert str(error.value).startswith(message)


# --- method


def method(**table: Any) -> methods.Method:
    return build_method(MethodConfig.model_validate({"kind": "furl"} | table))


def test_a_method_is_what_a_call_would_make() -> None:
    assert method() == methods.furl()
    assert method(kind="fedavg", batch_size=8) == methods.fedavg(local=Phase(batch_size=8))
    assert method(kind="local", optimizer={"learning_rate": 0.5}) == methods.local(
        local=Phase(optimizer=sgd(0.5))
    )
    built = method(
        private=["user", "head.*"], private_init=["normal", 0.1], weighting="uniform", clip_norm=2,
        optimizer={"learning_rate": 0.3, "rates": {"user": 1.0}}, server_optimizer={"momentum": 0.9},
        loss={"kind": "squared_error", "label": "y", "l2": {"user": 0.5}},
    )  # fmt: skip
    loss = terms.squared_error("y") + 0.5 * terms.l2_penalty("user")
    assert built == methods.furl(
        ["user", "head.*"], private_init=("normal", 0.1),
        local=Phase(clip_norm=2, optimizer=sgd(0.3, rates={"user": 1.0}), loss=loss),
        server=averaging(sgd(1.0, momentum=0.9), by="uniform"),
    )  # fmt: skip


def test_what_is_not_said_of_the_server_stays_the_methods_own() -> None:
    assert method(kind="fedfusion", weighting="uniform") == methods.fedfusion(
        server=averaging(sgd(1.0, rates={"fusion.gamma": 0.1}), by="uniform")
    )
    assert method(kind="fedfusion", server_optimizer={"momentum": 0.9}) == methods.fedfusion(
        server=averaging(sgd(1.0, momentum=0.9))
    )


def test_adaptation() -> None:
    built = method(
        adapt={"optimizer": {"learning_rate": 2.0}, "epochs": 3, "batch_size": 4, "clip_norm": 1.0}
    )
    (phase,) = built.adapt.phases
    assert phase.optimizer == sgd(2.0)
    assert (phase.trains, phase.examples, phase.epochs, phase.batch_size, phase.clip_norm) == (
        "private",
        "all",
        3,
        4,
        1,
    )
    assert phase.loss == built.client.phases[0].loss


def test_loss() -> None:
    assert build_loss(LossConfig()) == terms.cross_entropy()
    assert build_loss(LossConfig(label="stars", smoothing=0.1)) == terms.cross_entropy("stars", smoothing=0.1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"kind": "fural"},
            f"method.kind: there is no method 'fural'; there are {', '.join(methods.METHODS)}. Did you mean 'furl'?",
        ),
        ({"batch": 3}, "method.batch: unknown key. "),
        ({"batch_size": "3"}, "method.batch_size: wanted int; got '3'."),
        ({"weighting": "none"}, "method.weighting: wanted one of 'examples', 'uniform'; got 'none'."),
        (
            {"kind": "local", "server_optimizer": {}},
            "method.server_optimizer: 'local' has no server optimiser.",
        ),
    ],
)
def test_methods_that_cannot_be_made(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        method(**table)
    assert str(error.value).startswith(message)


# --- all together


def test_run_config_keeps_a_file_that_gives_the_run_again(tmp_path: Path) -> None:
    from fedkeep.experiments.config import read_config

    run_config(config(seed=3), out=tmp_path / "r")
    kept, _ = read_config(tmp_path / "r" / "config.toml")
    assert kept == config(seed=3)


def test_movielens_end_to_end(tmp_path: Path) -> None:
    """Matrix factorisation as an instance of FURL: the error falls below that of the mean rating."""
    from fedkeep.experiments.builtin import builtin_config

    rng = np.random.default_rng(0)
    taste, kind = rng.standard_normal((20, 1)), rng.standard_normal((15, 1))
    lines = [
        f"{u + 1}\t{i + 1}\t{int(np.clip(np.rint(3 + 1.5 * (taste[u] @ kind[i])), 1, 5))}\t{u * 100 + i}"
        for u in range(20)
        for i in range(15)
    ]
    (tmp_path / "ml-100k").mkdir()
    (tmp_path / "ml-100k" / "u.data").write_text("\n".join(lines) + "\n", encoding="utf-8")
    small = builtin_config("matrix-factorization", {"run.epochs": "20", "run.cohort": "10"})
    run = run_config(small, folder=tmp_path)
    ratings = np.concatenate([run.data.columns["label"][list(run.data.rows(c, "test"))] for c in range(20)])  # type: ignore[index]
    assert run.evaluate("test")["rmse"] < 0.8 * ratings.std()


# --- images


def pictures(folder: Path) -> Path:
    """Write 80 images of 10 classes, as the lossless part of CIFAR-10 lies in a folder of data."""
    (folder / "cifar10").mkdir()
    draw = np.random.default_rng(0)
    np.savez(
        folder / "cifar10" / "cifar10_train4000_lossless.npz",
        images=draw.integers(0, 256, (80, 32, 32, 3), dtype=np.uint8),
        labels=np.tile(np.arange(10, dtype=np.uint8), 8),
    )
    return folder


LOSSLESS = {"reader": "cifar10", "form": "lossless"}
MAJORITY = {"kind": "majority", "clients": 2, "p": 0.5, "train": 16, "valid": 8, "valid_from": "train"}


def test_images_are_partitioned_and_some_stay_out(tmp_path: Path) -> None:
    data = {**LOSSLESS, "partition": MAJORITY, "opt_out": {"fraction": 0.5}}
    settings = config(
        seed=3,
        data=data,
        model={"kind": "cifar_cnn"},
        method={"kind": "fedavg"},
        run={"rounds": 1, "cohort": 2},
    )
    made = build_data(settings, pictures(tmp_path))
    expected = majority(cifar10(tmp_path / "cifar10", "lossless"), 2, 0.5, 16, 8, valid_from="train", seed=3)
    assert made.fingerprint() == opt_out(expected, 0.5, seed=3).fingerprint()
    assert parse_config(settings.to_toml(), "again") == settings
    run = run_config(settings, folder=tmp_path, out=tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert kept["partition"] == made.meta["partition"]
    assert kept["opt_out"]["fraction"] == 0.5
    assert isinstance(run.evaluate("valid")["accuracy"], float)


def test_sizes_of_images() -> None:
    made = FederatedData(
        {"image": np.zeros((2, 3, 16, 16), np.uint8), "label": np.array([0, 2])}, [0, 2], ["a"]
    )
    assert sizes_of(made) == {"classes": 3, "channels": 3, "side": 16}
    model = build_model(config(model={"kind": "cnn", "widths": [2, 3], "hidden": [5, 4]}), made)
    assert model(torch.from_numpy(np.asarray(made.columns["image"]))).shape == (2, 3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            LOSSLESS,
            (
                "data.partition: missing. The reader 'cifar10' gives images that belong to no client; divide them by "
                "one of the kinds majority, dirichlet, shards, by_size."
            ),
        ),
        (
            {"reader": "toy", "partition": MAJORITY},
            (
                "data.partition: the reader 'toy' gives examples that belong to clients already. Leave the table out."
            ),
        ),
        (
            {**LOSSLESS, "partition": {"kind": "majorty"}},
            (
                "data.partition.kind: there is no partition 'majorty'; there are majority, dirichlet, shards, by_size. "
                "Did you mean 'majority'?"
            ),
        ),
        ({**LOSSLESS, "partition": {**MAJORITY, "p": "0.5"}}, "data.partition.p: wanted float; got '0.5'."),
        ({**LOSSLESS, "partition": {"kind": "shards"}}, "data.partition: missing clients."),
        (
            {"reader": "toy", "opt_out": {"fractoin": 0.5}},
            (
                "data.opt_out.fractoin: unknown key. Did you mean 'fraction'? Known here: fraction, by, seed."
            ),
        ),
    ],
)  # fmt: skip
def test_partitions_that_cannot_be_made(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        build_data(config(data=data), pictures(tmp_path))
    assert str(error.value) == message


def test_every_name_has_a_line_of_documentation() -> None:
    from fedkeep.cli.listing import about

    read = [reader.read for reader in READERS.values()]
    for thing in [*read, *MODELS.values(), *PARTITIONS.values(), *methods.METHODS.values()]:
        assert len(about(thing)) > 10


PICTURES = majority(
    ImageSet(np.zeros((80, 3, 32, 32), np.uint8), np.arange(80) % 4, 60, ["a", "b", "c", "d"]), 2, 0.5, 20, 8
)


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
            f"model.local_expert.kind: there is no model 'cnm'; there are {', '.join(MODELS)}. Did you mean 'cnn'?",
        ),
        (
            {"kind": "mixture_of_experts", "global_expert": {"kind": "cnn", "wdith": 3}},
            (
                "model.global_expert.wdith: unknown key. Did you mean 'widths'? Known here: classes, channels, side, "
                "widths, hidden, dropout."
            ),
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
            "model.network: wanted Module; got 3.",
        ),
    ],
)  # fmt: skip
def test_models_within_a_model_that_cannot_be_made(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_model(config(model=model), PICTURES)
    assert str(error.value) == message


def adapting(kind: str, table: dict[str, Any]) -> tuple[Phase, ...]:
    return build_method(MethodConfig(kind=kind, adapt=AdaptConfig.model_validate(table))).adapt.phases


def test_adaptation_of_several_phases() -> None:
    table = {"epochs": 7, "batch_size": 3, "clip_norm": 2.0, "optimizer": {"learning_rate": 0.5}}
    own, joint = adapting("mixture", table)
    usual = methods.mixture()
    for phase, before in zip((own, joint), usual.adapt.phases, strict=True):
        assert (phase.trains, phase.examples, phase.early_stopping) == (before.trains, "all", EarlyStopping())
        assert (phase.epochs, phase.batch_size, phase.clip_norm, phase.optimizer) == (7, 3, 2.0, sgd(0.5))
    stops = {**table, "early_stopping": {"every": 1, "patience": 3}}
    (tuned,) = adapting("fine_tuned", stops)
    assert tuned.early_stopping == EarlyStopping(every=1, patience=3)
    (fitted,) = adapting("fedprox", table)
    assert (fitted.trains, fitted.examples, fitted.early_stopping) == ("private", "all", None)


def test_augmented_images() -> None:
    table = {"augment": {"shift": 2, "mirror": False}, "smoothing": 0.1}
    loss = build_loss(LossConfig.model_validate(table))
    assert loss == Augmented(terms.cross_entropy(smoothing=0.1), 2, False)
    assert build_loss(LossConfig.model_validate({"augment": {}})) == Augmented(terms.cross_entropy())


def test_the_built_in_mixture_is_the_papers() -> None:
    made = builtin_config("mixture")
    method, usual = build_method(made.method), methods.mixture()
    assert (method.adapt, method.client) == (usual.adapt, usual.client)
    assert isinstance(build_model(made, PICTURES), models.MixtureOfExperts)
    assert (made.run.rounds, made.run.cohort) == (1500, 5)
