"""IYY's path on generated reviews of its shape: 3 clients of unlike size, 5 classes, 400 words, rates of its own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep.experiments.build import build_data, build_method, build_model
from fedkeep.experiments.reproductions import reproduce
from fedkeep_papers.kit.results import read_results
from fedkeep_papers.kteps import book, published
from tests.documents import ROOT
from tests.papers.kteps.conftest import WORDS
from tests.papers.kteps.runs import read_numbers, request
from tests.tiny import Rounds, job, results

SIZES = {"imdb": (12, 10), "yelp-2013": (6, 5), "yelp-2014": (24, 5)}  # training reviews, levels of rating
IYY = book.SCENES[1]


@pytest.fixture
def reviews(data: Path, tmp_path: Path) -> Path:
    """A folder of data with Tang's files; the first review of each is longer than what is kept."""
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    (folder / "tang").mkdir()
    rng = np.random.default_rng(0)
    for corpus, (size, levels) in SIZES.items():
        for split, count in (("train", size), ("test", 5)):
            rows = []
            for n in range(count):
                text = " ".join(["man", *rng.choice(WORDS, 410 if n == 0 else 5)])
                rows.append(f"u\t\tp\t\t{n % levels + 1}\t\t{text}\n")
            (folder / "tang" / f"{corpus}-{split}.txt.ss").write_text("".join(rows), encoding="utf-8")
    return folder


def config(folder: Path, **changes: str) -> Any:
    own = book.Book(request(folder, folder / "out", changes=changes), "kteps-table3")
    (cell,) = own.cells(own.scenes[1], "KTEPS").values()
    return cell.resolved()


def test_asp_mtl_tells_as_many_clients_apart_as_there_are(
    reviews: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/asp-mtl"])
    own = book.Book(request(reviews, reviews / "out"), "kteps-table3")
    told = []
    for scene in own.scenes:
        (cell,) = own.cells(scene, "ASP-MTL").values()
        told.append(cell.resolved().method.options["tasks"])
    assert told == [16, 3]


def test_what_is_read_and_set(reviews: Path) -> None:
    found = config(reviews)
    data = build_data(found, reviews)
    assert list(data.ids) == list(SIZES)
    assert data.meta["classes"] == 5
    assert sorted(set(np.asarray(data.columns["label"]).tolist())) == [0, 1, 2, 3, 4]
    text = data.columns["text"]
    assert max(np.diff(text.offsets)) == 400
    assert (found.run.rounds, found.run.cohort, found.method.options["batch_size"]) == (20, 3, 64)
    optimizer = build_method(found.method).client.phases[0].optimizer
    assert [
        optimizer.rate(n) for n in ("embedding.weight", "encoder.weight_ih_l0", "private.classifier.0.weight")
    ] == [
        0.01,
        0.1,
        0.1,
    ]
    assert optimizer.momentum == 0.9


@pytest.mark.parametrize(
    ("weighting", "shares"), [(None, [12 / 42, 6 / 42, 24 / 42]), ("uniform", [1 / 3] * 3)]
)
def test_clients_count_by_their_reviews_or_alike(
    weighting: str | None, shares: list[float], reviews: Path
) -> None:
    """One round by hand: w + Σ share_k (u_k − w), N_k = 12, 6 and 24."""
    changes = {"method.noise": "0.0"} | ({"method.weighting": f'"{weighting}"'} if weighting else {})
    found = config(reviews, **changes)
    data = build_data(found, reviews)
    method, model = build_method(found.method), build_model(found, data, reviews)
    work = job(method.extend(model), method, data)
    start = work.net.initial()
    moved = [done.upload for done in results(work, range(3))]
    rounds = Rounds(work)
    rounds([0, 1, 2])
    for name in ("encoder.weight_ih_l0", "classifier.2.bias", "projection.weight"):
        wanted = start[name] + sum(s * u.deltas[name] for s, u in zip(shares, moved, strict=True) if u)
        torch.testing.assert_close(rounds.server.params[name], wanted, rtol=0, atol=1e-6)
    assert not torch.equal(rounds.server.params["classifier.2.bias"], start["classifier.2.bias"])


@pytest.mark.slow
def test_table_3_of_iyy(reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = (
        ("run.rounds", "2"),
        ("model.hidden", "3"),
        ("personalization.steps", "4"),
        ("personalization.every", "2"),
    )
    monkeypatch.setattr(book, "SCENES", (book.SCENES[0], replace(IYY, scales={"full": short})))
    monkeypatch.setattr(book, "builtin_names", lambda: ["kteps/fedavg", "kteps/kteps"])
    reproduce("kteps-table3", request(reviews, tmp_path / "out", only=["iyy-*"]))
    rows = {
        (r.scene, r.method): r
        for r in read_results(tmp_path / "out" / "kteps-table3.json")
        if r.metric == "accuracy_ap"
    }
    kteps = rows["IYY", "KTEPS"]
    assert (kteps.seeds, kteps.published) == ((0,), 0.603)
    (file,) = (tmp_path / "out" / "kteps").glob("iyy-kteps-full-0-*")
    numbers = read_numbers(file)
    curves = numbers.curves["0.01"]["own"]
    assert set(curves) == set(SIZES)
    assert kteps.value == pytest.approx(
        np.mean([np.mean(c) for c in curves.values()]), abs=1e-6
    )  # N_k has no part
    assert set(numbers.source) == {f"{c}-{s}.txt.ss" for c in SIZES for s in ("train", "test")} | {
        "word_vectors_200d.npz"
    }
    assert rows["FDU", "KTEPS"].value is None  # not asked for


def test_table_1(reviews: Path, tmp_path: Path) -> None:
    reproduce("kteps-table1", request(reviews, tmp_path / "out"))
    found = {(r.scene, r.method, r.metric): r for r in read_results(tmp_path / "out" / "kteps-table1.json")}
    row = found["IYY", "yelp-2014", "training_reviews"]
    assert (row.value, row.published) == (24, 183019)
    assert found["FDU", "books", "test_reviews"].value == 5
    words = found["IYY", "yelp-2013", "mean_words"]
    assert words.value == pytest.approx((411 + 5 * 6) / 6)  # before it is cut
    assert words.published == published.STATISTICS["IYY-yelp-2013"][2] == 199


def test_pages_speak_of_iyy_where_they_have_rows_of_it(reviews: Path, tmp_path: Path) -> None:
    made = book.Book(request(reviews, tmp_path), "kteps-figure4")
    rows = [
        book.Line(scene, "KTEPS", "accuracy_ag", {}, lambda _: 0.0) for scene in ("FDU", "IYY, no data here")
    ]
    assert "`tang`" not in made._what_was_run(rows[:1])
    assert "speak of them. IYY is run where the folder `tang`" in made._what_was_run(rows)
    for page in sorted((ROOT / "results").glob("kteps-*.md")):
        text = page.read_text(encoding="utf-8")
        assert ("`tang`" in text) == ("\n## IYY" in text), page.name
