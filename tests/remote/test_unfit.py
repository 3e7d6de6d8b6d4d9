"""A row that cannot be encoded takes its own client out, and no other of the device's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedkeep import FederatedData, Phase, methods
from fedkeep.core.errors import DataError, LostError
from fedkeep.data import SPLITS
from fedkeep.data.preparation import Encoding, Labels, Plain, Raw
from fedkeep.experiments.config import DataConfig
from fedkeep.experiments.sources import ConfiguredSource
from fedkeep.remote.fingerprint import sha256_of
from fedkeep.remote.messages import EncodingFits, Here, message_of, packet_of
from fedkeep.remote.own_data import MOST_UNFIT, encodable
from fedkeep.remote.transport import MemoryTransport
from tests.remote.hand import Hand
from tests.remote.test_nodes import met, passed, said
from tests.tiny import Logits, classes

DATA = classes(kind="f4")
WHY = "Its data cannot be used: they are damaged or do not fit. Its own log says more."


def raw(data: FederatedData, wrong: Sequence[str] = (), clients: Sequence[int] | None = None) -> Raw:
    """Return data as a reader gives them, with a label that nobody knows at these clients."""
    chosen = range(len(data)) if clients is None else clients
    rows = [
        (str(data.ids[client]), split, row)
        for client in chosen
        for split in SPLITS
        for row in data.rows(client, split)
    ]
    owner, split, places = zip(*rows, strict=True)
    labels = [str(data.columns["label"][row]) for row in places]
    for client in wrong:
        labels[owner.index(client) + 1] = "secret"
    columns: dict[str, Any] = {
        "x": Plain(values=data.columns["x"][list(places)]),
        "label": Labels(values=labels, names=("0", "1", "2")),
    }
    return Raw(client=list(owner), split=list(split), columns=columns)


def hand_of(source: Raw) -> Hand:
    hand = Hand(Logits, methods.furl("user", local=Phase(batch_size=4)), DATA)
    hand.encoding = Encoding.of(source.summary())
    hand.parts = {**hand.parts, "encoding": sha256_of(hand._plain())}
    return hand


def test_a_clients_row_that_does_not_fit_takes_no_other_out(tmp_path: Path) -> None:
    hand = hand_of(raw(DATA))
    node, told_here = hand.node(tmp_path, [0, 1, 2]), list[str]()
    node.source, node.tell = raw(DATA, ["user-1"], [0, 1, 2]), told_here.append
    fits = message_of(hand.say(node, hand.encode()), EncodingFits)
    assert (list(fits.clients), fits.unfit) == (["user-0", "user-2"], ["user-1"])
    row = len(DATA.rows(0)) + 1
    assert told_here == [
        f"Client 'user-1' takes no part: Row {row}: label 'secret' is not one of label_names, ['0', '1', '2']."
    ]
    orders = [hand.order(hand.first_order(f"user-{k}")) for k in range(3)]
    answers = {answer.client: answer for answer in hand.ask(node, hand.work(orders, 0, 5)).answers}
    assert [client for client, answer in answers.items() if answer.upload is None] == ["user-1"]
    fault = answers["user-1"].fault
    assert isinstance(fault, LostError)
    assert str(fault) == f"Client 'user-1' takes no part: {WHY}"
    assert b"secret" not in b"".join(hand.left)
    node.close()
    again = hand.node(tmp_path, [0, 1, 2])  # its owner has mended the row
    again.source = raw(DATA, [], [0, 1, 2])
    assert all(a.upload is not None for a in hand.ask(again, hand.work(orders, 0, 6)).answers)


def test_where_many_or_all_do_not_fit_the_device_takes_no_part(tmp_path: Path) -> None:
    many = classes(counts=(3,) * (MOST_UNFIT + 2), kind="f4")
    encoding = Encoding.of(raw(many).summary())
    ids = list(map(str, many.ids))
    data, faults = encodable(raw(many, ids[1 : MOST_UNFIT + 1]), encoding)
    assert (list(data.ids), list(faults)) == ([ids[0], ids[-1]], ids[1 : MOST_UNFIT + 1])
    for wrong in (ids[1:], ids):
        with pytest.raises(DataError, match=r"^Row \d+: label 'secret'"):
            encodable(raw(many, wrong), encoding)


def test_who_opts_out_by_a_draw_is_not_drawn_anew() -> None:
    """Among fewer clients others would be drawn."""
    settings = DataConfig.model_validate({"reader": "toy", "opt_out": {"fraction": 0.5, "by": "client"}})
    source = ConfiguredSource(raw(DATA, ["user-1"]), settings, 0)
    encoding = Encoding.of(raw(DATA).summary())
    with pytest.raises(DataError, match="secret"):
        encodable(source, encoding)
    data, faults = encodable(replace(source, settings=DataConfig(reader="toy")), encoding)
    assert (len(data), list(faults)) == (5, ["user-1"])


def test_a_server_does_not_wait_for_who_does_not_fit_and_asks_again_until_it_does() -> None:
    left = [2]

    def serve(packet: Any) -> Any:
        if packet.header["kind"] == "hello":
            return packet_of(Here(run="r", clients=["a", "b"]))
        left[0] -= 1
        unfit = ["b"] if left[0] >= 0 else []
        return packet_of(
            EncodingFits(run="r", clients={c: {"train": 3} for c in "ab" if c not in unfit}, unfit=unfit)
        )

    nodes = met(MemoryTransport({"x": serve}), patience=20.0)
    assert nodes.place == {"a": "x"}
    assert nodes.refusal("b") == WHY
    assert nodes.reasons == {"x": f"Client 'b' takes no part: {WHY}"}
    assert said(nodes, "refused") == [f"Client 'b' takes no part: {WHY}"]
    passed(nodes, 30.0)
    assert (left[0], said(nodes, "refused")) == (0, [f"Client 'b' takes no part: {WHY}"]), "told once"
    passed(nodes, 50.0)
    assert nodes.place == {"a": "x", "b": "x"}
    assert (nodes.refusal("b"), nodes.reasons) == (None, {})
    passed(nodes, 100.0)
    assert left[0] == -1, "who fits is not asked again"
