"""The CNNs and the gate, against the same in plain functions, and their sizes by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedkeep import Split, check_split, methods, simulate
from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.net import Net
from fedkeep.data import ImageSet, majority, opt_out
from fedkeep.models import CNN, CifarCNN, FashionCNN, Gate
from tests.refusals import raises


def images(n: int, channels: int, side: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, channels, side, side), generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # conv 3·6·25 + 6, conv 6·16·25 + 16, 400·120 + 120, 120·84 + 84, 84·10 + 10
        (CifarCNN(10), 456 + 2_416 + 48_120 + 10_164 + 850),
        (CifarCNN(100), 456 + 2_416 + 48_120 + 10_164 + 8_500),
        # conv 1·6·25 + 6, conv 6·12·25 + 12, 192·84 + 84, 84·42 + 42, 42·10 + 10
        (FashionCNN(10), 156 + 1_812 + 16_212 + 3_570 + 430),
        (Gate(CifarCNN(1)), 456 + 2_416 + 48_120 + 10_164 + 85),
        (Gate(FashionCNN(1)), 156 + 1_812 + 16_212 + 3_570 + 43),
    ],
)
def test_numbers_of_parameters_by_hand(model: nn.Module, expected: int) -> None:
    assert sum(p.numel() for p in model.parameters()) == expected


def plain(model: CNN, image: Tensor) -> Tensor:
    p = dict(model.named_parameters())
    x = (image.to(torch.float64) / 255 - 0.5) / 0.5
    x = F.max_pool2d(F.conv2d(x, p["conv1.weight"], p["conv1.bias"]).clamp(min=0), 2)
    x = F.max_pool2d(F.conv2d(x, p["conv2.weight"], p["conv2.bias"]).clamp(min=0), 2)
    for name in ("fc1", "fc2"):
        x = (x.reshape(len(x), -1) @ p[f"{name}.weight"].T + p[f"{name}.bias"]).clamp(min=0)
    return x @ p["out.weight"].T + p["out.bias"]


@pytest.mark.parametrize(("model", "shape"), [(CifarCNN(7), (3, 32)), (FashionCNN(7), (1, 28))])
def test_the_layers(model: CNN, shape: tuple[int, int]) -> None:
    model = model.double().eval()
    image = images(3, *shape)
    torch.testing.assert_close(model(image), plain(model, image), rtol=0, atol=1e-12)
    torch.testing.assert_close(model(image.double() / 255), model(image), rtol=0, atol=1e-12)
    net = Net(model)
    values = net.initial()
    features = net.call("features", values, {"image": image})
    assert features.shape == (3, model.fc2.out_features)
    assert torch.equal(net.call("head", values, {"features": features}), net(values, {"image": image}))


def test_one_output_is_a_prediction_for_each_image() -> None:
    assert CNN(1, 1, 16)(torch.zeros(3, 1, 16, 16)).shape == (3,)


def test_many_clients_at_once() -> None:
    """Stacked parameters under vmap give what each client gives alone: the network has no data-dependent branch."""
    model = CNN(4, 1, 16, widths=(3, 4), hidden=(16, 8)).double().eval()
    net = Net(model)
    stacked = {name: torch.stack([v, v.flip(0) * 0.9]) for name, v in net.initial().items()}
    image = images(6, 1, 16).unflatten(0, (2, 3))
    together = torch.func.vmap(lambda p, x: net(p, {"image": x}))(stacked, image)
    for client in range(2):
        alone = net({name: v[client] for name, v in stacked.items()}, {"image": image[client]})
        torch.testing.assert_close(together[client], alone, rtol=0, atol=1e-12)


def test_dropout_stands_behind_the_first_linear_layer() -> None:
    model = CifarCNN(10, dropout=0.5)
    image = images(2, 3, 32)
    assert not torch.equal(model(image), model(image))
    seen: list[Tensor] = []
    model.drop.register_forward_hook(lambda _module, given, _out: seen.append(given[0]))
    model.eval()
    assert torch.equal(model(image), model(image))
    assert seen[0].shape == (2, 120)
    assert (seen[0] >= 0).all()  # after the ReLU


def test_images_of_another_size() -> None:
    with raises(DataError, wanted=(3, 32, 32), got=(1, 28, 28), model="CifarCNN"):
        CifarCNN(10)(images(2, 1, 28))
    for side in (12, 30):
        with raises(ConfigError, text=f"side must be a multiple of 4, at least 16; got {side}."):
            CNN(10, 3, side)
    assert CNN(10, 2, 16)(images(2, 2, 16)).shape == (2, 10)


def tiny() -> ImageSet:
    draw = np.random.default_rng(0)
    labels = np.tile(np.arange(4), 20)
    shown = draw.integers(0, 60, (80, 1, 16, 16), dtype=np.uint8)
    shown[np.arange(80), 0, 4 * labels, :] = 250  # a bright line whose height is the class
    return ImageSet(shown, labels, 60, [f"line {c}" for c in range(4)], "lines")


def test_it_trains_on_bytes_with_a_private_head_and_opted_out_clients() -> None:
    model = CNN(4, 1, 16, widths=(3, 4), hidden=(16, 8), dropout=0.0)
    data = opt_out(majority(tiny(), 2, 0.5, 24, 8, seed=1), 0.5)
    batch = data.batch(data.rows(0, "train"))
    assert batch["image"].dtype == torch.uint8
    loss = methods.terms.cross_entropy()
    batches = [batch, data.batch(data.rows(1, "train"))]
    assert check_split(model, Split("out.*"), batches, loss=loss).ok
    run = simulate(model, methods.furl("out.*"), data, rounds=3, cohort=2)
    assert run.evaluate("valid")["loss"] > 0
