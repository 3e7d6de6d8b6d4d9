"""What a run says of itself: results beside answers without a model, and remarks where it did not learn."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.data import FederatedData, Ragged, toy
from fedkeep.experiments.learned import cut_inputs, remarks, simplest
from fedkeep.experiments.run import Run
from fedkeep.methods.terms import cross_entropy, squared_error
from fedkeep.models import ConfidenceGate, Linear, MixtureOfExperts


def trained(rate: float = 0.1, rounds: int = 4, private: float | None = None) -> Run:
    torch.manual_seed(0)
    rates = {} if private is None else {"user": private}
    local = Phase(loss=cross_entropy(), optimizer=sgd(rate, rates=rates))
    return simulate(
        Linear(4, 3),
        methods.furl("user", local=local),
        toy(users=6, examples=40),
        rounds=rounds,
        progress=False,
    )


def labelled(labels: list[float], splits: list[str], task: str) -> FederatedData:
    kind = np.float32 if task == "regression" else np.int64
    return FederatedData.from_columns(
        list("aaabbb"),
        {"x": np.zeros((6, 4), np.float32), "label": np.array(labels, kind)},
        split=splits,
        meta={"task": task, "classes": 1 if task == "regression" else 3},
    )


SPLIT = ["train", "train", "test"] * 2


def test_answers_without_a_model_by_hand() -> None:
    """Client a trains on 0, 0, b on 1, 2: one answer is 0, right for a's test example; b's own (1) for b's."""
    data = labelled([0, 0, 0, 1, 1, 1], SPLIT, "multiclass")
    run = simulate(Linear(4, 3), methods.fedavg(), data, rounds=1, progress=False)
    found = simplest(run)
    assert (found.one, found.each) == (0.5, 1.0)


def test_without_test_examples_nothing_is_said_of_them() -> None:
    data = labelled([0, 0, 0, 1, 1, 1], ["train", "train", "valid"] * 2, "multiclass")
    assert simplest(simulate(Linear(4, 3), methods.fedavg(), data, rounds=1, progress=False)) is None


def test_numbers_without_a_model_by_hand() -> None:
    """All users' mean is 3; a's own, with that as one more number, 5/3, b's 13/3. Test labels are 1 and 7."""
    data = labelled([0, 2, 1, 4, 6, 7], SPLIT, "regression")
    method = methods.fedavg(local=Phase(loss=squared_error()))
    found = simplest(simulate(Linear(4, 1), method, data, rounds=1, progress=False))
    assert found.one == pytest.approx(((3 - 1) ** 2 / 2 + (3 - 7) ** 2 / 2) ** 0.5)
    assert found.each == pytest.approx(((5 / 3 - 1) ** 2 / 2 + (13 / 3 - 7) ** 2 / 2) ** 0.5)


def test_a_run_that_learned_needs_no_remark_but_more_time() -> None:
    run = trained()
    assert [remark.split(".")[0] for remark in remarks(run)] in ([], ["Still improving at the last round"])


def test_nothing_learned() -> None:
    run = trained(rate=1e-9, rounds=1)
    one = simplest(run)
    worse = [
        replace(r, value=one.one) if (r.split, r.metric) == ("test", "accuracy") else r for r in run.history
    ]
    assert "one answer for all" in remarks(replace(run, history=worse))[0]


def test_a_loss_that_rose() -> None:
    run = trained()
    losses = iter([1.0, 2.0, 5.0, 10.5])
    rose = [
        replace(r, value=next(losses)) if (r.split, r.metric) == ("train", "loss") else r for r in run.history
    ]
    assert "learning_rate" in remarks(replace(run, history=rose))[0]
    assert not any("rose" in remark for remark in remarks(run))


def test_private_values_that_never_moved() -> None:
    assert any("never moved" in remark for remark in remarks(trained(private=0.0)))
    assert not any("never moved" in remark for remark in remarks(trained()))


def test_private_values_that_the_last_step_moves() -> None:
    torch.manual_seed(0)
    expert = Linear(4, 3)
    model = MixtureOfExperts(expert, copy.deepcopy(expert), ConfidenceGate())
    method = methods.mixture(local_epochs=1, mixture_epochs=1)
    run = simulate(model, method, toy(users=4, examples=20), rounds=1, progress=False)
    assert not any("never moved" in remark for remark in remarks(run))  # nobody has taken it yet
    run.fit()
    assert not any("never moved" in remark for remark in remarks(run))
    still = run.own("user-0", stage="shared")
    run.fitted = {client: still | {} for client in run.data.ids}
    assert any("never moved" in remark for remark in remarks(run))


def test_texts_that_are_cut() -> None:
    columns = {
        "text": Ragged.from_rows([[1] * length for length in (3, 8, 8, 1)]),
        "label": np.array([0, 1, 0, 1]),
    }
    for most, parts in ((8, ("50.0 %", "8 characters", "max_length = 32")), (9, ())):
        meta = {"max_length": most, "vocabulary": {"kind": "char"}}
        said = cut_inputs(FederatedData.from_columns(list("aabb"), columns, ["train", "test"] * 2, meta))
        assert bool(said) == bool(parts)
        assert all(part in said for part in parts)


def test_users_whose_training_diverged() -> None:
    run = trained()
    loss = run.examples.tensors["own/loss"].clone()
    client = run.examples.tensors["client"]
    loss[client == client[0]] = float("nan")
    wrong = replace(run, examples=replace(run.examples, tensors={**run.examples.tensors, "own/loss": loss}))
    first = run.data.ids[int(client[0])]
    assert any("1 of 6 users" in r and repr(first) in r for r in remarks(wrong))
    assert not any("diverged" in remark for remark in remarks(run))
