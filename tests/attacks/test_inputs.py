"""Words and images from changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedkeep.attacks import Sighting, invert_image, psnr, rows_seen, words_f1
from fedkeep.attacks.inputs import first_layer, layer_input
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params


def test_words_are_the_rows_that_changed() -> None:
    table = nn.Embedding(10, 4)
    loss = table(torch.tensor([3, 7, 7])).pow(2).sum()
    (grad,) = torch.autograd.grad(loss, [table.weight])
    assert rows_seen(Sighting(changes={"e": -0.1 * grad}, clients=("anna",)), "e") == {3, 7}
    sent = Sighting(changes={"e": torch.ones(10, 4)}, clients=("anna",), rows={"e": torch.tensor([2, 5])})
    assert rows_seen(sent, "e") == {2, 5}


def test_noise_hides_words_unless_they_stand_out() -> None:
    draw = torch.Generator().manual_seed(0)
    for size, found in ((0.01, False), (3.0, True)):
        change = torch.zeros(500, 40)
        change[:50] = size
        noisy = Sighting(
            changes={"e": change + torch.randn(500, 40, generator=draw)}, clients=("anna",), noise=1.0
        )
        assert (words_f1(rows_seen(noisy, "e"), range(50)) > 0.95) == found


def test_f1_by_hand() -> None:
    """Two of three found and one wrong: 2 · 2 / (3 + 3). Padding counts in neither."""
    assert words_f1({0, 1, 2, 9}, {0, 1, 2, 3}) == pytest.approx(4 / 6)
    assert words_f1(set(), {1}) == 0


def test_the_input_of_a_linear_layer_is_exact_for_one_example() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(20, 5), torch.randn(1, 20)
    layer(x).logsumexp(1).sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert torch.allclose(
        layer_input(-0.1 * layer.weight.grad, -0.1 * layer.bias.grad).float(), x[0], atol=1e-5
    )


def test_psnr_by_hand() -> None:
    """An error of 0.1 everywhere: −10 log10 0.01 = 20 dB."""
    assert psnr(torch.full((1, 4, 4), 0.6), torch.full((1, 4, 4), 0.5)) == pytest.approx(20.0, abs=1e-5)
    assert psnr(torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)) == pytest.approx(60.0)


class Flat(nn.Module):
    """A classifier that looks at pixels as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(image.flatten(1))))


def loss(net: Net, params: Params, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(net(params, batch), batch["label"])


def test_an_image_from_one_step_and_not_from_noise() -> None:
    torch.manual_seed(0)
    net = Net(Flat())
    assert first_layer(net.module, list(net.trainable())) == "hidden"
    assert first_layer(net.module, ["out.weight", "out.bias"]) == "out"
    params = net.initial()
    image = torch.zeros(1, 1, 8, 8)
    image[..., 2:6, 3:7] = 0.8
    known = {n: v.clone().requires_grad_() for n, v in params.items()}
    value = loss(net, known, {"image": image, "label": torch.tensor([1])})
    grads = dict(zip(known, torch.autograd.grad(value, list(known.values())), strict=True))
    start = torch.full((1, 8, 8), 0.3)
    guess, found = psnr(start, image[0]), {}
    for noise in (0.0, 1.0):
        changes = {n: -0.1 * g + noise * torch.randn(g.shape) for n, g in grads.items()}
        seen = Sighting(changes=changes, clients=("anna",))
        found[noise] = psnr(invert_image(net, params, seen, start, 1, loss, steps=40), image[0])
    assert found[0.0] > guess + 5
    assert found[1.0] < guess + 2
    assert math.isfinite(found[1.0])
