"""Orders, answers and results of judging are read as they were written, and refused where they are malformed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import methods
from fedkeep.core.errors import LostError, NonFiniteError, UploadError
from fedkeep.engines import Judged, LocalDevice, Sequential, orders_of
from fedkeep.engines.first_values import first_global
from fedkeep.methods import Sent
from fedkeep.remote import Packet
from fedkeep.remote.messages import Answers, ClientAnswer, ClientOrder, Judging, Work, message_of, packet_of
from fedkeep.split import Split
from fedkeep.store import Named
from tests.refusals import raises
from tests.tiny import Logits, classes, job

SPLIT = Split(["user"])
ONE = Sent(params={"w/x": torch.ones(3), "b": torch.tensor(2)}, state={"c": torch.zeros(2)})
TWO = Sent(params={"w/x": torch.zeros(3), "b": torch.tensor(1)})


def order(client: str, sent: Sent = ONE, **given: Any) -> ClientOrder:
    return ClientOrder(round=3, client=client, sent=sent, progress=0.25, **given)


WORK = Work(
    run="r",
    fingerprint="f",
    encoding="e",
    round=3,
    attempt=9,
    leaves="clients",
    orders=(
        order("a", judge=(Judging(split="test", models=("own", "shared")),)),
        order("ü", TWO, version=2, attempt=7, share=1 / 3, best=Named(2, 1, 6), train=False),
        order("c", version=1, attempt=2**63 - 1, share=1.0),
    ),
)


def carried(packet: Packet) -> Packet:
    return Packet.from_bytes(packet.to_bytes())


def upload(weight: float = 3.0) -> Any:
    rows = {"w": torch.tensor([1, 4])}
    return SPLIT.upload(
        {"w": torch.ones(2, 2)}, {"w": torch.zeros(2, 2), "user": torch.ones(1)}, weight, rows
    )


ANSWERS = Answers(
    run="r",
    round=3,
    attempt=9,
    answers=(
        ClientAnswer(client="a", upload=upload(), loss=0.1),
        ClientAnswer(client="b", upload=upload(0.0), loss=math.nan),
        ClientAnswer(client="c", fault=NonFiniteError("c: the loss became NaN")),
        ClientAnswer(client="d", fault=LostError("gone")),
        ClientAnswer(client="e", loss=math.inf),
    ),
)


class TestWork:
    def test_it_is_read_as_it_was_written(self) -> None:
        read = message_of(carried(packet_of(WORK)), Work)
        assert dataclasses.replace(read, orders=()) == dataclasses.replace(WORK, orders=())
        for got, wanted in zip(read.orders, WORK.orders, strict=True):
            assert (got.version, got.attempt, got.share) == (wanted.version, wanted.attempt, wanted.share)
            assert got.best == wanted.best
            assert (got.train, got.judge, got.client) == (
                wanted.train,
                wanted.judge,
                wanted.client,
            )
            assert (got.round, got.progress) == (3, 0.25)
            sent, given = got.sent.flat, wanted.sent.flat
            assert list(sent) == list(given)
            assert all(torch.equal(sent[n], v) for n, v in given.items())
        assert read.orders[0].sent is read.orders[2].sent  # the same travels once
        assert len(packet_of(WORK).tensors) == 3 + 2

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda h, t: h.pop("run"), "run: Field required"),
            (lambda h, t: h.update(more=1), "more: Unexpected keyword argument"),
            (lambda h, t: h.update(attempt=0), "attempt: Input should be greater than or equal to 1"),
            (lambda h, t: h.update(round=True), "round: Input should be a valid integer"),
            (lambda h, t: h.update(round=-1), "round: Input should be greater"),
            (
                lambda h, t: h["orders"][0].update(share=1.5),
                "orders.0.share: Input should be less than or equal",
            ),
            (
                lambda h, t: h["orders"][0].update(version="2"),
                "orders.0.version: Input should be a valid integer",
            ),
            (
                lambda h, t: h["orders"][0].update(judge=[{"split": "all", "models": ["own"]}]),
                "orders.0.judge.0.split",
            ),
            (
                lambda h, t: h["orders"][0].update(judge=[{"split": "test", "models": []}]),
                "orders.0.judge.0.models",
            ),
            (lambda h, t: h["orders"][1].update(client="a"), "client 'a' stands in its orders twice"),
            (lambda h, t: h["orders"][1].update(sent=5), "sent should be number 1, is 5"),
            (lambda h, t: t.update(more=torch.ones(1)), "the tensor 'more' has no place in it"),
            (lambda h, t: t.update({"sent/2/params/w": torch.ones(1)}), "'sent/2'/… has no place"),
            (lambda h, t: t.update({"sent/0/kept/w": torch.ones(1)}), "'sent/0/kept/'… has no place"),
            (lambda h, t: h["orders"][0].update(round=4), "an order is of round 4"),
            (lambda h, t: h["orders"][1].update(best=[2, 1]), "orders.1.best"),
            (lambda h, t: h["orders"][1].update(best=[2, -1, 6]), "orders.1.best.1: Input should be greater"),
            (lambda h, t: h["orders"][1].update(best=[4, 1, 6]), "at its best at (4, 1, 6)"),
            (lambda h, t: h["orders"][1].update(best=[2, 3, 6]), "at its best at (2, 3, 6)"),
            (lambda h, t: h["orders"][1].update(best=[2, 2, 6]), "at its best at (2, 2, 6)"),
            (lambda h, t: h["orders"][1].update(best=[2, 1, 7]), "at its best at (2, 1, 7)"),
            (lambda h, t: h["orders"][1].update(best=[2, 0, 6]), "version 0 of client 'ü' is of attempt 6"),
            (lambda h, t: h["orders"][1].update(attempt=0), "version 2 of client 'ü' is of attempt 0"),
            (lambda h, t: h.update(kind="answers"), "it should be 'work'"),
            (lambda h, t: t.update({"sent/0/params/client/w": torch.ones(1)}), "has the name of a state"),
            (
                lambda h, t: t.update({"sent/0/state/c": torch.tensor([math.nan])}),
                "holds a NaN or an infinity",
            ),
        ],
    )
    def test_what_is_malformed_is_refused(self, change: Callable[[Any, Any], None], said: str) -> None:
        packet = carried(packet_of(WORK))
        header, tensors = dict(packet.header), dict(packet.tensors)
        change(header, tensors)
        with raises(UploadError, said=said):
            message_of(Packet(header, tensors), Work)


class TestAnswers:
    def test_they_are_read_as_they_were_written(self) -> None:
        read = message_of(carried(packet_of(ANSWERS)), Answers, SPLIT)
        assert (read.run, read.round, read.attempt) == ("r", 3, 9)
        for got, wanted in zip(read.answers, ANSWERS.answers, strict=True):
            assert (got.client, repr(got.loss)) == (wanted.client, repr(wanted.loss))
            assert (type(got.fault), str(got.fault)) == (type(wanted.fault), str(wanted.fault))
            assert (got.upload is None) == (wanted.upload is None)
        first = read.answers[0].upload
        assert first.weight == 3.0
        assert torch.equal(first.deltas["w"], -torch.ones(2, 2))
        assert first.rows["w"].tolist() == [1, 4]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda h, t: t.pop("losses"), "0 is not there"),
            (lambda h, t: t.update(losses=torch.zeros(5)), "'losses' has no place in it"),
            (lambda h, t: t.update(losses=torch.zeros(6).double()), "losses should be 5 float64 numbers"),
            (lambda h, t: h["answers"][1].update(loss=0), "0 is not there"),
            (lambda h, t: t.update({"upload/0/deltas/user": torch.ones(1)}), "the private 'user' is in it"),
            (lambda h, t: t.update({"upload/2/deltas/w": torch.ones(1)}), "has no place in it"),
            (lambda h, t: h["answers"][3].update(upload=[0, 1.0]), "upload should be number 2, is 0"),
            (lambda h, t: h["answers"][0].update(fault=["lost", ""]), "'a' there are an upload and a fault"),
            (lambda h, t: h["answers"][1].update(client="a"), "client 'a' stands in its answers twice"),
            (lambda h, t: h["answers"][3].update(fault=["well", ""]), "answers.3.fault.0: Input should be"),
            (
                lambda h, t: h["answers"][1].update(upload=[1, None]),
                "answers.1.upload.1: Input should be a valid",
            ),
            (lambda h, t: h["made"].update(x={"keys": {}}), "steps of client 'x' are in it, and no answer"),
        ],
    )
    def test_what_is_malformed_is_refused(self, change: Callable[[Any, Any], None], said: str) -> None:
        packet = carried(packet_of(ANSWERS))
        header, tensors = dict(packet.header), dict(packet.tensors)
        change(header, tensors)
        with raises(UploadError, said=said):
            message_of(Packet(header, tensors), Answers, SPLIT)


def judged(leaves: Any, kind: str = "multiclass") -> Judged:
    """Return what judging two models of four clients gives."""
    data = classes((3, 4, 2, 5), labels=2 if kind == "binary" else 3)
    data.meta["task"] = kind
    work = job(Logits(labels=2 if kind == "binary" else 3).double(), methods.furl("user"), data)
    device = LocalDevice(work, Sequential(), leaves=leaves)
    orders = orders_of(work.method, first_global(work.method, work.net, data), map(str, data.ids))
    (found,) = device.judge(orders, "test", ("own", "shared"))
    return found


def retyped(tensors: dict[str, Any], name: str, kind: torch.dtype) -> None:
    tensors[name] = tensors[name].to(kind)


class TestJudged:
    @pytest.mark.parametrize("kind", ["multiclass", "binary"])
    @pytest.mark.parametrize("leaves", ["sums", "clients", "examples"])
    def test_it_is_read_as_it_was_written(self, leaves: str, kind: str) -> None:
        wanted = judged(leaves, kind)
        sent = packet_of(dataclasses.replace(ANSWERS, judged=(("test", wanted),)))
        ((split, got),) = message_of(carried(sent), Answers, SPLIT).judged
        assert (split, got.task, got.models, got.leaves) == ("test", wanted.task, wanted.models, leaves)
        for model in wanted.models:
            assert repr(got.metrics(model)) == repr(wanted.metrics(model))
            assert got.per_client(model) == wanted.per_client(model)
        assert np.array_equal(got.tallies.agreed, wanted.tallies.agreed)
        assert got.tallies.clients == wanted.tallies.clients
        assert bool(got.examples) == (leaves == "examples")

    @pytest.mark.parametrize(
        ("leaves", "change", "said"),
        [
            ("sums", lambda h, t: t.pop("judged/0/columns/count"), "missing ['count']"),
            ("sums", lambda h, t: t.update({"judged/0/columns/more": torch.ones(1)}), "unknown ['more']"),
            ("sums", lambda h, t: t["judged/0/columns/count"].neg_(), "'count' holds a number below 0"),
            (
                "sums",
                lambda h, t: t.update({"judged/0/columns/loss": torch.ones(1, 2)}),
                "'loss' should be (1, 2) torch.float64",
            ),
            ("clients", lambda h, t: h["judged"][0]["clients"].pop(), "should be (3,"),
            ("sums", lambda h, t: h["judged"][0].update(models=["own", "own"]), "a model stands twice"),
            ("sums", lambda h, t: h["judged"][0].update(task="unknown"), "judged.0.task"),
            (
                "examples",
                lambda h, t: t["judged/0/columns/0/client"].add_(4),
                "an example is of none of the 4 clients",
            ),
            (
                "examples",
                lambda h, t: t.update({"judged/0/columns/1/loss": torch.ones(1)}),
                "'1/loss' should be (12,)",
            ),
            ("examples", lambda h, t: t.pop("judged/0/columns/1/loss"), "missing ['1/loss']"),
            ("sums", lambda h, t: t["judged/0/columns/loss"].neg_(), "'loss' holds a number below 0"),
            (
                "sums",
                lambda h, t: t["judged/0/columns/loss"].fill_(-math.inf),
                "'loss' holds a number below 0",
            ),
            (
                "sums",
                lambda h, t: t["judged/0/columns/absolute"].sub_(1),
                "'absolute' holds a number below 0",
            ),
            ("sums", lambda h, t: t["judged/0/columns/accuracy"].neg_(), "'accuracy' holds a number below 0"),
            (
                "sums",
                lambda h, t: t["judged/0/columns/loss"].fill_(1.7e308),
                "'loss' holds a number beyond 1e+300",
            ),
            (
                "sums",
                lambda h, t: t["judged/0/columns/difference"].fill_(-1e301),
                "'difference' holds a number beyond 1e+300",
            ),
            (
                "sums",
                lambda h, t: t["judged/0/columns/count"].fill_(2**63 - 1),
                "'count' holds a number beyond 2^53",
            ),
            (
                "clients",
                lambda h, t: t["judged/0/columns/right"].fill_(2**52),
                "'right' is more than 'count'",
            ),
            (
                "clients",
                lambda h, t: t["judged/0/columns/people"].zero_(),
                "'count' tells of examples of nobody",
            ),
            (
                "examples",
                lambda h, t: retyped(t, "judged/0/columns/0/label", torch.bfloat16),
                "'0/label' should be real numbers",
            ),
            (
                "examples",
                lambda h, t: retyped(t, "judged/0/columns/1/label", torch.complex64),
                "'1/label' should be real numbers",
            ),
            (
                "examples",
                lambda h, t: t["judged/0/columns/0/loss"].fill_(-1e9),
                "'0/loss' holds a number below 0",
            ),
            ("examples", lambda h, t: t["judged/0/columns/1/score"].fill_(7.0), "'1/score' should be 0 or 1"),
            (
                "examples",
                lambda h, t: t["judged/0/columns/1/score"].fill_(math.nan),
                "'1/score' should be 0 or 1",
            ),
        ],
    )
    def test_what_is_malformed_is_refused(
        self, leaves: str, change: Callable[[Any, Any], None], said: str
    ) -> None:
        packet = carried(packet_of(dataclasses.replace(ANSWERS, judged=(("test", judged(leaves)),))))
        header, tensors = dict(packet.header), dict(packet.tensors)
        change(header, tensors)
        with raises(UploadError, said=said):
            message_of(Packet(header, tensors), Answers, SPLIT)

    def test_a_binary_score_that_is_no_number_is_refused(self) -> None:
        sent = packet_of(dataclasses.replace(ANSWERS, judged=(("test", judged("examples", "binary")),)))
        packet = carried(sent)
        packet.tensors["judged/0/columns/0/score"].fill_(math.nan)
        with pytest.raises(UploadError, match="'0/score' holds a NaN"):
            message_of(packet, Answers, SPLIT)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_the_losses_of_a_model_that_diverged_are_read(self, value: float) -> None:
        packet = carried(packet_of(dataclasses.replace(ANSWERS, judged=(("test", judged("clients")),))))
        packet.tensors["judged/0/columns/loss"][0] = value
        packet.tensors["judged/0/columns/difference"][0, :, 0] = value
        packet.tensors["judged/0/columns/difference"][1, :, 0] = -value
        ((_, got),) = message_of(packet, Answers, SPLIT).judged
        assert repr(got.metrics("own")["loss"]) == repr(value)


def test_the_order_of_an_uploads_tensors_tells_nothing_of_what_made_them() -> None:
    packets = []
    for names in ("bac", "cba"):
        values = {name: torch.ones(2) for name in names}
        made = dataclasses.replace(upload(), deltas=values, rows=dict(values))
        answer = ClientAnswer(client="a", upload=made, loss=0.5)
        packets.append(packet_of(Answers(run="r", round=0, attempt=1, answers=(answer,))))
    assert packets[0].to_bytes() == packets[1].to_bytes()
    assert [name for name in packets[0].tensors if "deltas" in name] == [
        f"upload/0/deltas/{n}" for n in "abc"
    ]
