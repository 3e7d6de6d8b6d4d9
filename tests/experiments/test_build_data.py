"""From a configuration to data: readers, splits, partitions, and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.data import FederatedData, cifar10, class_counts, majority, opt_out, toy
from fedkeep.experiments import sources
from fedkeep.experiments.build import build_data, build_source, data_folder, run_config
from fedkeep.experiments.config import parse_config
from fedkeep.experiments.sources import Reader
from tests.experiments.configs import config
from tests.refusals import raises


def test_generated_data_take_the_seed_unless_they_name_their_own() -> None:
    drawn = build_data(config(seed=5))
    assert drawn.fingerprint() == toy(seed=5).fingerprint()
    fixed = build_data(config(seed=5, data={"reader": "toy", "seed": 2, "users": 3}))
    assert fixed.fingerprint() == toy(users=3, seed=2).fingerprint()


@pytest.mark.parametrize("kind", ["str", "Path", "str | Path"])
def test_a_reader_of_ones_own_is_given_its_path_as_it_wants_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_reader_{kind.replace(' | ', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "from pathlib import Path\nimport fedkeep\n"
        f"def read(path: {kind}) -> fedkeep.FederatedData:\n"
        "    assert isinstance(path, str if 'str' == '" + kind + "' else Path)\n"
        "    return fedkeep.data.toy(users=3, examples=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = build_data(config(data={"reader": f"{name}:read", "path": "my.bin"}), tmp_path)
    assert len(data.ids) == 3


def test_a_split_of_its_own() -> None:
    split = {"fractions": [0.5, 0.25, 0.25], "seed": 3}
    made = build_data(config(data={"reader": "toy", "seed": 0, "split": split}))
    expected = toy(seed=0).split_per_user((0.5, 0.25, 0.25), seed=3)
    assert made.fingerprint() == expected.fingerprint()


def test_a_column_of_splits_has_the_name_that_the_configuration_gives(tmp_path: Path) -> None:
    parts = ["test", "train", "valid", "train"] * 3
    (tmp_path / "t.csv").write_text(
        "\n".join(["user,f,label,part", *(f"a,{n},{n % 2},{part}" for n, part in enumerate(parts))]) + "\n"
    )
    table = {"reader": "table", "path": "t.csv", "features": ["f"], "standardise": False}
    wanted = config(data=table | {"split": "part"})
    assert parse_config(wanted.to_toml()) == wanted
    source = build_source(wanted.data, 0, tmp_path)
    made = source.prepared()
    assert np.asarray(made.columns["x"])[:, 0].tolist() == [1, 3, 5, 7, 9, 11, 2, 6, 10, 0, 4, 8]
    assert [made.count(0, s) for s in ("train", "valid", "test")] == [6, 3, 3]
    assert source.settled(made) == wanted.data  # nothing was drawn
    with pytest.raises(DataError, match="has no column 'prt'; .* Did you mean 'part'?"):
        build_data(config(data=table | {"split": "prt"}), tmp_path)


def test_a_column_of_splits_that_nobody_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, reader="toy", split="part"):
        build_data(config(data={"reader": "toy", "split": "part"}))
    whole = FederatedData({"x": np.ones((9, 2)), "label": np.arange(9) % 2}, [0, 9], ["a"])
    monkeypatch.setattr(sources, "offered_readers", lambda: {"deaf": Reader(lambda split: whole)})
    with pytest.raises(DataError, match="^data.split names 'part', but.*'deaf'"):
        build_data(config(data={"reader": "deaf", "split": "part"}))


def test_data_without_a_split_are_split(tmp_path: Path) -> None:
    whole = FederatedData({"x": np.ones((20, 2)), "label": np.arange(20) % 2}, [0, 10, 20], ["a", "b"])
    whole.save(tmp_path / "mine")
    made = build_data(config(seed=4, data={"reader": "saved", "folder": "mine"}), tmp_path)
    assert made.fingerprint() == whole.split_per_user(seed=4).fingerprint()
    assert [made.count(0, s) for s in ("train", "valid", "test")] == [8, 1, 1]


def test_a_place_is_looked_up_in_the_folder_of_data(tmp_path: Path) -> None:
    toy(users=3).save(tmp_path / "mine")
    relative, absolute = (
        {"reader": "saved", "folder": "mine"},
        {"reader": "saved", "folder": str(tmp_path / "mine")},
    )
    assert len(build_data(config(data=relative), tmp_path)) == 3
    assert len(build_data(config(data=relative), tmp_path / "mine")) == 3  # the data set's own folder
    assert len(build_data(config(data=absolute))) == 3


@pytest.mark.parametrize(
    ("data", "folder", "kind", "message"),
    [
        ({"reader": "toi"}, None, ConfigError, "data.reader: there is no reader 'toi'."),
        (
            {"reader": "table"},
            ".",
            ConfigError,
            "data.path: missing. It says where in the folder of data to read.",
        ),
        ({"reader": "table", "path": 3}, ".", ConfigError, "data.path: wanted a path as text; got 3."),
        ({"reader": "movielens"}, None, DataError, "The reader 'movielens' wants a folder of data."),
        ({"reader": "movielens"}, "none", DataError, "The folder of data none does not exist."),
        ({"reader": "movielens"}, __file__, DataError, f"The folder of data {__file__} is no folder."),
        (
            {"reader": "toy", "split": {"order": 1}},
            None,
            ConfigError,
            "data.split.order: wanted a text; got 1.",
        ),
        (
            {"reader": "toy", "split": {"odrer": "x"}},
            None,
            ConfigError,
            "data.split.odrer: unknown key. Did you mean data.split.order?",
        ),
    ],
)
def test_data_that_cannot_be_read(
    data: dict[str, Any],
    folder: str | None,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as error:
        build_data(config(data=data), None if folder is None else Path(folder))
    assert str(error.value).startswith(message)


def test_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    assert data_folder(None) is None
    monkeypatch.setenv("FEDKEEP_DATA", "there")
    assert data_folder(None) == Path("there")
    assert data_folder(Path("here")) == Path("here")


# --- images


def pictures(folder: Path) -> Path:
    """Write 80 images of 10 classes, as the lossless part of CIFAR-10 lies in a folder of data."""
    (folder / "cifar10").mkdir()
    draw = np.random.default_rng(0)
    np.savez(
        folder / "cifar10" / "cifar10_train4000_lossless.npz",
        images=draw.integers(0, 256, (80, 32, 32, 3), dtype=np.uint8),
        labels=np.tile(np.arange(10, dtype=np.uint8), 8),
    )
    return folder


LOSSLESS = {"reader": "cifar10", "form": "lossless"}
MAJORITY = {"kind": "majority", "clients": 2, "p": 0.5, "train": 16, "valid": 8, "valid_from": "train"}


def test_images_are_partitioned_and_some_stay_out(tmp_path: Path) -> None:
    data = {**LOSSLESS, "partition": MAJORITY, "opt_out": {"fraction": 0.5}}
    settings = config(
        seed=3,
        data=data,
        model={"kind": "cifar_cnn"},
        method={"kind": "fedavg"},
        run={"rounds": 1, "cohort": 2},
    )
    made = build_data(settings, pictures(tmp_path))
    expected = majority(cifar10(tmp_path / "cifar10", "lossless"), 2, 0.5, 16, 8, valid_from="train", seed=3)
    assert made.fingerprint() == opt_out(expected, 0.5, seed=3).fingerprint()
    assert parse_config(settings.to_toml(), "again") == settings
    run = run_config(settings, folder=tmp_path, out=tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    assert kept["partition"] == made.meta["partition"]
    assert kept["opt_out"]["fraction"] == 0.5
    assert isinstance(run.evaluate("valid")["accuracy"], float)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            LOSSLESS,
            (
                "data.partition: missing. The reader 'cifar10' gives images that belong to no client; divide them by "
                "one of the kinds majority, dirichlet, shards, by_size, feature_shift."
            ),
        ),
        (
            {"reader": "toy", "partition": MAJORITY},
            (
                "data.partition: the reader 'toy' gives examples that belong to clients already. Leave the table out."
            ),
        ),
        (
            {**LOSSLESS, "partition": {"kind": "majorty"}},
            "data.partition.kind: there is no partition 'majorty'. Did you mean 'majority'?",
        ),
        (
            {**LOSSLESS, "partition": {**MAJORITY, "p": "0.5"}},
            "data.partition.p: wanted a number; got '0.5'.",
        ),
        ({**LOSSLESS, "partition": {"kind": "shards"}}, "data.partition: missing clients."),
        (
            {"reader": "toy", "opt_out": {"fractoin": 0.5}},
            ("data.opt_out.fractoin: unknown key. Did you mean data.opt_out.fraction?"),
        ),
    ],
)
def test_partitions_that_cannot_be_made(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    with raises(ConfigError, said=message):
        build_data(config(data=data), pictures(tmp_path))


@pytest.mark.parametrize("kind", ["dirichlet", "shards", "by_size"])
def test_rows_of_a_table_are_dealt_by_their_classes(kind: str, tmp_path: Path) -> None:
    lines = [f"{n},{'xyz'[n % 3]},{'test' if n % 5 == 0 else 'train'}" for n in range(90)]
    (tmp_path / "t.csv").write_text("\n".join(["a,label,split", *lines]) + "\n")
    options = {"alpha": 1.0, "least": 2} if kind == "dirichlet" else {}
    table = {"reader": "table", "path": "t.csv", "features": ["a"], "standardise": False}
    dealt = config(data={**table, "partition": {"kind": kind, "clients": 4, **options}})
    data = build_data(dealt, tmp_path)
    assert list(data.ids) == [f"client-{n}" for n in range(4)]
    numbers = np.asarray(data.columns["x"])[:, 0].astype(int)
    assert (np.asarray(data.columns["label"]) == numbers % 3).all()  # each row with its own label
    assert len(set(numbers.tolist())) == len(numbers) > 80
    assert {int(n) % 5 for n in numbers[data.split_rows("test")]} == {0}
    assert data.meta["partition"]["kind"] == kind
    assert class_counts(data).sum() == len(numbers)


def test_numbers_to_predict_have_no_classes_to_deal_by(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,label\n" + "".join(f"{n},{n}.5\n" for n in range(9)))
    table = {"reader": "table", "path": "t.csv", "features": ["a"], "task": "regression"}
    with raises(DataError):
        build_data(config(data={**table, "partition": {"kind": "shards", "clients": 2}}), tmp_path)


def test_noise_is_added_to_numbers_alone(tmp_path: Path) -> None:
    lines = [f"{n},{n % 3}{'abc'[n % 3]},{'' if n == 7 else n * 2},hi,{'xy'[n % 2]}" for n in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,kind,b,text,label", *lines]) + "\n")
    table = {"reader": "table", "path": "t.csv", "features": ["a", "kind", "b"], "standardise": False}
    shift = {"kind": "feature_shift", "clients": 3, "sigma": 0.3}
    data = build_data(config(data={**table, "partition": shift}), tmp_path)
    x = np.asarray(data.columns["x"])
    a, levels, missing = x[:, 0], x[:, 1:4], x[:, 5]
    assert set(levels.ravel().tolist()) == {0, 1}
    assert missing.sum() == 1
    spread = [np.abs(a - np.rint(a))[data.rows(client)].mean() for client in range(3)]
    assert min(spread) > 0.1  # none of them is whole any more
    texts = {"reader": "table", "path": "t.csv", "partition": shift}
    with raises(DataError, kind="feature_shift", columns=["label", "text"]):
        build_data(config(data=texts), tmp_path)
