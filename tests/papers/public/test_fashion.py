from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep.core.errors import DataError
from fedkeep.data import ImageSet
from fedkeep.experiments.reproductions import Request
from fedkeep.experiments.sources import READERS, Reader
from fedkeep_papers.kit.results import read_results
from fedkeep_papers.public import fashion
from fedkeep_papers.public.pfllib import FourLayerCNN, divided, pfllib_fashion


def pictures(each: int = 700, classes: int = 10) -> ImageSet:
    labels = np.repeat(np.arange(classes), each)
    return ImageSet(
        np.zeros((len(labels), 1, 2, 2), np.uint8),
        labels,
        len(labels) - 10,
        [f"c{c}" for c in range(classes)],
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_image_has_one_owner_and_a_full_client_gets_no_more(seed: int) -> None:
    images, clients = pictures(), 20
    data = divided(images, clients, 0.1, 0.2, seed=seed)
    taken = np.sort(np.asarray(data.columns["_image"]))
    assert np.array_equal(taken, np.arange(len(images)))  # training and test images merged, each used once
    assert np.array_equal(
        np.asarray(data.columns["label"]), images.labels[np.asarray(data.columns["_image"])]
    )
    counts = {split: data.counts(split) for split in ("train", "valid", "test")}
    whole = sum(counts.values())
    assert np.array_equal(counts["train"], np.floor(0.75 * whole).astype(int))
    quarter = whole - counts["train"]
    assert np.abs(counts["valid"] - 0.2 * quarter).max() <= 1
    assert counts["test"].min() >= 1
    have = np.zeros(clients)
    for c in range(10):  # class after class: who has 1/20 of all images already is left out
        own = np.bincount(
            data.clients_of(np.flatnonzero(np.asarray(data.columns["label"]) == c)), minlength=clients
        )
        full = have >= len(images) / clients
        assert not own[:-1][full[:-1]].any()
        assert own[-1] <= 1 or not full[-1]  # the last one gets what rounding leaves, in PFLlib too
        have += own


def test_proportions_are_dirichlets() -> None:
    """Of many draws of the first class, a client's share has the mean and variance of Dirichlet(alpha)."""
    clients, alpha = 5, 0.5
    shares = []
    for seed in range(300):
        data = divided(pictures(1000, 2), clients, alpha, 0.0, seed=seed)
        own = data.clients_of(np.flatnonzero(np.asarray(data.columns["label"]) == 0))
        shares.append(np.bincount(own, minlength=clients)[:-1] / 1000)
    mean, total = 1 / clients, alpha * clients
    found = np.array(shares)  # a draw is kept only if all have two images, which takes some of the extremes
    assert abs(found.mean() - mean) < 0.02
    assert found.var() == pytest.approx(mean * (1 - mean) / (total + 1), rel=0.15)


def test_refusals() -> None:
    with pytest.raises(DataError, match="Wanted clients ≥ 1, alpha > 0.*0.*1.*0.*0.1.*0.2"):
        divided(pictures(), 0, 0.1, 0.2)
    with pytest.raises(DataError, match="1000 draws left one of 40"):
        divided(pictures(12, 1), 40, 0.1, 0.2)


def test_the_network_is_theirs_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    net = FourLayerCNN(10)
    assert sum(p.numel() for p in net.parameters()) == 582_026
    plain = nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    plain.load_state_dict(dict(zip(plain.state_dict(), net.state_dict().values(), strict=True)))
    images = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8)
    assert torch.allclose(net(images), plain((images / 255 - 0.5) / 0.5), atol=1e-5)


def written(folder: Path, images: int = 60) -> None:
    rng = np.random.default_rng(0)
    for part, n in (("train", images), ("t10k", images // 6)):
        label = np.arange(n, dtype=np.uint8) % 10
        pixels = (rng.integers(0, 40, (n, 28, 28)) + 20 * label[:, None, None]).astype(np.uint8)
        for kind, magic, shape, values in (
            ("images", 2051, (n, 28, 28), pixels),
            ("labels", 2049, (n,), label),
        ):
            head = struct.pack(f">{1 + len(shape)}I", magic, *shape)
            axes = len(shape)
            (folder / f"{part}-{kind}-idx{axes}-ubyte.gz").write_bytes(
                gzip.compress(head + values.tobytes(), mtime=0)
            )


def test_both_protocols_from_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data" / "fashion_mnist"
    folder.mkdir(parents=True)
    written(folder)

    def few(folder: Path, limit: int | None = None, seed: int = 0) -> object:
        return pfllib_fashion(folder, 3, 1.0, 0.3, limit, seed)

    monkeypatch.setitem(READERS, "pfllib_fashion", Reader(few, "folder", "fashion_mnist"))  # type: ignore[arg-type]
    monkeypatch.setattr("fedkeep.experiments.sources.Offered", lambda *_: READERS)
    monkeypatch.setattr(fashion, "METHODS", {n: fashion.METHODS[n] for n in ("FedAvg", "FedPer")})
    request = Request(tmp_path / "data", tmp_path / "results", "quick", progress=False)
    path = fashion.public_fashion(request)
    first = path.read_bytes()
    rows = {(r.method, r.scene): r for r in read_results(path.with_suffix(".json"))}
    assert len(rows) == 4
    for method in ("FedAvg", "FedPer"):
        best, chosen = (rows[method, f"2 rounds, {p}"].value for p in fashion.PROTOCOLS.values())
        assert best is not None
        assert chosen is not None
        assert best >= chosen
    monkeypatch.setattr(fashion.Cell, "__call__", lambda *_, **__: pytest.fail("computed twice"))
    assert fashion.public_fashion(request).read_bytes() == first


def test_a_run_of_other_settings_or_data_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data" / "fashion_mnist"
    folder.mkdir(parents=True)
    written(folder)

    def few(folder: Path, limit: int | None = None, seed: int = 0) -> object:
        return pfllib_fashion(folder, 3, 1.0, 0.3, limit, seed)

    def values(**more: bool) -> list[float | None]:
        path = fashion.public_fashion(
            Request(tmp_path / "data", tmp_path / "out", "quick", progress=False, **more)
        )
        return [row.value for row in read_results(path.with_suffix(".json"))]

    monkeypatch.setitem(READERS, "pfllib_fashion", Reader(few, "folder", "fashion_mnist"))  # type: ignore[arg-type]
    monkeypatch.setattr("fedkeep.experiments.sources.Offered", lambda *_: READERS)
    monkeypatch.setattr(fashion, "METHODS", {"FedProx": {"kind": "fedprox", "mu": 0.01}})
    first = values()
    assert None not in first
    written(folder, 90)
    assert values(finished=True) == [None, None]
    assert None not in values()
    written(folder)
    monkeypatch.setattr(fashion, "METHODS", {"FedProx": {"kind": "fedprox", "mu": 3.0}})
    assert values(finished=True) == [None, None]
    assert None not in values()
    monkeypatch.setattr(fashion, "METHODS", {"FedProx": {"kind": "fedprox", "mu": 0.01}})
    assert values(finished=True) == first


def test_the_best_round_and_the_chosen_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        ("valid", 1, 0.5),
        ("test", 1, 0.7),
        ("valid", 2, 0.6),
        ("test", 2, 0.4),
        ("valid", 3, 0.6),
        ("test", 3, 0.9),
    ]
    text = "".join(
        f'{{"round": {n}, "epoch": {n}.0, "split": "{s}", "client": null, "metric": "accuracy", "value": {v}, "n": 10}}\n'
        for s, n, v in lines
    )
    (tmp_path / "records.jsonl").write_text(text)
    monkeypatch.setattr(fashion, "read_info", lambda _: {})
    found = fashion.found_of(tmp_path)
    assert (found.best, found.best_round, found.chosen, found.chosen_round) == (0.9, 3, 0.4, 2)
