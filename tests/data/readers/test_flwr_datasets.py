"""Partitioners of ``flwr_datasets`` and images of ``datasets``, where they are installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedkeep.core.errors import DataError
from fedkeep.data import FederatedData, class_counts, huggingface
from tests.refusals import raises

datasets = pytest.importorskip("datasets")
partitioner = pytest.importorskip("flwr_datasets.partitioner")


def rows() -> object:
    columns = {"x": np.arange(200.0), "who": [f"u{n % 3}" for n in range(200)], "y": np.arange(200) % 4}
    features = {"x": "float32", "who": "string"}
    kinds = {name: datasets.Value(kind) for name, kind in features.items()}
    return datasets.Dataset.from_dict(
        columns, features=datasets.Features(**kinds, y=datasets.ClassLabel(names=list("abcd")))
    )


def test_each_partition_is_a_client() -> None:
    made = partitioner.DirichletPartitioner(
        num_partitions=5, partition_by="y", alpha=0.5, min_partition_size=2
    )
    made.dataset = rows()
    data = huggingface(made, features=["x"], label="y", standardise=False)
    assert list(data.ids) == list("01234")
    assert data.counts().sum() == 200
    for client in range(5):
        own = np.sort(made.load_partition(client)["x"])
        assert np.array_equal(np.sort(np.asarray(data.columns["x"])[data.rows(client)][:, 0]), own)
    assert (class_counts(data).sum(axis=0) == 50).all()
    natural = partitioner.NaturalIdPartitioner(partition_by="who")
    natural.dataset = rows()
    assert list(huggingface(natural, features=["x"], label="y").ids) == ["u0", "u1", "u2"]
    few = huggingface(natural, features=["x"], label="y", clients=2)
    assert len(few.ids) == 2
    assert set(few.ids) < {"u0", "u1", "u2"}
    small = partitioner.DirichletPartitioner(
        num_partitions=150, partition_by="y", alpha=0.01, min_partition_size=5
    )
    small.dataset = rows()
    with raises(DataError, name="huggingface"):
        huggingface(small, features=["x"], label="y")


@pytest.mark.parametrize("kept", ["inside", "in files"])
def test_images_of_the_library(tmp_path: Path, kept: str) -> None:
    for grey in (3, 9):
        Image.fromarray(np.full((4, 5), grey, np.uint8)).save(tmp_path / f"{grey}.png")
    files = [str(tmp_path / f"{grey}.png") for grey in (3, 9)]
    made = datasets.Dataset.from_dict({"img": files, "label": [0, 1], "who": ["a", "b"]})
    made = made.cast_column("img", datasets.Image())
    if kept == "inside":
        made = made.map(lambda row: row)
    data = huggingface(made, user="who", image="img")
    image = np.asarray(data.columns["image"])
    assert (image.shape, image[:, 0, 0, 0].tolist()) == ((2, 1, 4, 5), [3, 9])
    per_client = {who: made.filter(lambda row, who=who: row["who"] == who) for who in ("a", "b")}
    direct = FederatedData.from_datasets({k: v.remove_columns("who") for k, v in per_client.items()})
    assert np.array_equal(np.asarray(direct.columns["img"]), image)
