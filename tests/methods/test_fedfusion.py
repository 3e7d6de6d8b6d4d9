"""FedFusion: numbers by hand, reductions as equalities, and once more in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import averaging, methods, sgd
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.methods.fedfusion import AddFusion, Fusion, fused_with_itself
from tests.engines.reference import close
from tests.methods.parts import Parts, State, compare, descend, linear, plain_rounds
from tests.methods.test_two_streams import DATA, LOCAL, WHOLE, h, trained

OPERATORS = ("conv", "multi", "single")


def test_fusions_by_hand() -> None:
    local, received = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 4.0]])
    multi, single, conv = (Fusion(name, 2) for name in ("multi", "single", "conv"))
    assert multi(local, received).tolist() == [[1.0, 2.0]]  # γ starts at 0: the client's own features
    with torch.no_grad():
        multi.gamma.copy_(torch.tensor([0.25, -1.0]))
        single.gamma.fill_(0.5)
        conv.conv.weight.copy_(torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, 3.0]]))
        conv.conv.bias.copy_(torch.tensor([0.5, 0.0]))
    assert multi(local, received).tolist() == [[2.0, 0.0]]
    assert single(local, received).tolist() == [[3.0, 3.0]]
    assert conv(local, received).tolist() == [[11.5, 14.0]]


@pytest.mark.parametrize("operator", ["multi", "single"])
def test_fedfusion_of_one_step_is_fedavg(operator: Any) -> None:
    """E_l = E_g there, so γ is not moved."""
    run, plain = trained(methods.fedfusion(operator, local=WHOLE)), trained(methods.fedavg(local=WHOLE))
    close({n: run.server[n] for n in plain.server}, plain.server, atol=1e-14)
    assert float(run.server["fusion.gamma"].abs().max()) < 1e-15
    assert run.evaluate()["loss"] == pytest.approx(plain.evaluate()["loss"])


@pytest.mark.parametrize("operator", OPERATORS)
def test_fedfusion_equals_plain_pytorch(operator: Any) -> None:
    method = methods.fedfusion(operator, local=LOCAL)
    initial = AddFusion(operator)(Parts().double()).state_dict()

    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        def loss(w: State, batch: State) -> Tensor:
            mine, theirs = h(w, batch), h(received, batch)
            if operator == "conv":
                together = linear(w, "fusion.conv", torch.cat([mine, theirs], 1))
            else:
                together = w["fusion.gamma"] * theirs + (1 - w["fusion.gamma"]) * mine
            return nn.functional.cross_entropy(linear(w, "classifier", together), batch["label"])

        state = descend(state, [""], batches, loss, 0.2, 0.9)
        if operator != "conv":  # the server's tenth, taken here: averages are linear
            state["fusion.gamma"] = 0.1 * state["fusion.gamma"] + 0.9 * received["fusion.gamma"]
        return state

    run = trained(method).last
    compare(run, *plain_rounds(DATA, method, initial, train))
    assert all(float((run.server[n] - initial[n]).abs().max()) > 1e-6 for n in run.server)


def test_the_servers_steps_for_gamma() -> None:
    assert methods.fedfusion("multi").server == averaging(sgd(1.0, rates={"fusion.gamma": 0.1}))
    assert methods.fedfusion("conv").server == averaging()
    with pytest.raises(MethodError, match="'conv', 'multi' or 'single'; got 'mulit'"):
        methods.fedfusion("mulit")  # type: ignore[arg-type]


def test_the_aggregated_model_predicts_with_one_extractor() -> None:
    net = Net(AddFusion("single")(Parts().double()))
    params = {**net.initial(), "fusion.gamma": torch.tensor(0.25).double()}
    batch = {"x": torch.randn(5, 3, dtype=torch.float64)}
    torch.testing.assert_close(
        fused_with_itself(net, params, batch), linear(params, "classifier", h(params, batch))
    )
