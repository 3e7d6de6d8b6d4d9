"""Planted leaks: the audit finds each, and says what it looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fedkeep import Method, methods
from fedkeep.audit import AuditReport, audit
from fedkeep.core.params import Params
from fedkeep.engines import client_step
from fedkeep.engines.lanes import Pass
from fedkeep.remote import node, serving
from fedkeep.remote.messages import ClientAnswer
from fedkeep.split import Split, Upload
from tests.audit import leaks
from tests.audit.leaks import LOCAL, Body, Keeps, Own, furl, of_term
from tests.tiny import classes

DATA = classes(counts=(5, 6), kind="f4")
OUT = classes(counts=(9, 9), kind="f4", opted_in=True)
USER, STATE = "private parameter user", "kept state"

Row = tuple[Callable[[], nn.Module], Method, str, str, str]

# model, method · what leaves, what it changes with, and what that looks like
LEAKS: dict[str, Row] = {
    "the private vector": (
        Own,
        furl(sends=leaks.a_vector, finish=leaks.send_user),
        "sent/seen",
        USER,
        "the values themselves",
    ),
    "its sum": (
        Own,
        furl(sends=leaks.a_number, finish=leaks.send_sum),
        "sent/seen",
        USER,
        "the sum of the values",
    ),
    "its norm": (
        Own,
        furl(sends=leaks.a_number, finish=leaks.send_norm),
        "sent/seen",
        USER,
        "the norm of the values",
    ),
    "in half precision": (
        Own,
        furl(sends=leaks.in_half, finish=leaks.send_half),
        "sent/seen",
        USER,
        "in half precision",
    ),
    "in bfloat16": (
        Own,
        furl(sends=leaks.in_bfloat, finish=leaks.send_bfloat),
        "sent/seen",
        USER,
        "in bfloat16",
    ),
    "in 8 bits": (Own, furl(sends=leaks.quantised, finish=leaks.send_quantised), "sent/seen", USER, "a copy"),
    "its signs": (Own, furl(sends=leaks.quantised, finish=leaks.send_signs), "sent/seen", USER, ""),
    "the sign of its sum": (Own, furl(sends=leaks.a_number, finish=leaks.send_a_bit), "sent/seen", USER, ""),
    "a multiple": (
        Own,
        furl(sends=leaks.a_vector, finish=leaks.send_scaled),
        "sent/seen",
        USER,
        "-3 times the values",
    ),
    "a difference": (
        Own,
        furl(sends=leaks.a_vector, finish=leaks.send_difference),
        "sent/seen",
        USER,
        "a copy",
    ),
    "the last bits of a weight": (Own, furl(finish=leaks.in_low_bits), "upload/linear.weight", USER, ""),
    "its move in a bias": (Own, furl(finish=leaks.move_of_user), "upload/linear.bias", USER, ""),
    "a start that moves a bias": (Own, furl(start=leaks.begin_at_user), "upload/linear.bias", USER, ""),
    "a start in the first round alone": (
        Own,
        furl(state=leaks.not_yet, start=leaks.begin_at_user_once, finish=leaks.has_begun),
        "upload/linear.bias",
        USER,
        "",
    ),
    "a round later": (
        Own,
        furl(state=leaks.later, sends=leaks.a_vector, finish=leaks.send_later),
        "sent/seen",
        "kept state mine",
        "the values themselves",
    ),
    "the norm as the loss": (Own, of_term(leaks.AndNorm()), "loss", USER, "the norm of the values"),
    "a term that writes": (Own, of_term(leaks.Writes()), "upload/linear.bias", USER, ""),
    "another client's vector": (
        Own,
        of_term(leaks.Remembers()),
        "upload/linear.bias",
        "what another client keeps (user-0)",
        "",
    ),
    "batch statistics of private values": (
        lambda: Own(norm=True),
        methods.furl("user", local=LOCAL.but(batch_size=8)),
        "upload/norm.running_mean",
        USER,
        "running statistics",
    ),
    "the sum of examples": (
        Own,
        furl(sends=leaks.inputs, finish=leaks.send_examples),
        "sent/seen",
        "training examples",
        "of the sums of examples",
    ),
    "an example": (
        Own,
        furl(sends=leaks.inputs, finish=leaks.send_an_example),
        "sent/seen",
        "training examples",
        "the values themselves",
    ),
    "a link that hoards": (
        Own,
        furl().but(upload=(leaks.Hoards(),)),
        "upload/linear.weight",
        "kept state upload/0/linear.weight",
        "the values themselves",
    ),
    "a link that reports": (
        Own,
        furl().but(upload=(leaks.Tells(),)),
        "report/0/size",
        "kept state upload/0/size",
        "",
    ),
    "a server that looks into data": (
        Own,
        furl().but(server=leaks.LOOKS),
        "server/server/mean",
        "training examples",
        "",
    ),
    "a server beside the uploads": (
        Own,
        furl(finish=leaks.catch_user).but(server=leaks.SPY),
        "server/server/caught",
        "something besides uploads",
        "",
    ),
    "the joint norm of gradients": (
        Own,
        methods.furl("user", local=LOCAL.but(clip_norm=0.05)),
        "clip",
        "the joint norm",
        "",
    ),
}


def found(report: AuditReport, leaves: str, source: str, how: str) -> bool:
    """Tell whether a leak is among the findings, and fails the audit."""
    same = [f for f in report.leaks if f.leaves == leaves and f.source.startswith(source) and how in f.how]
    return bool(same) and not report.ok


def clean() -> None:
    leaks.SEEN.clear()
    leaks.CAUGHT.clear()


FAST = {
    "the private vector",
    "the last bits of a weight",
    "the norm as the loss",
    "a server beside the uploads",
    "a start in the first round alone",
}
ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in LEAKS]


@pytest.mark.parametrize("name", ALL)
def test_a_planted_leak_is_found(name: str) -> None:
    clean()
    model, method, leaves, source, how = LEAKS[name]
    data = OUT if "opted-out" in source else DATA
    assert found(audit(model(), method, data, rounds=2), leaves, source, how)


def test_what_a_model_remembers_of_an_opted_out_example_reaches_no_upload() -> None:
    report = audit(Keeps(), leaks.TWO_HEADS, OUT, rounds=2)  # a run puts back what a module's attributes held
    assert not [finding for finding in report.findings if "opted-out" in finding.source]


def test_another_clients_examples_are_no_declared_gradients() -> None:
    report = audit(Own(), of_term(leaks.KeepsFirst()), DATA, rounds=1)
    assert found(report, "upload/linear.weight", "training examples of another client (user-0)", "")
    assert report.verdict("weight") == "unchanged"


def test_no_text_of_a_fault_leaves() -> None:
    """A term of it would tell the private vector; the owner is told it."""
    report = audit(Own(), of_term(leaks.Breaks()), DATA, rounds=1)
    assert report.verdict("status") == "unchanged"
    assert not report.leaks


def test_what_is_not_a_leak_is_not_found() -> None:
    report = audit(Own(), furl(), DATA, rounds=2)
    assert report.ok
    assert {f.verdict for f in report.of("upload/linear.weight")} == {"gradients"}
    assert [f.verdict for f in report.of("loss")] == ["declared", "declared"]
    assert report.verdict("weight") == report.verdict("counts/train") == "unchanged"


# --- fedkeep itself, broken in one line


def test_the_split_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses such an upload, but then it has left."""
    whole = Split.upload

    def forgetful(self: Split, received: Params, trained: Params, *others: Any) -> Upload:
        made = whole(self, received, trained, *others)
        return made.but({**made.deltas, "user": trained["user"]})

    monkeypatch.setattr(Split, "upload", forgetful)
    assert found(audit(Own(), furl(), DATA, rounds=1), "upload/user", USER, "the values themselves")


def test_batch_statistics_of_opted_out_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    method = leaks.TWO_HEADS.adapting(
        phases=()
    )  # the loss on all examples depends on nothing that would adapt
    assert audit(Body(), method, OUT, rounds=2).ok
    finish = Pass.finish

    def careless(self: Pass) -> None:
        self.before = {}
        finish(self)

    monkeypatch.setattr(Pass, "finish", careless)
    report = audit(Body(), method, OUT, rounds=2)
    assert found(report, "upload/norm.running_mean", "values of opted-out examples", "running statistics")


def test_numbers_of_opted_out_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_step, "examples_of", lambda job, rows, draws: float(len(rows)))
    monkeypatch.setattr(node, "told_counts", lambda data, method: data.counts("train"))
    report = audit(Own(), furl(), OUT, rounds=1)
    assert found(report, "weight", "the number of opted-out examples", "")
    assert found(report, "counts/train", "the number of opted-out examples", "")


def test_what_a_client_adapts_to_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = serving._adapted

    def told(work: Any, orders: Any, device: Any, *given: Any) -> dict[str, ClientAnswer]:
        found = adapted(work, orders, device, *given)
        for one in orders:
            if one.adapt:
                place = device.job.data.index(one.client)
                own = device._versions["adapted"][0].read([place]) if "adapted" in device._versions else {}
                loss = float(sum(v.double().sum() for v in own.values()))
                found[one.client] = ClientAnswer(client=one.client, loss=loss)
        return found

    sources = ("what a client keeps that adapts", "the examples of a client that adapts")
    assert set(sources) <= set(audit(Own(), furl(), DATA).sources)
    monkeypatch.setattr(serving, "_adapted", told)
    report = audit(Own(), furl(), classes(counts=(5,), kind="f4"))
    assert {f.source for f in report.leaks if f.leaves == "loss"} >= set(sources)
