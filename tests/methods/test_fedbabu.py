"""FedBABU: an independent loop, a head that never moves, and its fine-tuning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedkeep import Phase, Split, averaging, methods, sgd
from fedkeep.core.errors import ConfigError, MethodError, SplitError
from fedkeep.engines import Stream
from fedkeep.engines.batches import batches
from tests import refusals
from tests.engines.reference import rows_of
from tests.fitting import fit_private
from tests.methods.parts import Deep
from tests.methods.plain import (
    DATA,
    SEED,
    State,
    apart,
    count,
    examples_of,
    initial,
    loss_of,
    plan,
    run_of,
    slopes_of,
)
from tests.tiny import everyone, job, results, same_bits

LOCAL = Phase(batch_size=4, epochs=2, optimizer=sgd(0.3))
HEAD = ("head.weight", "head.bias")


def plain() -> State:
    """Return all values after some rounds, the body trained by everybody and the head by nobody."""
    w = initial()
    for cohort in plan(LOCAL):
        total, mean = sum(map(count, cohort)), dict.fromkeys(w, torch.zeros(()))
        for k, steps in cohort.items():
            y = dict(w)
            for batch in steps:
                g = slopes_of(y, batch)
                y = {n: v if n in HEAD else v - 0.3 * g[n] for n, v in y.items()}
            mean = {n: mean[n] + count(k) / total * (y[n] - w[n]) for n in w}
        w = {n: v + mean[n] for n, v in w.items()}
    return w


def test_fedbabu_equals_a_plain_loop() -> None:
    run, w = run_of(methods.fedbabu(local=LOCAL)), plain()
    assert apart(run.server, {n: v for n, v in w.items() if n not in HEAD}) < 1e-12
    losses = [loss_of(w, examples_of(k, "test")) for k in range(len(DATA))]  # 3 test examples each
    expected = pytest.approx(float(torch.stack(losses).mean()), abs=1e-12)
    assert run.evaluate(stage="before")["loss"] == expected
    assert run.evaluate(stage="shared")["loss"] == expected


def test_the_head_is_frozen_in_rounds() -> None:
    """It never moves or leaves, is stored for no client, and is no traffic; the body's 16 float64 numbers are."""
    run = run_of(methods.fedbabu(local=LOCAL))
    first = {n: v for n, v in initial().items() if n in HEAD}
    assert set(run.server) == {"body.weight", "body.bias"}
    assert everyone(run.private, 6) == {}
    for k in range(len(DATA)):
        assert same_bits({n: run.parameters(DATA.ids[k], stage="before")[n] for n in HEAD}, first)
    for metric in ("upload_bytes", "download_bytes"):
        assert {r.value for r in run.history if r.metric == metric} == {(4 * 3 + 4) * 8}
    for result in results(job(Deep().double(), methods.fedbabu(local=LOCAL), DATA), [0, 1]):
        assert set(result.upload.deltas) == {"body.weight", "body.bias"}


@pytest.mark.parametrize("tunes", ["all", "head"])
def test_fine_tuning_equals_a_plain_loop(tunes: Any) -> None:
    run = run_of(methods.fedbabu(tunes=tunes, local=LOCAL))
    rows, phase = rows_of(DATA, 1), run.method.adapt.phases[0]
    assert phase.epochs == 10
    w = {**run.server, **{n: v for n, v in initial().items() if n in HEAD}}
    first = fit_private(run, "user-1", rows[:0])  # without examples: what fine-tuning starts from
    assert apart(first, {n: v for n, v in w.items() if tunes == "all" or n in HEAD}) == 0
    for chosen in batches(DATA, rows, phase, Stream(SEED, "personalize/user-1", len(rows)), 0):
        g = slopes_of(w, DATA.batch(chosen))
        w = {n: v - 0.3 * g[n] if tunes == "all" or n in HEAD else v for n, v in w.items()}
    own = fit_private(run, "user-1", rows)
    assert apart(own, {n: v for n, v in w.items() if tunes == "all" or n in HEAD}) < 1e-12
    assert all(
        not same_bits({n: v}, {n: run.parameters("user-1", stage="before")[n]}) for n, v in own.items()
    )
    assert everyone(run.private, 6) == {}


def test_fine_tuning_may_train_a_part_of_the_head() -> None:
    part = Phase(trains=("head.bias",), batch_size=4, examples="all")
    run = run_of(methods.fedbabu(local=LOCAL).adapting(phases=(part,)))
    own, first = fit_private(run, "user-1", rows_of(DATA, 1)), run.parameters("user-1", stage="before")
    assert [n for n, v in own.items() if not same_bits({n: v}, {n: first[n]})] == ["head.bias"]
    with pytest.raises(MethodError) as error:  # said before anything is trained
        methods.fedbabu(local=part.but(examples="opted_in")).check(Deep())
    names = ["body.weight", "body.bias"]
    assert str(error.value) == f"trains='head.bias' matches no trainable parameter; they are {names}."


def test_what_fedbabu_refuses() -> None:
    named = methods.fedbabu(server=averaging(sgd(1.0, rates={"head.*": 0.5})))  # the server has no head
    with pytest.raises(ConfigError, match=r"head\.\*"):
        named.check(Deep())
    with refusals.raises(SplitError, half="private", pattern="haed.*"):
        methods.fedbabu().adapting(split=Split("haed.*")).check(Deep())
