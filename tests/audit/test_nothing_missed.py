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
from fedkeep.core.errors import MethodError, NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.params import Batch, Params
from fedkeep.methods import Finish, Finished
from fedkeep.methods.terms import Term
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
    assert "NOT looked at: x; one value alone is there, so no other could be put in." in report.notes


def three_are_too_few(f: Finish) -> Finished:
    if sum(len(label) for label, _ in f.outputs(label_of)) < 4:
        raise MethodError("three examples are too few")
    return Finished()


@pytest.mark.parametrize("real", [False, True])
def test_opt_out_that_cannot_be_tried_is_no_success_where_the_data_have_any(real: bool) -> None:
    data = users(a=(4, 2 * real, 1, 1), b=ORDINARY)
    report = audit(Own(), furl(finish=three_are_too_few), data, rounds=1, allow=("loss", "judged"))
    assert not report.leaks
    assert report.ok is not real
    told = report.missed if real else report.notes
    assert any("pted-out examples" in text and "three examples are too few" in text for text in told)


@dataclass(frozen=True)
class Broken(Term):
    def __call__(self, net: Net, params: Params, batch: Batch, received: Any) -> Tensor:
        raise NonFiniteError("the loss is infinite")


def test_training_that_always_breaks_down_shows_nothing_and_is_no_success() -> None:
    report = audit(Own(), of_term(Broken()), users(a=ORDINARY, b=ORDINARY), rounds=1)
    assert not report.leaks
    assert not report.ok
    (missed,) = report.missed
    assert missed.startswith("what training sends, as client a never came through it:")
    assert "NaN or infinity" in missed


def test_a_joint_norm_that_was_never_cut_is_not_counted() -> None:
    method = methods.furl("user", local=LOCAL.but(clip_norm=1e6))
    report = audit(Own(), method, users(a=ORDINARY, b=ORDINARY), rounds=1)
    assert "the joint norm of the gradients" not in report.sources
    assert any("joint norm was NOT looked at" in note for note in report.notes)
