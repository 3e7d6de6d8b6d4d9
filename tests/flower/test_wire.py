import zlib

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedkeep.core.errors import UploadError
from fedkeep.flower.wire import DTYPES, RAW, _checksum, from_records, to_bytes, to_records
from fedkeep.remote import Packet
from tests.flower.loopback import Loopback, context
from tests.tiny import bits


def there_and_back(packet: Packet) -> Packet:
    return from_records(to_records([packet])[0])


def test_every_type_and_shape_comes_back_with_its_bits():
    made = {f"group/0/params/{name}": (5 * torch.randn(3, 4)).to(dtype) for name, dtype in DTYPES.items()}
    made |= {
        "group/0/state/client/h": torch.randn(3, 2).T,
        "group/0/params/last": torch.ones(1),
        "empty": torch.zeros(0, 3),
        "answer/1/rows/none": torch.zeros(2, 0, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "a/b/c/d/e.f": torch.tensor(float("nan")),
    }
    read = there_and_back(Packet({"kind": "work", "orders": [{"client": "ü", "share": 0.1}]}, made))
    assert read.header == {"kind": "work", "orders": [{"client": "ü", "share": 0.1}]}
    assert list(read.tensors) == list(made)
    for name, value in made.items():
        got = read.tensors[name]
        assert (got.dtype, got.shape, bits(got)) == (value.dtype, value.shape, bits(value)), name


def test_a_tensor_that_is_missing_twice_named_or_moved_is_noticed():
    for change in (lambda n: n[:1], lambda n: [*n, n[0]], lambda n: n[::-1], lambda n: [*n, "c"]):
        made = to_records([Packet({}, {"group/0/params/a": torch.ones(2), "b": torch.ones(3)})])[0]
        made["header"]["names"] = change(made["header"]["names"])
        with pytest.raises(UploadError, match="damaged on its way"):
            from_records(made)


def test_the_bytes_that_an_audit_searches_are_those_that_the_grid_carries():
    packet = Packet(
        {"kind": "answers"}, {"answer/0/deltas/w": torch.randn(3), "answer/0/deltas/b": torch.ones(2)}
    )
    grid = Loopback(lambda message, _: message, [context()])
    grid.travel(Message(to_records([packet])[0], dst_node_id=7, message_type="query"))
    carried, content = sorted(grid.carried.values(), key=len), to_bytes(packet)
    assert all(part in content for part in carried if not part.startswith(b"Message"))
    assert packet.tensors["answer/0/deltas/w"].numpy().tobytes() in content


def test_tensors_that_two_packets_share_are_turned_into_bytes_once():
    model = torch.randn(100)
    one, two = to_records([Packet({"kind": "work", "to": k}, {"group/0/params/w": model}) for k in (1, 2)])
    assert one["tensors/group/0/params"]["w"] is two["tensors/group/0/params"]["w"]
    assert one.object_id != two.object_id


def test_what_is_read_can_be_written_to():
    there_and_back(Packet({}, {"w": torch.zeros(3)})).tensors["w"].add_(1)


def test_a_header_that_json_cannot_hold_is_refused():
    with pytest.raises(UploadError, match="header cannot be written"):
        to_records([Packet({"loss": float("nan")})])
    with pytest.raises(UploadError, match="header cannot be written"):
        to_records([Packet({"loss": object()})])


def test_a_sparse_tensor_is_refused():
    with pytest.raises(UploadError, match="'w' is torch.float32, torch.sparse_coo"):
        to_records([Packet({}, {"w": torch.zeros(3).to_sparse()})])


def array(dtype="float32", shape=(2,), stype=RAW, data=b"\0" * 8):
    return Array(dtype, shape, stype, data)


def records(
    *, header='{"kind": "work"}', group="tensors/group/0/params", key="w", value=None, crc=None, **more
):
    """Return a message whose checksum is right, unless ``crc`` says another."""
    found = {group: value or ArrayRecord({key: array()})}
    sums = {
        "/".join([*g.split("/")[1:], k]): zlib.crc32(a.data) for g, r in found.items() for k, a in r.items()
    }
    checksum = _checksum(header or "", sums) if crc is None else crc
    told = ConfigRecord({"json": header or "", "names": list(sums), "crc": checksum})
    made = {"header": told} if header is not None else {}
    return RecordDict({**made, **found, **more})


def test_the_form_that_the_tests_below_damage_is_read():
    assert from_records(records()).tensors.keys() == {"group/0/params/w"}


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (records(header=None), "has no header"),
        (records(header="{"), "header cannot be read"),
        (records(header="[]"), "should be a table; it is list"),
        (records(header='{"a": NaN}'), "NaN is no number"),
        (records(header="[" * 100_000), "header cannot be read"),
        (RecordDict({"header": ConfigRecord({"json": 3, "names": [], "crc": 0})}), "has no header"),
        (RecordDict({"header": ConfigRecord({"json": "{}", "names": "w", "crc": 0})}), "has no header"),
        (RecordDict({"header": ConfigRecord({"json": "{}", "names": [1], "crc": 0})}), "has no header"),
        (RecordDict({"header": ConfigRecord({"json": "{}", "names": [], "crc": 0.5})}), "has no header"),
        (RecordDict({"header": ConfigRecord({"json": "{}"})}), "has no header"),
        (
            RecordDict({"header": ConfigRecord({"json": "{}", "names": [], "crc": 1, "more": 1})}),
            "has no header",
        ),
        (records(crc=7), "damaged on its way"),
        (RecordDict({"header": MetricRecord({"json": 1})}), "has no header"),
        (records(metrics=MetricRecord({"loss": 1.0})), "record 'metrics' that fedkeep does not send"),
        (records(group="private/0"), "record 'private/0' that fedkeep does not send"),
        (records(group="tensors", key="group/0/params/w"), "in the wrong record, 'tensors'"),
        (records(group="tensors/a/b/c/d"), "in the wrong record"),
        (records(value=ArrayRecord({"w": array(stype="numpy.ndarray")})), "came as 'numpy.ndarray'"),
        (records(value=ArrayRecord({"w": array(dtype="object")})), "of 'object'"),
        (records(value=ArrayRecord({"w": array(shape=(3,))})), "takes 12 bytes; 8 came"),
        (records(value=ArrayRecord({"w": array(shape=(-1, -2))})), "whole numbers from 0 on"),
        (records(value=ArrayRecord({"w": array(shape=(True, 2))})), "whole numbers from 0 on"),
        (records(value=ArrayRecord({"w": array("bool", (2,), data=b"\0\2")})), "neither 0 nor 1"),
    ],
)
def test_whatever_is_malformed_is_refused(damaged, said):
    with pytest.raises(UploadError, match=said.replace("'", ".")):
        from_records(damaged)


def test_nothing_that_could_run_code_is_read(tmp_path):
    payload = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    with pytest.raises(UploadError):
        from_records(records(value=ArrayRecord({"w": Array("object", (1,), "cpickle", payload)})))
    assert not (tmp_path / "ran").exists()


def test_a_value_that_changed_on_its_way_is_noticed():
    made = to_records([Packet({"kind": "work"}, {"group/0/params/w": torch.ones(2)})])[0]
    damaged = bytearray(made["tensors/group/0/params"]["w"].data)
    damaged[0] ^= 1
    made["tensors/group/0/params"]["w"].data = bytes(damaged)
    with pytest.raises(UploadError, match="damaged on its way"):
        from_records(made)
