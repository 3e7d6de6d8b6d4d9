"""The mixture's steps 2 and 3, on the device, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Run, methods, simulate
from fedkeep.core.errors import MethodError
from fedkeep.core.net import Net
from fedkeep.data import opt_out
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from fedkeep.experiments.personalize import adapt_clients, rooted
from fedkeep.methods import EarlyStopping, Phase, mixture
from fedkeep.models import ConfidenceGate, MixtureOfExperts
from tests.engines.reference import step
from tests.fitting import first_examples
from tests.methods.experts import DATA, LATER, LOCAL, Expert, Switch, federated, model, part
from tests.refusals import raises
from tests.tiny import bits, classes, same_bits, users

PAIRED = [
    ("local_copy", "probability", "scratch"),
    ("local_copy", "logprob", "finetuned"),
    ("frozen", "probability", "finetuned"),
    ("frozen", "logprob", "scratch"),
    ("gate_only", "probability", "finetuned"),
    ("gate_only", "logprob", "scratch"),
]
"""Of the settings below every two values are together in one."""


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
        step(stepper, loss(batch))
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


def by_hand(run: Run, number: int, tune: str, mix: str, init: str) -> tuple[nn.Module, list[int]]:
    """Return a client's mixture after steps 2 and 3, written with probabilities as they stand in eq. 5."""
    method = run.method
    module = model()
    module.load_state_dict({**module.state_dict(), **run.server})
    shared, own, gate = module.global_expert, module.local_expert, module.gate
    if init == "finetuned":
        own.load_state_dict(copy.deepcopy(shared.state_dict()))
    rows = first_examples(run, f"user-{number}", None)
    held = DATA.batch(DATA.rows(number, "valid"))
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
        list(own.parameters()), alone, 0.02, draws(number, rows, method.adapt.phases[0], 0), per_pass, held
    )
    tensors = [t for m in trained for t in m.parameters()]
    second = stopped_early(
        tensors, joint, 0.02, draws(number, rows, method.adapt.phases[1], 1), per_pass, held
    )
    return module, [first, second]


@pytest.mark.parametrize(
    ("tune", "mix", "init"),
    [
        pytest.param(tune, mix, init, marks=() if (tune, mix, init) in PAIRED else pytest.mark.slow)
        for init in ("scratch", "finetuned")
        for mix in ("probability", "logprob")
        for tune in ("local_copy", "frozen", "gate_only")
    ],
)
def test_adapting_equals_plain_pytorch(tune: Any, mix: Any, init: Any) -> None:
    run = federated(mixture(tune_global=tune, mix=mix, local_init=init, local=LOCAL, **LATER))
    before = {n: bits(v) for n, v in run.server.items()}
    found = adapt_clients(run)
    assert {n: bits(v) for n, v in run.server.items()} == before
    for number, client in enumerate(users(range(4))):
        expected, stops = by_hand(run, number, tune, mix, init)
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
    assert found.clients_frame("test")["accuracy"].to_pylist()[0] == pytest.approx(float(right))


def test_what_step_3_trains() -> None:
    for tune, changes in (("local_copy", "gls"), ("frozen", "gl"), ("gate_only", "g")):
        run = federated(
            mixture(tune_global=tune, local=LOCAL, **{**LATER, "local_epochs": 0, "early_stopping": None})
        )  # type: ignore[arg-type]
        own = adapt_clients(run, ["user-1"]).own("user-1")
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
        for client in users(range(4)):
            assert same_bits(part(found.own(client), "local_expert."), baseline.own(client))
            assert found.stopped[client][0] == baseline.stopped[client][0] > 0
    assert local.clients_frame()["accuracy"].to_pylist() != fine.clients_frame()["accuracy"].to_pylist()


def test_opted_out_clients_get_the_global_expert_and_their_own() -> None:
    data = opt_out(DATA, 0.5, seed=1)
    out = users(c for c in range(4) if not np.asarray(data.columns["opted_in"])[data.rows(c).start])
    run = federated(mixture(local=LOCAL, **LATER), data)
    assert len(out) == 2
    assert {r.n for r in run.history if r.metric == "upload_bytes"} == {2}  # the others alone are drawn
    found = adapt_clients(run)
    for client in out:
        assert found.stopped[client][0] > 0
        assert not same_bits(part(found.own(client), "gate."), part(Net(model()).initial(), "gate."))


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
        with raises(MethodError, said="starts the local expert from the global one", fault=fault):
            adapt_clients(run)


def test_early_stopping_without_validation_examples() -> None:
    """All passes are taken, unless the rule that was named requires them."""
    data = classes(counts=(5, 6), valid=0)
    made = model()
    usual, none, required = (
        simulate(
            copy.deepcopy(made),
            mixture(local=LOCAL, local_epochs=12, mixture_epochs=9, **stop),
            data,
            rounds=0,
        )
        for stop in ({}, {"early_stopping": None}, {"early_stopping": EarlyStopping()})
    )
    for client in ("user-0", "user-1"):
        assert same_bits(adapt_clients(usual).own(client), adapt_clients(none).own(client))
    with pytest.raises(MethodError, match="^Client 'user-0', adapting: "):
        adapt_clients(required)


def test_a_gate_that_sees_confidences_trains_too() -> None:
    joined = MixtureOfExperts(Expert(1), Expert(2), ConfidenceGate(Switch())).double()
    run = simulate(joined, mixture(local=LOCAL, **LATER), DATA, rounds=2)
    own = adapt_clients(run, ["user-0"]).own("user-0")
    assert float(own["gate.weigh.weight"].abs().sum()) > 0
