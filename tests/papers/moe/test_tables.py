"""The mixture of experts' table and figures on tiny generated images: whole, shared, and beside the published numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, DataError, RunError
from fedkeep.data import ImageSet, majority
from fedkeep.experiments.reproductions import Request, reproduce, reproductions
from fedkeep.report.blocks import Figure
from fedkeep.report.charts import Grid
from fedkeep_papers.kit import plots
from fedkeep_papers.moe import cells as moe_cells
from fedkeep_papers.moe import methods as moe_methods
from fedkeep_papers.moe import scene as moe_scene
from fedkeep_papers.moe import sheet as moe_sheet
from fedkeep_papers.moe import tables as moe
from fedkeep_papers.moe.cells import Work
from fedkeep_papers.moe.scene import Adapting, Federation, Scene
from fedkeep_papers.moe.sheet import FIGURE2, FIGURE2_P, TABLE2
from fedkeep_papers.moe.variants import (
    AUGMENTED,
    AUTHORS,
    FEDAVG,
    FROM_TUNED,
    LOCAL,
    MIXTURE,
    OTHERS,
    PAPER,
    TUNED,
)
from tests.papers.moe.images import drawn, write_cifar, write_fashion
from tests.refusals import raises

TINY = replace(
    moe_sheet.SIZES["quick"],
    federation=Federation(1, 1),
    adapting=Adapting(1, 1, 1),
    p=(0.6,),
    train=(4, 6),
    p5=(0.6,),
    small=Federation(1, 1),
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def scene(dataset: str = "cifar10", p: float = 0.8, q: float = 0.0, **rest: Any) -> Scene:
        clients = min(rest.get("clients", 5), 10)
        return moe_scene.Scene(
            dataset, p, q, clients=clients, train=min(rest.get("train", 500), 6), valid=4, test=4
        )

    monkeypatch.setattr(moe, "Scene", scene)
    monkeypatch.setitem(moe_sheet.SIZES, "quick", TINY)
    monkeypatch.setattr(moe_cells, "SHOWN", 1)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let figures be empty files: drawing them takes longer than all the rest, and has its own tests."""

    def undrawn(figure: Figure, folder: Path, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").touch()
        return folder / f"{name}.png"

    monkeypatch.setattr(plots, "write", undrawn)


def request(images: Path, out: Path, **changes: Any) -> Request:
    return Request(data=images, out=out, progress=False, **changes)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def test_table2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, titles, write = tmp_path / "images", [], plots.write

    def titled(figure: Figure, folder: Path, name: str) -> Path:
        titles.extend(chart.heading for chart in figure.panels if isinstance(chart, Grid))
        return write(figure, folder, name)

    monkeypatch.setattr(plots, "write", titled)
    monkeypatch.setattr(moe, "TABLE2", {p: TABLE2[p] for p in (0.8, 1.0)})
    write_cifar(images / "cifar10")
    path = reproduce("moe-table2", request(images, tmp_path / "results", seeds=[0, 1]))
    assert path == tmp_path / "results" / "moe-table2-quick.md"
    rows = rows_of(path)
    variants = [v.name for v in (*PAPER, AUTHORS)]
    assert len(rows) == 2 * 2 * len(variants)  # protocols × p × ways
    assert [r["method"] for r in rows[: len(variants)]] == variants
    assert all(r["seeds"] == [0, 1] and r["std"] is not None for r in rows)
    first = {r["method"]: r["published"] for r in rows if r["scene"].endswith("p = 0.8, paper's protocol")}
    assert {n: v for n, v in first.items() if v is not None} == {n: m for n, (m, _) in TABLE2[0.8].items()}
    assert all(r["published"] is None for r in rows if "clean" in r["scene"])
    text = path.read_text(encoding="utf-8")
    for word in (
        "Mixture 67.17 ± 1.96",
        "JPEG re-encoding",
        "1 rounds of 1 local epochs",
        "difference in points, paired by seed",
        "moe-table2-quick/p0.8.png",
        "partition-p1-q0.png",
        "Mixture − Fine-tuned",
    ):
        assert word in text
    for figure in ("p0.8", "p1", "partition-p0.8-q0", "partition-p1-q0"):
        assert (tmp_path / "results" / "moe-table2-quick" / f"{figure}.png").stat().st_size > 5_000
    assert titles == [f"CIFAR-10, training images, p = {p}, seed 0" for p in ("0.8", "1")]
    files = sorted(p.name for p in (tmp_path / "results" / "moe").glob("*.json"))
    assert len(files) == 2 * 2 * 2  # seeds × p × (local, the rest)
    assert files[0] == "cifar10-n5-N6-p0.8-q0-s0-r1-e1-a1x1x1.json"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_figures_3_and_5_share_cells_and_nothing_is_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, out = tmp_path / "images", tmp_path / "results"
    write_cifar(images / "cifar10")
    write_fashion(images / "fashion_mnist")
    path = reproduce("moe-figure3", request(images, out))
    rows = rows_of(path)
    assert len(rows) == 2 * 3 * 5  # protocols × q × ways
    assert {r["method"] for r in rows} == {v.name for v in (*PAPER, AUTHORS)}
    local: dict[str, set[float]] = {}
    for r in rows:
        if r["method"] == "Local" and "clean" in r["scene"]:
            local.setdefault(r["scene"].split("p = ")[1][:3], set()).add(r["value"])
    assert [len(values) for values in local.values()] == [1]  # the same, whoever opts out
    assert {p.stem for p in (out / "moe-figure3-quick").iterdir()} == {
        "paper",
        "clean",
        "partition-p0.6-q0",
        "partition-p0.6-q0.9",
    }
    computed: list[str] = []
    real = Work.compute
    monkeypatch.setattr(
        Work, "compute", lambda self, v: (computed.append(self.cell.scene.slug), real(self, v))[1]
    )
    reproduce("moe-figure3", request(images, out))
    assert computed == []
    path = reproduce("moe-figure5", request(images, out))
    assert "cifar10-n5-N6-p0.6-q0-s0" not in computed  # figure 3's
    assert {"cifar10-n5-N4-p0.6-q0-s0", "fashion_mnist-n5-N6-p0.6-q0-s0"} <= set(computed)
    assert "here p is 0.6 and the size 4, 6" in path.read_text(encoding="utf-8")
    assert {p.stem for p in (out / "moe-figure5-quick").iterdir()} == {"paper", "clean"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Classes that are in the test split alone:UserWarning")
@pytest.mark.usefixtures("undrawn")
def test_figure_2_beside_the_authors_plot(tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_cifar(images / "cifar100", classes=100, train=500, test=200)
    rows = rows_of(reproduce("moe-figure2", request(images, tmp_path / "results")))
    assert len(rows) == 2 * 2 * 5  # protocols × fractions × ways
    known = {(r["scene"], r["method"]): r["published"] for r in rows if r["published"] is not None}
    assert len(known) == 5  # every client in each round, the paper's protocol
    assert all("fraction of clients 1" in scene and "paper" in scene for scene, _ in known)
    place = FIGURE2_P.index(0.6)
    (mixture,) = [v for (scene, method), v in known.items() if method == "Mixture" and "p = 0.6" in scene]
    (of_logs,) = [v for (_, method), v in known.items() if "log-probabilities" in method]
    assert mixture == of_logs == FIGURE2["Mixture"][place] == 0.45
    files = sorted(p.name for p in (tmp_path / "results" / "moe").glob("*.json"))
    assert [f for f in files if "f0.1" in f] == ["cifar100-n10-N6-p0.6-q0-s0-r1-e1-f0.1-a1x1x1.json"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Classes that are in the test split alone:UserWarning")
@pytest.mark.usefixtures("undrawn")
def test_figure_2_of_the_official_test_images_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"data.partition.valid": "3", "data.partition.test": "2"}
    monkeypatch.setattr(moe, "TEST_IMAGES_ALONE", {**moe.TEST_IMAGES_ALONE, **few})
    images, labels = tmp_path / "images" / "cifar100", np.arange(500) % 100
    images.mkdir(parents=True)
    pixels = drawn(labels, 3, 32, 0).transpose(0, 2, 3, 1)
    names = [f"class {c}" for c in range(100)]
    np.savez(images / "cifar100_test.npz", images=pixels, fine_label=labels, fine_names=names)
    path = reproduce("moe-figure2", request(images.parent, tmp_path / "results"))
    rows = rows_of(path)
    assert len(rows) == 2 * 2 * 5
    assert all(row["value"] is not None for row in rows)
    text = " ".join(path.read_text(encoding="utf-8").split())
    assert "Of CIFAR-100 the official test images alone are at hand" in text
    assert "drawn from these, none twice: 6 to train, 3 to validate and 2 to test." in text
    assert "3 validation images" in text
    assert "Test images are 2 a client." in text


def test_fifty_clients_share_the_official_test_images() -> None:
    """9,999 images, one class with 99: the sizes fit at every p, and each client has its own."""
    labels = np.delete(np.arange(10_000) % 100, 0)
    images = ImageSet(np.zeros((9_999, 1, 1, 1), np.uint8), labels, 9_999, [f"class {c}" for c in range(100)])
    sizes = {key.rpartition(".")[2]: value.strip('"') for key, value in moe.TEST_IMAGES_ALONE.items()}
    assert sizes == {"valid": "40", "test": "50", "test_from": "train"}
    for p in FIGURE2_P:
        data = majority(images, 50, p, 100, 40, test=50, valid_from="train", test_from="train")
        assert [set(data.counts(split)) for split in ("train", "valid", "test")] == [{100}, {40}, {50}]
        assert len(set(np.asarray(data.columns["_image"]).tolist())) == 50 * 190


@pytest.mark.usefixtures("undrawn")
def test_figure_4_is_fashion(tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_fashion(images / "fashion_mnist")
    path = reproduce("moe-figure4", request(images, tmp_path / "results"))
    rows = rows_of(path)
    assert len(rows) == 2 * 2 * 5
    assert all(r["scene"].startswith("Fashion-MNIST, 5 × 6") for r in rows)
    assert {r["scene"].split(", p = ")[1] for r in rows if r["method"] == LOCAL.name} == {
        f"{p}{q}, {protocol}"
        for p in ("0.6",)
        for q in ("", ", q = 0.9")
        for protocol in ("paper's protocol", "clean protocol")
    }
    text = path.read_text(encoding="utf-8")
    assert "JPEG" not in text
    assert "The paper: 1,500 rounds; 200 epochs, measured every 5, 10 without improvement. This scale" in text
    assert text.count("Mixture − Fine-tuned") == text.count("Mixture − Local") == 2 * 2  # protocols × q
    assert text.count("| q = 0.9 | Fine-tuned |") == text.count("| q = 0.9 | Mixture |") == 2
    assert text.index("Opt-out factor q = 0:\n") < text.index("Opt-out factor q = 0.9:\n")


def test_differences_by_hand() -> None:
    found = {
        ("Fine-tuned", 0.0): {0: 0.5, 1: 0.75},
        ("Fine-tuned", 0.9): {0: 0.25, 1: 0.625},
        ("Mixture", 0.0): {0: 0.625},
        ("Mixture", 0.9): {0: 0.5, 1: 0.25},
    }
    own: Any = SimpleNamespace(
        values=lambda scene, way, split: found[way.name, scene.q] if split == "test" else {}
    )
    scenes = {q: [moe_scene.Scene(p=0.6, q=q)] for q in (0.0, 0.9)}
    tuned, mixed = moe_sheet.Way(TUNED), moe_sheet.Way(MIXTURE)
    falls = moe_sheet.falls(own, scenes, [tuned, mixed]).splitlines()
    assert "change in points from q = 0" in falls[0]
    assert falls[2:] == [
        "| paper's protocol | q = 0.9 | Fine-tuned | – |",
        "| paper's protocol | q = 0.9 | Mixture | – |",
        "| clean protocol | q = 0.9 | Fine-tuned | −18.75 ± 8.84 |",  # −25 and −12.5
        "| clean protocol | q = 0.9 | Mixture | −12.50 |",  # of the one seed that both have
    ]
    gaps = moe_sheet.paired(own, scenes[0.9], [(mixed, tuned)]).splitlines()
    assert gaps[2:] == [
        "| paper's protocol | Mixture − Fine-tuned | – |",
        "| clean protocol | Mixture − Fine-tuned | −6.25 ± 44.19 |",  # 25 and −37.5
    ]


@pytest.mark.slow
def test_methods_on_the_same_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_methods, "Scene", moe.Scene)
    monkeypatch.setattr(moe_methods, "TABLE2", {0.8: TABLE2[0.8]})
    monkeypatch.setitem(moe_methods.ROUNDS, "quick", 2)
    images, out = tmp_path / "images", tmp_path / "results"
    write_cifar(images / "cifar10")
    path = reproduce("moe-methods", request(images, out))
    rows = rows_of(path)
    names = [v.name for v in PAPER] + list(moe_methods.METHODS)
    assert [r["method"] for r in rows] == names * 2
    assert all(r["value"] is not None for r in rows)
    text = path.read_text(encoding="utf-8")
    assert "- FedPer: a private last layer" in text
    assert "train 2 rounds of their own" in text
    monkeypatch.setattr(moe_methods.MethodJob, "run", lambda *_: pytest.fail("computed twice"))
    before = rows
    assert rows_of(reproduce("moe-methods", request(images, out))) == before
    lines = text.splitlines()
    (clean,) = [r["value"] for r in rows if r["method"] == "FedPer" and "clean" in r["scene"]]
    assert f"| FedPer | {100 * clean:.1f} | {100 * clean:.1f} |" in lines  # one p: its mean too
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][
        1 : 1 + len(names)
    ] == names
    cell = moe_methods.MethodCell("FedPer", moe.Scene("cifar10", 0.8), 2, 1)
    source = moe_scene.source_of(moe_scene.Scene(), images)
    file = json.loads(cell.file(out / "moe").read_text(encoding="utf-8"))
    best = max(file["curve"], key=lambda point: (point[1], -point[0]))
    assert [file["round"], file["valid"], file["test"]] == best
    assert file["curve"][-1][1:] == [file["last_valid"], file["last_test"]]
    assert clean == file["test"]
    assert replace(cell, learning_rate=1e-3).slot(out / "moe", source).read() is None
    cell.file(out / "moe").write_text(json.dumps({**file, "commit": "of then"}), encoding="utf-8")
    again = rows_of(reproduce("moe-methods", request(images, out)))
    assert {r["commit"] for r in again if r["method"] == "FedPer"} == {"of then"}
    cell.file(out / "moe").write_text("{}", encoding="utf-8")
    with pytest.raises(
        RunError,
        match=r"fedper-r2-e1\.json holds no.*{\}",
    ):
        cell.slot(out / "moe", source).read()


def test_the_full_scale_is_the_papers() -> None:
    full = moe_sheet.SIZES["full"]
    assert (full.federation, full.adapting) == (Federation(1500, 3, 10, 1e-4), Adapting(200, 5, 10, 10, 1e-4))
    assert full.seeds == (0, 1, 2, 3)
    assert full.p == FIGURE2_P
    assert moe_sheet.result_name("moe-table2", "full") == "moe-table2"
    assert moe_sheet.result_name("moe-table2", "medium") == "moe-table2-medium"


def test_real_images_are_needed(tmp_path: Path) -> None:
    names = [n for n in reproductions() if n.startswith("moe-")]
    assert {
        "moe-table2",
        "moe-methods",
        "moe-figure2",
        "moe-figure3",
        "moe-figure4",
        "moe-figure5",
        "moe-figure6",
    } <= set(names)
    for name in names:
        with raises(DataError, said="The mixture of experts' scenes read real"):
            reproduce(name, Request(None, tmp_path))
    (tmp_path / "cifar10").mkdir()
    with pytest.raises(DataError, match=r"cifar10 has none of the files \*train\*.parquet"):
        reproduce("moe-table2", request(tmp_path, tmp_path / "results"))


def test_what_cannot_be_divided_says_what_is_missing(tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_fashion(images / "fashion_mnist", train=60, test=60)
    cell = moe_cells.Cell(
        Scene("fashion_mnist", 1.0, clients=6, train=4, valid=4, test=4), Federation(1), Adapting(1)
    )
    with pytest.raises(
        DataError,
        match="6 clients with 2 majority.*12.*2",
    ):
        Work(cell, images, tmp_path / "r", tmp_path / "s").data()
    cell = replace(cell, scene=replace(cell.scene, clients=5, train=14))
    with pytest.raises(DataError, match="5 clients with 14 official.*70.*10"):
        Work(cell, images, tmp_path / "r", tmp_path / "s").data()
    cell = replace(cell, scene=replace(cell.scene, train=4, q=1.0))
    with pytest.raises(DataError, match="nobody would be left to train the federated part"):
        Work(cell, images, tmp_path / "r", tmp_path / "s").data()
    cell = replace(cell, scene=replace(cell.scene, q=0.0, p=1.5))
    with pytest.raises(DataError, match=r"fraction p of majority classes in \(0, 1\]; got 1.5"):
        Work(cell, images, tmp_path / "r", tmp_path / "s").data()
    with pytest.raises(ConfigError):
        reproduce("moe-tabel2", request(images, tmp_path))


@pytest.mark.slow
def test_variants_and_other_federations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "TABLE2", {0.8: TABLE2[0.8]})
    more = replace(
        TINY,
        variants=(FROM_TUNED, AUGMENTED[1]),
        federations=(({"augment": True}, "augmented", (FEDAVG, AUGMENTED[2])),),
    )
    monkeypatch.setitem(moe_sheet.SIZES, "quick", more)
    images = tmp_path / "images"
    write_cifar(images / "cifar10")
    path = reproduce("moe-variants", request(images, tmp_path / "results", seeds=[0, 1]))
    names = [v.name for v in (*PAPER, FROM_TUNED, AUGMENTED[1])] + [
        "FedAvg; augmented",
        "Mixture, augmented; augmented",
    ]
    rows = rows_of(path)
    assert [r["method"] for r in rows] == names * 2
    assert all(r["seeds"] == [0, 1] for r in rows)
    files = {p.name for p in (tmp_path / "results" / "moe").glob("*.json")}
    assert "cifar10-n5-N6-p0.8-q0-s0-r1-e1-aug-a1x1x1.json" in files
    text = path.read_text(encoding="utf-8")
    assert "The best mixture by the validation images, over these p together: " in text
    assert "− Fine-tuned, augmented" in text


def test_the_best_mixture_is_chosen_on_validation_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {
        ("valid", MIXTURE): 0.5,
        ("valid", OTHERS[0]): 0.6,
        ("valid", OTHERS[1]): 0.4,
        ("test", MIXTURE): 0.5,
        ("test", OTHERS[0]): 0.45,
        ("test", OTHERS[1]): 0.9,
    }
    monkeypatch.setitem(moe_sheet.SIZES, "quick", replace(TINY, variants=(OTHERS[0], OTHERS[1])))
    monkeypatch.setattr(moe_sheet.Sheet, "run", lambda self: None)
    monkeypatch.setattr(moe_sheet, "source_of", lambda *_: {})
    monkeypatch.setattr(
        moe_sheet.Sheet,
        "values",
        lambda self, scene, way, split: (
            {0: table[split, way.variant]} if (split, way.variant) in table else {}
        ),
    )
    text = reproduce("moe-variants", request(tmp_path, tmp_path / "results", seeds=[0])).read_text(
        encoding="utf-8"
    )
    assert f"The best mixture by the validation images, over these p together: {OTHERS[0].name}." in text
    clean = [line for line in text.splitlines() if "clean protocol" in line]
    (line,) = [line for line in clean if f"{OTHERS[0].name} − Mixture" in line]
    assert line.count("−5.00") == 3  # and so it says where that one is behind
