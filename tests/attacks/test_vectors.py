"""A private vector, read from one upload and from predictions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import fedkeep
from fedkeep.attacks import Sighting, place_of, vector_from_predictions, vector_in_upload
from fedkeep.core.net import Net
from fedkeep.methods.base import forward


def model() -> fedkeep.models.DocumentModel:
    torch.manual_seed(0)
    return fedkeep.models.DocumentModel(40, 5, user_dim=8, embedding_dim=8, hidden=8, mlp=16)


def texts(count: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(1, 40, (count, 12), generator=draw)
    return {
        "text": text,
        "text_length": torch.full((count,), 12),
        "label": torch.randint(0, 5, (count,), generator=draw),
    }


def test_by_hand() -> None:
    """u = (1, −2); two units whose biases changed by 0.5 and −1: ΔW[:, user] = Δb uᵀ."""
    weight = torch.tensor([[9.0, 0.5, -1.0], [7.0, -1.0, 2.0]])
    seen = Sighting(changes={"l.weight": weight, "l.bias": torch.tensor([0.5, -1.0])}, clients=("anna",))
    assert vector_in_upload(seen, "l", slice(1, 3)).tolist() == pytest.approx([1.0, -2.0], abs=1e-12)


def trained(steps: int) -> tuple[Sighting, torch.Tensor]:
    """Return the change of the federated part after steps of SGD in plain PyTorch, and the vector it began with."""
    net, batch = model(), texts(6)
    user = torch.randn(8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        net.user.copy_(user)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    for step in range(steps):
        chosen = torch.arange(6) if steps == 1 else torch.tensor([step % 6, (step + 1) % 6])
        loss = F.cross_entropy(
            net(batch["text"][chosen], batch["text_length"][chosen]), batch["label"][chosen]
        )
        for parameter, slope in zip(
            net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True
        ):
            parameter.data -= 0.5 * slope
    after = dict(net.named_parameters())
    changes = {n: after[n].detach() - v for n, v in before.items() if n != "user"}
    return Sighting(changes=changes, clients=("anna",)), user


@pytest.mark.parametrize(("steps", "error", "cosine"), [(1, 2e-6, 1 - 1e-9), (6, 0.2, 0.99)])
def test_one_upload_gives_the_vector(steps: int, error: float, cosine: float) -> None:
    """Exact but for rounding after one step, near after six; the private vector never left."""
    seen, user = trained(steps)
    net = Net(model())
    assert "user" not in seen.changes
    place = place_of(net, net.initial(), texts(3), "user")
    assert place == ("mlp.1", slice(16, 24))
    found = vector_in_upload(seen, *place)
    assert float((found - user).norm() / user.norm()) < error
    assert float(F.cosine_similarity(found, user.double(), dim=0)) > cosine


def test_noise_ends_it() -> None:
    seen, user = trained(1)
    draw = torch.Generator().manual_seed(3)
    changes = {n: v + v.norm() * torch.randn(v.shape, generator=draw) for n, v in seen.changes.items()}
    found = vector_in_upload(Sighting(changes=changes, clients=("anna",)), "mlp.1", slice(16, 24))
    assert abs(float(F.cosine_similarity(found, user.double(), dim=0))) < 0.8


def test_a_private_bias_goes_into_no_layer() -> None:
    net = Net(fedkeep.models.Linear(4, 3))
    assert place_of(net, net.initial(), {"x": torch.randn(2, 4)}, "user") is None


@pytest.mark.slow
def test_predictions_give_the_vector() -> None:
    net, batch = Net(model().double()), texts(60)
    known = net.initial()
    user = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    seen = forward(net, {**known, "user": user}, batch).log_softmax(1)
    default = {"user": torch.zeros(8, dtype=torch.float64)}
    found = vector_from_predictions(net, known, default, batch, seen.detach(), forward, steps=300)["user"]
    assert float(F.cosine_similarity(found, user, dim=0)) > 0.99
    flat = torch.full_like(seen, -torch.log(torch.tensor(5.0)))  # predictions that say nothing
    nothing = vector_from_predictions(net, known, default, batch, flat, forward, steps=300)["user"]
    assert abs(float(F.cosine_similarity(nothing, user, dim=0))) < 0.8
