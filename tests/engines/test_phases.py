"""Early stopping, repeated steps, phases that take turns, and the upload chain."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkeep import Client, Method, Phase, Split, adam, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError, UploadError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.engines import Stream, lanes, local_run
from fedkeep.methods import EarlyStopping, WeightedMean
from fedkeep.methods.terms import Term, cross_entropy, squared_error
from fedkeep.privacy import Draw, Encoded, Link
from tests.engines.reference import rows_of
from tests.refusals import raises
from tests.tiny import Logits, Rounds, Scalar, classes, job, pairs

PRIVATE = Split("*")


class Pair(nn.Module):
    """ŷ = (a + b) x: a federated and a private number."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a + self.b) * x[:, 0]


@dataclass(frozen=True)
class Watched(Term):
    """A loss that is 2w on training batches, and on validation batches what a list says next."""

    values: tuple[float, ...] = ()
    seen: list[float] = field(default_factory=list)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Params) -> Tensor:
        if torch.is_grad_enabled():
            assert net.module.training
            return 2 * params["w"]
        assert not net.module.training
        self.seen.append(float(params["w"]))
        return torch.tensor(self.values[len(self.seen) - 1])


def stopped(
    values: tuple[float, ...], rule: EarlyStopping, epochs: int = 20, valid: int = 1
) -> tuple[float, int, list[float]]:
    """Return w, the best pass and the values of w at each measurement; every pass moves w by −1."""
    data = pairs({"a": [(1, 1)] * (2 + valid)}, test=valid)
    loss = Watched(values)
    phase = Phase(loss=loss, optimizer=sgd(0.5), epochs=epochs, batch_size=2, early_stopping=rule)
    net = Net(Scalar(0.0))
    result = local_run(
        net,
        PRIVATE,
        Client(phases=(phase,)),
        net.initial(),
        {},
        data,
        np.arange(2),
        Stream(0, "a"),
        valid=np.arange(2, 2 + valid),
    )
    return float(result.params["w"]), result.stopped[0], loss.seen


def test_early_stopping_by_hand() -> None:
    """Measured after passes 1, 3, 5, 7; the lowest at 3; two that don't improve end it at 7; w is that of pass 3."""
    w, best, seen = stopped((5.0, 3.0, 3.0, 4.0, 0.0), EarlyStopping(every=2, patience=2))
    assert (w, best, seen) == (-3.0, 3, [-1.0, -3.0, -5.0, -7.0])


def test_an_improvement_must_be_large_enough() -> None:
    w, best, seen = stopped(
        (5.0, 4.6, 4.4, 9.0, 9.0), EarlyStopping(every=1, patience=2, min_improvement=0.5)
    )
    assert (w, best, len(seen)) == (-3.0, 3, 5)  # 4.6 is no improvement of 5, 4.4 is


def test_the_validation_loss_is_the_mean_over_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at once and one: 2 after pass 1, 2.25 after pass 2; the means of both batches' means would fall: 3, 2.5."""
    monkeypatch.setattr(lanes, "EVALUATION_BATCH", 3)
    w, best, seen = stopped((1.0, 5.0, 2.0, 3.0), EarlyStopping(every=1, patience=1), valid=4)
    assert (w, best, seen) == (-1.0, 1, [-1.0, -1.0, -2.0, -2.0])


def test_passes_may_end_first_and_the_best_is_kept_all_the_same() -> None:
    w, best, seen = stopped((5.0, 6.0), EarlyStopping(every=5, patience=10), epochs=8)
    assert (w, best, seen) == (-1.0, 1, [-1.0, -6.0])


def test_a_loss_that_is_not_a_number_is_no_improvement() -> None:
    assert stopped((math.nan, 2.0, math.nan, math.nan), EarlyStopping(every=1, patience=2))[:2] == (-2.0, 2)


def test_early_stopping_wants_validation_examples() -> None:
    data = pairs({"a": [(1, 1)]})
    net = Net(Scalar())
    phase = Phase(loss=squared_error(), early_stopping=EarlyStopping())
    with raises(MethodError, who="Client 'a', round 0"):
        local_run(
            net, PRIVATE, Client(phases=(phase,)), net.initial(), {}, data, rows_of(data, 0), Stream(0, "a")
        )


def test_what_leaves_the_client_can_not_stop_early() -> None:
    with raises(MethodError, method="fedavg", federated="user"):
        methods.fedavg().on_client(phases=(Phase(early_stopping=EarlyStopping()),)).check(Logits())
    Method(name="own", split=PRIVATE, client=Client(phases=(Phase(early_stopping=EarlyStopping()),))).check(
        Logits()
    )


def test_repeated_steps_by_hand() -> None:
    """w ← w − 0.25 · 2 (w − 1) halves the distance to 1 at each of three steps on the one mini-batch."""
    data = pairs({"a": [(1, 1)]})
    net = Net(Scalar())
    phase = Phase(loss=squared_error(), optimizer=sgd(0.25))
    thrice = Client(phases=(phase,), turns=(3,))
    result = local_run(net, PRIVATE, thrice, net.initial(), {}, data, rows_of(data, 0), Stream(0, "a"))
    assert (float(result.params["w"]), result.steps) == (0.875, 3)


def test_phases_take_turns_by_hand() -> None:
    """Two mini-batches (x = y = 1 and again): b twice, then a, halving the distance of a + b to 1 by each step.

    The distance is 1/2, 1/4, 1/8 after the first mini-batch; b = 3/4, a = 1/8. Then b takes 1/16 + 1/32, a 1/64.
    """
    data = pairs({"a": [(1, 1), (1, 1)]})
    phases = (
        Phase(loss=squared_error(), trains="private", optimizer=sgd(0.25), batch_size=1),
        Phase(loss=squared_error(), trains="federated", optimizer=sgd(0.25), batch_size=1),
    )
    rule = Method(name="turns", split=Split("b"), client=Client(phases=phases, turns=(2, 1)))
    made = job(Pair(), rule, data)
    rounds = Rounds(made)
    rounds([0])
    assert float(rounds.server.params["a"]) == 1 / 8 + 1 / 64
    assert float(made.store.read([0])["b"][0]) == 3 / 4 + 1 / 16 + 1 / 32
    rounds = Rounds(job(Pair(), rule.on_client(turns="phases"), data))
    rounds([0])
    # b comes to 3/4 in two steps, before a takes half of the rest and half of what then remains.
    assert float(rounds.server.params["a"]) == 1 / 8 + 1 / 16


@dataclass(frozen=True)
class Listed(Term):
    """Cross-entropy that lists whose step it is, and on how many examples."""

    name: str = ""
    steps: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, net: Net, params: Params, batch: Batch, received: Params) -> Tensor:
        self.steps.append((self.name, len(batch["label"])))
        return cross_entropy()(net, params, batch, received)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("phases", "a3 a2 b3 b2"),
        ("batches", "a3 b3 a2 b2"),
        ((2, 1), "a3 a3 b3 a2 a2 b2"),
        ((1, 3), "a3 b3 b3 b3 a2 b2 b2 b2"),
    ],
)
def test_the_order_of_the_steps(turns: Any, expected: str) -> None:
    data, net, steps = classes(counts=(5,)), Net(Logits()), list[tuple[str, int]]()
    phases = tuple(Phase(batch_size=3, loss=Listed(name=name, steps=steps)) for name in "ab")
    client = Client(phases=phases, turns=turns)
    local_run(net, PRIVATE, client, net.initial(), {}, data, rows_of(data, 0), Stream(0, "user-0"))
    assert " ".join(f"{name}{examples}" for name, examples in steps) == expected


@pytest.mark.parametrize("name", ["by", "missing_rows"])
def test_a_mean_checks_its_fields(name: str) -> None:
    allowed = {"by": ["examples", "uniform"], "missing_rows": ["unchanged", "owners_only"]}[name]
    with raises(MethodError, text=f"{name} must be {allowed[0]!r} or {allowed[1]!r}; got 'other'."):
        WeightedMean(**{name: "other"})  # type: ignore[arg-type]


def test_values_stay_within_bounds() -> None:
    """A step of 0.4 · 2 would take w from 0 to 0.8; it stays at 0.5, and from there returns freely."""
    for make in (sgd, adam):
        optimizer = make(0.4, bounds={"w": (0.0, 0.5)})
        params = {"w": torch.zeros(2, dtype=torch.float64), "v": torch.zeros(1, dtype=torch.float64)}
        state = optimizer.init()
        slope = {
            "w": torch.tensor([-2.0, 2.0], dtype=torch.float64),
            "v": torch.tensor([-9.0], dtype=torch.float64),
        }
        for _ in range(2):
            optimizer.update(params, slope, state)
        assert params["w"].tolist() == [0.5, 0.0]
        assert float(params["v"]) > 0.7
    with pytest.raises(ConfigError, match=r"^The bounds of 'w' must be \(low, high\); got \(1.0, 0.0\)."):
        sgd(bounds={"w": (1, 0)})
    with pytest.raises(ConfigError, match="^The bounds pattern 'v' matches no parameter; they are"):
        sgd(bounds={"v": (0, 1)}).check_patterns(["w"])


@dataclass(frozen=True)
class Halved(Link):
    """Sends half of a change under another name, and its client's draw."""

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        assert tensors.keys() == start.keys()
        noise = draw.normal(())
        return Encoded(tensors={"noise": noise, **{f"{n}/half": v / 2 for n, v in tensors.items()}})

    def decode(self, tensors: Params, start: Params, sent: Params) -> Params:
        return {n: 2 * tensors[f"{n}/half"] for n in start}


@dataclass(frozen=True)
class Doubled(Link):
    """Sends everything twice."""

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        return Encoded(tensors={n: torch.stack([v, v]) for n, v in tensors.items()})

    def decode(self, tensors: Params, start: Params, sent: Params) -> Params:
        return {n: v[0] for n, v in tensors.items()}


DATA = classes()


def test_the_chain_encodes_in_order_and_decodes_backwards() -> None:
    plain = methods.furl("user", local=Phase(optimizer=sgd(0.3)))
    chained = plain.but(upload=(Halved(), Doubled()))
    runs = [simulate(Logits(), m, DATA, rounds=3, cohort=4) for m in (plain, chained)]
    for name, value in runs[0].server.items():
        assert torch.equal(value, runs[1].server[name])
    sizes = [{r.value for r in run.history if r.metric == "upload_bytes"} for run in runs]
    assert sizes == [{4.0 * 12}, {2 * (8 + 4.0 * 12)}]


SEEN: list[float] = []


@dataclass(frozen=True)
class Drawing(Halved):
    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        SEEN.append(float(draw.normal(())))
        return Encoded(tensors=tensors)

    def decode(self, tensors: Params, start: Params, sent: Params) -> Params:
        return tensors


def test_each_link_of_each_client_and_round_has_its_own_draw() -> None:
    seen = SEEN
    seen.clear()
    rule = methods.fedavg().but(upload=(Drawing(), Drawing()))
    simulate(Logits(), rule, DATA, rounds=2, cohort=6)
    tried, first = (
        seen[:-24],
        seen[-24:],
    )  # links are tried before the first round: who can't take these says so then
    assert len(set(first) - set(tried)) == 24
    assert len(set(tried)) == 2
    seen.clear()
    simulate(Logits(), rule, DATA, rounds=2, cohort=6)
    assert seen[-24:] == first


def test_an_upload_that_cannot_be_decoded_is_refused() -> None:
    @dataclass(frozen=True)
    class Lossy(Halved):
        def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
            whole = super().encode(tensors, start, draw, state, sent).tensors
            return Encoded(tensors={n: v for n, v in whole.items() if n != "user/half"})

    rule = methods.fedavg().but(upload=(Lossy(),))
    with pytest.raises(UploadError) as error:
        simulate(Logits(), rule, DATA, rounds=1, cohort=1)
    assert str(error.value).endswith("was refused: it cannot be decoded ('user/half').")
    run = simulate(Logits(), rule, DATA, rounds=1, cohort=3, on_nonfinite="skip", min_clients=0)
    assert [r.value for r in run.history if r.metric == "refused_clients"] == [3.0]


def test_adaptation_may_stop_early() -> None:
    rule = methods.fine_tuned(local=Phase(optimizer=sgd(0.3)))
    adapt = tuple(
        replace(p, early_stopping=EarlyStopping(every=1, patience=2), epochs=30) for p in rule.adapt.phases
    )
    run = simulate(Logits(), rule.adapting(phases=adapt), DATA, rounds=2, cohort=3)
    from tests.fitting import fit_private

    own = fit_private(run, "user-1", rows_of(DATA, 1))
    assert not torch.equal(own["linear.weight"], run.server["linear.weight"])
