"""The federated mixture of experts: FedAvg of one expert, then steps 2 and 3 on the device, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import FederatedData, Run, adam, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.core.params import Params
from fedkeep.data import opt_out
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.experiments.adapt import adapt_clients, rooted
from fedkeep.experiments.personalize import first_examples
from fedkeep.methods import EarlyStopping, Method, Phase, mixture, terms
from fedkeep.methods.augment import Augmented
from fedkeep.methods.outputs import NegativeLogLikelihood, OnOutput, PredictOutput, as_likelihood
from fedkeep.models import ConfidenceGate, MixtureOfExperts
from tests.tiny import bits, classes, same_bits

DATA = classes(counts=(12, 9, 7, 10), valid=6, test=5)
LOCAL = Phase(optimizer=adam(0.02), batch_size=4, epochs=2)
LATER: dict[str, Any] = {
    "local_epochs": 12, "mixture_epochs": 9, "early_stopping": EarlyStopping(every=2, patience=2),
}  # fmt: skip


class Expert(nn.Module):
    """A linear expert with dropout."""

    def __init__(self, seed: int, outputs: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.drop = nn.Dropout(dropout)
            self.body = nn.Linear(3, 5)
            self.out = nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.drop(torch.tanh(self.body(x))))
        return logits


class Switch(nn.Module):
    """A linear gate."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(9)
            self.linear = nn.Linear(3, 1)

    def logit(self, x: Tensor) -> Tensor:
        logit: Tensor = self.linear(x).squeeze(1)
        return logit


def model(dropout: float = 0.0) -> MixtureOfExperts:
    return MixtureOfExperts(Expert(1, dropout=dropout), Expert(2, dropout=dropout), Switch()).double()


def federated(
    method: Method, data: FederatedData = DATA, dropout: float = 0.0, rounds: int = 4, **options: Any
) -> Run:
    return simulate(model(dropout), method, data, rounds=rounds, cohort=3, seed=5, **options)


def part(values: Params, prefix: str) -> Params:
    return {n.removeprefix(prefix): v for n, v in values.items() if n.startswith(prefix)}


# --- step 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_rounds_are_fedavg_of_the_global_expert_bit_for_bit(dropout: float) -> None:
    run = federated(mixture(local=LOCAL), dropout=dropout)
    plain = simulate(
        Expert(1, dropout=dropout).double(), methods.fedavg(local=LOCAL), DATA, rounds=4, cohort=3, seed=5
    )
    assert same_bits(part(run.server, "global_expert."), plain.server)
    pulled = federated(mixture(mu=0.5, local=LOCAL), dropout=dropout)
    other = simulate(
        Expert(1, dropout=dropout).double(),
        methods.fedprox(0.5, local=LOCAL),
        DATA,
        rounds=4,
        cohort=3,
        seed=5,
    )
    assert same_bits(part(pulled.server, "global_expert."), other.server)
    assert not same_bits(run.server, pulled.server)


def test_rounds_compute_the_global_expert_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for kind, name in ((Switch, "logit"), (Expert, "forward")):
        real = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda self, x, real=real: (calls.append(type(self).__name__), real(self, x))[1]
        )
    federated(mixture(local=LOCAL), evaluate_every=0)
    assert calls.count("Switch") == 1  # the look at the widths
    calls.clear()
    simulate(
        Expert(1).double(), methods.fedavg(local=LOCAL), DATA, rounds=4, cohort=3, seed=5, evaluate_every=0
    )
    steps = calls.count("Expert")
    calls.clear()
    federated(mixture(local=LOCAL), evaluate_every=0)
    assert calls.count("Expert") == steps + 2


def test_private_parts_stay_as_they_were_made() -> None:
    run = federated(mixture(local=LOCAL))
    initial = Net(model()).initial()
    kept = run.private.read(range(4))
    assert {n.split(".")[0] for n in kept} == {"local_expert", "gate"}
    assert all(torch.equal(v, initial[n].expand_as(v)) for n, v in kept.items())
    assert set(run.server) == {n for n in initial if n.startswith("global_expert.")}


def test_before_adapting_a_client_has_the_global_expert_alone() -> None:
    run = federated(mixture(local=LOCAL))
    plain = simulate(Expert(1).double(), methods.fedavg(local=LOCAL), DATA, rounds=4, cohort=3, seed=5)
    for split in ("valid", "test"):
        assert (
            run.evaluate(split)
            == run.evaluate(split, shared=True)
            == pytest.approx(plain.evaluate(split), abs=1e-12)
        )
    ours, theirs = ([r for r in found.history if r.split == "test"] for found in (run, plain))
    assert [(r.round, r.metric, r.client) for r in ours] == [(r.round, r.metric, r.client) for r in theirs]
    assert [r.value for r in ours] == pytest.approx([r.value for r in theirs], abs=1e-12)
    for method, waits in (
        (mixture(), True),
        (methods.fine_tuned(), False),
        (methods.local(), False),
        (methods.furl("gate.*"), False),
    ):
        assert method.waits(sorted(run.net.trainable())) is waits


# --- steps 2 and 3 in plain PyTorch


def draws(client: int, rows: np.ndarray, phase: Phase, number: int) -> Iterator[dict[str, Tensor]]:
    stream = Stream(5, f"personalize/{DATA.ids[client]}", len(rows))
    for chosen in batches(DATA, rows, phase, stream, number):
        yield DATA.batch(chosen)


def stopped_early(
    tensors: list[nn.Parameter],
    loss: Any,
    rate: float,
    steps: Iterator[dict[str, Tensor]],
    per_pass: int,
    valid: dict[str, Tensor],
) -> int:
    """Train by Adam with early stopping every 2 passes, patience 2; leave the best values and return their pass."""
    stepper = torch.optim.Adam(tensors, rate)
    best, at, waited, kept = float("inf"), 0, 0, [t.detach().clone() for t in tensors]
    for number, batch in enumerate(steps, 1):
        stepper.zero_grad()
        loss(batch).backward()
        stepper.step()
        epoch, inside = divmod(number, per_pass)
        if inside or (epoch - 1) % 2:
            continue
        with torch.no_grad():
            value = float(loss(valid))
        if value < best:
            best, at, waited, kept = value, epoch, 0, [t.detach().clone() for t in tensors]
        else:
            waited += 1
            if waited == 2:
                break
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):  # type: ignore[assignment]
            tensor.copy_(value)
    return at


def by_hand(run: Run, client: int, tune: str, mix: str, init: str) -> tuple[nn.Module, list[int]]:
    """Return a client's mixture after steps 2 and 3, written with probabilities as they stand in eq. 5."""
    method = run.method
    module = model()
    module.load_state_dict({**module.state_dict(), **run.server})
    shared, own, gate = module.global_expert, module.local_expert, module.gate
    if init == "finetuned":
        own.load_state_dict(copy.deepcopy(shared.state_dict()))
    rows = first_examples(run, client, None)
    held = DATA.batch(DATA.rows(client, "valid"))
    per_pass = -(-len(rows) // 4)

    def alone(batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(own(batch["x"]), batch["label"])

    def joint(batch: dict[str, Tensor]) -> Tensor:
        h = torch.sigmoid(gate.logit(batch["x"]))[:, None]  # type: ignore[operator]
        p, g = (torch.softmax(e(batch["x"]), 1) for e in (own, shared))
        mixed = torch.log(h * p + (1 - h) * g) if mix == "probability" else h * p.log() + (1 - h) * g.log()
        return nn.functional.nll_loss(mixed, batch["label"])

    trained = {"local_copy": [shared, own, gate], "frozen": [own, gate], "gate_only": [gate]}[tune]
    first = stopped_early(
        list(own.parameters()), alone, 0.02, draws(client, rows, method.adapt.phases[0], 0), per_pass, held
    )
    tensors = [t for m in trained for t in m.parameters()]
    second = stopped_early(
        tensors, joint, 0.02, draws(client, rows, method.adapt.phases[1], 1), per_pass, held
    )
    return module, [first, second]


@pytest.mark.parametrize("tune", ["local_copy", "frozen", "gate_only"])
@pytest.mark.parametrize("mix", ["probability", "logprob"])
@pytest.mark.parametrize("init", ["scratch", "finetuned"])
def test_adapting_equals_plain_pytorch(tune: Any, mix: Any, init: Any) -> None:
    run = federated(mixture(tune_global=tune, mix=mix, local_init=init, local=LOCAL, **LATER))
    before = {n: bits(v) for n, v in run.server.items()}
    found = adapt_clients(run)
    assert {n: bits(v) for n, v in run.server.items()} == before
    for client in range(4):
        expected, stops = by_hand(run, client, tune, mix, init)
        own = found.own(client)
        names = {
            n for n, _ in expected.named_parameters() if tune == "local_copy" or not n.startswith("global")
        }
        assert set(own) == names
        for name in names:
            torch.testing.assert_close(own[name], expected.get_parameter(name).detach(), rtol=0, atol=1e-9)
        assert list(found.stopped[client]) == stops
    batch = DATA.batch(DATA.rows(0, "test"))
    expected, _ = by_hand(run, 0, tune, mix, init)
    output = expected(x=batch["x"]) if mix == "probability" else expected.log_mixture(x=batch["x"])  # type: ignore[operator]
    right = (output.argmax(1) == batch["label"]).double().mean()
    assert found.accuracies("test")[0] == pytest.approx(float(right))


def test_what_step_3_trains() -> None:
    for tune, changes in (("local_copy", "gls"), ("frozen", "gl"), ("gate_only", "g")):
        run = federated(
            mixture(tune_global=tune, local=LOCAL, **{**LATER, "local_epochs": 0, "early_stopping": None})
        )  # type: ignore[arg-type]
        own = adapt_clients(run, [1]).own(1)
        start = {**Net(model()).initial(), **run.server}
        for letter, prefix in (("g", "gate."), ("l", "local_expert."), ("s", "global_expert.")):
            same = same_bits(part(own, prefix), part(start, prefix))
            assert same == (letter not in changes) or (prefix == "global_expert." and not part(own, prefix))


def test_step_2_is_local_training_and_fine_tuning_bit_for_bit() -> None:
    """One run of FedAvg serves all: the local expert alone is the baseline Local, a fine-tuned one the other."""
    plain = simulate(
        Expert(1, dropout=0.3).double(), methods.fedavg(local=LOCAL), DATA, rounds=4, cohort=3, seed=5
    )
    stop, tune = LATER["early_stopping"], LATER["local_epochs"]
    alone = methods.local(local=Phase(optimizer=LOCAL.optimizer, batch_size=4))
    alone = alone.adapting(
        phases=(
            Phase(optimizer=LOCAL.optimizer, batch_size=4, epochs=tune, examples="all", early_stopping=stop),
        )
    )
    tuned = methods.fine_tuned(local=LOCAL, tune_epochs=tune, early_stopping=stop)
    local = adapt_clients(rooted(plain, Expert(2, dropout=0.3).double(), alone))
    fine = adapt_clients(rooted(plain, Expert(1, dropout=0.3).double(), tuned))
    for init, baseline in (("scratch", local), ("finetuned", fine)):
        method = mixture(local_init=init, local=LOCAL, **{**LATER, "mixture_epochs": 0})  # type: ignore[arg-type]
        found = adapt_clients(rooted(plain, model(0.3), method, "global_expert."))
        for client in range(4):
            assert same_bits(part(found.own(client), "local_expert."), baseline.own(client))
            assert found.stopped[client][0] == baseline.stopped[client][0] > 0
    assert local.accuracies() != fine.accuracies()


def test_opted_out_clients_get_the_global_expert_and_their_own() -> None:
    data = opt_out(DATA, 0.5, seed=1)
    out = [c for c in range(4) if not np.asarray(data.columns["opted_in"])[data.rows(c).start]]
    run = federated(mixture(local=LOCAL, **LATER), data)
    assert len(out) == 2
    assert {r.n for r in run.history if r.metric == "upload_bytes"} == {2}  # the others alone are drawn
    found = adapt_clients(run)
    for client in out:
        assert found.stopped[client][0] > 0
        assert not same_bits(part(found.own(client), "gate."), part(Net(model()).initial(), "gate."))


# --- losses, names, refusals


class Both(nn.Module):
    """p_l = (0.8, 0.2), p_g = (0.3, 0.7) and h = 0.6 as one output each."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor([[0.6, 0.4]]).log().expand(len(x), -1)

    def log_mixture(self, x: Tensor) -> Tensor:
        return torch.tensor([[-0.6154753, -1.1083327]]).expand(len(x), -1)


def test_the_losses_by_hand() -> None:
    net, batch = Net(Both()), {"x": torch.zeros(2, 1), "label": torch.tensor([0, 1])}
    proper, authors = mixture().adapt.phases[1].loss, mixture(mix="logprob").adapt.phases[1].loss
    # −(ln 0.6 + ln 0.4) / 2, and without normalisation (0.6154753 + 1.1083327) / 2
    assert float(proper(net, {}, batch, {})) == pytest.approx(0.7135582, abs=1e-6)
    assert float(authors(net, {}, batch, {})) == pytest.approx(0.8619040, abs=1e-6)
    weighed = {**batch, "weight": torch.tensor([1.0, 0.0])}
    assert float(authors(net, {}, weighed, {})) == pytest.approx(0.6154753, abs=1e-6)


def test_a_loss_with_penalties_keeps_them_in_both_mixes() -> None:
    loss = terms.cross_entropy("kind") + 0.5 * terms.l2_penalty("gate.*")
    nll = NegativeLogLikelihood("kind") + 0.5 * terms.l2_penalty("gate.*")
    assert (
        mixture(local=Phase(loss=loss, optimizer=adam(1e-4), epochs=3, batch_size=10)).adapt.phases[1].loss
        == loss
    )
    assert mixture(
        mix="logprob", local=Phase(loss=loss, optimizer=adam(1e-4), epochs=3, batch_size=10)
    ).adapt.phases[1].loss == OnOutput("log_mixture", nll)
    assert mixture(local=Phase(loss=loss, optimizer=adam(1e-4), epochs=3, batch_size=10)).client.phases[
        0
    ].loss == OnOutput("global_logits", loss)
    assert OnOutput("log_mixture", nll).reads_parameters
    assert not OnOutput("log_mixture", NegativeLogLikelihood()).reads_parameters
    assert as_likelihood(2.0 * Augmented(terms.cross_entropy(), 1)) == 2.0 * Augmented(
        NegativeLogLikelihood(), 1
    )
    with pytest.raises(MethodError) as error:
        as_likelihood(terms.cross_entropy(task="topic"))
    assert str(error.value) == (
        "mix='logprob' mixes one output; the loss names a task. Use mix='probability'."
    )
    with pytest.raises(MethodError) as error:
        mixture(
            mix="logprob",
            local=Phase(
                loss=terms.cross_entropy(smoothing=0.1), optimizer=adam(1e-4), epochs=3, batch_size=10
            ),
        )
    assert str(error.value) == "mix='logprob' knows no label smoothing. Use mix='probability'."


def test_the_defaults_are_the_papers() -> None:
    method = mixture()
    (shared,), (own, joint) = method.client.phases, method.adapt.phases
    assert (shared.optimizer, shared.epochs, shared.batch_size, shared.examples) == (
        adam(1e-4),
        3,
        10,
        "opted_in",
    )
    for phase in (own, joint):
        assert (phase.optimizer, phase.epochs, phase.batch_size, phase.examples) == (
            adam(1e-4),
            200,
            10,
            "all",
        )
        assert phase.early_stopping == EarlyStopping(every=5, patience=10)
    assert (own.trains, joint.trains) == (("local_expert.*",), "all")
    assert method.predict_shared == PredictOutput("global_logits")
    assert mixture(local_optimizer=sgd(0.1), mixture_optimizer=sgd(0.2)).adapt.phases[1].optimizer == sgd(0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tune_global": "copy"},
            "tune_global must be 'local_copy', 'frozen' or 'gate_only'; got 'copy'.",
        ),
        ({"local_init": "tuned"}, "local_init must be 'scratch' or 'finetuned'; got 'tuned'."),
        ({"mix": "logits"}, "mix must be 'probability' or 'logprob'; got 'logits'."),
    ],
)
def test_unknown_choices(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError) as error:
        mixture(**options)
    assert str(error.value) == message


def test_models_that_are_no_mixture() -> None:
    with pytest.raises(MethodError) as error:
        simulate(Expert(1), mixture(), DATA, rounds=1)
    assert str(error.value) == (
        "'mixture' trains a global expert, a local expert and a gate; Expert has not these parts. Join three networks: "
        "models.MixtureOfExperts(global_expert, local_expert, gate)."
    )


def test_a_fine_tuned_start_needs_equal_experts() -> None:
    class Wide(Expert):
        def __init__(self) -> None:
            super().__init__(2)
            self.body = nn.Linear(3, 5, bias=False)

    for own, fault in (
        (Wide(), "unknown ['local_expert.body.bias']"),
        (Expert(2, 4), "'local_expert.out.weight' wants (4, 5), is (3, 5)"),
    ):
        joined = MixtureOfExperts(Expert(1), own, Switch()).double()
        run = simulate(joined, mixture(local_init="finetuned", local=LOCAL), DATA, rounds=0)
        with pytest.raises(MethodError) as error:
            adapt_clients(run)
        assert str(error.value) == (
            "local_init='finetuned' starts the local expert from the global one, so both must have the same layers; they "
            f"differ: {fault}. Use local_init='scratch', or one architecture for both."
        )


def test_early_stopping_without_validation_examples() -> None:
    data = classes(counts=(5, 6), valid=0)
    run = simulate(model(), mixture(local=LOCAL), data, rounds=0)
    with pytest.raises(MethodError, match="^Client 'user-0', adapting: .* there is no example in the split"):
        adapt_clients(run)


def test_a_gate_that_sees_confidences_trains_too() -> None:
    joined = MixtureOfExperts(Expert(1), Expert(2), ConfidenceGate(Switch())).double()
    run = simulate(joined, mixture(local=LOCAL, **LATER), DATA, rounds=2)
    own = adapt_clients(run, [0]).own(0)
    assert float(own["gate.weigh.weight"].abs().sum()) > 0
