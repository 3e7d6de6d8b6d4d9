"""A node answers what it is asked, refuses what does not fit and says what differs, and loses nothing."""

from __future__ import annotations

import dataclasses
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedkeep import Phase, methods
from fedkeep.core.errors import LostError, NonFiniteError
from fedkeep.data.preparation import Ready
from fedkeep.engines import Order
from fedkeep.methods import Sent
from fedkeep.methods.terms import squared_error
from fedkeep.privacy import GaussianNoise
from fedkeep.remote import Packet
from fedkeep.remote.device_file import file_of
from fedkeep.remote.messages import PROTOCOL, ClientOrder, EncodingFits, Here, Refused, message_of, packet_of
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.serving import _without_links
from fedkeep.store import Line, Named, database
from tests.engines.test_round import BROKEN, Fragile
from tests.remote.device_states import begun
from tests.remote.hand import RUN, Hand, only
from tests.tiny import Logits, bits, classes, files, same_bits

FURL = methods.furl("user", local=Phase(batch_size=4))
SHARED = methods.furl("user", private_scale="fedavg", local=Phase(batch_size=4))
DATA = classes(kind="f4")


@pytest.fixture
def hand() -> Hand:
    return Hand(Logits, FURL, DATA)


def reason(packet: Packet) -> str:
    return message_of(packet, Refused).reason


class TestHello:
    def test_it_tells_its_clients_and_sums_its_data_up(self, hand: Hand, tmp_path: Path) -> None:
        node = hand.node(tmp_path, [4, 2])
        here = message_of(hand.say(node, hand.hello(summarise={"clients_a_word": 1})), Here)
        assert here.clients == ["user-4", "user-2"]
        assert here.summary["clients"] == 2
        assert files(tmp_path) == {}

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            (
                {"protocol": PROTOCOL + 1},
                f"The server speaks protocol {PROTOCOL + 1}, this device {PROTOCOL}.",
            ),
            ({"code": "9.9 abc"}, "The server runs fedkeep 9.9 (source abc), this device "),
            ({"run": "../run"}, "A run's id is 1 to 64 letters"),
            ({"summarise": {"clients_a_word": 0}}, "preparation.clients_a_word must be at least 1; got 0"),
            ({"summarise": {"word": 0}}, "The rules of the summary cannot be used"),
        ],
    )
    def test_what_it_cannot_take_part_in_is_refused(
        self, hand: Hand, tmp_path: Path, changes: dict[str, Any], said: str
    ) -> None:
        assert said in reason(hand.say(hand.node(tmp_path, [0]), hand.hello(**changes)))

    def test_simulated_noise_is_for_tests(self, hand: Hand, tmp_path: Path) -> None:
        node = hand.node(tmp_path, [0], simulated_noise=False)
        assert "draws its noise from the system" in reason(hand.say(node, hand.hello()))
        assert "draws its noise from the system" in reason(hand.say(node, hand.encode()))
        assert message_of(hand.say(node, hand.hello(simulated_noise=False)), Here)


class TestEncoding:
    def test_it_tells_numbers_of_examples_and_keeps_what_was_agreed(self, hand: Hand, tmp_path: Path) -> None:
        node = hand.node(tmp_path, [1, 0])
        fits = message_of(hand.say(node, hand.encode()), EncodingFits)
        assert fits.clients == {
            "user-1": {"train": 9, "valid": 2, "test": 3},
            "user-0": {"train": 5, "valid": 2, "test": 3},
        }
        assert message_of(hand.say(node, hand.encode()), EncodingFits) == fits  # again
        store = node._runs[RUN].store
        assert store.file.about.agreed["hello"]["experiment"] == "text"

    @pytest.mark.parametrize(
        ("theirs", "said"),
        [
            (Hand(Logits, SHARED, DATA), "method"),
            (Hand(lambda: Logits(seed=1), FURL, DATA), "initial values"),
            (Hand(lambda: Logits().double(), FURL, DATA), "initial values, uploads"),
            (Hand(Logits, methods.furl("linear.bias"), DATA), "method, split, uploads"),
        ],
    )
    def test_the_parts_that_differ_are_named(
        self, hand: Hand, tmp_path: Path, theirs: Hand, said: str
    ) -> None:
        node = theirs.node(tmp_path, [0])
        assert f"what differs: {said}. Install" in reason(hand.say(node, hand.encode()))
        assert files(tmp_path) == {}

    def test_data_that_do_not_fit_are_not_told_of(self, hand: Hand, tmp_path: Path) -> None:
        said: list[str] = []
        other = classes(labels=5, kind="f4").select([0])
        node = Node(
            Ready(data=other),
            tmp_path,
            OwnerTerms(owner="ann", simulated_noise=True),
            hand.experiment,
            tell=said.append,
        )
        assert reason(hand.say(node, hand.encode())) == (
            "Its data cannot be used: they are damaged or do not fit. Its own log says more."
        )
        assert "there are 5 classes, more than 3" in said[0]

    def test_a_fault_in_a_model_is_told_here_alone(self, hand: Hand, tmp_path: Path) -> None:
        said: list[str] = []

        def experiment(text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Any]:
            raise KeyError("/home/ann/secret")

        node = Node(
            Ready(data=DATA),
            tmp_path,
            OwnerTerms(owner="ann", simulated_noise=True),
            experiment,
            tell=said.append,
        )
        assert reason(hand.say(node, hand.encode())) == "It has failed with KeyError. Its own log says more."
        assert re.fullmatch(r"KeyError: '/home/ann/secret' \(test_node\.py, line \d+, in experiment\)", *said)

    def test_more_than_a_row_holds_is_refused_before_training(
        self, hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(database, "BESIDE", 10**9 - 8)
        said = reason(hand.say(hand.node(tmp_path, [0]), hand.encode()))
        assert said.startswith("A client's private values take 16 bytes, ")


class TestWork:
    def order(self, hand: Hand, client: str = "user-0", **changes: Any) -> ClientOrder:
        return dataclasses.replace(hand.order(hand.first_order(client)), **changes)

    def test_the_same_message_twice_gives_the_same_bytes_and_stages_once(
        self, hand: Hand, tmp_path: Path
    ) -> None:
        node = hand.met(tmp_path, [0, 1])
        work = hand.work([self.order(hand, judge=(only(),)), self.order(hand, "user-1")], 0, 5)
        for _ in range(2):
            hand.ask(node, work)
        assert hand.left[-1] == hand.left[-2]
        store = node._runs[RUN].store
        assert [v[1:] for v in store.file.versions()] == [
            ("user-0", 1, 5, 0, 0, False),
            ("user-1", 1, 5, 0, 0, False),
        ]

    def test_what_was_staged_is_durable_before_the_answer_is_there(self, hand: Hand, tmp_path: Path) -> None:
        node = hand.met(tmp_path, [0])
        hand.ask(node, hand.work([self.order(hand)], 0, 5))
        store = node._runs[RUN].store
        staged = begun(store, "user-0", Line(1, 5))
        store.clear()
        node.close()
        again = hand.met(tmp_path, [0])
        other = again._runs[RUN].store
        assert same_bits(begun(other, "user-0", Line(1, 5)), staged)

    def test_models_are_judged_before_training_and_clients_together(self, tmp_path: Path) -> None:
        hand = Hand(Logits, FURL, classes())
        node = hand.met(tmp_path, [0, 1, 2], leaves="clients")
        orders = [self.order(hand, c, judge=(only("test", "own", "shared"),)) for c in ("user-0", "user-2")]
        answers = hand.ask(node, hand.work(orders, 0, 5, leaves="examples"))
        ((split, judged),) = answers.judged
        assert (split, judged.leaves, judged.models) == ("test", "clients", ("own", "shared"))
        assert judged.tallies.clients == ("user-0", "user-2")
        model = Logits().double()
        for place, client in enumerate(("user-0", "user-2")):  # an independent loop
            rows = hand.data.rows(hand.data.index(client), "test")
            x = torch.as_tensor(hand.data.columns["x"][rows.start : rows.stop])
            label = torch.as_tensor(hand.data.columns["label"][rows.start : rows.stop])
            loss = nn.functional.cross_entropy(model(x), label, reduction="sum")
            assert judged.tallies.loss[place, 0] == pytest.approx(loss.item(), rel=1e-6)

    def test_models_do_not_see_what_is_sent_for_the_upload_chain(self) -> None:
        state = {"c": torch.ones(1), "upload/0/bound": torch.ones(1)}
        sent = _without_links(Sent(params={"w": torch.ones(2)}, state=state))
        assert (list(sent.params), list(sent.state)) == (["w"], ["c"])

    def test_its_owner_says_what_of_judging_leaves(self, hand: Hand, tmp_path: Path) -> None:
        node = hand.met(tmp_path, [0, 1])
        orders = [self.order(hand, c, train=False, judge=(only(),)) for c in ("user-0", "user-1")]
        answers = hand.ask(node, hand.work(orders, 0, 5, leaves="examples"))
        ((_, judged),) = answers.judged
        assert judged.leaves == "sums"
        assert judged.tallies.clients == ("",)
        assert judged.count == 6
        assert [a.upload for a in answers.answers] == [None, None]

    def test_clients_of_other_devices_and_versions_that_are_missing_are_lost(
        self, hand: Hand, tmp_path: Path
    ) -> None:
        node = hand.met(tmp_path, [0, 1])
        orders = [
            self.order(hand, "user-3"),
            self.order(hand, "user-0", version=2, attempt=7, judge=(only(),)),
            self.order(hand, "user-1", judge=(only(),)),
        ]
        answers = hand.ask(node, hand.work(orders, 4, 8))
        first, second, third = answers.answers
        assert isinstance(first.fault, LostError)
        assert str(first.fault) == "Client 'user-3' is not on this device."
        assert isinstance(second.fault, LostError)
        assert "The order wants version 2 of what client 'user-0' keeps" in str(second.fault)
        assert third.fault is None
        assert third.upload is not None
        assert answers.judged[0][1].count == 3  # of user-1 alone

    def test_a_client_may_begin_anew_if_its_owner_says_so(self, hand: Hand, tmp_path: Path) -> None:
        node = hand.met(tmp_path, [0], on_missing="anew")
        answers = hand.ask(node, hand.work([self.order(hand, version=2, attempt=7)], 4, 8))
        assert answers.answers[0].upload is not None
        store = node._runs[RUN].store
        assert [v[1:4] for v in store.file.versions()] == [("user-0", 2, 7), ("user-0", 3, 8)]

    def test_a_client_from_a_backup_may_go_on_from_its_older_version(
        self, hand: Hand, tmp_path: Path
    ) -> None:
        node, told = hand.node(tmp_path, [0, 1], on_missing="older"), list[str]()
        node.tell = told.append
        hand.meet(node)
        first = self.order(hand)
        hand.ask(node, hand.work([first], 0, 5))
        hand.ask(node, hand.work([self.order(hand, version=1, attempt=5, train=False)], 1, 6))
        orders = [
            self.order(hand, "user-0", version=3, attempt=9, best=Named(1, 1, 4)),
            self.order(hand, "user-1", version=3, attempt=9),
        ]
        found = hand.ask(node, hand.work(orders, 4, 12)).answers
        assert found[0].upload is not None
        assert told[-3].endswith("It starts from version 1.")
        assert "that of the best round 1, is not on this device" in told[-2]  # another attempt's is
        assert isinstance(found[1].fault, LostError)  # nothing of it is here
        store = node._runs[RUN].store
        assert [v[1:4] for v in store.file.versions("user-0")][-2:] == [("user-0", 3, 9), ("user-0", 4, 12)]

    @pytest.mark.parametrize("on_missing", ["older", "anew"])
    @pytest.mark.parametrize("history", [0, 1])
    def test_a_late_message_lets_nobody_begin_anew(
        self, hand: Hand, tmp_path: Path, history: int, on_missing: str
    ) -> None:
        node = hand.met(tmp_path, [0], on_missing=on_missing, history=history)
        works = [
            hand.work([self.order(hand, version=round, attempt=4 + round if round else 0)], round, 5 + round)
            for round in range(4)
        ]
        for work in works:
            assert hand.ask(node, work).answers[0].fault is None
        last = self.order(hand, version=4, attempt=8, train=False)
        hand.ask(node, hand.work([last], 4, 9))
        store = node._runs[RUN].store
        before = store.file.versions()
        for work in works[1 : 4 - history]:
            late = hand.ask(node, work).answers[0]
            assert isinstance(late.fault, LostError)
            assert "The order wants version" in str(late.fault)
            assert store.file.versions() == before
        assert hand.ask(node, hand.work([last], 4, 10)).answers[0].fault is None
        assert store.file.versions() == before

    def test_a_client_that_breaks_down_keeps_what_it_had(self, tmp_path: Path) -> None:
        hand = Hand(Fragile, methods.furl("user", local=Phase(loss=squared_error())), BROKEN)
        clients = range(len(BROKEN))
        node = hand.met(tmp_path, list(clients))
        orders = [self.order(hand, str(client)) for client in BROKEN.ids]
        answers = hand.ask(node, hand.work(orders, 0, 5))
        broken = [a.client for a in answers.answers if isinstance(a.fault, NonFiniteError)]
        assert broken
        store = node._runs[RUN].store
        assert {v.client for v in store.file.versions()} == {str(c) for c in BROKEN.ids} - set(broken)

    def test_noise_comes_from_the_system(self, tmp_path: Path) -> None:
        noisy = FURL.but(upload=(GaussianNoise(0.1),))
        hand = Hand(Logits, noisy, DATA, changes={"simulated_noise": False})
        node = hand.met(tmp_path, [0])
        work = hand.work([self.order(hand)], 0, 5)
        first, second = (hand.ask(node, work).answers[0].upload for _ in range(2))
        assert all(bits(v) != bits(second.deltas[n]) for n, v in first.deltas.items())

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"run": "unknown"}, "The run 'unknown' has no private state on this device."),
            ({"run": "../run"}, "A run's id is 1 to 64 letters"),
            ({"fingerprint": "x"}, "of another experiment than this device has agreed on"),
            ({"encoding": "x"}, "of another encoding than this device has agreed on"),
        ],
    )
    def test_orders_of_something_else_are_refused(
        self, hand: Hand, tmp_path: Path, changes: dict[str, Any], said: str
    ) -> None:
        node = hand.met(tmp_path, [0])
        work = dataclasses.replace(hand.work([self.order(hand)], 0, 5), **changes)
        assert said in reason(hand.say(node, packet_of(work)))

    @pytest.mark.parametrize(
        ("sent", "said"),
        [
            (lambda p: {n: v for n, v in p.items() if n != "linear.bias"}, "missing ['linear.bias']"),
            (lambda p: {**p, "user": torch.zeros(3)}, "unknown ['user']"),
            (lambda p: {**p, "linear.bias": torch.zeros(4)}, "'linear.bias' wants (3,), is (4,)"),
            (
                lambda p: {**p, "linear.bias": torch.zeros(3).double()},
                "wants torch.float32, is torch.float64",
            ),
            (lambda p: {**p, "linear.bias": torch.full((3,), torch.inf)}, "holds a NaN or an infinity"),
        ],
    )
    def test_parameters_that_do_not_fit_are_refused(
        self, hand: Hand, tmp_path: Path, sent: Any, said: str
    ) -> None:
        node = hand.met(tmp_path, [0])
        order = hand.first_order("user-0")
        wrong = Order(round=0, client="user-0", sent=Sent(params=sent(order.sent.params)))
        assert said in reason(hand.say(node, packet_of(hand.work([hand.order(wrong)], 0, 5))))

    @pytest.mark.skipif(sys.platform != "linux", reason="needs limits of file sizes")
    def test_on_a_full_disk_clients_are_lost_and_nothing_leaves(self, hand: Hand, tmp_path: Path) -> None:
        node = hand.met(tmp_path, [0, 1])
        work = hand.work([self.order(hand), self.order(hand, "user-1", judge=(only(),))], 0, 5)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            answers = hand.ask(node, work)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [type(a.fault) for a in answers.answers] == [LostError, LostError]
        assert "cannot be written" in str(answers.answers[0].fault)
        assert str(tmp_path) not in str(hand.left[-1])
        assert answers.judged == ()
        assert all(a.fault is None for a in hand.ask(node, work).answers)  # there is space again

    def test_a_damaged_state_is_reported_and_not_reset(self, hand: Hand, tmp_path: Path) -> None:
        node = hand.met(tmp_path, [0])
        hand.ask(node, hand.work([self.order(hand)], 0, 5))
        node.close()
        path = file_of(tmp_path, RUN)
        path.write_bytes(path.read_bytes()[:5000])
        before = path.read_bytes()
        again = hand.node(tmp_path, [0])
        for packet in (packet_of(hand.encode()), packet_of(hand.work([self.order(hand)], 0, 5))):
            said = reason(hand.say(again, packet))
            assert said.startswith(f"The private state of the run {RUN!r} cannot be read: ")
            assert str(tmp_path) not in said
        assert path.read_bytes() == before

    def test_a_model_that_fails_is_refused_without_its_text(self, tmp_path: Path) -> None:
        class Failing(Logits):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if len(x) > 1:
                    raise RuntimeError(f"secret {x[0, 0]}")
                return super().forward(x)

        hand = Hand(Failing, FURL, DATA)
        node = hand.met(tmp_path, [0])
        answers = hand.ask(node, hand.work([self.order(hand)], 0, 5))
        assert [str(a.fault) for a in answers.answers] == [
            "Client 'user-0': its device failed with MethodError. Its own log says more."
        ]


@pytest.mark.parametrize(
    "header", [{}, {"kind": 3}, {"kind": "work"}, {"kind": "hello", "run": "a"}, {"kind": "x", "run": None}]
)
def test_nonsense_is_refused(hand: Hand, tmp_path: Path, header: dict[str, Any]) -> None:
    assert "was refused" in reason(hand.say(hand.node(tmp_path, [0]), Packet(header)))


def test_two_runs_do_not_meet(tmp_path: Path) -> None:
    one, two = Hand(Logits, FURL, DATA, run="one"), Hand(Logits, SHARED, DATA, run="two", seed=1)
    both: list[Hand] = []
    for hand in (one, two):
        alone = dataclasses.replace(hand, ledger={}, left=[])
        alone.meet(alone.node(tmp_path / hand.run, range(6)))
        alone.go(2, 3)
        both.append(alone)
    node = one.node(tmp_path / "both", range(6))
    node.experiment = lambda text, encoding: (Logits(), SHARED if text == "two" else FURL)
    two.changes = {"experiment": "two"}
    one.meet(node)
    two.meet(node)
    for round in range(2):
        for hand in (one, two):
            hand.go(round + 1, 3, begin=round) if round else hand.go(1, 3)
    for hand, alone in zip((one, two), both, strict=True):
        assert same_bits(hand.kept(), alone.kept())
        assert same_bits(hand.server.params, alone.server.params)
