"""Images shifted, mirrored or transformed: by hand, and only where gradients are taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Phase, methods, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.data import ImageSet, majority
from fedkeep.methods.augment import Augmented, moved
from fedkeep.methods.fedprox import Proximal
from fedkeep.methods.terms import Term, cross_entropy, l2_penalty
from fedkeep.models import CNN
from tests.refusals import raises
from tests.tiny import same_bits

NUMBERS = torch.arange(12, dtype=torch.uint8).reshape(1, 1, 3, 4)


def plain(image: Tensor, down: int, right: int, mirrored: bool) -> list[list[int]]:
    """Return image[clamp(y + down), clamp(x + right)], mirrored, in lists."""
    rows = image[0, 0].tolist()
    found = [[rows[min(max(y + down, 0), 2)][min(max(x + right, 0), 3)] for x in range(4)] for y in range(3)]
    return [row[::-1] if mirrored else row for row in found]


def test_every_image_is_one_of_the_shifts_by_hand_and_all_occur() -> None:
    torch.manual_seed(0)
    out = moved(NUMBERS.expand(400, -1, -1, -1), 1, True)
    assert (out.shape, out.dtype) == ((400, 1, 3, 4), torch.uint8)
    shifts = {str(plain(NUMBERS, d, r, m)) for d in (-1, 0, 1) for r in (-1, 0, 1) for m in (False, True)}
    assert len(shifts) == 18
    assert {str(image[0].tolist()) for image in out} == shifts
    assert plain(NUMBERS, 1, -1, False) == [[4, 4, 5, 6], [8, 8, 9, 10], [8, 8, 9, 10]]


def test_channels_move_together() -> None:
    image = torch.stack([NUMBERS[0, 0], NUMBERS[0, 0] + 100])[None].float()
    out = moved(image.expand(50, -1, -1, -1), 2, True)
    assert torch.equal(out[:, 0] + 100, out[:, 1])
    assert torch.equal(moved(image, 0, False), image)


def darker(image: Tensor) -> Tensor:
    """Return an image times a draw of its own, as a transform of torchvision's would: by Python's ``if``."""
    return image.float() * torch.rand(1) if bool(torch.rand(1) < 0.5) else image.float()


def test_a_transform_is_given_each_image_alone_and_draws_by_the_clients_seed() -> None:
    module = Sees()
    net, term = Net(module), Augmented(cross_entropy(), transform=darker)
    images = NUMBERS.expand(30, -1, -1, -1)
    batch = {"image": images, "label": torch.zeros(30, dtype=torch.int64)}
    torch.manual_seed(5)
    term(net, net.initial(), batch, {})
    torch.manual_seed(5)
    wanted = torch.stack([darker(image) for image in images])
    assert torch.equal(module.seen[0], wanted)
    with torch.no_grad():
        term(net, net.initial(), batch, {})
    assert torch.equal(module.seen[1], images / 255)


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_a_run_with_a_transform_repeats_to_the_bit(engine: str) -> None:
    images = np.random.default_rng(0).random((24, 1, 6, 6), np.float32)
    data = FederatedData.from_columns(
        [f"c{n % 3}" for n in range(24)], {"image": images, "label": np.arange(24) % 2}, ["train"] * 24
    )
    loss = Augmented(cross_entropy(), transform=darker)

    def run(loss: Term) -> Params:
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
        for value in model.parameters():
            nn.init.constant_(value, 0.1)
        method = methods.fedavg(local=Phase(loss=loss, batch_size=4))
        return simulate(model, method, data, rounds=2, engine=engine, progress=False).server

    assert same_bits(run(loss), run(loss))
    assert not same_bits(run(loss), run(cross_entropy()))


class Sees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.seen: list[Tensor] = []

    def forward(self, image: Tensor) -> Tensor:
        self.seen.append(image)
        return self.w * image.flatten(1)[:, :2].float()


def test_validation_losses_see_images_as_they_are() -> None:
    module = Sees()
    net, term = Net(module), Augmented(cross_entropy(), 1)
    batch = {"image": NUMBERS.expand(30, -1, -1, -1), "label": torch.zeros(30, dtype=torch.int64)}
    term(net, net.initial(), batch, {})
    assert not torch.equal(module.seen[0], batch["image"])
    with torch.no_grad():
        same = term(net, net.initial(), batch, {})
        assert float(same) == float(cross_entropy()(net, net.initial(), batch, {}))
    assert torch.equal(module.seen[1], batch["image"] / 255)


def test_what_the_term_reads_is_what_its_own_reads() -> None:
    assert not Augmented(cross_entropy()).reads_parameters
    assert Augmented(cross_entropy() + l2_penalty("*")).reads_parameters
    assert Augmented(cross_entropy() + Proximal(1.0)).reads_received
    with raises(MethodError, column="picture", there=["image"]):
        Augmented(cross_entropy(), column="picture")(Net(Sees()), {}, {"image": NUMBERS}, {})
    with raises(MethodError, text="shift must be at least 0; got -1."):
        Augmented(cross_entropy(), -1)


def test_a_seed_draws_the_same_images() -> None:
    labels = torch.arange(80).numpy() % 4
    shown = torch.randint(
        0, 256, (80, 1, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    data = majority(ImageSet(shown.numpy(), labels, 60, ["a", "b", "c", "d"]), 2, 0.5, 20, 8)
    torch.manual_seed(0)
    model = CNN(4, 1, 16, widths=(3, 4), hidden=(16, 8), dropout=0.0)
    runs = [
        simulate(
            model, methods.fedavg(local=Phase(loss=loss, batch_size=5)), data, rounds=2, seed=seed
        ).server
        for loss, seed in (
            (Augmented(cross_entropy()), 1),
            (Augmented(cross_entropy()), 1),
            (cross_entropy(), 1),
        )
    ]
    assert same_bits(runs[0], runs[1])
    assert not same_bits(runs[0], runs[2])
