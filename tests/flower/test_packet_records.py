import json
import tracemalloc

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE

from fedkeep.core.errors import UploadError
from fedkeep.core.packet import TYPES, tensors_packed
from fedkeep.flower import packet_records
from fedkeep.flower.inner import nested_bytes
from fedkeep.flower.packet_records import CONTENT, from_records, to_bytes, to_records
from fedkeep.remote import Packet
from tests.flower.loopback import Loopback, context
from tests.tiny import bits


def there_and_back(packet: Packet) -> Packet:
    return from_records(to_records([packet])[0])


def test_every_type_and_shape_comes_back_with_its_bits():
    made = {f"sent/0/params/{dtype}": (5 * torch.randn(3, 4)).to(dtype) for dtype in TYPES}
    made |= {
        "sent/0/state/client/h": torch.randn(3, 2).T,
        "sent/0/params/last": torch.ones(1),
        "empty": torch.zeros(0, 3),
        "upload/1/rows/none": torch.zeros(2, 0, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "a/b/c/d/e.f": torch.tensor(float("nan")),
    }
    header = {"kind": "work", "orders": [{"client": "ü", "share": 0.1}]}
    others = [
        Packet({"to": 1}, {n: made[n] for n in ("scalar", "empty")}),
        Packet({"to": 2}, {"w": torch.ones(1)}),
    ]
    for read in (
        there_and_back(Packet(header, made)),
        from_records(to_records([*others, Packet(header, made)])[2]),
    ):
        assert read.header == header
        assert list(read.tensors) == list(made)
        for name, value in made.items():
            got = read.tensors[name]
            assert (got.dtype, got.shape, bits(got)) == (value.dtype, value.shape, bits(value)), name


def test_the_bytes_that_an_audit_searches_are_those_that_the_grid_carries():
    packet = Packet(
        {"kind": "answers"}, {"upload/0/deltas/w": torch.randn(3), "upload/0/deltas/b": torch.ones(2)}
    )
    grid = Loopback(lambda message, _: message, [context()])
    grid.travel(Message(to_records([packet])[0], dst_node_id=7, message_type="query"))
    carried, content = sorted(grid.carried.values(), key=len), to_bytes(packet)
    assert all(part in content for part in carried if not part.startswith(b"Message"))
    assert packet.tensors["upload/0/deltas/w"].numpy().tobytes() in content


def test_tensors_that_packets_share_are_one_record_and_the_others_another():
    """Flower asks for each record by itself, so their number must not grow with that of the tensors."""
    model = {f"sent/0/params/{n}": torch.randn(100) for n in range(9)}
    half = {f"sent/1/params/{n}": torch.randn(10) for n in range(9)}
    sent = [{**model}, {**model, **half}, {**model, **half, "own": torch.ones(1)}]
    made = to_records([Packet({"to": k}, tensors) for k, tensors in enumerate(sent)])
    assert [list(each) for each in made] == [
        ["own/0", "shared-0/0"],
        ["own/0", "shared-0/0", "shared-1/0"],
        ["own/0", "shared-0/0", "shared-1/0"],
    ]
    assert made[0]["shared-0/0"] is made[1]["shared-0/0"] is made[2]["shared-0/0"]
    assert made[1]["shared-1/0"] is made[2]["shared-1/0"]
    for k, tensors in enumerate(sent):
        read = from_records(made[k])
        assert (read.header, list(read.tensors)) == ({"to": k}, list(tensors))
        assert all(torch.equal(read.tensors[n], v) for n, v in tensors.items())


def test_a_message_is_two_objects_and_one_for_each_record():
    """Each object costs each of the link, the node and the device's process a request, so a record must have none inside it."""
    model = torch.randn(100)
    records, _ = to_records([Packet({"to": k}, {"w": model}) for k in range(2)])
    message = Message(records, dst_node_id=7, message_type="query")
    assert [part.partition(b" ")[0] for part in nested_bytes(message)] == [
        b"ConfigRecord",
        b"ConfigRecord",
        b"RecordDict",
        b"Message",
    ]


@pytest.fixture
def small_pieces(monkeypatch):
    """Let pieces have 100 bytes."""
    monkeypatch.setattr(packet_records, "PIECE", 100)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("numbers", range(90, 120))
def test_a_file_beyond_a_piece_is_cut_wherever_its_end_falls(numbers):
    model, own = torch.randint(255, (numbers,), dtype=torch.uint8), torch.ones(60)
    packets = [Packet({"to": k}, {"w": model, **({"own": own} if k else {})}) for k in range(2)]
    for packet, records in zip(packets, to_records(packets), strict=True):
        contents = {name: record[CONTENT] for name, record in records.items()}
        for file in ("own", "shared-0"):
            pieces = [content for name, content in contents.items() if name.startswith(f"{file}/")]
            assert list(map(len, pieces[:-1])) == [100] * (len(pieces) - 1)
            assert 0 < len(pieces[-1]) <= 100
        read = from_records(records)
        assert (read.header, list(read.tensors)) == (packet.header, list(packet.tensors))
        assert all(torch.equal(read.tensors[n], v) for n, v in packet.tensors.items())


def test_a_piece_is_no_larger_than_flowers_own_of_an_array():
    """A device's line must carry two of them in the 180 seconds after which the link gives an answer up."""
    assert packet_records.PIECE == FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE


def test_records_that_were_read_hold_nothing_any_more():
    (records,) = to_records([Packet({}, {"w": torch.ones(2)})])
    from_records(records)
    assert not records


def test_a_packet_is_in_memory_three_times_at_most_while_it_is_read(monkeypatch):
    """As a file, without its checksum, and as tensors; its pieces are gone by then."""
    monkeypatch.setattr(packet_records, "PIECE", 1 << 20)
    (sent,) = to_records([Packet({}, {"w": torch.ones(1 << 20)})])
    tracemalloc.start()
    try:
        records = RecordDict({name: ConfigRecord.inflate(record.deflate()) for name, record in sent.items()})
        tracemalloc.reset_peak()
        packet = from_records(records)
        assert tracemalloc.get_traced_memory()[1] < 3.5 * (4 << 20)
    finally:
        tracemalloc.stop()
    assert packet.tensors.keys() == {"w"}


def test_what_is_read_can_be_written_to():
    there_and_back(Packet({}, {"w": torch.zeros(3)})).tensors["w"].add_(1)


def packed(header, tensors=(), **more):
    """Return records whose own part has any header, right in its checksum."""
    content = tensors_packed(dict(tensors), json.dumps(header))
    return RecordDict({"own/0": ConfigRecord({CONTENT: content}), **more})


ABOUT = {"header": {"kind": "work"}, "names": ["w"], "beside": []}
ONE = {"w": torch.ones(2)}
FILE = tensors_packed(ONE, json.dumps(ABOUT))


def test_the_form_that_the_tests_below_damage_is_read():
    assert from_records(packed(ABOUT, ONE)).tensors.keys() == {"w"}
    assert from_records(RecordDict({"own/0": ConfigRecord({CONTENT: FILE})})).tensors.keys() == {"w"}


def alone(record):
    return RecordDict({"own/0": record})


ARRAY = Array("uint8", (len(FILE),), "fedkeep.packet", FILE)


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (RecordDict(), "it holds []"),
        (RecordDict({"own": ConfigRecord({CONTENT: FILE})}), "it holds ['own']"),
        (RecordDict({"own/1": ConfigRecord({CONTENT: FILE})}), "it holds ['own/1']"),
        (RecordDict({"own/00": ConfigRecord({CONTENT: FILE})}), "it holds ['own/00']"),
        (RecordDict({"shared-0/0": ConfigRecord({CONTENT: FILE})}), "it holds ['shared-0/0']"),
        (packed(ABOUT, ONE, more=ConfigRecord({CONTENT: b"x"})), "it holds ['own/0', 'more']"),
        (packed(ABOUT, ONE, **{"own/2": ConfigRecord({CONTENT: b"x"})}), "it holds ['own/0', 'own/2']"),
        (packed(ABOUT, ONE, **{"shared-1/0": ConfigRecord({CONTENT: b"x"})}), "['own/0', 'shared-1/0']"),
        (packed(ABOUT, ONE, metrics=MetricRecord({"loss": 1.0})), "'metrics' is MetricRecord ['loss']"),
        (alone(ArrayRecord({CONTENT: ARRAY})), "'own/0' is ArrayRecord ['content']"),
        (RecordDict({"packet": ArrayRecord({"own": ARRAY})}), "'packet' is ArrayRecord ['own']"),
        (alone(ConfigRecord({})), "'own/0' is ConfigRecord []"),
        (alone(ConfigRecord({CONTENT: FILE, "more": b"x"})), "'own/0' is ConfigRecord ['content', 'more']"),
        (alone(ConfigRecord({"other": FILE})), "'own/0' is ConfigRecord ['other']"),
        (alone(ConfigRecord({CONTENT: [FILE]})), "'own/0' is of type list"),
        (alone(ConfigRecord({CONTENT: "text"})), "'own/0' is of type str"),
        (alone(ConfigRecord({CONTENT: 1})), "'own/0' is of type int"),
        (alone(ConfigRecord({CONTENT: b""})), "'own' are of [0] bytes"),
        (
            packed(ABOUT, ONE, **{"own/1": ConfigRecord({CONTENT: b""})}),
            f"'own' are of [{len(FILE)}, 0] bytes",
        ),
        (
            packed(ABOUT, ONE, **{"own/1": ConfigRecord({CONTENT: FILE})}),
            f"of [{len(FILE)}, {len(FILE)}] bytes",
        ),
        (packed(ABOUT, ONE, **{"shared-0/0": ConfigRecord({CONTENT: FILE})}), "put together from others"),
        (packed({}), "no header"),
        (packed({**ABOUT, "header": []}, ONE), "no header"),
        (packed({**ABOUT, "names": "w"}, ONE), "no header"),
        (packed({**ABOUT, "more": 1}, ONE), "no header"),
        (packed({**ABOUT, "names": []}, ONE), "not that of its tensors"),
        (packed({**ABOUT, "names": ["v"]}, ONE), "not that of its tensors"),
        (packed({**ABOUT, "names": [1]}, ONE), "not that of its tensors"),
        (packed({**ABOUT, "names": ["w", "w"]}, ONE), "not that of its tensors"),
        (packed({**ABOUT, "names": [["w"]]}, ONE), "not that of its tensors"),
        (packed({**ABOUT, "beside": ["00000000"]}, ONE), "put together from others"),
    ],
)
def test_whatever_is_malformed_is_refused(damaged, said):
    with pytest.raises(UploadError) as error:
        from_records(damaged)
    assert said in str(error.value)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("0 1 2 3", ""),
        ("0 1 2", "its checksum"),
        ("0 1 3", "holds ['own/0', 'own/1', 'own/3']"),
        ("1 2 3", "holds ['own/1', 'own/2', 'own/3']"),
        ("0 2 1 3", "holds ['own/0', 'own/2', 'own/1', 'own/3']"),
        ("1 0 2 3", "holds ['own/1', 'own/0', 'own/2', 'own/3']"),
        ("0=1 1=0 2 3", "its checksum"),
        ("0 1=0 2 3", "its checksum"),
        ("0 1=3 2 3", "'own' are of [100, 12, 100, 12] bytes"),
        ("0 1 2 3 4=3", "'own' are of [100, 100, 100, 12, 12] bytes"),
    ],
)
def test_pieces_that_are_missing_or_out_of_order_or_doubled_are_refused(order, said):
    (records,) = to_records([Packet({"kind": "work"}, {"w": torch.arange(140, dtype=torch.uint8)})])
    assert [len(record[CONTENT]) for record in records.values()] == [100, 100, 100, 12]
    pairs = [(place, source or place) for place, _, source in (word.partition("=") for word in order.split())]
    made = RecordDict({f"own/{place}": records[f"own/{source}"] for place, source in pairs})
    if said:
        with pytest.raises(UploadError) as error:
            from_records(made)
        assert said in str(error.value)
    else:
        assert from_records(made).tensors.keys() == {"w"}


@pytest.mark.usefixtures("small_pieces")
def test_a_piece_that_is_larger_than_is_cut_is_refused(monkeypatch):
    assert len(FILE) > 100
    with pytest.raises(UploadError, match=rf"'own' are of \[{len(FILE)}\] bytes"):
        from_records(RecordDict({"own/0": ConfigRecord({CONTENT: FILE})}))


def test_parts_of_two_messages_do_not_make_one():
    first, second = ({"sent/0/params/w": torch.full((2,), float(k))} for k in range(2))
    one, _ = to_records([Packet({"to": k}, first) for k in range(2)])
    other, _ = to_records([Packet({"to": k}, second) for k in range(2)])
    for beside in ({"shared-0/0": other["shared-0/0"]}, {}):
        with pytest.raises(UploadError, match="put together from others"):
            from_records(RecordDict({"own/0": one["own/0"], **beside}))


def test_a_tensor_that_comes_twice_is_noticed():
    shared = {"w": torch.ones(2)}
    made, _ = to_records([Packet({}, shared), Packet({}, shared)])
    about = {"header": {}, "names": ["w"], "beside": [made["shared-0/0"][CONTENT][-4:].hex()]}
    twice = packed(about, {"w": torch.zeros(2)}, **{"shared-0/0": made["shared-0/0"]})
    with pytest.raises(UploadError, match="not that of its tensors"):
        from_records(twice)


def test_nothing_that_could_run_code_is_read(tmp_path):
    payload = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    with pytest.raises(UploadError):
        from_records(alone(ConfigRecord({CONTENT: payload})))
    with pytest.raises(UploadError):
        from_records(alone(ArrayRecord({CONTENT: Array("object", (1,), "cpickle", payload)})))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", ["own/0", "shared-0/0"])
def test_a_value_that_changed_on_its_way_is_noticed(part):
    model = torch.ones(2)
    made, _ = to_records(
        [Packet({"kind": "work"}, {"w": model, "v": torch.zeros(2)}), Packet({}, {"w": model})]
    )
    damaged = bytearray(made[part][CONTENT])
    damaged[-6] ^= 1
    made[part] = ConfigRecord({CONTENT: bytes(damaged)})
    with pytest.raises(UploadError, match="its checksum is not that of its content"):
        from_records(made)


def test_tensors_of_one_name_that_differ_between_packets_stay_apart():
    """A server that sends each client its own model (pFedHN, FedAMP) fills the same names with different values."""
    common = torch.ones(3)
    packets = [
        Packet({"to": k}, {"sent/0/params/w": torch.full((2,), float(k)), "sent/0/params/common": common})
        for k in range(3)
    ]
    packets.append(Packet({"to": 3}, dict(packets[1].tensors)))
    for sent, records in zip(packets, to_records(packets), strict=True):
        got = from_records(records)
        assert list(got.tensors) == list(sent.tensors)
        assert all(torch.equal(got.tensors[name], value) for name, value in sent.tensors.items())
