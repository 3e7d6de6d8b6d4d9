"""KTEPS, FedFusion and PFL-DA by other readings: numbers by hand, reductions as equalities, and plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeep import Method, averaging, methods, sgd, simulate
from fedkeep.core.declared import declared
from fedkeep.core.errors import MethodError, SplitError
from fedkeep.core.net import Net
from fedkeep.methods import EarlyStopping, Phase
from fedkeep.methods.branches import TwoBranches
from fedkeep.methods.kteps import Plateau, PredictBranches
from fedkeep.methods.pfl_da import AddGate
from fedkeep.methods.terms import cross_entropy, l2_penalty
from fedkeep.privacy import Projection
from fedkeep_papers.kteps import methods as readings
from fedkeep_papers.kteps.methods import (
    AddKeptFusion,
    BothLosses,
    BranchLoss,
    KeptFusionLoss,
    fused_with_own,
)
from tests.engines.reference import close, rows_of
from tests.methods.parts import Parts, State, Words, compare, descend, linear, plain_rounds
from tests.methods.test_kteps import Plus
from tests.methods.test_tied import Twice
from tests.methods.test_two_streams import DATA, LOCAL, WHOLE, h, trained
from tests.refusals import raises
from tests.tiny import Rounds, everyone, job, results, same_bits, texts

TEXTS = texts(counts=(9, 4, 12), vocabulary=300)
OPERATORS = ("conv", "multi", "single")
KEPT: dict[str, Any] = {"persistent_local": True, "local": LOCAL}
BOTH: dict[str, Any] = {**KEPT, "train_received": True, "gamma": 0.3}


@pytest.mark.parametrize("name", ["kteps", "kteps_star", "fedfusion", "pfl_da"])
def test_the_plain_reading_is_the_librarys_method(name: str) -> None:
    given: dict[str, Any] = {"local": LOCAL, **({"start": 1, "end": 2} if "star" in name else {})}
    given |= {"table": "encoder.weight"} if "star" in name else {}
    one, two = (getattr(module, name)(**given) for module in (methods, readings))
    assert (one.name, one.split, one.upload, one.note) == (two.name, two.split, two.upload, two.note)
    mine, theirs = trained(one), trained(two)
    assert same_bits(mine.server, theirs.server)
    if one.split.private:
        assert same_bits(everyone(mine.private, 6), everyone(theirs.private, 6))


@pytest.mark.parametrize("engine", ["workers", "vectorised"])
@pytest.mark.parametrize(
    "method",
    [
        readings.fedfusion("conv", persistent_local=True, local=Phase(batch_size=3, optimizer=sgd(0.1))),
        readings.fedfusion(**BOTH),
        readings.kteps(0.5, kernel="median", normalised=True, noise=0, local=LOCAL),
    ],
    ids=["published copies", "a received and a private extractor", "median, normalised"],
)
def test_every_engine_trains_them_to_the_same(method: Method, engine: str) -> None:
    one, other = trained(method), trained(method, engine=engine)
    close(other.server, one.server, atol=1e-12)
    close(everyone(other.private, 6), everyone(one.private, 6), atol=1e-12)


# --- KTEPS


def test_the_whole_loss_by_hand() -> None:
    """x = (ln 3, 0), label 0, private w = 2: β (−ln 3/4 − ln 9/10) + λ2 L_kt."""
    branches = TwoBranches(projections=False)
    net = Net(branches(Plus()))
    params = {"classifier.w": torch.tensor(1.0).double(), "private.classifier.w": torch.tensor(2.0).double()}
    batch = {"x": torch.tensor([[math.log(3), 0.0]], dtype=torch.float64), "label": torch.tensor([0])}
    teacher = 3**0.25 / (3**0.25 + 1)
    taught = -(teacher * math.log(0.9) + (1 - teacher) * math.log(0.1))
    value = float(BranchLoss(branches, diversity=0.5, transfer=0.1, share=0.5)(net, params, batch, {}))
    assert value == pytest.approx((math.log(4 / 3) + math.log(10 / 9)) / 2 + 0.1 * taught, abs=1e-14)


@pytest.mark.parametrize(("architecture", "copies"), readings.ARCHITECTURES.items())
def test_architectures_name_parts(architecture: Any, copies: tuple[str, ...]) -> None:
    for projections in (True, False):
        method = readings.kteps(architecture=architecture, projections=projections)
        assert method.extend == TwoBranches(copies, projections)
        assert readings.kteps(architecture=copies, projections=projections) == method
    with pytest.raises(SplitError, match="matches no parameter"):
        simulate(Parts().double(), readings.kteps(architecture=(), projections=False), DATA, rounds=1)


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "D"},
        {"kernel": "double"},
        {"predict": "ps"},
        {"share": 0.0},
        {"student_temperature": 0.0},
    ],
)
def test_options_that_are_refused(options: dict[str, Any]) -> None:
    with raises(MethodError, said=repr(*options.values())):
        readings.kteps(**options)


def test_two_whole_models_that_share_nothing_are_fedavg_and_local() -> None:
    """Table 8's C without projections and diversity: the teacher is stopped, so the shared model is FedAvg's."""
    given: dict[str, Any] = {"architecture": ("encoder", "classifier"), "projections": False, "noise": 0}
    run = trained(readings.kteps(0, 0.5, **given, local=LOCAL))
    assert same_bits(run.server, trained(methods.fedavg(local=LOCAL)).server)
    taught = everyone(run.private, 6)
    run = trained(readings.kteps(0, 0, **given, local=LOCAL))
    alone = everyone(trained(methods.local(local=LOCAL)).private, 6)
    close({n.removeprefix("private."): v for n, v in everyone(run.private, 6).items()}, alone, atol=1e-13)
    assert not torch.equal(taught["private.encoder.weight"], alone["encoder.weight"])


def test_options_change_what_they_name() -> None:
    given: dict[str, Any] = {"diversity": 0.5, "transfer": 0.5, "noise": 0, "local": LOCAL}
    base = trained(readings.kteps(**given)).server["encoder.weight"]
    for options in (
        {"kernel": "single"},
        {"kernel": "median"},
        {"normalised": True},
        {"share": 0.5},
        {"student_temperature": 4},
        {"projections": False},
    ):
        assert not torch.equal(base, trained(readings.kteps(**given, **options)).server["encoder.weight"])
    assert readings.kteps(share=0.5).note == Plateau(1.0)
    assert readings.kteps(predict="p").predict == PredictBranches(TwoBranches(), "p")
    star = readings.kteps_star(1, 2, table="w", center=False, noise=0, share=0.5)
    assert star.upload == (Projection(1, 2, "w", center=False),)
    assert star.client == readings.kteps(share=0.5).client


def test_halved_losses_are_halved_rates_with_doubled_weights() -> None:
    """β L + λ R at rate η is L + (λ / β) R at rate β η, up to rounding."""
    half = readings.kteps(0.5, 0.25, share=0.5, noise=0, local=LOCAL)
    slow = methods.kteps(1.0, 0.5, noise=0, local=LOCAL.but(optimizer=sgd(0.1, momentum=0.9)))
    close(trained(half).server, trained(slow).server, atol=1e-12)


@pytest.mark.parametrize("build", [BranchLoss, KeptFusionLoss, BothLosses])
def test_tables_stay_local_unless_the_loss_reads_parameters(build: Any) -> None:
    assert build(loss=cross_entropy()).reads_parameters is False
    assert build(loss=l2_penalty("*")).reads_parameters
    assert build(loss=methods.fedprox().client.phases[0].loss).reads_received


# --- FedFusion


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("reset", "both"),
    [
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
        (True, True),
    ],
)
def test_fedfusion_equals_plain_pytorch(operator: Any, reset: bool, both: bool) -> None:
    gamma = 0.3 if both and operator != "conv" else 0.0
    given: dict[str, Any] = {"reset_local": reset, "train_received": both, "gamma": gamma}
    method = readings.fedfusion(operator, **KEPT, **given)
    initial = AddKeptFusion(operator, gamma=gamma)(Parts().double()).state_dict()

    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        def loss(w: State, batch: State) -> Tensor:
            mine, theirs = h(w, batch, "own."), h(w if both else received, batch)
            if operator == "conv":
                together = linear(w, "fusion.conv", torch.cat([mine, theirs], 1))
            else:
                together = w["fusion.gamma"] * theirs + (1 - w["fusion.gamma"]) * mine
            return nn.functional.cross_entropy(linear(w, "classifier", together), batch["label"])

        names = ["own.encoder", "fusion", "classifier", *(["encoder"] if both else [])]
        if reset:
            state |= {n: received[n.removeprefix("own.")] for n in state if n.startswith("own.")}
        state = descend(state, names, batches, loss, 0.2, 0.9)
        if not both:  # a copy leaves
            state |= {n.removeprefix("own."): v for n, v in state.items() if n.startswith("own.")}
        if operator != "conv":  # the server's tenth, taken here: averages are linear
            state["fusion.gamma"] = 0.1 * state["fusion.gamma"] + 0.9 * received["fusion.gamma"]
        return state

    run = trained(method)
    compare(run, *plain_rounds(DATA, method, initial, train))
    kept = everyone(run.private, 6)
    assert not torch.equal(kept["own.encoder.weight"][0], kept["own.encoder.weight"][1])
    assert all(float((run.server[n] - initial[n]).abs().max()) > 1e-6 for n in run.server)


def test_a_persistent_clients_extractor_is_uploaded_and_kept() -> None:
    method = readings.fedfusion(**KEPT)
    work = job(method.extend(Parts().double()), method, DATA)
    rounds = Rounds(work)
    start = rounds.server.params["encoder.weight"].clone()
    (result,) = results(work, [2])
    torch.testing.assert_close(
        result.upload.deltas["encoder.weight"] + start, result.kept["own.encoder.weight"]
    )
    assert set(result.kept) == {"own.encoder.weight", "own.encoder.bias"}
    rounds([2])
    torch.testing.assert_close(rounds.server.params["encoder.weight"], result.kept["own.encoder.weight"])


def test_a_trained_received_extractor_is_uploaded_and_the_own_one_stays() -> None:
    method = readings.fedfusion(**BOTH)
    work = job(method.extend(Parts().double()), method, DATA)
    start = Rounds(work).server.params["encoder.weight"].clone()
    (result,) = results(work, [2])
    sent = result.upload.deltas["encoder.weight"] + start
    assert float((sent - start).abs().max()) > 1e-3
    assert float((sent - result.kept["own.encoder.weight"]).abs().max()) > 1e-3
    # From γ = 0 the loss does not depend on the received extractor: the first mini-batch leaves it as it was.
    once = readings.fedfusion(persistent_local=True, train_received=True, local=WHOLE)
    (result,) = results(job(once.extend(Parts().double()), once, DATA), [2])  # type: ignore[misc]
    assert float(result.upload.deltas["encoder.weight"].abs().max()) == 0


def test_persistent_tables_are_uploaded_by_local_rows() -> None:
    method = readings.fedfusion(**KEPT)
    run = simulate(Words(), method, TEXTS, rounds=2, cohort=3, seed=3).last
    start = Words().embedding.weight.detach()
    used = torch.zeros(300, dtype=torch.bool)
    used[torch.as_tensor(TEXTS.columns["text"].take(rows_of(TEXTS, 2)).values)] = True  # type: ignore[union-attr]
    own = run.parameters("user-2")["own.embedding.weight"]
    moved = (own != start).any(1)
    assert moved.any()
    assert not moved[~used].any()
    for n in ("embedding.weight", "own.embedding.weight"):
        assert declared(run.net.module).lookup[n] == "text"


def test_both_extractors_rows_are_trained_as_whole_tables_are() -> None:
    method = readings.fedfusion(**BOTH)
    rows, whole = (
        simulate(Words().double(), m, TEXTS, rounds=3, cohort=3, seed=3).last
        for m in (method, method.on_client(tables="whole"))
    )
    close(rows.server, whole.server, atol=1e-14)
    for user in TEXTS.ids:
        close(rows.parameters(user), whole.parameters(user), atol=1e-14)
    sent = [[r.value for r in run.history if r.metric == "upload_bytes"] for run in (rows, whole)]
    assert all(few < many for few, many in zip(*sent, strict=True))


def test_a_table_that_starts_as_received_is_kept_with_the_received_rows() -> None:
    """Words that only others train are, in the copy that a client keeps, as it received them in its last round."""
    method = readings.fedfusion(**KEPT, reset_local=True)
    one, two = (
        simulate(Words(), method, TEXTS, rounds=rounds, cohort=3, seed=3).last for rounds in (1, 2)
    )  # the second round starts with what the first one leaves
    used = torch.zeros(300, dtype=torch.bool)
    used[torch.as_tensor(TEXTS.columns["text"].take(rows_of(TEXTS, 2)).values)] = True  # type: ignore[union-attr]
    used[0] = True
    own = two.parameters("user-2")["own.embedding.weight"]
    received = one.server["embedding.weight"]
    assert torch.equal(own[~used], received[~used])
    assert not torch.equal(own[used], received[used])
    assert not torch.equal(received[~used], Words().embedding.weight[~used])


@pytest.mark.parametrize("reset", [False, True])
def test_layers_that_share_a_weight_share_it_in_a_copy(reset: bool) -> None:
    run = simulate(
        Twice().double(), readings.fedfusion(**KEPT, reset_local=reset), DATA, rounds=2, cohort=6
    ).last
    kept = {name.split(".", 1)[1] for name in everyone(run.private, 6)}
    assert {"encoder.weight", "encoder.bias", "second.bias"} <= kept
    assert "second.weight" not in kept


@pytest.mark.parametrize("options", [{"reset_local": True}, {"train_received": True}, {"gamma": 0.5}])
def test_what_a_kept_extractor_has_needs_one(options: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match="persistent_local"):
        readings.fedfusion(**options)


@pytest.mark.parametrize("operator", ["multi", "single"])
def test_a_whole_number_as_the_start_of_gamma(operator: Any) -> None:
    whole, same = (trained(readings.fedfusion(operator, **KEPT, gamma=g)).server for g in (0, 0.0))
    assert same_bits(whole, same)


@pytest.mark.parametrize(("operator", "gamma"), [("conv", 0.5), ("multi", math.nan), ("single", math.inf)])
def test_a_start_of_gamma_that_is_none(operator: Any, gamma: float) -> None:
    with pytest.raises(MethodError, match=f"got {gamma:g} with operator {operator!r}"):
        readings.fedfusion(operator, **KEPT, gamma=gamma)


def test_the_servers_steps_for_gamma() -> None:
    assert readings.fedfusion(**KEPT).server == averaging(sgd(1.0, rates={"fusion.gamma": 0.1}))
    assert readings.fedfusion("conv", **KEPT).server == averaging()


def test_predictions_of_the_fused_models() -> None:
    net = Net(AddKeptFusion("single")(Parts().double()))
    params = {**net.initial(), "fusion.gamma": torch.tensor(0.25).double()}
    params["own.encoder.weight"] = params["own.encoder.weight"] + 1
    batch = {"x": torch.randn(5, 3, dtype=torch.float64)}
    mine, theirs = h(params, batch, "own."), h(params, batch)
    torch.testing.assert_close(
        fused_with_own(net, params, batch), linear(params, "classifier", 0.25 * theirs + 0.75 * mine)
    )


@pytest.mark.parametrize("chosen", [{"examples": "all"}, {"early_stopping": EarlyStopping()}], ids=str)
def test_what_is_published_may_not_be_trained_or_chosen_by_examples_that_stay(chosen: dict[str, Any]) -> None:
    """Opted-out ones train it, or validation examples say when it stops."""
    method = readings.fedfusion(persistent_local=True)
    (phase,) = method.client.phases
    alone = Phase(loss=phase.loss, trains="private", **chosen)
    with pytest.raises(MethodError, match="'fedfusion' has hooks"):
        method.on_client(phases=(alone,)).check(method.extend(Parts()))


# --- PFL-DA


def test_the_general_models_own_loss_by_hand() -> None:
    """p_G = (3/4, 1/4), p_k = (1/2, 1/2), α = 3/4: −log 0.6875, and M_G's own, −log 0.75, at weight 2."""
    net = Net(AddGate()(Parts(1, 1, 2).double()))
    params = {n: torch.zeros_like(v) for n, v in net.initial().items()}
    params["classifier.bias"] = torch.tensor([math.log(3), 0.0]).double()
    params["gate.bias"] = torch.tensor([math.log(3)]).double()
    batch = {"x": torch.ones(1, 1).double(), "label": torch.tensor([0])}
    expected = -math.log(0.6875) - 2 * math.log(0.75)
    assert float(BothLosses(general=2.0)(net, params, batch, {})) == pytest.approx(expected, abs=1e-7)
    for general in (-0.1, math.nan, math.inf):
        with pytest.raises(MethodError, match="general"):
            readings.pfl_da(general=general)


def test_pfl_da_with_a_loss_of_its_own_equals_plain_pytorch() -> None:
    method = readings.pfl_da(general=0.3, local=LOCAL)

    def train(state: State, received: State, batches: list[State], c: int, number: int) -> State:
        def loss(w: State, batch: State) -> Tensor:
            found = h(w, batch)
            general, own = (
                linear(w, "classifier", found),
                linear(w, "own.classifier", h(w, batch, "own.")).softmax(1),
            )
            alpha = torch.sigmoid(linear(w, "gate", found))
            mixed = alpha * general.softmax(1) + (1 - alpha) * own
            alone = nn.functional.cross_entropy(general, batch["label"])
            return -mixed.gather(1, batch["label"][:, None]).log().mean() + 0.3 * alone

        return descend(state, [""], batches, loss, 0.2, 0.9)

    compare(trained(method), *plain_rounds(DATA, method, AddGate()(Parts().double()).state_dict(), train))
