"""What a result of the mixture of experts depends on: the clients' data, FedAvg's settings, adaptation's settings.

Source: arXiv:2010.02056, Table 1 and experiments. Every draw follows from the seed; validation images decide when
training stops and are what the paper reports ("paper"), test images are disjoint from them ("clean").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedkeep.core.errors import ConfigError, check_choice
from fedkeep.data import FederatedData, ImageSet, opt_out
from fedkeep.experiments.build import build_data, read_source
from fedkeep.experiments.config import Config, parse_config
from fedkeep_papers.kit.cells import digest

MODELS = {"cifar10": "cifar_cnn", "cifar100": "cifar_cnn", "fashion_mnist": "fashion_cnn"}
By = Literal["client", "example", "class"]
MAJORITY = 2  # classes of a client
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion_mnist": "Fashion-MNIST"}


@dataclass(frozen=True)
class Scene:
    """A data set divided among clients by majority classes.

    Attributes:
        dataset: ``cifar10``, ``cifar100`` or ``fashion_mnist``, or another reader of images, with ``changes``.
        p: fraction of a client's images that its two majority classes have, in (0, 1].
        q: fraction that opts out, in [0, 1), of what ``by`` names; truncated.
        seed: of all draws.
        clients: their number.
        train, valid, test: images a client; CIFAR-100's validation images come from the official training images.
        changes: of the configuration, by which other images take the data set's place; see ``changed``.
        by: "client": q of the clients opt out; "example": every client opts out of q of its images, drawn at random;
            "class": every client opts out of q of its two majority classes, the first ones.
    """

    dataset: str = "cifar10"
    p: float = 0.8
    q: float = 0.0
    seed: int = 0
    clients: int = 5
    train: int = 500
    valid: int = 400
    test: int = 1000
    changes: tuple[tuple[str, str], ...] = ()
    by: By = "client"

    def __post_init__(self) -> None:
        check_choice("A scene's clients opt out by", self.by, ("client", "example", "class"))
        if self.dataset not in MODELS and not self.changes:
            raise ConfigError(
                "The scenes' data sets are {models}; got {dataset!r}.",
                models=list(MODELS),
                dataset=self.dataset,
            )

    @property
    def slug(self) -> str:
        """The scene's part of a file's name."""
        return f"{self.base}-q{self.q:g}{'' if self.by == 'client' else f'-{self.by}'}-s{self.seed}"

    @property
    def base(self) -> str:
        """The same, of what doesn't depend on who opts out, without the seed."""
        other = f"-{digest(dict(self.changes), {})}" if self.changes else ""
        return f"{self.dataset}{other}-n{self.clients}-N{self.train}-p{self.p:g}"

    @property
    def title(self) -> str:
        """The data set's name in tables; of other images, where they are."""
        given = dict(self.changes)
        return given.get("data.path") or given.get("data.folder") or NAMES.get(self.dataset, self.dataset)

    @property
    def model(self) -> str:
        """The network's name: the paper's, or of other images one of their size."""
        return MODELS.get(self.dataset, "cnn")

    def settings(self) -> dict[str, Any]:
        """Return what results depend on, as plain data; changes, and "client" as who opts out, are left out."""
        own, usual = asdict(self), {"changes": (), "by": "client"}
        return {name: value for name, value in own.items() if name not in usual or value != usual[name]}

    def tables(self) -> dict[str, Any]:
        """Return the configuration's table ``data``."""
        partition = {
            "kind": "majority",
            "clients": self.clients,
            "p": float(self.p),
            "train": self.train,
            "valid": self.valid,
            "test": self.test,
        }
        if self.dataset == "cifar100":
            partition["valid_from"] = "train"
        data: dict[str, Any] = {"reader": self.dataset, "partition": partition}
        if not self.q or self.by == "class":
            return data
        by = {} if self.by == "client" else {"by": self.by}
        return {**data, "opt_out": {"fraction": float(self.q), **by}}

    @property
    def hidden(self) -> int:
        """How many of its majority classes every client opts out of."""
        return int(self.q * MAJORITY + 1e-9) if self.by == "class" else 0

    @property
    def opted_out(self) -> str:
        """Who opts out, for tables; empty: nobody."""
        ways = {
            "client": f"q = {self.q:g}",
            "example": f"{self.q:g} of each client's images out",
            "class": f"{self.hidden} of each client's {MAJORITY} majority classes out",
        }
        return ways[self.by] if self.q else ""


@dataclass(frozen=True)
class Federation:
    """How the global expert is trained; the defaults are the paper's.

    Attributes:
        rounds: of FedAvg.
        epochs, batch_size, learning_rate: local training, by Adam.
        fraction: of all clients that a round draws, among those who opted in.
        mu: FedProx's pull; 0: FedAvg.
        server_momentum: of the server's optimiser, with rate 1 − momentum so that steps keep their length.
        augment: training images are shifted and mirrored at random.
    """

    rounds: int = 1500
    epochs: int = 3
    batch_size: int = 10
    learning_rate: float = 1e-4
    fraction: float = 1.0
    mu: float = 0.0
    server_momentum: float = 0.0
    augment: bool = False

    @property
    def slug(self) -> str:
        """The settings' part of a file's name; what is the paper's is left out."""
        parts = [f"r{self.rounds}"]
        for name, letter in (
            ("epochs", "e"),
            ("batch_size", "b"),
            ("learning_rate", "lr"),
            ("fraction", "f"),
            ("mu", "mu"),
            ("server_momentum", "sm"),
        ):
            if getattr(self, name) != getattr(Federation, name):
                parts.append(f"{letter}{getattr(self, name):g}")
        return "-".join([*parts, *(["aug"] if self.augment else [])])

    def config(self, scene: Scene) -> Config:
        """Return the configuration of the federated run."""
        method: dict[str, Any] = {
            "kind": "fedprox" if self.mu else "fedavg",
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "optimizer": {"kind": "adam", "learning_rate": self.learning_rate},
        }
        if self.mu:
            method["mu"] = float(self.mu)
        if self.augment:
            method["loss"] = {"augment": {}}
        if self.server_momentum:
            method["server_optimizer"] = {
                "learning_rate": 1 - self.server_momentum,
                "momentum": self.server_momentum,
            }
        run = {
            "rounds": self.rounds,
            "cohort": max(1, round(self.fraction * scene.clients)),
            "sampling": "independent",
            "evaluate_every": max(1, self.rounds // 20),
        }
        config = Config.model_validate(
            {
                "name": "FedProx" if self.mu else "FedAvg",
                "seed": scene.seed,
                "data": scene.tables(),
                "model": {"kind": scene.model},
                "method": method,
                "run": run,
            }
        )
        return parse_config(config.to_toml(), "The scene", dict(scene.changes)) if scene.changes else config


@dataclass(frozen=True)
class Adapting:
    """How clients train on their devices: local training, fine-tuning, mixture; the defaults are the paper's.

    Attributes:
        epochs: passes at most.
        every, patience: early stopping by the validation loss.
        batch_size, learning_rate: by Adam.
    """

    epochs: int = 200
    every: int = 5
    patience: int = 10
    batch_size: int = 10
    learning_rate: float = 1e-4

    @property
    def slug(self) -> str:
        """The settings' part of a file's name; empty for the paper's."""
        return "" if self == Adapting() else f"-a{self.epochs}x{self.every}x{self.patience}"


def changed(scene: Scene, changes: Mapping[str, str]) -> Scene:
    """Return a scene with other data, e.g. ``{"data.reader": "npz_images", "data.path": "mine.npz"}``.

    Args:
        scene: the scene.
        changes: dotted keys of the table ``data`` and TOML values.

    Raises:
        ConfigError: they give no configuration, or change what rows differ by: p, or who opts out.
    """
    if not changes:
        return scene
    given = replace(scene, changes=tuple(changes.items()))
    data, usual = Federation().config(given).data, Federation().config(scene).data
    sizes = {} if data.partition is None else data.partition.options
    for key, alike in (
        ("data.partition.p", sizes.get("p", scene.p) == scene.p),
        ("data.opt_out", data.opt_out == usual.opt_out),
    ):
        if not alike:
            raise varied(key)
    kept = {name: sizes[name] for name in ("clients", "train", "valid", "test") if name in sizes}
    return replace(given, dataset=data.reader, **kept)


def varied(key: str) -> ConfigError:
    """Return what is said of a setting that is not the same for all rows."""
    return ConfigError(
        "--set {key}: rows differ by it, so it can't be one value for all. Leave it out; --only chooses among rows.",
        key=key,
    )


def clients_of(scene: Scene, config: Config, folder: Path | None) -> FederatedData:
    """Return a scene's data, given the configuration of its federation; majority classes opt out here."""
    data = build_data(config, folder)
    if not scene.hidden:
        return data
    classes = np.asarray(data.meta["partition"]["classes"])[:, : scene.hidden]  # (clients, hidden)
    own = classes[data.clients_of(np.arange(data.examples))]

    def is_hidden(columns: Mapping[str, Any]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (columns["label"][:, None] == own).any(axis=1)
        return found

    return opt_out(data, where=is_hidden)


def source_of(scene: Scene, data: Path | None) -> Mapping[str, str]:
    """Return the sha256 of the files of a scene's images, by their names."""
    return _source(scene.dataset, scene.changes, data)


@cache
def _source(dataset: str, changes: tuple[tuple[str, str], ...], data: Path | None) -> Mapping[str, str]:
    config = Federation().config(Scene(dataset, changes=changes))
    images = read_source(config.data, config.seed, data)
    assert isinstance(images, ImageSet)
    return images.source
