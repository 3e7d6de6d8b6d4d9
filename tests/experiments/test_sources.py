"""A configuration's source: a device's own files, the pooled run's data, and a server's model without any data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedkeep
from fedkeep.core.errors import ConfigError
from fedkeep.core.run_files import read_info
from fedkeep.data import FederatedData, Ragged
from fedkeep.data.columns import Column, offsets_of
from fedkeep.data.preparation import Encoding, Rules, merged
from fedkeep.experiments.build import (
    build_data,
    build_model,
    build_source,
    encoding_of,
    run_config,
    settled,
    sizes_of,
)
from fedkeep.experiments.config import Config, DataConfig
from tests.experiments.configs import CLASSIFIER, REVIEWS, config, shops

NODES = {
    "north": [
        ("anna", "good day", "pos"),
        ("anna", "a good day", "pos"),
        ("anna", "hm", "pos"),
        ("bo", "day", "pos"),
    ],
    "south": [
        ("cy", "so so tea", "neutral"),
        ("cy", "tea", "neg"),
        ("cy", "so bad", "neg"),
        ("cy", "so", "neg"),
    ],
}


def tables(folder: Path) -> Path:
    """Write a table for each node, and one of all rows."""
    every = [row for rows in NODES.values() for row in rows]
    for name, rows in {**NODES, "all": every}.items():
        (folder / f"{name}.csv").write_text(
            "\n".join(map(",".join, [("user", "text", "label"), *rows])) + "\n"
        )
    return folder


def text_config(name: str = "all", **more: Any) -> Config:
    data = {
        "reader": "table",
        "path": f"{name}.csv",
        "tokens": "word",
        "split": {"fractions": [0.5, 0.2, 0.3]},
    }
    model = {"kind": "text_classifier", "embedding_dim": 2, "hidden": 3}
    return config(data=data, model=model, method={"kind": "fedavg"}, **more)


def joined(parts: list[FederatedData]) -> FederatedData:
    """Return the clients of several nodes as one data set, in the order of their ids."""
    owner = sorted((client_id, part, c) for part, d in enumerate(parts) for c, client_id in enumerate(d.ids))
    columns: dict[str, Column] = {}
    for name, first in parts[0].columns.items():
        pieces = [parts[p].columns[name] for _, p, _ in owner]
        rows = [parts[p].split_rows("all", [c]) for _, p, c in owner]
        if isinstance(first, Ragged):
            each = [piece[int(n)] for piece, own in zip(pieces, rows, strict=True) for n in own]
            columns[name] = Ragged(np.concatenate(each), offsets_of(np.array([len(e) for e in each])))
        else:
            columns[name] = np.concatenate([piece[own] for piece, own in zip(pieces, rows, strict=True)])
    counts = np.array([[parts[p].count(c, s) for s in ("train", "valid", "test")] for _, p, c in owner])
    ends = offsets_of(counts.sum(axis=1))
    bounds = np.column_stack([ends[:-1], ends[:-1, None] + np.cumsum(counts, axis=1)])
    return FederatedData(columns, ends, [i for i, _, _ in owner], bounds, parts[0].meta)


@pytest.mark.parametrize(
    "rules", [{}, {"clients_a_word": 2}, {"tokens": "char", "vocabulary": 6, "max_length": 4}]
)
def test_two_nodes_equal_the_pooled_run_to_the_bit(rules: dict[str, Any], tmp_path: Path) -> None:
    wanted = text_config(preparation=rules)
    pooled = build_data(wanted, tables(tmp_path))
    sources = [build_source(text_config(n).data, wanted.seed, tmp_path) for n in NODES]
    encoding = Encoding.of(merged(source.summary(wanted.preparation) for source in sources))
    data = joined([source.encoded(encoding) for source in sources])
    assert data.fingerprint() == pooled.fingerprint()
    assert data.meta["encoding"] == pooled.meta["encoding"] == encoding.digest
    assert data.meta["label_names"] == ["neg", "neutral", "pos"]
    runs = [
        fedkeep.simulate(
            build_model(wanted, given), fedkeep.methods.fedavg(), data, rounds=2, engine="sequential"
        )
        for given, data in ((encoding, data), (pooled, pooled))
    ]
    assert all(torch.equal(value, runs[1].server[name]) for name, value in runs[0].server.items())
    untrained = build_model(wanted, encoding).state_dict()
    assert any(not torch.equal(value, untrained[name]) for name, value in runs[0].server.items())


def test_without_one_encoding_two_nodes_would_mix_their_classes(tmp_path: Path) -> None:
    alone = [build_data(text_config(name), tables(tmp_path)) for name in NODES]
    zero = [data.meta["label_names"][0] for data in alone]
    assert zero == ["pos", "neg"]
    assert [data.meta["classes"] for data in alone] == [2, 2]


def test_a_server_without_data_makes_the_same_model(tmp_path: Path) -> None:
    wanted = config(data=REVIEWS, model=CLASSIFIER, seed=3)
    data = build_data(wanted, shops(tmp_path))
    source = build_source(wanted.data, wanted.seed, tmp_path)
    encoding = Encoding.from_json(Encoding.of(source.summary()).to_json())
    assert sizes_of(encoding) == sizes_of(data) == {"vocabulary": 5, "classes": 2}
    served, own = (build_model(wanted, given, tmp_path).state_dict() for given in (encoding, data))
    assert served["embedding.weight"][2].tolist() == [1.0, 2.0]  # of "good"
    assert all(torch.equal(value, own[name]) for name, value in served.items())
    numbers = Encoding.of(build_source(DataConfig(reader="toy"), 0).summary())
    assert encoding_of(numbers) is numbers
    table = {"reader": "table", "path": "t.csv", "features": ["f"], "task": "regression"}
    (tmp_path / "t.csv").write_text("user,f,label\na,1,2.5\n")
    regression = Encoding.of(build_source(DataConfig(**table), 0, tmp_path).summary())
    wrong = config(method={"kind": "fedavg", "loss": {"kind": "cross_entropy"}})
    with pytest.raises(ConfigError, match="'cross_entropy' wants.*'label'"):
        build_model(wrong, regression)
    assert settled(config(), regression).method.loss.kind == "squared_error"
    assert settled(wrong, regression).method.loss == wrong.method.loss


def test_the_table_preparation() -> None:
    assert config().preparation == Rules()
    given = {
        "clients_a_word": 3,
        "standardise": True,
        "label_names": ["b", "a"],
        "tokens": "word",
        "vocabulary": 9,
    }
    assert config(preparation=given).preparation == Rules(
        clients_a_word=3, standardise=True, label_names=("b", "a"), tokens="word", vocabulary=9
    )
    assert config().model_dump(exclude_defaults=True).keys() == {"data", "model", "method", "run"}


def test_features_are_standardised_where_a_configuration_says_so(tmp_path: Path) -> None:
    rows = [f"{user},{n * n},{n % 2}" for user in "ab" for n in range(10)]
    (tmp_path / "t.csv").write_text("\n".join(["user,f,label", *rows]))
    data = {"reader": "table", "path": "t.csv", "features": ["f"]}
    x = build_data(config(data=data, preparation={"standardise": True}), tmp_path).columns["x"]
    made = build_data(config(data=data), tmp_path)
    plain = np.asarray(made.columns["x"], np.float64)
    train = plain[made.split_rows("train")]
    assert len(train) == 16, "the file has no split, so it is divided here: valid and test shape nothing"
    assert np.allclose(x, (plain - train.mean()) / train.std(), rtol=1e-6)


def test_a_run_keeps_its_encoding(tmp_path: Path) -> None:
    wanted = text_config(run={"rounds": 2, "cohort": 2, "engine": "sequential"})
    run_config(wanted, folder=tables(tmp_path), out=tmp_path / "run")
    info = read_info(tmp_path / "run")
    assert info["data"]["encoding"] == build_data(wanted, tmp_path).meta["encoding"]


@pytest.mark.parametrize("by", ["client", "example"])
@pytest.mark.parametrize("order", ["random", "chronological"])
def test_examples_that_are_drawn_to_opt_out_shape_no_vocabulary_and_no_scale(
    tmp_path: Path, by: str, order: str
) -> None:
    rows = [f"u{n % 5},all own{n},{n % 2},{n * n},{n}" for n in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["user,text,label,x,time", *rows]))
    drawn = {"split": {"order": order}, "opt_out": {"fraction": 0.4, "by": by}}
    texts = config(
        data={"reader": "table", "path": "t.csv", "tokens": "word", **drawn},
        model={"kind": "text_classifier", "embedding_dim": 2, "hidden": 2},
    )
    source = build_source(texts.data, 0, tmp_path)
    made = source.prepared(texts.preparation)
    inside = np.asarray(made.columns["opted_in"])
    own = np.asarray(made.columns["time"])
    trains = np.zeros(len(inside), bool)
    trains[made.split_rows("train")] = True
    shape = inside & trains
    told = source.summary().columns["text"].counts  # type: ignore[attr-defined]
    assert 10 < shape.sum() < inside.sum() < 35
    assert told == {"all": int(shape.sum())} | {f"own{n}": 1 for n in own[shape].tolist()}
    assert set(made.meta["vocabulary"]["symbols"]) == set(told)
    numbers = config(data={"reader": "table", "path": "t.csv", "features": ["x"], **drawn})
    scaled = build_source(numbers.data, 0, tmp_path).prepared(Rules(standardise=True))
    assert np.array_equal(scaled.columns["opted_in"], inside)  # type: ignore[arg-type]
    assert np.array_equal(scaled.columns["time"], own)  # type: ignore[arg-type]
    assert scaled.meta["standardised"]["means"] == pytest.approx([(own[shape].astype(float) ** 2).mean()])


def test_a_device_that_draws_none_to_opt_out_fits_one_that_does(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "\n".join(["user,text,label", *(f"u{n % 4},t{n},{n % 2}" for n in range(16))])
    )
    table = {"reader": "table", "path": "t.csv"}
    some, all_in = (
        build_source(DataConfig.model_validate({**table, **more}), 0, tmp_path)
        for more in ({"opt_out": {"fraction": 0.5}}, {})
    )
    encoding = Encoding.of(merged([some.summary(), all_in.summary()]))
    assert "opted_in" not in encoding.columns
    assert some.encoded(encoding).columns["opted_in"].sum() == 8  # type: ignore[union-attr]
    assert "opted_in" not in all_in.encoded(encoding).columns


def test_where_a_table_divides_anew_the_texts_that_then_train_alone_count(tmp_path: Path) -> None:
    rows = [
        f"u{u},only{u}x{k},{k % 2},{'test' if k < 2 else 'train'},{k}" for u in range(4) for k in range(10)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["user,text,label,split,time", *rows]))
    table = {"reader": "table", "path": "t.csv", "tokens": "word"}
    for more, train in (
        ({}, range(2, 10)),
        ({"split": {"order": "chronological", "fractions": [0.6, 0.2, 0.2]}}, range(6)),
        ({"split": {"order": "random"}, "opt_out": {"fraction": 0.3, "by": "example"}}, None),
    ):
        source = build_source(DataConfig.model_validate({**table, **more}), 0, tmp_path)
        data = source.prepared()
        rows_ = data.split_rows("train")
        if train is None:
            rows_ = rows_[np.asarray(data.columns["opted_in"])[rows_]]
        else:
            assert sorted(set(np.asarray(data.columns["time"])[rows_].tolist())) == list(train)
        known = [row for row in range(data.examples) if data.columns["text"][row][0] > 1]
        assert known == sorted(rows_.tolist())
        assert source.encoded(Encoding.of(source.summary())).fingerprint() == data.fingerprint()
