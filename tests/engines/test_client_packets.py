"""Orders and results of clients survive the way of their bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedkeep import methods, models
from fedkeep.core.errors import MethodError, NonFiniteError
from fedkeep.core.net import Net
from fedkeep.core.packet import Packet
from fedkeep.core.params import row
from fedkeep.data import toy
from fedkeep.engines import client_packets, first_default, first_global
from fedkeep.engines.client_packets import apart, failed, obey, order_packet, result_of, together
from fedkeep.engines.client_step import ClientResult, ClientToTrain, Job, train_client
from fedkeep.engines.device import job_of
from fedkeep.store import MemoryStore

METHOD, DATA = methods.furl("user"), toy(users=3, examples=8)


def job() -> Job:
    net = Net(models.Linear(4, 3))
    return job_of(METHOD, net, DATA, MemoryStore(first_default(METHOD, net, 0), DATA.ids), 0, "cpu")


def carried(packet: Packet) -> Packet:
    return Packet.from_bytes(packet.to_bytes())


@pytest.mark.parametrize("alike", [True, False])
def test_a_client_that_is_ordered_to_train_gives_what_it_gives_here(alike: bool) -> None:
    made = job()
    sent = first_global(METHOD, made.net, DATA).params
    kept = made.kept([0, 1, 2])
    orders = [order_packet(ClientToTrain(c, sent), row(kept, c), 2, 0.25, alike=alike) for c in range(3)]
    assert any(name.startswith("sent:") for name in orders[0].tensors) is not alike
    there = [obey(made, one, sent if alike else None) for one in apart(carried(together(orders)))]
    for client, packet in enumerate(apart(carried(together(there)))):
        found, wanted = (
            result_of(packet, METHOD.split, client),
            train_client(made, sent, row(kept, client), client, 2, 0.25),
        )
        assert found.upload is not None
        assert wanted.upload is not None
        assert found.kept is not None
        assert wanted.kept is not None
        assert (found.client, found.loss, found.moves) == (client, wanted.loss, wanted.moves)
        assert found.upload.weight == wanted.upload.weight
        for ours, theirs in ((found.upload.deltas, wanted.upload.deltas), (found.kept, wanted.kept)):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("loss", [math.inf, math.nan, 0.1])
def test_a_loss_that_is_no_number_arrives(monkeypatch: pytest.MonkeyPatch, loss: float) -> None:
    made = job()
    sent = first_global(METHOD, made.net, DATA).params

    def trained(*given: Any) -> ClientResult:
        done = train_client(*given)
        done.loss = loss
        return done

    monkeypatch.setattr(client_packets, "train_client", trained)
    order = order_packet(ClientToTrain(1, sent), row(made.kept([1]), 0), 0, 0.0, alike=True)
    found = result_of(carried(obey(made, order, sent)), METHOD.split, 1)
    assert found.loss == loss or (math.isnan(found.loss) and math.isnan(loss))


def test_an_error_arrives_with_facts_that_are_no_numbers() -> None:
    (error,) = apart(carried(together([failed(MethodError("The rate is {rate}.", rate=math.nan))])))
    with pytest.raises(MethodError, match=r"The rate is nan\.") as caught:
        result_of(error, METHOD.split, 0)
    assert math.isnan(caught.value.facts["rate"])


def test_a_breakdown_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job()
    sent = first_global(METHOD, made.net, DATA).params
    broken = ClientResult(1, fault=NonFiniteError("Client {client!r}: NaN.", client="user-1"))
    monkeypatch.setattr(client_packets, "train_client", lambda *_: broken)
    order = order_packet(ClientToTrain(1, sent), row(made.kept([1]), 0), 0, 0.0, alike=True)
    found = result_of(carried(obey(made, order, sent)), METHOD.split, 1)
    assert found.upload is None
    assert found.kept is None
    assert isinstance(found.fault, NonFiniteError)
    assert found.fault.facts == {"client": "user-1"}
