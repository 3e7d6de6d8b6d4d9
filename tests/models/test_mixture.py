"""The mixture of experts: eq. 5 by hand, both mixes, its ends, and parts that don't fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.models import CNN, ConfidenceGate, Gate, MixtureOfExperts
from tests.refusals import raises


class Says(nn.Module):
    """Gives the same class probabilities for every example."""

    def __init__(self, *p: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(p, dtype=torch.float64).log())

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


class Share(nn.Module):
    """Gives the same share for every example."""

    def __init__(self, h: float) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.tensor(math.log(h / (1 - h)), dtype=torch.float64))

    def logit(self, x: Tensor) -> Tensor:
        return self.z.expand(len(x))


X = torch.zeros(2, 3)


def model(h: float = 0.6) -> MixtureOfExperts:
    return MixtureOfExperts(Says(0.3, 0.7), Says(0.8, 0.2), Share(h))


def test_equation_5_by_hand() -> None:
    mixed = model()(x=X, label=torch.zeros(2))  # a column that no part wants is left aside
    # 0.6 · 0.8 + 0.4 · 0.3 = 0.60, 0.6 · 0.2 + 0.4 · 0.7 = 0.40
    torch.testing.assert_close(mixed.exp(), torch.tensor([[0.6, 0.4]] * 2, dtype=torch.float64))
    assert model().share(x=X).tolist() == pytest.approx([0.6, 0.6])
    torch.testing.assert_close(model().global_logits(x=X)[0].exp(), torch.tensor([0.3, 0.7]).double())
    torch.testing.assert_close(model().local_logits(x=X)[0].exp(), torch.tensor([0.8, 0.2]).double())


def test_the_authors_mix_by_hand() -> None:
    # 0.6 ln 0.8 + 0.4 ln 0.3 = −0.6154753, 0.6 ln 0.2 + 0.4 ln 0.7 = −1.1083327; the sum of exponentials is not 1
    mixed = model().log_mixture(x=X)[0].detach()
    assert mixed.tolist() == pytest.approx([-0.6154753, -1.1083327], abs=1e-6)
    assert float(mixed.exp().sum()) == pytest.approx(0.870493, abs=1e-6)


def test_gradients_by_hand() -> None:
    mixture = model()
    (-mixture(x=X)[0, 0]).backward()
    # with m = h p_l + (1 − h) p_g = 0.6: −(p_l − p_g) h (1 − h) / m = −0.5 · 0.24 / 0.6
    assert float(mixture.gate.z.grad) == pytest.approx(-0.2)  # type: ignore[arg-type]
    # −r (1 − p_l) with the responsibility r = h p_l / m = 0.8; and likewise r_g = 0.2, p_g = 0.3
    assert mixture.local_expert.logits.grad.tolist() == pytest.approx([-0.16, 0.16])  # type: ignore[union-attr]
    assert mixture.global_expert.logits.grad.tolist() == pytest.approx([-0.14, 0.14])  # type: ignore[union-attr]


@pytest.mark.parametrize("output", ["forward", "log_mixture"])
def test_a_share_of_one_is_the_local_expert_and_of_zero_the_global_one(output: str) -> None:
    for z, expected in ((800.0, [0.8, 0.2]), (-800.0, [0.3, 0.7])):
        mixture = model()
        with torch.no_grad():
            mixture.gate.z.fill_(z)  # type: ignore[operator]
        mixed = getattr(mixture, output)(x=X)
        assert mixed[0].exp().tolist() == pytest.approx(expected, abs=1e-12)
        mixed.sum().backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in mixture.parameters() if p.grad is not None)


def test_experts_that_are_certain_keep_the_loss_finite() -> None:
    mixture = model()
    with torch.no_grad():
        mixture.local_expert.logits.copy_(torch.tensor([2e3, -2e3]))  # type: ignore[operator]
        mixture.gate.z.fill_(50.0)  # type: ignore[operator]
    loss = -mixture(x=X)[0, 1]
    loss.backward()
    # the global expert's 0.7, which keeps a share of e^−50
    assert float(loss.detach()) == pytest.approx(50.0 - math.log(0.7))
    assert bool(torch.isfinite(mixture.gate.z.grad).all())  # type: ignore[arg-type,union-attr]


def test_experts_of_different_architecture_and_columns() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2, 4)

        def forward(self, note: Tensor) -> Tensor:
            return self.out(note)

    cnn = CNN(4, 1, 16, widths=(3, 4), hidden=(16, 8))
    gate = Gate(CNN(1, 1, 16, widths=(2, 2), hidden=(6, 5)))
    net = Net(MixtureOfExperts(cnn, Bag(), gate))
    batch = {"image": torch.rand(3, 1, 16, 16), "note": torch.rand(3, 2), "label": torch.zeros(3)}
    assert net(net.initial(), batch).exp().sum(1).tolist() == pytest.approx([1.0] * 3)
    with raises(MethodError, column="note", columns=["image"], who="The mixture's local_expert, Bag,"):
        net(net.initial(), {"image": batch["image"]})


def test_widths_that_differ_are_named_before_the_first_step() -> None:
    torch.manual_seed(0)
    wide = MixtureOfExperts(Says(0.3, 0.7), Says(0.3, 0.3, 0.4), Share(0.5))
    with pytest.raises(MethodError) as error:
        wide.global_logits(x=X)  # all that the rounds of federation compute
    assert error.value.facts == {"local": (2, 3), "shared": (2, 2)}


def test_gates_that_do_not_fit() -> None:
    with pytest.raises(MethodError) as error:
        MixtureOfExperts(Says(0.3, 0.7), Says(0.8, 0.2), nn.Linear(3, 1))
    assert error.value.facts == {"gate": "Linear"}

    class Two(nn.Module):
        def logit(self, x: Tensor) -> Tensor:
            return x[:, :2]

    with pytest.raises(MethodError) as error:
        MixtureOfExperts(Says(0.3, 0.7), Says(0.8, 0.2), Two())(x=X)
    assert error.value.facts == {"wanted": (2,), "gate": "Two", "got": (2, 2)}


def test_a_network_as_a_gate() -> None:
    network = CNN(1, 1, 16, widths=(2, 2), hidden=(6, 5)).eval()
    gate, image = Gate(network), torch.rand(4, 1, 16, 16)
    share = gate(image=image, label=torch.zeros(4))
    assert share.shape == (4,)
    assert ((share > 0) & (share < 1)).all()
    torch.testing.assert_close(share, torch.sigmoid(network(image)), rtol=0, atol=0)
    with torch.no_grad():
        network.out.bias.fill_(1e4)
    assert torch.isfinite(gate.logit(image=image)).all()  # where the share itself is 1
    with pytest.raises(MethodError) as error:
        Gate(CNN(2, 1, 16)).logit(image=image)
    assert error.value.facts == {"network": "CNN", "got": (4, 2)}


def test_a_gate_of_any_network_and_columns() -> None:
    class Surer(nn.Module):
        """The difference of what the experts are most sure of, and of a column."""

        def forward(self, local_logits: Tensor, global_logits: Tensor, note: Tensor) -> Tensor:
            return local_logits.amax(1) - global_logits.amax(1) + note

    mixture = MixtureOfExperts(Says(0.3, 0.7), Says(0.8, 0.2), Gate(Surer()))
    note = torch.tensor([0.0, math.log(3.0)], dtype=torch.float64)
    # The local expert says 0.8 at most, the global one 0.7: h / (1 − h) is 8/7, and three times that.
    expected = [(8 / 15) * 0.8 + (7 / 15) * 0.3, (24 / 31) * 0.8 + (7 / 31) * 0.3]
    assert mixture(x=X, note=note).exp()[:, 0].tolist() == pytest.approx(expected)
    with raises(
        MethodError,
        column="note",
        columns=["global_logits", "local_logits", "x"],
        who="The mixture's gate, Gate,",
    ):
        MixtureOfExperts(Says(0.3, 0.7), Says(0.8, 0.2), Gate(Surer()))(x=X)


def test_a_part_that_is_not_trained_predicts_without_dropout() -> None:
    def part(classes: int) -> CNN:
        return CNN(classes, 1, 16, widths=(3, 4), hidden=(16, 8), dropout=0.5)

    mixture = MixtureOfExperts(part(4), part(4), Gate(part(1))).train()
    image = torch.rand(3, 1, 16, 16)
    for trained, changes in ((mixture.local_expert, True), (None, False)):
        mixture.requires_grad_(False)
        if trained is not None:
            trained.requires_grad_()
        outs = [mixture(image=image).detach() for _ in range(2)]
        assert torch.equal(*outs) != changes
        assert mixture.global_expert.drop.training  # type: ignore[union-attr]
        assert torch.equal(mixture.global_logits(image=image), mixture.global_logits(image=image))
    mixture.eval()
    assert torch.equal(mixture(image=image), mixture(image=image))
    assert not mixture.global_expert.drop.training  # type: ignore[union-attr]


def test_looking_at_the_widths_draws_nothing() -> None:
    part = CNN(4, 1, 16, widths=(3, 4), hidden=(16, 8), dropout=0.5)
    mixture = MixtureOfExperts(part, CNN(4, 1, 16), Gate(CNN(1, 1, 16))).train()
    image = torch.rand(3, 1, 16, 16)
    torch.manual_seed(3)
    first = mixture.global_logits(image=image)
    torch.manual_seed(3)
    assert torch.equal(first, part(image))


def test_a_gate_that_sees_confidences_by_hand() -> None:
    gate = ConfidenceGate().double()
    own, shared = (
        torch.tensor([[0.8, 0.2], [0.1, 0.9]]).double(),
        torch.tensor([[0.3, 0.7], [0.5, 0.5]]).double(),
    )
    assert gate.logit(own.log(), shared.log()).tolist() == [0.0, 0.0]
    with torch.no_grad():
        gate.weigh.weight.copy_(torch.tensor([[1.0, 10.0, 100.0, 1000.0, 1e4]]))
        gate.weigh.bias.fill_(0.5)
    # ln 0.8 = −0.2231436, H(0.8, 0.2) = 0.5004024, ln 0.7 = −0.3566749, H(0.3, 0.7) = 0.6108643, other classes
    expected = 0.5 - 0.2231436 + 5.004024 - 35.66749 + 610.8643
    logit = gate.logit(own.log().requires_grad_(), shared.log())
    logit = logit.detach()
    assert float(logit[0]) == pytest.approx(expected, abs=1e-3)
    assert float(logit[1]) == pytest.approx(
        0.5
        + math.log(0.9)
        - 10 * (0.1 * math.log(0.1) + 0.9 * math.log(0.9))
        - 100 * math.log(2)
        + 1000 * math.log(2),
        abs=1e-6,
    )  # the first of equal classes is taken: 1 and 0 differ
    assert ConfidenceGate(Share(0.6)).double().logit(own, shared, x=X).tolist() == pytest.approx(
        [math.log(1.5)] * 2
    )


def test_no_gradient_reaches_the_experts_through_their_confidences() -> None:
    mixture = MixtureOfExperts(Says(0.3, 0.7), Says(0.8, 0.2), ConfidenceGate().double())
    with torch.no_grad():
        mixture.gate.weigh.bias.fill_(math.log(1.5))  # type: ignore[union-attr]
        mixture.gate.weigh.weight.fill_(0.0)  # type: ignore[union-attr]
    (-mixture(x=X)[0, 0]).backward()
    assert mixture.local_expert.logits.grad.tolist() == pytest.approx([-0.16, 0.16])  # type: ignore[union-attr]
    assert float(mixture.gate.weigh.bias.grad) == pytest.approx(-0.2)  # type: ignore[union-attr]
