"""FedFusion: numbers by hand, reductions as equalities, and once more in plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Phase, averaging, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.methods import EarlyStopping
from fedkeep.methods.fedfusion import AddFusion, Fusion, fused_with_itself, fused_with_own
from tests.engines.reference import close, rows_of
from tests.methods.parts import Parts, State, Words, compare, descend, linear, plain_rounds
from tests.methods.test_two_streams import DATA, LOCAL, WHOLE, h, trained
from tests.tiny import Rounds, everyone, job, results, same_bits, texts

TEXTS = texts(counts=(9, 4, 12), vocabulary=300)
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
@pytest.mark.parametrize(
    ("persistent", "reset", "both"),
    [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, False, True),
        (True, True, True),
    ],
)
def test_fedfusion_equals_plain_pytorch(operator: Any, persistent: bool, reset: bool, both: bool) -> None:
    gamma = 0.3 if both and operator != "conv" else 0.0
    method = methods.fedfusion(
        operator,
        persistent_local=persistent,
        reset_local=reset,
        train_received=both,
        gamma=gamma,
        local=LOCAL,
    )
    initial = AddFusion(operator, persistent, gamma=gamma)(Parts().double()).state_dict()
    local = "own." if persistent else ""

    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        def loss(w: State, batch: State) -> Tensor:
            mine, theirs = h(w, batch, local), h(w if both else received, batch)
            if operator == "conv":
                together = linear(w, "fusion.conv", torch.cat([mine, theirs], 1))
            else:
                together = w["fusion.gamma"] * theirs + (1 - w["fusion.gamma"]) * mine
            return nn.functional.cross_entropy(linear(w, "classifier", together), batch["label"])

        names = [f"{local}encoder", "fusion", "classifier", *(["encoder"] if both else [])]
        if reset:
            state |= {n: received[n.removeprefix("own.")] for n in state if n.startswith("own.")}
        state = descend(state, names, batches, loss, 0.2, 0.9)
        if persistent and not both:  # a copy leaves
            state |= {n.removeprefix("own."): v for n, v in state.items() if n.startswith("own.")}
        if operator != "conv":  # the server's tenth, taken here: averages are linear
            state["fusion.gamma"] = 0.1 * state["fusion.gamma"] + 0.9 * received["fusion.gamma"]
        return state

    run = trained(method)
    compare(run, *plain_rounds(DATA, method, initial, train))
    if persistent:
        kept = everyone(run.private, 6)
        assert not torch.equal(kept["own.encoder.weight"][0], kept["own.encoder.weight"][1])
    assert all(float((run.server[n] - initial[n]).abs().max()) > 1e-6 for n in run.server)


def test_a_persistent_clients_extractor_is_uploaded_and_kept() -> None:
    method = methods.fedfusion(persistent_local=True, local=LOCAL)
    assert method.extend is not None
    work = job(method.extend(Parts().double()), method, DATA)
    rounds = Rounds(work)
    start = rounds.server.params["encoder.weight"].clone()
    (result,) = results(work, [2])
    assert result.upload is not None
    assert result.kept is not None
    torch.testing.assert_close(
        result.upload.deltas["encoder.weight"] + start, result.kept["own.encoder.weight"]
    )
    assert set(result.kept) == {"own.encoder.weight", "own.encoder.bias"}
    rounds([2])
    torch.testing.assert_close(rounds.server.params["encoder.weight"], result.kept["own.encoder.weight"])


def test_a_trained_received_extractor_is_uploaded_and_the_own_one_stays() -> None:
    method = methods.fedfusion(persistent_local=True, train_received=True, gamma=0.3, local=LOCAL)
    assert method.extend is not None
    work = job(method.extend(Parts().double()), method, DATA)
    start = Rounds(work).server.params["encoder.weight"].clone()
    (result,) = results(work, [2])
    assert result.upload is not None
    assert result.kept is not None
    sent = result.upload.deltas["encoder.weight"] + start
    assert float((sent - start).abs().max()) > 1e-3
    assert float((sent - result.kept["own.encoder.weight"]).abs().max()) > 1e-3
    # From γ = 0 the loss does not depend on the received extractor: the first mini-batch leaves it as it was.
    once = methods.fedfusion(persistent_local=True, train_received=True, local=WHOLE)
    (result,) = results(job(once.extend(Parts().double()), once, DATA), [2])  # type: ignore[misc]
    assert result.upload is not None
    assert float(result.upload.deltas["encoder.weight"].abs().max()) == 0


def test_persistent_tables_are_uploaded_by_local_rows() -> None:
    method = methods.fedfusion(persistent_local=True, local=LOCAL)
    run = simulate(Words(), method, TEXTS, rounds=2, cohort=3, seed=3)
    start = Words().embedding.weight.detach()
    used = torch.zeros(300, dtype=torch.bool)
    used[torch.as_tensor(TEXTS.columns["text"].take(rows_of(TEXTS, 2)).values)] = True  # type: ignore[union-attr]
    own = run.parameters("user-2")["own.embedding.weight"]
    moved = (own != start).any(1)
    assert moved.any()
    assert not moved[~used].any()
    for n in ("embedding.weight", "own.embedding.weight"):
        assert run.net.module.lookup[n] == "text"  # type: ignore[index]


def test_both_extractors_rows_are_trained_as_whole_tables_are() -> None:
    method = methods.fedfusion(persistent_local=True, train_received=True, gamma=0.3, local=LOCAL)
    rows, whole = (
        simulate(Words().double(), m, TEXTS, rounds=3, cohort=3, seed=3)
        for m in (method, method.on_client(tables="whole"))
    )
    close(rows.server, whole.server, atol=1e-14)
    for user in TEXTS.ids:
        close(rows.parameters(user), whole.parameters(user), atol=1e-14)
    sent = [[r.value for r in run.history if r.metric == "upload_bytes"] for run in (rows, whole)]
    assert all(few < many for few, many in zip(*sent, strict=True))


def test_a_table_that_starts_as_received_is_kept_with_the_received_rows() -> None:
    """Words that only others train are, in the copy that a client keeps, as it received them in its last round."""
    method = methods.fedfusion(persistent_local=True, reset_local=True, local=LOCAL)
    one, two = (
        simulate(Words(), method, TEXTS, rounds=rounds, cohort=3, seed=3) for rounds in (1, 2)
    )  # the second round starts with what the first one leaves
    used = torch.zeros(300, dtype=torch.bool)
    used[torch.as_tensor(TEXTS.columns["text"].take(rows_of(TEXTS, 2)).values)] = True  # type: ignore[union-attr]
    used[0] = True
    own = two.parameters("user-2")["own.embedding.weight"]
    received = one.server["embedding.weight"]
    assert torch.equal(own[~used], received[~used])
    assert not torch.equal(own[used], received[used])
    assert not torch.equal(received[~used], Words().embedding.weight[~used])


def test_a_start_as_received_needs_a_kept_extractor() -> None:
    with pytest.raises(MethodError) as error:
        methods.fedfusion(reset_local=True)
    assert str(error.value) == (
        "reset_local says how a kept extractor starts, and none is kept. Set persistent_local too."
    )
    with pytest.raises(MethodError) as error:
        methods.fedfusion(train_received=True)
    assert str(error.value) == (
        "train_received trains a received extractor beside a kept one, and none is kept. Set persistent_local too."
    )


@pytest.mark.parametrize("operator", ["multi", "single"])
def test_a_whole_number_as_the_start_of_gamma(operator: Any) -> None:
    whole, same = (
        trained(methods.fedfusion(operator, gamma=gamma, local=LOCAL)).server for gamma in (1, 1.0)
    )
    assert same_bits(whole, same)


@pytest.mark.parametrize(("operator", "gamma"), [("conv", 0.5), ("multi", math.nan), ("single", math.inf)])
def test_a_start_of_gamma_that_is_none(operator: Any, gamma: float) -> None:
    with pytest.raises(MethodError) as error:
        methods.fedfusion(operator, gamma=gamma)
    assert str(error.value) == (
        "gamma is where the weight of received features starts, a finite number, and 0 by 'conv', which has no such "
        f"weight; got {gamma:g} with operator {operator!r}."
    )


def test_the_servers_steps_for_gamma() -> None:
    assert methods.fedfusion("multi").server == averaging(sgd(1.0, rates={"fusion.gamma": 0.1}))
    assert methods.fedfusion("conv").server == averaging()
    with pytest.raises(MethodError) as error:
        methods.fedfusion("mulit")  # type: ignore[arg-type]
    assert str(error.value) == "operator must be 'conv', 'multi' or 'single'; got 'mulit'."


def test_predictions_of_the_fused_models() -> None:
    net = Net(AddFusion("single", persistent=True)(Parts().double()))
    params = {**net.initial(), "fusion.gamma": torch.tensor(0.25).double()}
    params["own.encoder.weight"] = params["own.encoder.weight"] + 1
    batch = {"x": torch.randn(5, 3, dtype=torch.float64)}
    mine, theirs = h(params, batch, "own."), h(params, batch)
    torch.testing.assert_close(
        fused_with_own(net, params, batch), linear(params, "classifier", 0.25 * theirs + 0.75 * mine)
    )
    torch.testing.assert_close(fused_with_itself(net, params, batch), linear(params, "classifier", theirs))


@pytest.mark.parametrize("chosen", [{"examples": "all"}, {"early_stopping": EarlyStopping()}], ids=str)
def test_what_is_published_may_not_be_trained_or_chosen_by_examples_that_stay(chosen: dict[str, Any]) -> None:
    """Opted-out ones train it, or validation examples say when it stops."""
    method = methods.fedfusion(persistent_local=True)
    (phase,) = method.client.phases
    alone = Phase(loss=phase.loss, trains="private", **chosen)
    assert method.extend is not None
    with pytest.raises(MethodError) as error:
        method.on_client(phases=(alone,)).check(method.extend(Parts()))
    assert str(error.value) == (
        "'fedfusion' has hooks (start, finish) that see private values, so opted-out and validation examples, which "
        "train or choose them, would influence what leaves the client. Use examples='opted_in' and no early stopping."
    )
