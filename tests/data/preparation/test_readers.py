"""Readers go through a summary and an encoding, and their data are what they were before; nodes equal the pooled run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.columns import Column
from fedkeep.data.preparation import Encoding, Raw, Rules, Source, Summary, merged, prepared
from fedkeep.data.readers import raw_movielens, raw_review_files, raw_table
from fedkeep.experiments.build import build_data
from fedkeep.experiments.config import builtin_config
from fedkeep_papers.kteps.fdu_mtl import DOMAINS, raw_fdu_mtl
from tests.data.preparation.files import READ, ROWS, csv, films, shops
from tests.refusals import raises

BEFORE = {
    "characters": "80079f83e0044a1868d293bded4da455",
    "few characters": "3c8ee5472ff04dfe0347c82dd89a327d",
    "words": "38d706b4c3838c15d4bd9ca39a4b5317",
    "words, not split": "794ceda13877f719012d1027ac5ca171",
    "integers as labels": "62e71562c829e9f79bc4ec24dbdf1476",
    "names of labels": "53b540140f04d3afe970cb873f8211f0",
    "times with fractions": "5fefbadb4bae7878ea38e9be6c75c652",
    "features": "9e7e762ccafc4f84da85c8c2408af636",
    "regression": "86f7ebc359cddb50b028bf0d04968126",
    "reviews": "9271f83a7c4435fcfd265e82e439a794",
    "reviews, cut": "8c797c138eff6f2a39a331999baa3991",
    "films": "110d61cc8c320c2dbc901b3267c731aa",
    "chats": "571bf5361ec822adc7021f76eb2a065f",
    "chats, hashed": "9784efacdf1353b36b287f74b97dd8d0",
    "domains": "7841c32d76957974a6505e812068e50f",
    "corpora": "51375020999f3abf594f6e4de5fe67d8",
}
"""Fingerprints of data as readers gave them at commit a4d334d, which numbered words and labels themselves."""
BEFORE_REAL = {
    "furl/personalized-fl": ("zulip_channels", "c1d754eef3fea0a930271900a574f228"),
    "furl-words/personalized-fl": ("zulip_channels", "3442b521359d7ed0f858702c36807ff9"),
    "kteps/kteps": ("fdu_mtl", "3b283f86e39165b37f7df707696618f8"),
}
DATA = os.environ.get("FEDKEEP_DATA", "")
pytestmark = pytest.mark.filterwarnings("ignore:The feature 'f' reaches 3e.38")


def hashed(data: FederatedData) -> str:
    text = json.dumps(data.fingerprint(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@pytest.mark.parametrize("name", READ)
def test_the_data_of_a_reader_are_what_they_were(name: str, tmp_path: Path) -> None:
    assert hashed(READ[name](tmp_path)) == BEFORE[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", BEFORE_REAL)
def test_the_data_of_a_configuration_are_what_they_were(name: str) -> None:
    folder, wanted = BEFORE_REAL[name]
    if not (DATA and Path(DATA, folder).is_dir()):
        pytest.skip(f"set FEDKEEP_DATA to a folder that holds {folder}/ to test the real data")
    assert hashed(build_data(builtin_config(name), Path(DATA))) == wanted


# -- several nodes, each with files of its own


def row(column: Column, number: int) -> tuple[Any, ...]:
    value = column[number]
    return value.dtype.str, value.shape, value.tobytes()


def check_equal(nodes: Sequence[Source], pooled: Source, rules: Rules = Rules()) -> Encoding:
    """Check that every client's data are the same on its node and in the pooled run, and return the encoding."""
    summaries = [Summary.from_json(node.summary(rules).to_json()) for node in nodes]  # as they travel
    encoding = Encoding.from_json(Encoding.of(merged(summaries)).to_json())
    whole = prepared(pooled, rules)
    assert whole.meta["encoding"] == encoding.digest
    assert Encoding.of(merged(summaries[::-1])).digest == encoding.digest
    parts = [node.encoded(encoding) for node in nodes]
    assert sorted(client for part in parts for client in part.ids) == sorted(whole.ids)
    for part in parts:
        assert part.columns.keys() == whole.columns.keys()
        for key in ("task", "classes", "vocabulary", "label_names"):
            assert part.meta.get(key) == whole.meta.get(key)
        for name, column in part.columns.items():
            ours, theirs = (
                (c.values if isinstance(c, Ragged) else c).dtype for c in (column, whole.columns[name])
            )
            assert ours == theirs
            for client, client_id in enumerate(part.ids):
                for split in ("all",) if part.bounds is None else ("train", "valid", "test"):
                    here, there = part.rows(client, split), whole.rows(whole.index(client_id), split)
                    assert [row(column, n) for n in here] == [row(whole.columns[name], n) for n in there]
    return encoding


def test_two_nodes_with_other_labels_and_words_equal_the_pooled_run(tmp_path: Path) -> None:
    here = [
        ("anna", "good day", "pos", "train", "1", "1", "1"),
        ("anna", "day", "pos", "test", "2", "1", "1"),
    ]
    there = [
        ("bo", "so so", "neutral", "train", "1.5", "1", "1"),
        ("bo", "bad", "neg", "test", "2", "1", "1"),
    ]
    nodes = [
        raw_table(csv(tmp_path / f"{n}.csv", rows), tokens="word") for n, rows in (("a", here), ("b", there))
    ]
    encoding = check_equal(nodes, raw_table(csv(tmp_path / "t.csv", here + there), tokens="word"))
    assert encoding.meta["label_names"] == ["neg", "neutral", "pos"]
    assert encoding.meta["vocabulary"]["symbols"] == ["so", "day", "good"]
    alone = [prepared(node) for node in nodes]  # what each node would make of its own file
    assert [d.columns["label"].tolist() for d in alone] == [[0, 0], [1, 0]]


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens": "word", "vocabulary": 5},
        {"tokens": "char", "max_length": 3},
        {"features": ["g", "f"]},
        {"features": ["f"], "label": "g", "task": "regression"},
    ],
)
@pytest.mark.parametrize("ruled", [False, True])
@hypothesis.given(node_of=st.tuples(*[st.integers(0, 2)] * 3))
@hypothesis.settings(max_examples=8)
def test_however_clients_are_divided_over_nodes(
    settings: dict[str, Any], ruled: bool, node_of: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rules = (
        (Rules(standardise=False) if "features" in settings else Rules(clients_a_word=2))
        if ruled
        else Rules()
    )
    place = tmp_path_factory.mktemp("nodes")
    node = dict(zip(("al", "bo", "cy"), node_of, strict=True))
    rows = [[r for r in ROWS if node[r[0]] == n] for n in sorted(set(node_of))]
    nodes = [raw_table(csv(place / f"{n}.csv", own), **settings) for n, own in enumerate(rows)]
    check_equal(nodes, raw_table(csv(place / "t.csv"), **settings), rules)


def test_nodes_with_reviews_and_with_films(tmp_path: Path) -> None:
    whole = shops(tmp_path / "whole")
    nodes = []
    for name in ("tea", "film"):
        (tmp_path / name).mkdir()
        for file in whole.glob(f"{name}.*"):
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        nodes.append(raw_review_files(tmp_path / name, vocabulary=5, valid=1, limit=4))
    check_equal(nodes, raw_review_files(whole, vocabulary=5, valid=1, limit=4))
    rated = films(tmp_path / "films") / "u.data"
    lines = rated.read_text().splitlines()
    for user in ("7", "11", "3"):
        own = [line for line in lines if line.split("\t")[0] == user]
        (tmp_path / user).write_text("\n".join(own) + "\n")
    encoding = check_equal(
        [raw_movielens(tmp_path / user) for user in ("7", "11", "3")], raw_movielens(rated)
    )
    assert encoding.sizes == {"classes": 1, "items": 4}


def test_a_label_keeps_its_number_where_a_limit_leaves_its_rows_out(tmp_path: Path) -> None:
    rows = "".join(f"good tea,{label}\n" for label in ("b", "c", "a") * 3)
    (tmp_path / "shop.train.csv").write_text("text,label\n" + rows)
    (tmp_path / "shop.test.csv").write_text("text,label\nbad tea,c\n")
    source = raw_review_files(tmp_path, limit=1)
    assert len(set(source.columns["label"].values)) < 3  # type: ignore[attr-defined]
    assert Encoding.of(source.summary()).meta["label_names"] == ["a", "b", "c"]
    unknown = raw_review_files(tmp_path, limit=1, label_names=["a", "b"])
    with pytest.raises(DataError, match=r"shop\.test\.csv, line 2: label 'c' is not one"):
        unknown.encoded(Encoding.of(unknown.summary()))


@pytest.mark.slow
@pytest.mark.skipif(
    not (DATA and Path(DATA, "fdu_mtl").is_dir()),
    reason="set FEDKEEP_DATA to a folder that holds fdu_mtl/ to test the real data",
)
def test_two_nodes_with_real_reviews_equal_the_pooled_run() -> None:
    folder = Path(DATA, "fdu_mtl")
    nodes = [raw_fdu_mtl(folder, domains=DOMAINS[:5]), raw_fdu_mtl(folder, domains=DOMAINS[5:])]
    encoding = check_equal(nodes, raw_fdu_mtl(folder))
    assert encoding.sizes == {"vocabulary": 50_002, "classes": 2}


def test_data_that_do_not_fit_say_so(tmp_path: Path) -> None:
    def source(name: str, **settings: Any) -> Raw:
        return raw_table(csv(tmp_path / name, **settings.pop("csv", {})), **settings)

    encoding = Encoding.of(source("t.csv", tokens="word").summary())
    others = {
        "the column 'time' is missing": source("a.csv", csv={"drop": ("time",)}, tokens="word"),
        "the column 'text' is missing": source("b.csv", features=["f"]),
        "the column 'label' is of the kind 'target', not 'label'": source(
            "c.csv", label="g", task="regression"
        ),
    }
    for why, other in others.items():
        assert encoding.fault(other.summary()) == why
        with raises(DataError, text=f"The data do not fit the federation's encoding: {why}."):
            other.encoded(encoding)
    unknown = source("d.csv", csv={"label": lambda word: {"pos": "so-so"}.get(word, word)}, tokens="word")
    assert encoding.fault(unknown.summary()) == (
        "the column 'label': the label 'so-so' is not one of ['neg', 'neutral', 'pos']."
    )
    with raises(DataError, label="so-so"):
        unknown.encoded(encoding)
    other = source("e.csv", tokens="word", max_length=3)
    assert encoding.fault(other.summary()) == "the column 'text': max_length 3, not 256"
    assert np.diff(other.encoded(encoding).columns["text"].offsets).max() == 3  # type: ignore[union-attr]
