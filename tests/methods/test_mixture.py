"""The federated mixture of experts: FedAvg of one expert, its losses, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedkeep import adam, methods, sgd, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.methods import EarlyStopping, Phase, mixture, terms
from fedkeep.methods.augment import Augmented
from fedkeep.methods.mixture import NegativeLogLikelihood, OnOutput, PredictOutput, as_likelihood
from tests.methods.experts import DATA, LOCAL, Expert, Switch, federated, model, part
from tests.refusals import raises
from tests.tiny import same_bits


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


def test_clients_side_by_side_train_the_global_expert_with_its_dropout() -> None:
    run = federated(mixture(local=LOCAL), dropout=0.5, engine="vectorised")
    plain = simulate(
        Expert(1, dropout=0.5).double(), methods.fedavg(local=LOCAL), DATA, rounds=4, cohort=3, seed=5
    )
    torch.testing.assert_close(part(run.server, "global_expert."), plain.server, rtol=0, atol=1e-12)


def test_rounds_compute_the_global_expert_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for kind, name in ((Switch, "logit"), (Expert, "forward")):
        real = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda self, x, real=real: (calls.append(type(self).__name__), real(self, x))[1]
        )
    federated(mixture(local=LOCAL), evaluate_every=0)
    # the look at the widths, whether examples are mixed, and the rehearsal in both modes
    assert calls.count("Switch") == 1 + 3 + 2
    calls.clear()
    simulate(
        Expert(1).double(), methods.fedavg(local=LOCAL), DATA, rounds=4, cohort=3, seed=5, evaluate_every=0
    )
    steps = calls.count("Expert")
    calls.clear()
    federated(mixture(local=LOCAL), evaluate_every=0)
    assert calls.count("Expert") == steps + 2 + 3 + 2  # before the rounds both experts


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
            run.evaluate(split, stage="before")
            == run.evaluate(split, stage="shared")
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
    with raises(MethodError, said="mixes one output; the loss names a task. Use"):
        as_likelihood(terms.cross_entropy(task="topic"))
    with raises(MethodError, said="knows no label smoothing. Use mix="):
        mixture(
            mix="logprob",
            local=Phase(
                loss=terms.cross_entropy(smoothing=0.1), optimizer=adam(1e-4), epochs=3, batch_size=10
            ),
        )


def test_with_the_papers_rate_and_passes_the_defaults_are_the_papers() -> None:
    method = mixture(local=Phase(optimizer=adam(1e-4), epochs=3, batch_size=10))
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
        assert phase.early_stopping == EarlyStopping(every=5, patience=10, required=False)
    assert (own.trains, joint.trains) == (("local_expert.*",), "all")
    assert method.predict_shared == PredictOutput("global_logits")
    assert mixture(local_optimizer=sgd(0.1), mixture_optimizer=sgd(0.2)).adapt.phases[1].optimizer == sgd(0.2)


def test_models_that_are_no_mixture() -> None:
    with raises(MethodError, said="trains a global expert, a local expert and a", module="Expert"):
        mixture().made_for(Expert(1))
