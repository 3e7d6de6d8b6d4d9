"""Opting out of a part of one's data, and local experts of several kinds: what leaves, what stays, what the table says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.core.errors import ConfigError
from fedkeep.data import FederatedData
from fedkeep.experiments.build import build_method, build_model
from fedkeep.experiments.personalize import adapt_clients, rooted
from fedkeep.experiments.reproductions import Request
from fedkeep.methods import mixture
from fedkeep_papers.kit import plots
from fedkeep_papers.kit.cells import Finished
from fedkeep_papers.moe import cells as moe_cells
from fedkeep_papers.moe import figure6 as moe_figure6
from fedkeep_papers.moe import sheet as moe_sheet
from fedkeep_papers.moe.cells import Work
from fedkeep_papers.moe.experts import OnPixels
from fedkeep_papers.moe.figure6 import ALIKE, figure6, mixed, several, share
from fedkeep_papers.moe.results import Cell, Result
from fedkeep_papers.moe.scene import Adapting, Federation, Scene
from fedkeep_papers.moe.variants import KINDS, LOCAL, MIXTURE, PAPER, Variant, adapting_method, mixture_model
from tests.engines.test_opt_out import leaves
from tests.papers.moe.images import write_cifar, write_fashion
from tests.refusals import raises
from tests.tiny import same_bits

SCENE = Scene("fashion_mnist", 0.8, train=10, valid=8, test=8)
CELL = Cell(SCENE, Federation(2, 1), Adapting(2, 1, 2))
SMALL, LINEAR = KINDS[2:]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_fashion(folder / "fashion_mnist")
    return folder


def work(images: Path, folder: Path, **changes: Any) -> Work:
    return Work(replace(CELL, scene=replace(SCENE, **changes)), images, folder / "results", folder / "runs")


def out_of(data: FederatedData) -> np.ndarray:
    return ~np.asarray(data.columns["opted_in"], bool)


def test_a_hidden_class_is_the_clients_own_and_nobody_elses(images: Path, tmp_path: Path) -> None:
    data = work(images, tmp_path, q=0.5, by="class").data()
    label, out = np.asarray(data.columns["label"]), out_of(data)
    for client, (hidden, kept) in enumerate(data.meta["partition"]["classes"]):
        for split, majority in (("train", 4), ("valid", 3), ("test", 3)):  # of 8 and of 6.4, so 6
            rows = data.rows(client, split)
            own = np.arange(rows.start, rows.stop)
            assert (label[own[out[own]]] == hidden).all()
            assert out[own].sum() == (label[own] == hidden).sum() == majority
            assert kept in label[own[~out[own]]]
    assert data.meta["opt_out"]["training_examples_in"] == 5 * 6


@pytest.mark.parametrize(
    ("q", "by", "expected"),
    [
        (0.5, "client", 0.4),
        (0.9, "client", 0.8),
        (0.4, "example", 0.4),
        (0.5, "class", 0.4),
        (0.0, "class", 0.0),
    ],
)
def test_shares_are_those_of_the_data(
    q: float, by: Any, expected: float, images: Path, tmp_path: Path
) -> None:
    own = work(images, tmp_path, q=q, by=by)
    assert share(own.cell.scene) == pytest.approx(expected)
    if q:
        data = own.data()
        assert out_of(data)[data.split_rows("train")].mean() == pytest.approx(expected)


def test_shares_by_hand() -> None:
    assert share(Scene(p=0.6, q=0.5, by="class")) == pytest.approx(0.3)  # 150 of 500
    assert share(Scene(p=0.9, q=0.5, by="class", train=9)) == pytest.approx(4 / 9)  # 8 of 9 images, 4 a class
    assert share(Scene(p=0.6, q=0.29, by="example", train=100)) == pytest.approx(0.29)
    assert share(Scene(q=0.3, clients=5)) == pytest.approx(0.2)


@pytest.mark.parametrize(("q", "by"), [(0.4, "example"), (0.5, "class")])
def test_what_leaves_does_not_depend_on_what_opted_out(
    q: float, by: Any, images: Path, tmp_path: Path
) -> None:
    """Opted-out images and labels become others: uploads and server keep their bits, and experts of all kinds change."""
    own = work(images, tmp_path, q=q, by=by)
    config, data = own.cell.federation.config(own.cell.scene), own.data()
    drawn, columns, out = np.random.default_rng(1), dict(data.columns), out_of(data)
    for name, high in (("image", 256), ("label", 10)):
        column = np.array(columns[name])
        column[out] = drawn.integers(0, high, column[out].shape)
        columns[name] = column
    other = FederatedData(columns, data.offsets, data.ids, data.bounds, data.meta)
    plain = build_method(config.method)
    mixed = mixture(local=plain.client.phases[0], local_epochs=1, mixture_epochs=1)
    for model, method, prefix in (
        (build_model(config, data), plain, ""),
        (mixture_model(SCENE, LINEAR, data), mixed, "global_expert."),
    ):
        uploads, states, _ = leaves(model, method, data)
        assert leaves(model, method, other)[:2] == (uploads, states)
        assert {weight for weight, _ in uploads} == {6.0}  # of ten images
        expert = build_model(config, data).state_dict()
        assert all(set(sent) == {prefix + name for name in expert} for _, sent in uploads)
    run = own.federated()
    found = []
    for each in (data, other):
        model = mixture_model(SCENE, LINEAR, each)
        whole = rooted(replace(run, data=each), model, mixed, "global_expert.")
        before = {name: value.clone() for name, value in whole.server.items()}
        found.append(adapt_clients(whole).own(whole.clients[0]))
        assert same_bits(whole.server, before)
        assert {name.split(".")[0] for name in whole.server} == {"global_expert"}
    assert not torch.equal(found[0]["local_expert.out.weight"], found[1]["local_expert.out.weight"])


def test_each_client_has_an_expert_of_its_own_kind_and_no_other(images: Path, tmp_path: Path) -> None:
    """Groups adapt from one run of FedAvg, each with its model; that is bit for bit as if all were alike."""
    own = work(images, tmp_path)
    run, data = own.federated(), own.data()
    sizes = {}
    for kind, numbers in ((MIXTURE, [0, 3]), (SMALL, [1, 4]), (LINEAR, [2])):
        clients = [data.ids[number] for number in numbers]
        model, method = mixture_model(SCENE, kind, data), adapting_method(kind, CELL.adapting)
        some = adapt_clients(rooted(run, model, method, "global_expert."), clients)
        alike = own.adapted(kind)
        assert list(some.clients) == clients
        for client in clients:
            assert same_bits(some.own(client), alike.own(client))
            assert set(some.own(client)) == {name for name, _ in model.named_parameters()}
        sizes[kind.name] = sum(p.numel() for p in model.get_submodule("local_expert").parameters())
        assert some.clients_frame("test")["accuracy"].to_pylist() == [
            alike.clients_frame("test")["accuracy"].to_pylist()[number] for number in numbers
        ]
    assert sizes["Mixture, linear"] == 28 * 28 * 10 + 10
    assert len(set(sizes.values())) == 3


def test_several_kinds_by_hand() -> None:
    alike = [Result((v, v, v, v, v), tuple(v + k / 10 for k in range(5))) for v in (0.1, 0.2, 0.3)]
    assert mixed(alike, "valid") == pytest.approx((0.1 + 0.2 + 0.3 + 0.1 + 0.2) / 5)
    assert mixed(alike, "test") == pytest.approx((0.1 + 0.3 + 0.5 + 0.4 + 0.6) / 5)
    assert [[way.variant.expert for way in ways] for ways in ALIKE.values()] == [["", "small", "linear"]] * 2


def test_a_seed_that_lacks_a_kind_is_not_in_the_row_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = ALIKE[MIXTURE.name]
    values = {first: {0: 0.1, 1: 0.5}, second: {0: 0.2, 1: 0.5}, third: {0: 0.3}}

    def finished(_: moe_sheet.Sheet, __: Scene, way: moe_sheet.Way) -> dict[int, Finished[Result]]:
        return {
            seed: Finished(result=Result((v,) * 5, ()), numerics=int(10 * v), commit=f"{v}", seconds=v)
            for seed, v in values[way].items()
        }

    monkeypatch.setattr(moe_sheet.Sheet, "finished", finished)
    asked = Request(tmp_path, tmp_path, seeds=[0, 1], progress=False)
    row = several(moe_sheet.sheet(asked, [SCENE], ()), SCENE, MIXTURE.name, "valid")
    assert (row.seeds, row.value) == ((0,), pytest.approx((0.1 + 0.2 + 0.3 + 0.1 + 0.2) / 5))
    assert (row.commit, row.numerics, row.seconds) == ("0.1, 0.2, 0.3", (1, 2, 3), 0.6)


def test_pixels_by_hand() -> None:
    expert = OnPixels(2, 1, 2)
    with torch.no_grad():
        expert.out.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 2.0]]))
        expert.out.bias.zero_()
    image = torch.tensor([[[[255, 0], [0, 0]]]], dtype=torch.uint8)
    assert expert(image).tolist() == [[1.0, -2.0]]


def test_names_and_settings_of_what_was_there_stay() -> None:
    assert "by" not in Scene(q=0.5).settings()
    assert Scene(p=0.6, q=0.4, by="example").slug == "cifar10-n5-N500-p0.6-q0.4-example-s0"
    assert Scene(q=0.4, by="example").settings()["by"] == "example"
    assert "opt_out" not in Scene(q=0.5, by="class").tables()
    cell = replace(CELL, scene=replace(SCENE, q=0.4, by="example"))
    assert cell.settings(LOCAL) == CELL.settings(LOCAL)  # local training knows nothing of who opts out
    assert "expert" not in CELL.settings(MIXTURE)["variant"]
    assert CELL.settings(KINDS[0])["variant"]["expert"] == "small"
    assert LINEAR.first.settings() == KINDS[1].settings()
    with raises(
        ConfigError,
        got="image",
        what="A scene's clients opt out by",
        choices="'client', 'example' or 'class'",
    ):
        Scene(by="image")  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        Variant("?", expert="linaer")
    assert str(error.value).startswith(
        "A local expert's architecture must be 'small' or 'linear'; got 'linaer'."
    )
    with raises(ConfigError, said="A local expert that starts from the global", expert="small"):
        Variant("?", expert="small", local_init="finetuned")


def test_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(moe_sheet.SIZES["quick"], federation=Federation(1, 1), adapting=Adapting(1, 1, 1))
    monkeypatch.setitem(moe_sheet.SIZES, "quick", tiny)
    monkeypatch.setattr(moe_figure6, "FEW", {"client": (0.9,), "example": (0.4,), "class": (0.5,)})
    monkeypatch.setattr(moe_cells, "SHOWN", 1)

    drawn: list[str] = []

    def write(figure: Any, folder: Path, name: str) -> Path:  # drawing has its own tests
        drawn.append(name)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        path.touch()
        return path

    monkeypatch.setattr(plots, "write", write)
    write_cifar(tmp_path / "images" / "cifar10")
    sizes = {f"data.partition.{name}": str(n) for name, n in (("train", 10), ("valid", 4), ("test", 4))}
    path = figure6(Request(tmp_path / "images", tmp_path / "out", progress=False, changes=sizes))
    rows = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    assert len(rows) == 2 * (len(PAPER) + len(KINDS) + 2 + 3 * len(PAPER))  # protocols × (whole, three parts)
    assert all(row["value"] is not None for row in rows)
    local = {row["value"] for row in rows if row["method"] == "Local" and "clean" in row["scene"]}
    assert len(local) == 1
    text = path.read_text(encoding="utf-8")
    for part in (
        "| clean protocol | p = 0.6 | nobody | 0 % |",
        "| clean protocol | p = 0.6 | whole clients | 80 % |",
        "| clean protocol | p = 0.6 | each client's images, at random | 40 % |",
        "| clean protocol | p = 0.6 | each client's majority class | 30 % |",
        "0.4 of each client's images out, paper's protocol",
        "1 of each client's 2 majority classes out, clean protocol",
        "| clean protocol | p = 0.6 | several kinds |",
    ):
        assert part in text
    assert drawn == ["out-p0.6-paper", "kinds-paper", "out-p0.6-clean", "kinds-clean"]
    assert all(f"moe-figure6-quick/{name}.png" in text for name in drawn)
