"""KTEPS's tables with other settings than the configurations': other reviews, other readings of the method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.reproductions import reproduce
from fedkeep_papers.kteps import book, published, variants
from fedkeep_papers.kteps.cells import CellJob
from fedkeep_papers.kteps.fdu_mtl import DOMAINS
from tests.papers.kteps.runs import read_numbers, request, rows
from tests.refusals import raises


@pytest.fixture
def shops(data: Path) -> Path:
    """The folder of data, with a folder of reviews of three shops; one is called like a domain of the paper."""
    folder = data / "shops"
    folder.mkdir(exist_ok=True)
    for shop in ("books", "south", "west"):
        for split in ("train", "test"):
            lines = [f"man {('bad', 'good')[n % 2]} w{n},{n % 2}" for n in range(6)]
            (folder / f"{shop}.{split}.csv").write_text("\n".join(["text,label", *lines]), encoding="utf-8")
    return data


@pytest.mark.slow
def test_a_folder_of_reviews_takes_fdus_place(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg", "kteps/kteps"])
    changes = {"data.reader": '"reviews"', "data.folder": '"shops"'}
    path = reproduce("kteps-table3", request(shops, tmp_path, changes=changes))
    found = rows(tmp_path, "kteps-table3")
    kteps = found["KTEPS", "accuracy_ap"]
    assert (kteps.scene, kteps.seeds, kteps.published) == ("reviews", (0,), None)
    (file,) = (tmp_path / "kteps").glob("reviews-kteps-full-0-*")
    numbers = read_numbers(file)
    assert set(numbers.test) == {"books", "south", "west"}
    assert kteps.value == pytest.approx(np.mean(list(numbers.curves["0.01"]["own"].values())), abs=1e-6)
    assert set(numbers.source) == {
        f"{s}.{p}.csv" for s in ("books", "south", "west") for p in ("train", "test")
    } | {"word_vectors_200d.npz"}
    text = path.read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| books |"))
    assert "(" not in row, "the paper's books are not these"
    assert "FDU-MTL is" not in text
    assert 'Changed: `data.reader = "reviews"`, `data.folder = "shops"`.' in text
    reproduce("kteps-figure4", request(shops, tmp_path, changes=changes))
    assert rows(tmp_path, "kteps-figure4")["FedAvg", "accuracy_ag"].scene == "reviews"
    reproduce("kteps-table1", request(shops, tmp_path, changes=changes))
    read = rows(tmp_path, "kteps-table1")["books", "training_reviews"]
    assert (read.scene, read.value, read.published) == ("reviews", 6, None)


@pytest.mark.slow
def test_with_validation_reviews_accuracies_are_the_last_rounds_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's records have clients' accuracies of the round that is best on these reviews alone."""
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg", "kteps/indiv"])
    changes = {"data.valid": "3", "run.rounds": "3", "run.evaluate_every": "1"}
    reproduce("kteps-table3", request(data, tmp_path, changes=changes, seeds=[0, 1]))
    files = sorted((tmp_path / "kteps").glob("*.json"))
    assert len(files) == 4
    for file in files:
        numbers = read_numbers(file)
        assert set(numbers.test) == set(DOMAINS)
        assert numbers.test_curve[-1] == [3, pytest.approx(np.mean(list(numbers.test.values())), abs=1e-6)]
    found = rows(tmp_path, "kteps-table3")
    assert found["Indiv", "accuracy_ap"].value is not None
    assert found["Indiv", "accuracy_ap"].seeds == (0, 1)


def test_other_data_are_not_the_papers_however_they_are_named(shops: Path, tmp_path: Path) -> None:
    (shops / "tang").mkdir(exist_ok=True)
    whole = {"data": '{ reader = "reviews", folder = "shops" }'}
    for changes, names in (
        ({}, ["FDU", "IYY"]),
        (whole, ["reviews"]),
        ({"data.reader": "'reviews'"}, ["reviews"]),
    ):
        own = book.Book(request(shops, tmp_path, changes=changes), "kteps-table2")
        assert [scene.name for scene in own.scenes] == names
    (shops / "tang").rmdir()


def test_what_is_printed_of_a_scene() -> None:
    table = {"books": 1, "FDU": 2, "IYY-imdb": 3}
    assert published.of_scene(table, "FDU") == table
    assert published.of_scene(table, "IYY") == {"imdb": 3}
    assert published.of_scene(table, "reviews") == {}


@pytest.mark.parametrize("held_out", [False, True])
def test_variants_have_a_requests_settings(shops: Path, tmp_path: Path, held_out: bool) -> None:
    changes = {"method.share": "0.5", "data.reader": '"reviews"', "data.folder": '"shops"'}
    own = book.Book(request(shops, tmp_path, changes=changes), "kteps-variants")
    cell = variants._cell(own, "dropout", 0, held_out=held_out)
    config = cell.resolved()
    assert (config.method.options["share"], config.model.options["dropout"]) == (0.5, 0.3)
    assert (config.data.reader, cell.name.partition("-")[0]) == ("reviews", "reviews")


@pytest.mark.parametrize(
    ("table", "key", "value", "own", "own_value"),
    [
        ("kteps-table1", "data.max_length", "9", "data.max_length", "1000000"),
        ("kteps-table3", "personalization.ratio", "1.0", "personalization.ratio", "0.01"),
        ("kteps-table4", "method.transfer", "0.1", "method.transfer", "0.0"),
        ("kteps-table5", "personalization", "{ ratio = 1.0 }", "personalization.ratio", "0.01"),
        ("kteps-table6", "personalization.ratio", "1.0", "personalization.ratio", "0.01"),
        ("kteps-table7", "method.start", "3", "method.start", "2"),
        ("kteps-table8", "method.projections", "true", "method.projections", "false"),
        ("kteps-figure5", "method.end", "7", "method.end", "150"),
        ("kteps-readings", "model.mean_over", "9", "model.mean_over", "200"),
        ("kteps-baselines", "method.operator", '"single"', "method.operator", '"conv"'),
        ("kteps-variants", "model.dropout", "0.1", "model.dropout", "0.3"),
        ("kteps-variants", "run.rounds", "7", "run.rounds", "30"),
    ],
)
def test_what_a_table_sets_itself_may_not_be_changed(
    table: str,
    key: str,
    value: str,
    own: str,
    own_value: str,
    data: Path,
    tmp_path: Path,
    computed: list[str],
) -> None:
    with raises(
        ConfigError,
        text=(
            f"{table} sets {own} itself, here to {own_value}; changed by --set, its rows would not be what they say. Leave "
            f"it out, or train a single run with it: fedkeep run."
        ),
    ):
        reproduce(table, request(data, tmp_path, changes={key: value}))
    assert computed == []


def test_settings_that_a_run_cannot_have_are_named_before_any_is_trained(
    data: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "HELD_OUT", 3)
    share = {"method.share": "0.5"}
    every = {"personalization.every": "3"}
    for table, changes, names in (
        ("kteps-table2", share, "fdu-indiv-full-0 runs kteps/indiv, .*share"),
        ("kteps-table3", every, "personalization: .*every 3"),
        ("kteps-variants", every, "personalization: .*every 3"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){names}"):
            reproduce(table, request(data, tmp_path, changes=changes))
    assert computed == []
    asked: list[CellJob] = []
    monkeypatch.setattr(book, "run_long_jobs", lambda tasks, *_, on: asked.extend(tasks))
    reproduce("kteps-table2", request(data, tmp_path, changes=share, only=["*-kteps-full-*"]))
    assert [task.cell.resolved().method.options["share"] for task in asked] == [0.5]


@pytest.mark.slow
def test_a_reading_is_a_cell_of_its_own(
    finished: Path, data: Path, tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg", "kteps/kteps"])
    (tmp_path / "kteps").symlink_to(finished / "kteps")
    usual, halved = request(data, tmp_path), request(data, tmp_path, changes={"method.share": "0.5"})
    plain = book.Book(usual, "kteps-table3")
    (one,) = plain.cells(plain.fdu, "KTEPS").values()
    own = book.Book(halved, "kteps-table3")
    (cell,) = own.cells(own.fdu, "KTEPS").values()
    assert cell.resolved().method.options["share"] == 0.5
    assert own.task(cell).slot.read() is None
    assert plain.task(one).slot.read() is not None
    assert computed == []


def test_what_may_not_be_changed(tmp_path: Path) -> None:
    with raises(ConfigError, text="furl-table3 lets no settings be changed; got 'data.reader'."):
        reproduce("furl-table3", request(None, tmp_path, changes={"data.reader": '"reviews"'}))
    with raises(ConfigError, name="kteps-table3", key="seed"):
        reproduce("kteps-table3", request(None, tmp_path, changes={"seed": "3"}))
    with raises(ConfigError, name="kteps-table1", key="model.hidden", which="settings of the tables data"):
        reproduce("kteps-table1", request(None, tmp_path, changes={"model.hidden": "3"}))
