"""The data sets of ``natural-users``, the methods, the configuration of each run, and what others found on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep.experiments.build import build_data
from fedkeep.experiments.config import Config, parse_toml
from fedkeep.experiments.config_tables import made_of
from fedkeep.experiments.plugins import builtin_text

SHARED = ("batch_size", "clip_norm", "epochs", "loss", "optimizer", "server_optimizer")
"""Of the method's table, what all methods of a data set have in common."""
COUNTING = "Counting"


@dataclass(frozen=True)
class Scene:
    """A data set.

    Attributes:
        name: of its configuration ``natural/NAME``, which is FURL's.
        title: for people.
        metrics: what the table shows, the headline first.
        private: name patterns of what FURL keeps.
        head: of what FedPer and FedRep keep.
        published: others' numbers of the headline, by method.
    """

    name: str
    title: str
    metrics: tuple[str, ...]
    private: tuple[str, ...] = ("user", "user_bias")
    head: tuple[str, ...] = ("user", "user_bias")
    published: Mapping[str, float] = field(default_factory=dict)


LME4 = 1.207607
"""RMSE on InstEval's test examples of the mixed model ``y ~ 1 + (1 | s) + (1 | d)``, fitted to its training examples by
REML (lme4 1.1-31, R 4.2.2), on the split that the configuration ``natural/insteval`` makes. In R, of a table with the columns s,
d, y and split: ``m <- lmer(y ~ 1 + (1 | s) + (1 | d), x[x$split == "train", ])``, then
``sqrt(mean((predict(m, test, allow.new.levels = TRUE) - test$y)^2))``."""
SCENES = (
    Scene("movielens", "MovieLens-100K, ratings", ("rmse", "mae")),
    Scene("insteval", "InstEval, ratings", ("rmse", "mae"), published={"FURL": LME4}),
    Scene("movielens-ranking", "MovieLens-100K, the last film among 100", ("hr10", "ndcg10")),
    Scene(
        "shakespeare",
        "Shakespeare, the next character",
        ("accuracy", "perplexity"),
        head=("head.*", "user_bias"),
    ),
)
METHODS = ("FedAvg", "Local", "FURL", "FedRep", "FedPer", "Ditto", "FedAvg + fine-tuning")
"""As the table names them; counting, which trains nothing, stands beside them."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Cell:
    """One run: a method on a data set, with a seed."""

    scene: Scene
    method: str
    seed: int
    scale: str

    @property
    def name(self) -> str:
        """The run's name, for ``--only``, and the begin of the names of its folder and its file."""
        method = self.method.lower().replace(" + ", "-")
        return f"{self.scene.name}-{method}-{self.seed}"

    def config(self) -> Config:
        """Return the run's configuration: the data set's, with the method's own settings."""
        where = f"natural/{self.scene.name}"
        content = parse_toml(builtin_text(where), where)
        given = content["method"]
        own, run = self._own()
        content["method"] = {name: given[name] for name in SHARED if name in given} | own
        if self.method == "Local":
            content["method"].pop("server_optimizer", None)
        if self.method == "FURL":
            content["method"] = given
        content["run"] = content["run"] | {"evaluate_shared": self.method in ("FURL", "Ditto")} | run
        if self.scale == "quick":  # a try
            content["run"] |= {"rounds": 4, "evaluate_every": 2}
            content["run"].pop("epochs", None)
        found: Config = made_of(Config, {**content, "name": self.method, "seed": self.seed}, where)
        return found

    def _own(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is the method's own in the tables ``method`` and ``run``."""
        head = list(self.scene.head)
        table: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "FedAvg": ({"kind": "fedavg"}, {}),
            "Local": ({"kind": "local"}, {}),
            "FURL": ({"kind": "furl"}, {}),
            "FedRep": ({"kind": "fedrep", "private": head, "head_epochs": 2, "weighting": "examples"}, {}),
            "FedPer": ({"kind": "fedper", "private": head}, {}),
            "Ditto": ({"kind": "ditto", "lam": 0.1}, {}),
            "FedAvg + fine-tuning": ({"kind": "fine_tuned", "tune_epochs": 3}, {"evaluate_adapted": True}),
        }
        return table[self.method]


def source_of(scene: Scene, folder: Path | None) -> Mapping[str, str]:
    """Return the sha256 of the files that a data set is read from.

    Raises:
        DataError: its package is not installed; says the command.
    """
    return dict(build_data(Cell(scene, "FURL", 0, "full").config(), folder).meta["source"])
