import json

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedkeep.core.errors import UploadError
from fedkeep.flower.array_records import RAW, from_records, to_bytes, to_records
from fedkeep.remote import Packet
from fedkeep.remote.messages import TYPES, tensor_file
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


def test_tensors_that_packets_share_are_one_array_and_the_others_another():
    """Flower asks for each array by itself, so their number must not grow with that of the tensors."""
    model = {f"sent/0/params/{n}": torch.randn(100) for n in range(9)}
    half = {f"sent/1/params/{n}": torch.randn(10) for n in range(9)}
    sent = [{**model}, {**model, **half}, {**model, **half, "own": torch.ones(1)}]
    made = to_records([Packet({"to": k}, tensors) for k, tensors in enumerate(sent)])
    arrays = [records["packet"] for records in made]
    assert [sorted(each) for each in arrays] == [
        ["own", "shared-0"],
        ["own", "shared-0", "shared-1"],
        ["own", "shared-0", "shared-1"],
    ]
    assert arrays[0]["shared-0"] is arrays[1]["shared-0"] is arrays[2]["shared-0"]
    assert arrays[1]["shared-1"] is arrays[2]["shared-1"]
    for k, tensors in enumerate(sent):
        read = from_records(made[k])
        assert (read.header, list(read.tensors)) == ({"to": k}, list(tensors))
        assert all(torch.equal(read.tensors[n], v) for n, v in tensors.items())


def test_what_is_read_can_be_written_to():
    there_and_back(Packet({}, {"w": torch.zeros(3)})).tensors["w"].add_(1)


def packed(header, tensors=(), stype=RAW, **more):
    """Return records whose own part has any header, right in its checksum."""
    content = tensor_file(dict(tensors), json.dumps(header))
    return RecordDict(
        {"packet": ArrayRecord({"own": Array("uint8", (len(content),), stype, content)}), **more}
    )


ABOUT = {"header": {"kind": "work"}, "names": ["w"], "beside": []}
ONE = {"w": torch.ones(2)}


def test_the_form_that_the_tests_below_damage_is_read():
    assert from_records(packed(ABOUT, ONE)).tensors.keys() == {"w"}


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (RecordDict(), "not made by fedkeep"),
        (RecordDict({"packet": ConfigRecord({"own": 1})}), "not made by fedkeep"),
        (RecordDict({"packet": ArrayRecord({})}), "not made by fedkeep"),
        (packed(ABOUT, ONE, metrics=ConfigRecord({"loss": 1.0})), "it holds ['metrics', 'packet']"),
        (packed(ABOUT, ONE, stype="numpy.ndarray"), "'own' is 'numpy.ndarray'"),
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


def test_parts_of_two_messages_do_not_make_one():
    first, second = ({"sent/0/params/w": torch.full((2,), float(k))} for k in range(2))
    one, _ = to_records([Packet({"to": k}, first) for k in range(2)])
    other, _ = to_records([Packet({"to": k}, second) for k in range(2)])
    one["packet"]["shared-0"] = other["packet"]["shared-0"]
    with pytest.raises(UploadError, match="put together from others"):
        from_records(one)
    del one["packet"]["shared-0"]
    with pytest.raises(UploadError, match="put together from others"):
        from_records(one)


def test_a_tensor_that_comes_twice_is_noticed():
    shared = {"w": torch.ones(2)}
    made, _ = to_records([Packet({}, shared), Packet({}, shared)])
    about = {"header": {}, "names": ["w"], "beside": [made["packet"]["shared-0"].data[-4:].hex()]}
    twice = packed(about, {"w": torch.zeros(2)})
    twice["packet"]["shared-0"] = made["packet"]["shared-0"]
    with pytest.raises(UploadError, match="not that of its tensors"):
        from_records(twice)


def test_nothing_that_could_run_code_is_read(tmp_path):
    payload = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    for stype in (RAW, "cpickle"):
        with pytest.raises(UploadError):
            from_records(RecordDict({"packet": ArrayRecord({"own": Array("object", (1,), stype, payload)})}))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", ["own", "shared-0"])
def test_a_value_that_changed_on_its_way_is_noticed(part):
    model = torch.ones(2)
    made, _ = to_records(
        [Packet({"kind": "work"}, {"w": model, "v": torch.zeros(2)}), Packet({}, {"w": model})]
    )
    damaged = bytearray(made["packet"][part].data)
    damaged[-6] ^= 1
    made["packet"][part].data = bytes(damaged)
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
