"""What devices tell before the first round, in secure sums: the encoding is that of plain sums, and no numbers leave."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import Method, averaging, methods, simulate
from fedkeep.core.errors import ConfigError, RunError, UploadError
from fedkeep.data.preparation import Encoding, Raw, Rules, Summary, merged, prepared
from fedkeep.data.preparation.feature_columns import Features
from fedkeep.data.preparation.label_columns import Labels
from fedkeep.data.preparation.numbers import KeyColumn
from fedkeep.data.preparation.table import Hash, hash_of
from fedkeep.data.preparation.texts import Texts
from fedkeep.methods import SecureSums, securely
from fedkeep.models import Linear
from fedkeep.privacy.secure.secure_client import SecureClient
from fedkeep.remote import Packet
from fedkeep.remote.device_tally import SignedWords
from fedkeep.remote.events import Events
from fedkeep.remote.messages import (
    Ask,
    Hello,
    Here,
    Message,
    Portion,
    Prepare,
    Prepared,
    Refused,
    message_of,
    packet_of,
)
from fedkeep.remote.node import Node, OwnerTerms
from fedkeep.remote.nodes import Nodes
from fedkeep.remote.pooled import pooled
from fedkeep.remote.served_run import Federation, serve_run
from fedkeep.remote.told import lanes_told
from fedkeep.remote.transport import Died, MemoryTransport, Weather
from tests.engines.test_conformance import SEED
from tests.remote.hand import RUN
from tests.remote.test_conformance import server_of
from tests.tiny import on_server, same_bits

STEPS = ["keys", "shares", "masked", "revealed"]
SECRET = 123456.7890625  # a feature's value of the first device alone
SHARE = 2 / 3
NUMBERS = Portion(what="numbers")


def raw(place: int, rows: int = 6, **columns: Any) -> Raw:
    """Return a device's clients: two features, one of them missing now and then, and two classes."""
    draw = np.random.default_rng(place)
    values = draw.normal(size=(rows, 2)) * 10.0 ** draw.integers(-3, 3)
    values[:, 1][draw.random(rows) < 0.3] = np.nan
    if place == 0:
        values[0] = SECRET, 1.0
    values = values.astype(np.float32)
    return Raw(
        client=[f"client-{place}-{row % 2}" for row in range(rows)],
        split=["train"] * rows,
        columns={
            "x": Features(names=("a", "b"), values=values),
            "label": Labels(values=["no", "yes"] * (rows // 2)),
            **columns,
        },
    )


def method() -> Method:
    return securely(methods.fedavg(server=averaging(by="uniform")), SecureSums(clip=100.0, bits=64))


def experiment(text: str, encoding: Mapping[str, Any]) -> tuple[torch.nn.Module, Method]:
    torch.manual_seed(0)
    made = Encoding.from_json(json.dumps(encoding))
    return Linear(len(made.meta["features"]), 2), method()


class Fleet:
    """Nodes of a run with secure sums, over a virtual clock.

    Attributes:
        answers: what each has answered, by its number, in order.
    """

    def __init__(self, folder: Path, count: int = 3, back: float | None = 30.0, **options: Any) -> None:
        self.folder, self.count, self.back, self.lives = folder, count, back, 0
        self.raws = [raw(place) for place in range(count)]
        self.terms: dict[str, Any] = {}
        self.answers: dict[int, list[Packet]] = {place: [] for place in range(count)}
        self.before: Callable[[int, Packet], None] = lambda place, packet: None
        self.after: Callable[[int, Packet], None] = lambda place, packet: None
        self.names = {f"node-{place}": place for place in range(count)}
        served = {name: self.start(place) for name, place in self.names.items()}
        self.transport = MemoryTransport(served, **{"takes": lambda name, packet: 1.0, **options})
        self.transport.on_death = self._died

    def start(self, place: int) -> Callable[[Packet], Packet]:
        """Return what a new process of a node serves."""
        node = self.node(place)

        def serve(packet: Packet) -> Packet:
            self.before(place, packet)
            answer = node.serve(packet)
            self.answers[place].append(answer)
            self.after(place, packet)
            return answer

        return serve

    def node(self, place: int) -> Node:
        given = OwnerTerms(owner="ann", simulated_noise=True, leaves="clients", secure=True, **self.terms)
        return Node(self.raws[place], self.folder / str(place), given, experiment)

    def _died(self, name: str) -> None:
        if self.back is not None:
            self.transport.after(self.back, lambda: self._returns(name))

    def _returns(self, name: str) -> None:
        place = self.names[name]
        self.lives += 1
        self.names[new := f"{name}.{self.lives}"] = place
        self.transport.join(new, self.start(place))

    def pooled(self, rules: Rules = Rules(), patience: float = 3600.0) -> Summary:
        from dataclasses import asdict

        nodes = Nodes(self.transport, hello(rules=asdict(rules)), Events(self.transport.now))
        nodes.look()
        while len(nodes.here) < self.count:
            assert self.transport.now() < 10_000, nodes.reasons
            self.transport.wait(1.0)
            nodes.look()
        return pooled(nodes, patience=patience, poll=1.0)

    def plain(self, places: Sequence[int] | None = None, rules: Rules = Rules()) -> Summary:
        """Return what these devices would tell in the clear, added up."""
        return merged(self.raws[place].summary(rules) for place in (places or range(self.count)))


def hello(rules: Mapping[str, Any] | None = None, **changes: Any) -> Hello:
    from fedkeep.remote import fingerprint
    from fedkeep.remote.messages import PROTOCOL

    given = {"protocol": PROTOCOL, "run": RUN, "code": fingerprint.code(), "experiment": "text", "seed": 0}
    given |= {"simulated_noise": True, "summarise": dict(rules or {}), "secure": SHARE}
    return Hello(**{**given, **changes})


def dies(fleet: Fleet, place: int, step: str, *, served: bool) -> None:
    """Let a node die once at a step, before or after it has served it."""
    left = [place]

    def kill(which: int, packet: Packet) -> None:
        if packet.header.get("kind") == "prepare" and packet.header["ask"]["step"] == step and which in left:
            left.remove(which)
            raise Died

    if served:
        fleet.after = kill
    else:
        fleet.before = kill


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_sum_is_that_of_plain_summaries_to_the_bit(count: int, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, count)
    found = fleet.pooled()
    assert found == fleet.plain()
    assert Encoding.of(found).digest == Encoding.of(fleet.plain()).digest


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("count", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_a_device_that_dies_at_a_step_and_comes_back_is_in_the_sum(
    count: int, step: str, served: bool, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, count)
    dies(fleet, 1, step, served=served)
    assert fleet.pooled() == fleet.plain()
    assert len(fleet.transport.deaths) == 1


@pytest.mark.parametrize("step", STEPS)
def test_a_device_that_is_lost_for_good_is_missed_from_the_step_on(step: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 5, back=None)
    dies(fleet, 1, step, served=False)
    told = range(5) if step == "revealed" else (0, 2, 3, 4)
    assert fleet.pooled() == fleet.plain(list(told))


@pytest.mark.parametrize("step", STEPS[:3])
def test_with_fewer_than_the_threshold_a_sum_begins_anew_with_who_is_there(step: str, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 6, back=None)  # four must be there
    gone = {1, 2, 4}

    def kill(which: int, packet: Packet) -> None:
        if packet.header.get("kind") == "prepare" and packet.header["ask"]["step"] == step and which in gone:
            raise Died

    fleet.before = kill
    assert fleet.pooled() == fleet.plain([0, 3, 5])
    sums = {answer.header["sum"] for answer in fleet.answers[0] if answer.header["kind"] == "prepared"}
    assert sums == {1, 2, 3, 4}  # the first failed; numbers, words and names


@pytest.mark.parametrize("seed", range(4))
def test_what_is_lost_said_twice_late_or_damaged_on_its_way_changes_nothing(
    seed: int, tmp_path: Path
) -> None:
    weather = Weather(lose=0.1, corrupt=0.1, duplicate=0.3, delay=0.3, latest=40.0)
    fleet = Fleet(tmp_path, 4, weather=weather, seed=seed)
    draw = np.random.default_rng(seed)

    def kill(which: int, packet: Packet) -> None:
        if packet.header.get("kind") == "prepare" and draw.random() < 0.1:
            raise Died

    fleet.before = fleet.after = kill
    found = fleet.pooled(patience=1e5)
    last = [
        answer
        for each in fleet.answers.values()
        for answer in each
        if answer.header.get("step") == "revealed"
    ]
    told = [place for place in range(4) if f"seed/client-{place}-0" in last[-1].header["made"]]
    assert len(told) >= 3
    assert found == fleet.plain(told)


def test_a_sum_of_one_device_is_refused(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1)
    with pytest.raises(ConfigError, match="at least 2 devices"):
        fleet.pooled(patience=100.0)
    assert not [answer for answer in fleet.answers[0] if answer.header["kind"] == "prepared"]


def test_two_of_which_one_is_lost_make_no_sum(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2, back=None)
    dies(fleet, 1, "masked", served=False)
    with pytest.raises(ConfigError, match="at least 2 devices"):
        fleet.pooled(patience=2000.0)
    assert "revealed" not in {answer.header.get("step") for answer in fleet.answers[0]}


def test_what_was_begun_to_be_unmasked_is_never_summed_over_others(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3, back=None)
    gone = {1, 2}

    def kill(which: int, packet: Packet) -> None:
        if (
            packet.header.get("kind") == "prepare"
            and packet.header["ask"]["step"] == "revealed"
            and which in gone
        ):
            raise Died

    fleet.before = kill
    with pytest.raises(RunError, match="Begin a new run"):
        fleet.pooled(patience=2000.0)


def test_devices_that_differ_in_kind_are_in_no_sum(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 4)
    values = np.zeros((4, 3))
    other = Features(names=("a", "b", "c"), values=values)
    fleet.raws[2] = replace(fleet.raws[2], client=["client-2-0"] * 4, split=["train"] * 4)
    fleet.raws[2] = Raw(
        client=["client-2-0"] * 4,
        split=["train"] * 4,
        columns={"x": other, "label": Labels(values=["no"] * 4)},
    )
    for place in range(4):
        fleet.transport.join(f"node-{place}", fleet.start(place))
    assert fleet.pooled() == fleet.plain([0, 1, 3])


WORDS = ["good day", "good night to you", "so so good", "夜 é ok", "bye bye you", "rare-%s end"]


def worded(folder: Path, count: int, size: int = 100, **options: Any) -> Fleet:
    """Return a fleet with a column of every open kind: counted words, labels, categories, items."""
    fleet = Fleet(folder, count, **options)
    fleet.terms = {"clients_a_word": 1}
    for place in range(count):
        rows = [(place + row) % len(WORDS) for row in range(6)]
        texts = [WORDS[row].replace("%s", str(place)) for row in rows]
        levels = ("red", "größer", f"only {place}")
        fleet.raws[place] = raw(
            place,
            text=Texts(values=texts, tokens="word", size=size, max_length=5),
            item=KeyColumn(values=np.asarray(rows) * 1000 - 2000),
            label=Labels(values=[f"class {row % (2 + place)}" for row in rows]),
            kinds=Features(
                names=("n", "colour"),
                values=np.asarray([[row, row % 3] for row in rows], float),
                kinds={"colour": "category"},
                levels={"colour": levels},
            ),
        )
    return fleet


def refreshed(fleet: Fleet) -> Fleet:
    for place in range(fleet.count):
        fleet.transport.join(f"node-{place}", fleet.start(place))
    return fleet


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(clients_a_word=2),
        Rules(clients_a_word=4),
        Rules(clients_a_word_here=2),
        Rules(vocabulary=5),
        Rules(vocabulary=7, clients_a_word=2),
        Rules(vocabulary=2),
        Rules(tokens="char"),
        Rules(tokens="unicode_words"),
    ],
)
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_words_labels_categories_and_items_are_numbered_as_of_plain_summaries(
    count: int, rules: Rules, tmp_path: Path
) -> None:
    fleet = refreshed(worded(tmp_path, count))
    found, plain = fleet.pooled(rules), fleet.plain(rules=rules)
    assert Encoding.of(found).to_json() == Encoding.of(plain).to_json()
    assert found.open == ["item", "kinds", "label", *(["text"] if rules.tokens != "unicode_words" else [])]
    if rules.vocabulary is None and rules.clients_a_word == 1:
        assert found == plain


def test_a_word_that_the_encoding_leaves_out_is_asked_of_nobody(tmp_path: Path) -> None:
    fleet = refreshed(worded(tmp_path, 5))
    asked: list[Portion] = []

    def look(place: int, packet: Packet) -> None:
        if packet.header.get("kind") == "prepare":
            asked.append(message_of(packet, Prepare).portion)

    fleet.before = look
    found = fleet.pooled(Rules(clients_a_word=4))
    words = found.columns["text"].entries
    every = fleet.plain(rules=Rules(clients_a_word=4)).columns["text"].entries
    assert words.keys() < every.keys()
    (names,) = {one for one in asked if one.wanted}
    wanted = {Hash(*one[:3]) for one in names.wanted}
    column = found.open.index("text")
    for word in every:
        assert (hash_of(RUN, column, word.encode()) in wanted) == (word in words)


@pytest.mark.parametrize("what", ["words", "names"])
@pytest.mark.parametrize("step", STEPS)
def test_a_device_that_dies_while_words_are_summed_and_comes_back_is_in_the_sum(
    what: str, step: str, tmp_path: Path
) -> None:
    fleet = refreshed(worded(tmp_path, 3))
    left = [1]

    def kill(place: int, packet: Packet) -> None:
        header = packet.header
        now = header.get("kind") == "prepare" and header["portion"]["what"] == what
        if now and header["ask"]["step"] == step and place in left:
            left.remove(place)
            raise Died

    fleet.after = kill
    assert fleet.pooled() == fleet.plain()
    assert not left


def test_with_a_device_lost_for_good_between_sums_words_are_of_the_others(tmp_path: Path) -> None:
    fleet = refreshed(worded(tmp_path, 5, back=None))

    def kill(place: int, packet: Packet) -> None:
        if (
            place == 1
            and packet.header.get("kind") == "prepare"
            and packet.header["portion"]["what"] == "words"
        ):
            raise Died

    fleet.before = kill
    found = fleet.pooled()
    assert found.entries == fleet.plain([0, 2, 3, 4]).entries
    assert found.columns["x"] == fleet.plain().columns["x"]


def test_nothing_that_leaves_a_device_is_its_numbers_or_words(tmp_path: Path) -> None:
    """No packet holds a number or a word, as text or in lanes; the masked lanes are all over the ring."""
    fleet = refreshed(worded(tmp_path, 3))
    asked: list[Portion] = []

    def look(place: int, packet: Packet) -> None:
        if place == 0 and packet.header.get("kind") == "prepare" and packet.header["ask"]["step"] == "masked":
            asked.append(message_of(packet, Prepare).portion)

    fleet.before = look
    fleet.pooled()
    own = fleet.raws[0].summary()
    texts = [str(number) for number in own.columns["x"].numbers if number >= 1000]
    words = [text for _, text in own.entries if len(text) > 4]
    assert len(texts) == 4
    assert len(words) > 4
    vectors = list[np.ndarray]()
    for answer in fleet.answers[0]:
        said = json.dumps(answer.header, ensure_ascii=False)
        content = answer.to_bytes()
        assert not [text for text in (*texts, *words) if text in said or text.encode() in content]
        vectors += [value.numpy().view(np.uint64) for value in answer.tensors.values()]
    assert [one.what for one in asked] == ["numbers", "words", "names"]
    for portion, vector in zip(asked, vectors, strict=True):
        plain = lanes_told(portion, own, RUN)
        assert vector.shape == plain.shape
        assert plain.any()
        assert not (vector == plain).any()
        assert np.unique(vector >> np.uint64(56)).size > 20  # plain lanes have zeros there


def test_the_same_data_leave_otherwise_each_time(tmp_path: Path) -> None:
    vectors = []
    for folder in "ab":
        fleet = Fleet(tmp_path / folder, 3)
        fleet.pooled()
        vectors.append([v.numpy() for answer in fleet.answers[0] for v in answer.tensors.values()])
    assert len(vectors[0]) == 3
    for first, second in zip(*vectors, strict=True):
        assert not (first == second).any()


class Party:
    """A device by hand: its steps, each through bytes."""

    def __init__(self, node: Node) -> None:
        self.node, self.name = node, min(node.clients)

    def say(self, message: Message) -> Packet:
        return Packet.from_bytes(self.node.serve(Packet.from_bytes(packet_of(message).to_bytes())).to_bytes())

    def step(self, step: str, number: int, given: Mapping[str, str], **changes: Any) -> Prepared:
        packet = self.say(self.message(step, number, given, **changes))
        assert packet.header["kind"] == "prepared", packet.header
        return message_of(packet, Prepared)

    def refused(self, step: str, number: int, given: Mapping[str, str], **changes: Any) -> str:
        return message_of(self.say(self.message(step, number, given, **changes)), Refused).reason

    def message(
        self, step: str, number: int, given: Mapping[str, str], portion: Portion = NUMBERS, **changes: Any
    ) -> Prepare:
        return Prepare(
            run=RUN,
            hello=hello(**changes),
            party=self.name,
            portion=portion,
            ask=Ask(step=step, sum=number, given=given),
        )  # type: ignore[arg-type]


def test_a_step_is_answered_once_and_again_to_the_byte(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3)
    parties = [Party(fleet.node(place)) for place in range(3)]
    began = {"clients": "3"}
    keys = {one.name: one.step("keys", 1, began).made["keys"] for one in parties}
    boxes = {one.name: one.step("shares", 1, keys).made for one in parties}
    first = parties[0]
    given = {other: box[first.name] for other, box in boxes.items() if other != first.name}
    found = first.step("masked", 1, given)
    assert found.vector is not None
    again = Party(fleet.node(0)).step("masked", 1, given)  # another process
    assert again.vector is not None
    assert torch.equal(found.vector, again.vector)
    fewer = dict(list(given.items())[:1])
    for step, other in (("masked", fewer), ("shares", keys), ("keys", began)):
        assert "once" in first.refused(step, 1, other)
    assert "begun a later one" in first.refused("keys", 0, began)


def test_no_device_unmasks_two_sums_of_a_run(tmp_path: Path) -> None:
    """A server that has the sum of A, B and C asks A and B alone: the difference would be what C has."""
    fleet = Fleet(tmp_path, 3)
    parties = [Party(fleet.node(place)) for place in range(3)]

    def begin(number: int, some: Sequence[Party]) -> list[str]:
        keys = {one.name: one.step("keys", number, {"clients": str(len(some))}).made["keys"] for one in some}
        boxes = {one.name: one.step("shares", number, keys).made for one in some}
        for one in some:
            one.step("masked", number, {n: box[one.name] for n, box in boxes.items() if n != one.name})
        return list(keys)

    every, two = begin(1, parties), begin(2, parties[:2])
    for one in parties:
        one.step("revealed", 1, dict.fromkeys(every, ""))
    for one in parties[:2]:
        assert "another sum" in one.refused("revealed", 2, dict.fromkeys(two, ""))
        assert "another sum" in one.refused("keys", 3, {"clients": "2"})
    other = Portion(what="words", cells=512)  # of another part one may be made, and one alone
    assert parties[0].step("keys", 4, {"clients": "3"}, portion=other).made


def test_what_is_masked_is_what_keys_were_made_for(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    parties = [Party(fleet.node(place)) for place in range(2)]
    first, second = (Portion(what="words", cells=cells) for cells in (512, 516))
    keys = {one.name: one.step("keys", 1, {"clients": "2"}, portion=first).made["keys"] for one in parties}
    boxes = {one.name: one.step("shares", 1, keys, portion=first).made for one in parties}
    one, other = parties
    given = {other.name: boxes[other.name][one.name]}
    assert "another sum" in one.refused("masked", 1, given, portion=second)
    assert one.step("masked", 1, given, portion=first).vector is not None


@pytest.mark.parametrize("portion", [Portion(what="words", cells=1 << 22), Portion(what="words", cells=514)])
def test_a_table_without_bounds_is_refused_before_it_is_made(portion: Portion, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    parties = [Party(fleet.node(place)) for place in range(2)]
    keys = {one.name: one.step("keys", 1, {"clients": "2"}, portion=portion).made["keys"] for one in parties}
    boxes = {one.name: one.step("shares", 1, keys, portion=portion).made for one in parties}
    one, other = parties
    one.refused("masked", 1, {other.name: boxes[other.name][one.name]}, portion=portion)


def test_devices_that_are_asked_otherwise_or_of_another_form_hide_their_lanes(tmp_path: Path) -> None:
    """Masks are bound to what is asked: with other rules for one device the sum is of no use."""
    fleet = Fleet(tmp_path, 2)
    parties = [Party(fleet.node(place)) for place in range(2)]
    rules: list[dict[str, Any]] = [{}, {"standardise": True}]  # which give the same numbers here
    began = {"clients": "2"}
    keys = {
        one.name: one.step("keys", 1, began, rules=rule).made["keys"]
        for one, rule in zip(parties, rules, strict=True)
    }
    boxes = {
        one.name: one.step("shares", 1, keys, rules=rule).made
        for one, rule in zip(parties, rules, strict=True)
    }
    one, other = parties
    assert "sealed" in one.refused("masked", 1, {other.name: boxes[other.name][one.name]}, rules=rules[0])


def test_a_device_for_secure_sums_tells_no_number_in_the_clear(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    party = Party(fleet.node(0))
    said = message_of(party.say(hello(secure=None)), Refused).reason
    assert "device.secure" in said
    here = message_of(party.say(hello()), Here)
    assert here.summary is not None
    told = Summary.from_json(json.dumps(here.summary))
    assert told == told.blank == raw(0).summary().blank
    bare = hello(secure=None)
    message = Prepare(
        run=RUN,
        hello=bare,
        party=party.name,
        portion=Portion(),
        ask=Ask(step="keys", sum=1, given={"clients": "2"}),
    )
    assert "refused" in message_of(party.say(message), Refused).reason


def test_a_server_that_is_told_numbers_in_the_clear_refuses_them(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3)
    plain = json.loads(raw(1).summary().to_json())

    def loud(packet: Packet) -> Packet:
        return packet_of(Here(run=RUN, clients=["client-1-0", "client-1-1"], summary=plain))

    fleet.transport.join("node-1", loud)
    fleet.count = 2
    assert fleet.pooled() == fleet.plain([0, 2])


def test_secure_sums_of_summaries_are_signed(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    node = fleet.node(0)
    node.signed = {"text": SignedWords(preparation={}, secure=SHARE)}
    party = Party(node)
    assert message_of(party.say(hello()), Here)
    for secure in (None, 0.51):
        assert "preparation" in message_of(party.say(hello(secure=secure)), Refused).reason
    assert party.step("keys", 1, {"clients": "2"}).made
    assert "preparation" in party.refused("keys", 2, {"clients": "2"}, secure=0.51)
    assert "preparation" in party.refused("keys", 2, {"clients": "2"}, rules={"standardise": True})


def test_secrets_that_cannot_be_read_are_not_made_anew(tmp_path: Path) -> None:
    """A device that has forgotten whether it has unmasked a sum could be asked for another."""
    fleet = Fleet(tmp_path, 2)
    Party(fleet.node(0)).step("keys", 1, {"clients": "2"})
    (path,) = (tmp_path / "0").glob("*.sum")
    path.write_bytes(path.read_bytes()[:-9])
    for step, given in (("keys", {"clients": "2"}), ("shares", {})):
        assert "cannot be read" in Party(fleet.node(0)).refused(step, 2, given)


def test_wrong_shares_unmask_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many devices as the threshold one that reveals wrong shares ends the run, and no number is made up."""
    fleet, reveal = Fleet(tmp_path, 2), SecureClient.revealed

    def wrong(self: SecureClient, survivors: Any) -> Any:
        found = reveal(self, survivors)
        if self.name == "client-1-0":
            seeds = {name: bytes(len(share)) for name, share in found.seeds.items()}
            return replace(found, seeds=seeds)
        return found

    monkeypatch.setattr(SecureClient, "revealed", wrong)
    with pytest.raises(RunError, match="unmasked"):
        fleet.pooled(patience=2000.0)


def test_a_run_with_secure_sums_has_the_simulations_bits(tmp_path: Path) -> None:
    """From raw data to the last round: features are standardised by sums that nobody saw the summands of."""
    fleet = Fleet(tmp_path, 3)
    options: dict[str, Any] = {"rounds": 2, "cohort": 6, "seed": SEED, "evaluate_every": 0}
    federation = Federation(
        name="pooled",
        text="text",
        build=lambda encoding: experiment("", encoding),
        secure=SHARE,
        clients=6,
        simulated_noise=True,
        **options,
    )
    serve_run(federation, fleet.transport, tmp_path / "run", progress=False)
    parts = [column for one in fleet.raws for column in [one.columns["x"]]]
    labels = [label for one in fleet.raws for label in one.columns["label"].values]  # type: ignore[attr-defined]
    together = Raw(
        client=[client for one in fleet.raws for client in one.client],
        split=["train"] * len(labels),
        columns={
            "x": replace(parts[0], values=np.concatenate([part.values for part in parts])),  # type: ignore[attr-defined, type-var]
            "label": Labels(values=labels),
        },
    )
    data = prepared(together)
    model, made = experiment("", json.loads(Encoding.of(fleet.plain()).to_json()))
    expected = simulate(model, made, data, engine="sequential", progress=False, **options)
    assert same_bits(server_of(tmp_path / "run"), on_server(expected))
    info = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert info["encoding"] == json.loads(Encoding.of(fleet.plain()).to_json())


def test_any_of_its_clients_stands_for_a_device_and_no_other(tmp_path: Path) -> None:
    """The project's owner may list but some of a device's clients for it."""
    fleet = Fleet(tmp_path, 2)
    party = Party(fleet.node(0))
    party.name = "client-1-0"
    assert "none of this device's clients" in party.refused("keys", 1, {"clients": "2"})
    party.name = "client-0-1"
    assert party.step("keys", 1, {"clients": "2"}).made


@pytest.mark.parametrize(
    "tensors",
    [
        {"vector/0/lanes/all": torch.zeros(3)},
        {"vector/0/lanes/all": torch.zeros(3, 1, dtype=torch.int64)},
        {"vector/0/lanes/all": torch.zeros(3, dtype=torch.int64), "vector/0/lanes/more": torch.zeros(1)},
        {"vector/1/lanes/all": torch.zeros(3, dtype=torch.int64)},
        {},
    ],
)
def test_a_vector_that_is_none_is_refused(tensors: dict[str, torch.Tensor]) -> None:
    vector = torch.arange(3)
    packet = packet_of(Prepared(run=RUN, step="masked", sum=1, vector=vector))
    read = message_of(Packet.from_bytes(packet.to_bytes()), Prepared).vector
    assert read is not None
    assert torch.equal(read, vector)
    with pytest.raises(UploadError):
        message_of(replace(packet, tensors=tensors), Prepared)


def test_a_device_that_sends_other_lanes_is_left_out_before_anything_is_unmasked(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 4)
    node = fleet.node(1)

    def short(packet: Packet) -> Packet:
        answer = node.serve(packet)
        return replace(answer, tensors={name: value[1:] for name, value in answer.tensors.items()})

    fleet.transport.join("node-1", short)
    assert fleet.pooled() == fleet.plain([0, 2, 3])
