"""FURL's Table 3: its scenes, their configurations, the published numbers, and what the scales change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedkeep.data import FederatedData
from fedkeep.experiments.build import build_data
from fedkeep.experiments.reproductions import Request
from fedkeep_papers.furl import jobs
from fedkeep_papers.furl.channels import ORDERS
from fedkeep_papers.furl.jobs import JobSpec
from fedkeep_papers.furl.own_counts import Order
from fedkeep_papers.kit.data import needs_data


@dataclass(frozen=True)
class Configuration:
    """A row of the table: its name, its built-in configuration, and the published number (a fraction) or None."""

    name: str
    config: str
    published: float | None = None

    def overrides(self, scene: Scene, scale: str) -> dict[str, str] | None:
        """Return the settings that a scene and a scale change; None: the scale leaves this row out."""
        if scale == "full":
            return dict(scene.always)
        if scale == "quick":
            return {**scene.always, **scene.quick}
        own = scene.shorter.get(self.name, {})
        return None if self.name in scene.left_out else {**scene.always, **scene.medium, **own}


@dataclass(frozen=True)
class Scene:
    """A data set of the table and its configurations.

    Attributes:
        name: for the results.
        stands_for: the paper's data set in whose place it is used.
        needs_data: reads real data.
        metric: the headline's name.
        rows: the configurations, in the paper's order.
        quick, medium: overrides of every configuration at these scales; the full scale has none.
        order: how each user's examples are divided: as the data come (``random``), or the last ones test (``time``).
        seeds: the seeds of the full scale; the others have one.
        shorter: further overrides by row at the medium scale.
        left_out: rows that the medium scale leaves out.
        cold_start: measure new users at the medium scale, which takes another run.
    """

    name: str
    stands_for: str
    needs_data: bool
    metric: str
    rows: tuple[Configuration, ...]
    quick: Mapping[str, str]
    medium: Mapping[str, str]
    order: Order = "random"
    seeds: tuple[int, ...] = (0, 1, 2)
    shorter: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    cold_start: bool = True

    @property
    def always(self) -> Mapping[str, str]:
        """Overrides of every configuration at every scale."""
        return {"data.split": BY_TIME} if self.order == "time" else {}


def _rows(folder: str, published: Sequence[float | None] = (None,) * 4) -> tuple[Configuration, ...]:
    gs, ps, gf, pf = published
    return (
        Configuration("Global Server", f"{folder}/global-server", gs),
        Configuration("Personalized Server", f"{folder}/personalized-server", ps),
        Configuration("Global FL, paper's recipe", f"{folder}/global-fl-paper", gf),
        Configuration("Personalized FL, paper's recipe", f"{folder}/personalized-fl-paper", pf),
        Configuration("Global FL, best recipe", f"{folder}/global-fl", gf),
        Configuration("Personalized FL, best recipe", f"{folder}/personalized-fl", pf),
    )


def _by_time(scene: Scene) -> Scene:
    """Return a scene whose users' last messages test; one seed, without the paper's numbers."""
    return replace(
        scene,
        name=f"{scene.name}, {ORDERS['time']}",
        stands_for=f"{scene.stands_for}{LATER}",
        rows=tuple(replace(row, published=None) for row in scene.rows),
        order="time",
        seeds=(0,),
    )


LATER = "-by-time"
BY_TIME = '{ fractions = [0.8, 0.1, 0.1], order = "chronological" }'
EIGHTY = {"data.limit_users": "80", "data.seed": "0"}
"""Users of the zulip scenes at the quick scale: the same whatever a run's seed, and those of the untrained rows."""
MESSAGES = (
    Scene(
        "zulip_channels",
        "Subreddit",
        True,
        "accuracy",
        _rows("furl", (0.2893, 0.6613, 0.1190, 0.6241)),
        {"run.epochs": "3", **EIGHTY, "data.max_length": "64"},
        {"run.epochs": "12", "data.max_length": "80"},
        shorter={
            name: {"run.epochs": "6"}
            for name in ("Global Server", "Global FL, paper's recipe", "Personalized FL, paper's recipe")
        },
        left_out=("Global FL, best recipe",),
        cold_start=False,
    ),
    Scene(
        "zulip_channels, bag of words",
        "Subreddit-words",
        True,
        "accuracy",
        _rows("furl-words"),
        {"run.epochs": "4", **EIGHTY},
        {"run.epochs": "15"},
        shorter={
            name: {"run.epochs": "8"}
            for name in ("Global FL, paper's recipe", "Personalized FL, paper's recipe")
        },
    ),
)
CLICKS = Scene(
    "sticker-like (generated)",
    "Sticker",
    False,
    "auc",
    _rows("furl-sticker", (0.5775, 0.6560, 0.5724, 0.6563)),
    {"run.epochs": "6", "data.users": "150"},
    {"run.epochs": "20"},
)
SWEPT = (*MESSAGES, CLICKS)
SCENES = (*MESSAGES, *map(_by_time, MESSAGES), CLICKS)


def read(scene: Scene, request: Request) -> FederatedData:
    """Return the scene's data, as its first run reads or generates them.

    Raises:
        DataError: the folder of data is not named, or a file is damaged.
    """
    if scene.needs_data and request.data is None:
        raise needs_data(f"The scene {scene.name}")
    first = next(iter(specs_of(scene, request, Path(), {}).values()))
    return build_data(first.resolved(), first.data)


def specs_of(
    scene: Scene, request: Request, runs: Path, source: Mapping[str, Any]
) -> dict[tuple[str, int], JobSpec]:
    """Return the scene's runs by row and seed, given the sha256 of its files of data."""
    seeds = (
        tuple(request.seeds)
        if request.seeds is not None
        else scene.seeds
        if request.scale == "full"
        else (0,)
    )
    return {
        (row.name, seed): JobSpec(
            row.config,
            (*changed.items(), ("seed", str(seed)), ("name", f'"{row.name}"')),
            runs,
            jobs.folder_name(scene.stands_for.lower(), row.config.split("/")[1], str(seed)),
            request.data,
            source,
        )
        for seed in seeds
        for row in scene.rows
        if (changed := row.overrides(scene, request.scale)) is not None
    }


def held_out_of(spec: JobSpec) -> JobSpec:
    """Return the run of a configuration in which a tenth of the users is held out of federation."""
    changed = (("run.hold_out", "0.1"), ("name", '"Personalized FL, a tenth of users held out"'))
    return replace(spec, overrides=(*spec.overrides, *changed), name=f"{spec.name}-held-out")


def result_name(name: str, scale: str) -> str:
    """Return the results' name: a shorter run doesn't replace a longer one's."""
    return name if scale == "full" else f"{name}-{scale}"


def changes_of(scene: Scene, scale: str) -> str:
    """Say in words what a scale changes in a scene's configurations."""
    common = dict(scene.always)
    if scale != "full":
        common |= scene.quick if scale == "quick" else scene.medium
    if not common:
        return "nothing."
    said = ", ".join(f"`{key} = {value}`" for key, value in common.items())
    if scale == "medium":
        for name, own in scene.shorter.items():
            said += f"; {name} " + ", ".join(f"`{key} = {value}`" for key, value in own.items())
        said += "".join(f"; {name} was not run" for name in scene.left_out)
    return f"{said}."
