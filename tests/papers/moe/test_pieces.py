"""The mixture of experts' tables in pieces, and on other images than the paper's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.reproductions import Request, reproduce
from fedkeep_papers.kit.results import read_results
from fedkeep_papers.moe import cells, methods, sheet, tables
from fedkeep_papers.moe.scene import Adapting, Federation, Scene, changed
from fedkeep_papers.moe.sheet import TABLE2
from fedkeep_papers.moe.variants import AUTHORS, MIXTURE
from tests.papers.moe.images import drawn, write_cifar

SIZE = replace(sheet.SIZES["quick"], federation=Federation(1, 1), adapting=Adapting(1, 1, 1))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (tables, methods):
        monkeypatch.setattr(room, "Scene", lambda p: Scene(p=p, train=6, valid=4, test=4))
        monkeypatch.setattr(room, "TABLE2", {p: TABLE2[p] for p in (0.8, 1.0)})
    monkeypatch.setitem(sheet.SIZES, "quick", SIZE)
    monkeypatch.setitem(methods.ROUNDS, "quick", 1)
    monkeypatch.setattr(cells, "SHOWN", 1)


def request(images: Path, out: Path, *only: str, **changes: str) -> Request:
    dotted = {name.replace("_of_", "."): value for name, value in changes.items()}
    return Request(images, out, progress=False, only=only, changes=dotted)


def values(out: Path, name: str) -> dict[tuple[str, str], float | None]:
    return {(row.scene, row.method): row.value for row in read_results(out / f"{name}.json")}


@pytest.mark.slow
def test_a_table_is_run_in_pieces(tmp_path: Path) -> None:
    images, out = tmp_path / "images", tmp_path / "results"
    write_cifar(images / "cifar10")
    with pytest.raises(ConfigError, match=r"No run matches.*'cifar100-\*'.*p0\.8"):
        reproduce("moe-table2", request(images, out, "cifar100-*"))
    assert not (out / "moe").exists()
    reproduce("moe-table2", request(images, out, "*-p0.8-*-r1-*"))
    assert [p.name for p in (out / "moe").glob("*.json")] == ["cifar10-n5-N6-p0.8-q0-s0-r1-e1-a1x1x1.json"]
    found = values(out, "moe-table2-quick")
    first, second = (f"CIFAR-10, 5 × 6, p = {p}, clean protocol" for p in ("0.8", "1"))
    assert found[first, "Mixture"] is not None
    assert found[first, "Local"] is None  # a run of its own
    assert found[second, "Mixture"] is None
    reproduce("moe-table2", request(images, out, "*-local"))
    again = values(out, "moe-table2-quick")
    assert again[first, "Local"] is not None
    assert again[first, "Mixture"] == found[first, "Mixture"]
    reproduce("moe-methods", request(images, out, "*-fedper-r1-*"))
    own = values(out, "moe-methods-quick")
    assert own[first, "FedPer"] is not None
    assert own[first, "FedRep"] is None
    assert own[first, "Mixture"] == found[first, "Mixture"]


@pytest.mark.slow
def test_other_images_take_the_papers_place(tmp_path: Path) -> None:
    labels = np.arange(300) % 10
    np.savez(tmp_path / "signs.npz", images=drawn(labels, 1, 28, 0)[:, 0], kind=labels)
    out, place = (
        tmp_path / "results",
        {"data_of_reader": "npz_images", "data_of_path": "signs.npz", "data_of_label": "kind"},
    )
    drawn_from = {"data_of_partition_of_valid_from": "train", "data_of_partition_of_test_from": "train"}
    sizes = {"data_of_partition_of_train": "8"}
    path = reproduce("moe-table2", request(tmp_path, out, **place, **drawn_from, **sizes))
    found = values(out, "moe-table2-quick")
    assert {scene for scene, _ in found} == {
        f"signs.npz, 5 × 8, p = {p}, {protocol}"
        for p in ("0.8", "1")
        for protocol in ("paper's protocol", "clean protocol")
    }
    assert all(value is not None for value in found.values())
    assert all(row.published is None for row in read_results(path.with_suffix(".json")))
    text = path.read_text(encoding="utf-8")
    assert "JPEG" not in text
    assert "Published" not in text.replace("| published |", "")
    assert "Changed: `data.reader = npz_images`, `data.path = signs.npz`" in text
    name = next((out / "moe").glob("*-local.json")).name
    assert name.startswith("npz_images-")
    assert "-n5-N8-p" in name


@pytest.mark.parametrize(
    ("table", "changes", "key"),
    [
        ("moe-table2", {"data.partition.p": "0.5"}, "data.partition.p"),
        ("moe-figure3", {"data.opt_out": "{ fraction = 0.5 }"}, "data.opt_out"),
        ("moe-figure5", {"data.partition.train": "8"}, "data.partition.train"),
    ],
)
def test_what_rows_differ_by_is_not_set_for_all(
    table: str, changes: dict[str, str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "Scene", Scene)
    with pytest.raises(ConfigError, match=rf"^--set {key}: rows differ by.*--only"):
        reproduce(table, Request(tmp_path, tmp_path / "out", progress=False, changes=changes))
    assert not (tmp_path / "out").exists()


def test_the_best_mixture_is_chosen_where_all_ran_on_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (sheet.Way(v) for v in (MIXTURE, AUTHORS))
    scenes = [Scene(p=p) for p in (0.8, 1.0)]
    found = {(0.8, one): {0: 0.6}, (1.0, one): {0: 0.9}, (0.8, two): {}, (1.0, two): {0: 0.8}}
    monkeypatch.setattr(sheet.Sheet, "values", lambda _, scene, way, split: found[scene.p, way])
    own = sheet.sheet(Request(tmp_path, tmp_path, progress=False), scenes, [one, two])
    assert tables._best(own, scenes, [one, two]) is None  # the second has not run where all are lower
    found[0.8, two] = {0: 0.8}
    assert tables._best(own, scenes, [one, two]) == two
    found[0.8, two] = {1: 0.8}
    assert tables._best(own, scenes, [one, two]) is None


def test_a_changed_scene_is_another_cell() -> None:
    scene = Scene(p=0.6)
    assert changed(scene, {}) is scene
    assert "changes" not in scene.settings()
    other = changed(scene, {"data.reader": "npz_images", "data.path": "a.npz", "data.partition.clients": "4"})
    assert (other.dataset, other.clients, other.title, other.model) == ("npz_images", 4, "a.npz", "cnn")
    assert other.settings()["changes"]
    assert (
        other.base
        != changed(
            scene, {"data.reader": "npz_images", "data.path": "b.npz", "data.partition.clients": "4"}
        ).base
    )
    config = Federation().config(other)
    assert (config.data.reader, config.data.options["path"], config.run.cohort) == ("npz_images", "a.npz", 4)
    assert config.data.partition.options["p"] == 0.6
