"""What an audit looks at does not hang on who sorts first, and what it could not look at is no success."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep import FederatedData, methods
from fedkeep.audit import audit
from fedkeep.audit.findings import JOINT
from fedkeep.core.errors import MethodError, NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods import Finish, Finished
from fedkeep.methods.terms import Term
from fedkeep.prove import prove
from tests.audit.clients import users
from tests.audit.leaks import LOCAL, Own, furl, of_term

ORDINARY = (4, 0, 1, 1)


@pytest.mark.parametrize(
    "data",
    [
        users(a=(1, 0, 0, 0), b=(1, 0, 0, 0), c=ORDINARY, d=ORDINARY),
        users(a=(0, 2, 0, 1), b=(0, 2, 0, 1), c=ORDINARY, d=ORDINARY),
        users(a=(4, 0, 0, 0), b=(4, 0, 0, 0), c=(4, 0, 0, 0), d=(0, 0, 1, 0), e=(0, 0, 0, 1)),
        users(c=ORDINARY, d=ORDINARY, e=(1, 0, 0, 0), f=(0, 2, 0, 1)),
    ],
    ids=["of one example", "wholly opted out", "who are only judged", "last"],
)
def test_who_sorts_first_hides_no_leak(data: FederatedData) -> None:
    report = audit(Own(), furl(), data, rounds=1, allow=("loss",))
    judging = {f.leaves for f in report.leaks if f.source == "validation and test examples"}
    assert judging == {"judged/valid", "judged/test"}
    assert {"private parameter user", "training examples", "the number of opted-out examples"} <= set(
        report.sources
    )
    assert not report.missed


def label_of(net: Net, params: Params, batch: Batch) -> Tensor:
    return batch["label"]


def mean_label(f: Finish) -> Finished:
    found = torch.cat([label for label, _ in f.outputs(label_of)])
    return Finished(params={"linear.bias": f.trained["linear.bias"] + found.float().mean()})


def test_a_label_that_leaves_is_found_where_all_have_one_class() -> None:
    data = users(a=ORDINARY, b=ORDINARY)
    data.columns["label"] = np.zeros(data.examples, int)
    data.columns["x"] = np.zeros((data.examples, 3), int)
    report = audit(Own(), furl(finish=mean_label), data, rounds=1)
    assert "upload/linear.bias changes with training examples" in [str(f) for f in report.leaks]
    assert report.missed == ("x: one value alone is there, so no other could be put in",)


def three_are_too_few(f: Finish) -> Finished:
    if sum(len(label) for label, _ in f.outputs(label_of)) < 4:
        raise MethodError("three examples are too few")
    return Finished()


@pytest.mark.parametrize("real", [False, True])
def test_opt_out_that_cannot_be_tried_is_no_success(real: bool) -> None:
    data = users(a=(4, 2 * real, 1, 1), b=ORDINARY)
    report = audit(Own(), furl(finish=three_are_too_few), data, rounds=1, allow=("loss", "judged"))
    assert not report.leaks
    assert not report.ok
    told = [text for text in report.missed if text.startswith("opted-out examples: ")]
    assert told
    assert "three examples are too few" in told[0]


@dataclass(frozen=True)
class Broken(Term):
    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        raise NonFiniteError("the loss is infinite")


@dataclass(frozen=True)
class Zero(Term):
    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        return 0.0 * net(params, batch).sum()


def test_training_that_always_breaks_down_shows_nothing_and_is_no_success() -> None:
    report = audit(Own(), of_term(Broken()), users(a=ORDINARY, b=ORDINARY), rounds=1)
    assert not report.leaks
    assert not report.ok
    missed = report.missed[0]
    assert missed.startswith("what training sends, as client a never came through it:")
    assert "NaN or infinity" in missed


@pytest.mark.parametrize("over", ["all", "halves"])
def test_a_joint_norm_that_was_never_cut_is_found_by_a_lower_bound(over: Any) -> None:
    """As ``prove`` finds it, which follows operations: whatever the bound is, some gradient may be longer."""
    method = methods.furl("user", local=LOCAL.but(clip_norm=1e6, clip_over=over))
    data = users(a=ORDINARY, b=ORDINARY)
    report = audit(Own(), method, data, rounds=1)
    assert (report.ok, prove(Own(), method, data).ok) == (over == "halves",) * 2
    if over == "all":
        (leak,) = report.leaks
        assert (leak.leaves, leak.source) == ("clip", JOINT)
        assert "cut no gradient here" in leak.how
        allow = ("loss", "judged", "clip")
        assert audit(Own(), method, data, rounds=1, allow=allow).ok
        assert prove(Own(), method, data, allow=allow).ok


def test_a_joint_norm_of_gradients_that_are_all_zero_is_not_looked_at() -> None:
    method = methods.furl("user", local=LOCAL.but(loss=Zero(), clip_norm=1.0))
    report = audit(Own(), method, users(a=ORDINARY, b=ORDINARY), rounds=1)
    assert not report.leaks
    assert not report.ok
    assert any(text.startswith(JOINT) for text in report.missed)
