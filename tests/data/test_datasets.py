"""Data frames and PyTorch data sets, as people hold them, become federated data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import fedkeep
from fedkeep import FederatedData
from fedkeep.core.errors import DataError

FRAME = pyarrow.table(
    {
        "who": ["b", "a", "b", "a"],
        "km": [1.0, 2.0, 3.0, 4.0],
        "rain": [True, False, False, True],
        "way": ["bus", "bike", "bike", "bus"],
    }
)


class Dicts:
    """Examples as mappings, as Hugging Face's data sets give them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]


def pairs(n: int, width: int = 3) -> TensorDataset:
    return TensorDataset(torch.arange(n * width, dtype=torch.float32).view(n, width), torch.arange(n) % 2)


def test_a_frames_other_numbers_are_features() -> None:
    data = FederatedData.from_frame(FRAME, client="who", label="way", standardise=False)
    assert list(data.ids) == ["a", "b"]
    assert data.meta["label_names"] == ["bike", "bus"]
    np.testing.assert_array_equal(data.columns["x"], np.array([[2, 0], [4, 1], [1, 1], [3, 0]], np.float32))
    np.testing.assert_array_equal(data.columns["label"], [0, 1, 1, 0])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_of_other_libraries(library: str) -> None:
    frames = pytest.importorskip(library)
    data = FederatedData.from_frame(frames.DataFrame(FRAME.to_pydict()), client="who", label="way")
    expected = FederatedData.from_frame(FRAME, client="who", label="way")
    assert data.fingerprint() == expected.fingerprint()


@pytest.mark.parametrize(
    ("frame", "options", "facts"),
    [
        (FRAME, {"client": "whom"}, {"column": "whom"}),
        (
            FRAME.append_column("tags", [[["x"]] * 4]),
            {"client": "who"},
            {"column": "tags", "got": "'x' in step 0"},
        ),
        (FRAME.slice(0, 0), {"client": "who"}, {}),
        (FRAME.append_column("km", [[1.0] * 4]), {"client": "who"}, {"column": "km"}),
        ([1, 2], {"client": "who"}, {"got": "list"}),
        (
            SimpleNamespace(columns=["who", "km", "km"]),
            {"client": "who"},
            {"column": "km"},
        ),  # as pandas lets one
        (SimpleNamespace(columns=3), {"client": "who"}, {"got": "SimpleNamespace"}),
    ],
)
def test_frames_that_do_not_fit(frame: Any, options: dict[str, Any], facts: dict[str, Any]) -> None:
    with pytest.raises(DataError) as error:
        FederatedData.from_frame(frame, label="way", **options)
    assert facts.items() <= error.value.facts.items()


def test_a_frame_in_place_of_columns_is_told_where_it_goes() -> None:
    with pytest.raises(DataError, match="from_frame") as error:
        FederatedData.from_columns(["a", "b", "a", "b"], FRAME)
    assert error.value.facts["got"] == "Table"


def test_pairs_are_x_and_label() -> None:
    data = FederatedData.from_datasets({"b": pairs(2), "a": pairs(3)})
    assert list(data.ids) == ["a", "b"]
    assert data.columns["x"].shape == (5, 3)
    np.testing.assert_array_equal(data.columns["label"], [0, 1, 0, 0, 1])
    assert data.bounds is None


def test_random_transforms_are_warned_of() -> None:
    class Flipped(TensorDataset):
        def __getitem__(self, number: int) -> Any:
            x, label = super().__getitem__(number)
            return x + torch.rand(3), label

    with pytest.warns(UserWarning, match="Example 0 of client 'a' differs.*Augmented"):
        FederatedData.from_datasets({"a": Flipped(*pairs(3).tensors)})


def test_splits_of_each_client() -> None:
    data = FederatedData.from_datasets({c: {"train": pairs(4), "test": pairs(2)} for c in ("a", "b")})
    assert data.counts("train").tolist() == [4, 4]
    assert data.counts("valid").tolist() == [0, 0]
    assert data.counts("test").tolist() == [2, 2]


def test_mappings_and_sequences_of_different_lengths() -> None:
    rows = [{"text": [1, 2, 3], "label": 0}, {"text": [4], "label": 1}]
    data = FederatedData.from_datasets({7: Dicts(rows)})
    batch = data.batch(range(2))
    assert batch["text"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch["text_length"].tolist() == [3, 1]


@pytest.mark.parametrize(
    ("datasets", "facts"),
    [
        ({}, {"got": "dict"}),
        ([pairs(2)], {"got": "list"}),
        ({"a": pairs(2), "b": pairs(2, width=4)}, {"name": "x", "got": (4,), "wanted": (3,), "client": "b"}),
        ({"a": pairs(2), "b": {"train": pairs(2)}}, {"client": "b"}),
        ({"a": {"training": pairs(2)}}, {"client": "a"}),
        ({"a": iter([])}, {"client": "a", "got": "list_iterator"}),
        ({"a": Dicts([{"x": "text", "label": 0}])}, {"got": "str"}),
        ({"a": Dicts([{"x": 1.0, "label": 0}, {"x": 1.0}])}, {"got": ["x"], "wanted": ["label", "x"]}),
        ({"a": TensorDataset(torch.zeros(2, 3))}, {"got": 1}),
        ({"a": Dicts([])}, {}),
    ],
)
def test_data_sets_that_do_not_fit(datasets: Any, facts: dict[str, Any]) -> None:
    with pytest.raises(DataError) as error:
        FederatedData.from_datasets(datasets)
    assert facts.items() <= error.value.facts.items()


def test_data_that_were_not_split_train_by_the_usual_rule() -> None:
    data = FederatedData.from_datasets({c: pairs(10) for c in "abc"})
    model = torch.nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="80 %"):
        run = fedkeep.simulate(model, fedkeep.methods.fedavg(), data, rounds=1)
    assert run.data.counts("train").tolist() == [8, 8, 8]
    assert run.data.counts("test").tolist() == [1, 1, 1]


@pytest.mark.parametrize(("mode", "shape"), [("RGB", (2, 3, 5, 4)), ("L", (2, 1, 5, 4))])
def test_images_of_pillow_have_their_channels_first(mode: str, shape: tuple[int, ...]) -> None:
    images = Dicts([{"image": Image.new(mode, (4, 5)), "label": n} for n in range(2)])
    column = FederatedData.from_datasets({"a": images}).columns["image"]
    assert isinstance(column, np.ndarray)
    assert (column.shape, column.dtype) == (shape, np.uint8)


@pytest.mark.parametrize("divided", [True, False])
def test_data_sets_larger_than_memory_lie_in_a_folder(divided: bool, tmp_path: Path) -> None:
    sizes = {"b": 12, "a": 7, "none": 0}
    whole = {client: pairs(n) for client, n in sizes.items()}
    parts: Any = {c: {"test": pairs(2), "train": pairs(n)} for c, n in sizes.items() if n}
    given = parts if divided else whole
    wanted = FederatedData.from_datasets(given)
    found = FederatedData.from_datasets(given, folder=tmp_path / "new" / "examples")
    assert found.fingerprint() == (wanted if divided else wanted.split_per_user()).fingerprint()
    x = found.columns["x"]
    assert isinstance(x.base if isinstance(x, np.ndarray) else None, np.memmap)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["examples"]
    assert FederatedData.load(tmp_path / "new" / "examples").fingerprint() == found.fingerprint()
    run = fedkeep.simulate(
        torch.nn.Linear(3, 2), fedkeep.methods.fedavg(), found, rounds=1, cohort=2, progress=False
    )
    assert 0 <= run.evaluate()["accuracy"] <= 1


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"a": pairs(2), "b": pairs(2, 4)}, {"name": "x", "shape": (4,), "wanted": (3,)}),
        ({"a": Dicts([{"x": 1, "label": 0}, {"x": 0.5, "label": 0}])}, {"name": "x"}),
        ({"a": Dicts([{"x": 1, "label": 0}, {"y": 1, "label": 0}])}, {}),
        ({"a": pairs(0)}, {}),
        ([pairs(2)], {"got": "list"}),
    ],
)
def test_what_a_folder_refuses_and_nothing_is_left(given: Any, facts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        FederatedData.from_datasets(given, folder=tmp_path / "new")
    assert facts.items() <= error.value.facts.items()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError):
        FederatedData.from_datasets({"a": pairs(2)}, folder=tmp_path)
