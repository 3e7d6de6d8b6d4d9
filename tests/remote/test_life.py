"""Life after the first run: clients join and leave, models change, servers go back; private states follow or refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedkeep import FederatedData, Method, Phase, methods, simulate
from fedkeep.core.errors import LostError, MethodError
from fedkeep.core.params import Params
from fedkeep.methods import Kept
from fedkeep.remote import Packet, device_file, migration, node
from fedkeep.remote.device_file import DeviceFile, file_of
from fedkeep.remote.messages import EncodingFits, Refused, message_of, packet_of
from fedkeep.store import Default, Line
from tests.remote.device_states import begun
from tests.remote.hand import Hand
from tests.tiny import Logits, classes, everyone, same_bits

FURL = methods.furl("user", local=Phase(batch_size=4))
SHARED = methods.furl("user", private_scale="fedavg", local=Phase(batch_size=4))
DATA = classes(kind="f4")
OLD, NEW = "old", "new"


class Wider(Logits):
    """A second version of the model: one more private value, and one of another shape."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.full((width,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.more.sum()


def old_run(
    folder: Path, method: Method = FURL, make: Callable[[], nn.Module] = Logits, settle: bool = True
) -> Hand:
    """Return a finished run; unless ``settle``, devices have not heard of the last round."""
    hand = Hand(make, method, DATA, run=OLD)
    if not settle:
        hand.settle = lambda: None  # type: ignore[method-assign]
    hand.meet(hand.node(folder, range(6)))
    hand.go(3, 4)
    return hand


def versions(old: Hand) -> dict[str, Line]:
    return dict(old.ledger)


def new_run(
    make: Callable[[], nn.Module] = Logits, method: Method = FURL, data: FederatedData = DATA
) -> Hand:
    return Hand(make, method, data, run=NEW, changes={"continue_from": OLD})


def continued(new: Hand, old: Hand, folder: Path, clients: Any = range(6), **terms: Any) -> Packet:
    """Let a node with some clients begin the new run from the old one."""
    node = new.node(folder, list(clients), **terms)
    message = new.encode(versions=versions(old))
    packet = new.say(node, message)
    if packet.header["kind"] == "fits":
        new.nodes.append(node)
        new.place |= dict.fromkeys(message_of(packet, EncodingFits).clients, node)
    else:
        node.close()
    return packet


def closed(hand: Hand) -> Params:
    kept = hand.kept()
    hand.close()
    return kept


class TestAnotherRun:
    @pytest.mark.parametrize("settle", [True, False])
    @pytest.mark.parametrize("method", [FURL, SHARED])
    def test_it_begins_with_what_clients_kept(self, tmp_path: Path, method: Method, settle: bool) -> None:
        settled = closed(old_run(tmp_path / "other", method))
        old = old_run(tmp_path, method, settle=settle)
        old.close()
        new = new_run(method=method)
        continued(new, old, tmp_path)
        assert same_bits(new.kept(), settled)
        new.go(2, 4)
        again = DeviceFile(file_of(tmp_path, OLD), "ann", 0.1)  # the old run's are as they were
        assert again.about.run == OLD
        again.close()

    @pytest.mark.parametrize("method", [FURL, SHARED])
    def test_it_goes_on_as_a_simulation_does_that_is_given_the_states(
        self, tmp_path: Path, method: Method
    ) -> None:
        """Also where private values move by a share: from what a client took over, not from its default."""
        old = old_run(tmp_path, method)
        old.close()
        first = simulate(Logits(), method, DATA, rounds=3, cohort=4, evaluate_every=0, engine="sequential")
        second = simulate(
            Logits(),
            method,
            DATA,
            rounds=2,
            cohort=3,
            evaluate_every=0,
            engine="sequential",
            private=first.private,
        )
        new = new_run(method=method)
        continued(new, old, tmp_path)
        new.go(2, 3)
        assert same_bits(new.server.params, second.server)
        assert same_bits(closed(new), everyone(second.private, 6))

    @pytest.mark.parametrize("wrong", ["writes", "draws", "adds"])
    def test_what_was_never_accepted_is_by_a_rule_that_is_checked(
        self, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def rule(before: Kept, after: Kept, share: float) -> Kept:
            if wrong == "draws":
                torch.rand(())
            if wrong == "adds":
                return Kept(params={**after.params, "more": torch.ones(1)}, state=after.state)
            if wrong == "writes":
                after.params["user"].mul_(share)
            return after

        old = old_run(tmp_path, SHARED, settle=False)
        old.close()
        monkeypatch.setitem(migration.RULES, "by_share", rule)
        default = Default({"user": Logits().user.detach()})
        choices: dict[str, Any] = {"on_change": "refuse", "on_missing": "refuse"}
        with closing(DeviceFile(file_of(tmp_path, OLD), "ann", 0.1)) as file:
            made = migration.migrated(
                file, versions(old), default, encoding=file.about.agreed["encoded"], **choices
            )
            with pytest.raises(MethodError, match="accept of client 'user-"):
                dict(made)

    def test_clients_that_join_begin_with_the_default_and_those_that_left_stay_where_they_are(
        self, tmp_path: Path
    ) -> None:
        more = classes((5, 9, 3, 7, 4, 6, 8), kind="f4")
        old = old_run(tmp_path)
        before = closed(old)["user"]
        new = new_run(data=more)
        packet = continued(new, old, tmp_path, [1, 2, 6])
        assert set(message_of(packet, EncodingFits).clients) == {"user-1", "user-2", "user-6"}
        store = new.nodes[0]._runs[NEW].store
        assert torch.equal(begun(store, "user-2")["user"], before[2])
        assert torch.equal(begun(store, "user-6")["user"], Logits().user)
        new.close()
        file = DeviceFile(file_of(tmp_path, OLD), "ann", 0.1)
        assert {v.client for v in file.versions()} == {f"user-{k}" for k in range(6)}
        file.close()

    def test_the_process_that_holds_the_old_run_begins_it(self, tmp_path: Path) -> None:
        old, new = old_run(tmp_path), new_run()
        (node,), before = old.nodes, old.kept()
        packet = new.say(node, new.encode(versions=versions(old)))
        assert set(message_of(packet, EncodingFits).clients) == set(DATA.ids)
        new.nodes.append(node)
        new.place |= dict.fromkeys(DATA.ids, node)
        assert same_bits(new.kept(), before)
        old.go(4, 4, begin=3)  # it serves both
        closed(new)

    def test_killed_before_its_first_round_it_begins_the_same_way(self, tmp_path: Path) -> None:
        old = old_run(tmp_path)
        before = closed(old)
        new = new_run()
        continued(new, old, tmp_path)
        new.close()
        new.nodes.clear()
        new.meet(new.node(tmp_path, range(6)))  # a hello that knows nothing of versions
        assert same_bits(closed(new), before)

    def test_each_state_is_written_before_the_next_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All of a device's states were in memory at once."""
        old = old_run(tmp_path)
        old.close()
        calls: list[str] = []
        for place, name in ((node, "packed"), (device_file, "inserted")):
            real = getattr(place, name)
            monkeypatch.setattr(
                place, name, lambda *given, n=name, real=real: (calls.append(n), real(*given))[1]
            )
        continued(new := new_run(), old, tmp_path)
        new.close()
        assert calls == ["packed", "inserted"] * 6

    def test_another_model_is_refused_by_name(self, tmp_path: Path) -> None:
        old = old_run(tmp_path)
        old.close()
        new = new_run(Wider, methods.furl(["user", "more"]))
        said = message_of(continued(new, old, tmp_path), Refused).reason
        assert said == (
            "The private states of the run 'old' do not fit the new one: 'more' is new. Continue with what they were made "
            "with, or let what changed start from default values: on_change = 'anew'."
        )
        assert not file_of(tmp_path, NEW).exists()

    def test_what_agrees_migrates_by_name_and_the_rest_begins_anew(self, tmp_path: Path) -> None:
        both = methods.furl(["user", "more"], private_init="model")
        old = old_run(tmp_path, both, Wider)
        before = closed(old)
        new = new_run(lambda: Wider(width=4), both)
        packet = continued(new, old, tmp_path)
        assert "'more' is float32 4, and was float32 2." in message_of(packet, Refused).reason
        continued(new, old, tmp_path, on_change="anew")
        kept = closed(new)
        assert torch.equal(kept["user"], before["user"])
        assert not torch.equal(before["user"], Logits().user.expand(6, 3))
        assert torch.equal(kept["more"], torch.full((6, 4), 0.25))

    def test_with_another_encoding_nothing_is_guessed(self, tmp_path: Path) -> None:
        """A row of a table would stand for another word, and a number of a label for another one."""
        old = old_run(tmp_path)
        old.close()
        data = copy.copy(DATA)
        data.meta = {**DATA.meta, "label_names": ["a", "b", "c"]}
        new = new_run(data=data)
        assert "the encoding is another" in message_of(continued(new, old, tmp_path), Refused).reason
        continued(new, old, tmp_path, on_change="anew")
        assert torch.equal(closed(new)["user"], Logits().user.expand(6, 3))

    def test_a_version_that_is_missing_is_refused_or_begins_anew(self, tmp_path: Path) -> None:
        old = old_run(tmp_path)
        before = closed(old)
        old.ledger["user-3"] = old.ledger["user-3"]._replace(version=9, attempt=9)
        new = new_run()
        said = message_of(continued(new, old, tmp_path), Refused).reason
        assert said.startswith(
            "This device does not have version 9 of what client 'user-3' keeps in the run 'old'"
        )
        continued(new, old, tmp_path, on_missing="anew")
        kept = closed(new)["user"]
        assert torch.equal(kept[3], Logits().user)
        assert torch.equal(kept[4], before["user"][4])

    def test_a_client_whose_version_is_missing_may_begin_with_an_older_one(self, tmp_path: Path) -> None:
        old = old_run(tmp_path)
        before = closed(old)
        old.ledger["user-3"] = old.ledger["user-3"]._replace(version=9, attempt=9)
        new = new_run()
        continued(new, old, tmp_path, on_missing="older")
        kept = closed(new)["user"]
        assert torch.equal(kept[3], before["user"][3])
        assert not torch.equal(kept[3], Logits().user)

    @pytest.mark.parametrize("on_missing", ["refuse", "anew"])
    def test_states_of_another_owner_are_refused_and_never_taken_over(
        self, tmp_path: Path, on_missing: str
    ) -> None:
        old = old_run(tmp_path)
        old.close()
        packet = continued(new_run(), old, tmp_path, owner="bob", on_missing=on_missing)
        assert message_of(packet, Refused).reason == (
            "The private state of the run 'old' belongs to 'ann', and this device to 'bob'. Restore this device's own "
            "from a copy."
        )
        assert not file_of(tmp_path, NEW).exists()

    def test_states_that_are_not_there_are_missed(self, tmp_path: Path) -> None:
        old = old_run(tmp_path / "elsewhere")
        old.close()
        packet = continued(new_run(), old, tmp_path)
        assert message_of(packet, Refused).reason == "The run 'old' has no private state on this device."
        new = new_run()
        continued(new, old, tmp_path, on_missing="anew")
        assert torch.equal(closed(new)["user"], Logits().user.expand(6, 3))


class TestRollBack:
    """The server of a run goes back to an earlier round and goes on from there."""

    def gone_back(self, folder: Path, history: int, back: int) -> Hand:
        hand = Hand(Logits, SHARED, DATA, run=OLD)
        hand.meet(hand.node(folder, range(6), history=history))
        ledgers = []
        for round in range(4):
            hand.go(round + 1, 6, begin=round)
            ledgers.append((hand.server, dict(hand.ledger)))
        hand.server, hand.ledger = ledgers[back - 1][0], dict(ledgers[back - 1][1])
        return hand

    @pytest.mark.parametrize(("history", "back"), [(1, 3), (2, 3), (2, 2), (3, 1)])
    def test_devices_follow_as_far_as_they_keep_versions(
        self, tmp_path: Path, history: int, back: int
    ) -> None:
        wanted = Hand(Logits, SHARED, DATA, run=OLD)
        wanted.meet(wanted.node(tmp_path / "wanted", range(6)))
        for round in range(5):
            wanted.go(round + 1, 6, begin=round)
        hand = self.gone_back(tmp_path / "back", history, back)
        for round in range(back, 5):
            hand.go(round + 1, 6, begin=round)
        assert same_bits(hand.server.params, wanted.server.params)
        assert same_bits(closed(hand), closed(wanted))

    @pytest.mark.parametrize(("history", "back"), [(0, 3), (1, 2), (2, 1)])
    def test_further_back_they_refuse_by_name(self, tmp_path: Path, history: int, back: int) -> None:
        hand = self.gone_back(tmp_path, history, back)
        orders = [hand.order(hand.first_order(client, back)) for client in hand.nodes[0].clients]
        answers = hand.ask(hand.nodes[0], hand.work(orders, back, next(hand.attempts)))
        for answer in answers.answers:
            assert isinstance(answer.fault, LostError)
            assert f"The order wants version {back} of what client '{answer.client}' keeps" in str(
                answer.fault
            )

    def test_to_the_beginning_they_always_follow(self, tmp_path: Path) -> None:
        hand = self.gone_back(tmp_path, 0, 1)
        hand.ledger = {}
        hand.go(3, 6)
        wanted = simulate(Logits(), SHARED, DATA, rounds=3, cohort=6, evaluate_every=0, engine="sequential")
        assert same_bits(hand.server.params, wanted.server)
        assert same_bits(closed(hand), everyone(wanted.private, 6))


def test_new_data_of_a_client_are_used_from_the_next_run_on(tmp_path: Path) -> None:
    old = old_run(tmp_path)
    old.close()
    changed = classes((9, 9, 3, 7, 4, 6), kind="f4")
    new = new_run(data=changed)
    packet = continued(new, old, tmp_path)
    assert message_of(packet, EncodingFits).clients["user-0"]["train"] == 9
    assert packet_of(new.hello()).header["continue_from"] == OLD
