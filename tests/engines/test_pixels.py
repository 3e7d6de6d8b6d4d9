"""Masks as labels: the loss of each pixel, metrics of those that count, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import FederatedData, Phase, sgd
from fedkeep.core.errors import DataError, MethodError
from fedkeep.metrics import mean_iou
from fedkeep.report.runs import read_run
from tests.refusals import raises

SIDE, CLASSES = 6, 3


class Segmenter(nn.Module):
    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(1, 4, 3, stride, padding=1)
        self.head = nn.Conv2d(4, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image).relu())


def shapes(clients: int = 3, each: int = 6, **meta: Any) -> FederatedData:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(clients * each, 1, SIDE, SIDE)).astype("f4")
    mask = np.digitize(image[:, 0], [-0.5, 0.5])
    mask[rng.random(mask.shape) < 0.2] = -100
    split = (["train"] * (each - 2) + ["valid", "test"]) * clients
    about = {"task": "pixels", "classes": CLASSES} | meta
    return FederatedData.from_columns(
        np.repeat(np.arange(clients), each), {"image": image, "label": mask}, split, about
    )


LOCAL = Phase(optimizer=sgd(0.5), batch_size=3, epochs=2)
METHOD = fedkeep.methods.fedper("head.*", local=LOCAL)


def test_the_loss_is_that_of_torch() -> None:
    data, model = shapes(), Segmenter()
    batch = data.batch(range(data.examples))
    out = model(batch["image"]).detach()
    net = fedkeep.core.net.Net(model)
    wanted = nn.functional.cross_entropy(out, batch["label"], ignore_index=-100)
    assert float(LOCAL.loss(net, net.initial(), batch, {})) == pytest.approx(float(wanted), rel=1e-6)
    half = batch | {"weight": torch.tensor([1.0, 0.0] * (data.examples // 2))}
    kept = nn.functional.cross_entropy(out[::2], batch["label"][::2], ignore_index=-100)
    assert float(LOCAL.loss(net, net.initial(), half, {})) == pytest.approx(float(kept), rel=1e-6)


def test_metrics_are_of_pixels_that_count(tmp_path: Path) -> None:
    data = shapes()
    run = fedkeep.simulate(
        Segmenter(), METHOD, data, rounds=8, cohort=3, metrics=["mean_iou"], out=tmp_path / "run"
    )
    labels, guesses, losses = [], [], []
    for client in range(len(data)):
        model = Segmenter()
        model.load_state_dict(run.parameters(str(client)))
        batch = data.batch(data.rows(client, "test"))
        out, label = model(batch["image"]), batch["label"]
        loss = nn.functional.cross_entropy(out, label, ignore_index=-100, reduction="none")
        losses += loss[label >= 0].tolist()
        labels += label[label >= 0].tolist()
        guesses += out.argmax(1)[label >= 0].tolist()
    found = run.evaluate("test")
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean(np.equal(labels, guesses)))
    assert found["mean_iou"] == pytest.approx(mean_iou(labels, guesses))
    assert found["mean_iou"] > 0.6  # a threshold on the pixel itself
    examples = read_run(tmp_path / "run").examples
    assert examples("own").right.sum() == np.equal(labels, guesses).sum()


@pytest.mark.parametrize("engine", ["vectorised", "workers"])
def test_engines_agree(engine: str) -> None:
    ours, plain = (
        fedkeep.simulate(Segmenter(), METHOD, shapes(), rounds=2, cohort=3, engine=e, seed=1)
        for e in (engine, "sequential")
    )
    for name, value in plain.server.items():
        assert torch.allclose(ours.server[name], value, atol=1e-6)
    assert ours.evaluate("test") == pytest.approx(plain.evaluate("test"), rel=1e-5)


def test_a_model_of_another_size_is_told_before_training() -> None:
    with raises(MethodError, said="(B, classes, H, W)"):
        fedkeep.simulate(Segmenter(stride=2), METHOD, shapes(), rounds=1, cohort=3)


@pytest.mark.parametrize(
    ("label", "facts"),
    [
        (np.zeros((2, 4, 4), int), {"column": "image", "height": SIDE, "got_height": 4}),
        (
            np.full((2, SIDE, SIDE), 255),
            {"got": 255, "row": 0, "client": "0", "ignored": ", and -100 for what does not count"},
        ),
        (np.zeros((2, SIDE), int), {}),
    ],
)
def test_masks_that_do_not_fit(label: Any, facts: dict[str, Any]) -> None:
    image = np.zeros((2, 1, SIDE, SIDE), np.float32)
    with raises(DataError, **facts):
        FederatedData.from_columns(
            [0, 1], {"image": image, "label": label}, meta={"task": "pixels", "classes": CLASSES}
        )
