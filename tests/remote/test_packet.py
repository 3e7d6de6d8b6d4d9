import json
import zlib

import pytest
import torch

from fedkeep.core.errors import UploadError
from fedkeep.remote import Packet


def test_what_is_read_is_what_was_written():
    tensors = {
        "a/b": torch.randn(3, 2).T,
        "half": torch.randn(4).bfloat16(),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "flag": torch.tensor([True, False]),
    }
    made = Packet({"kind": "work", "orders": [{"client": "ü", "share": 0.25}]}, tensors)
    read = Packet.from_bytes(made.to_bytes())
    assert read.header == made.header
    assert read.tensors.keys() == tensors.keys()
    for name, value in tensors.items():
        assert read.tensors[name].dtype == value.dtype
        assert torch.equal(read.tensors[name], value)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:9], lambda b: b[:-1], lambda b: b"x" * 40])
def test_damaged_bytes_are_refused(damage):
    content = Packet({"kind": "hello"}, {"a": torch.ones(5)}).to_bytes()
    with pytest.raises(UploadError, match="cannot be read"):
        Packet.from_bytes(damage(content))


def test_a_header_that_json_cannot_hold_is_refused():
    for header in ({"loss": float("nan")}, {"loss": object()}):
        with pytest.raises(UploadError, match="header cannot be written"):
            Packet(header).to_bytes()


def test_a_tensor_that_does_not_travel_is_refused():
    with pytest.raises(UploadError, match=r"'w' is torch.float32, torch.sparse_coo. Dense ones travel"):
        Packet({}, {"w": torch.zeros(3).to_sparse()}).to_bytes()
    with pytest.raises(UploadError, match=r"'w' is torch.complex128"):
        Packet({}, {"w": torch.zeros(3, dtype=torch.complex128)}).to_bytes()


def written(text: str, value: bytes = b"\1", dtype: str = "BOOL") -> bytes:
    """Return the bytes of a packet with one tensor of one byte; checksum and lengths are right."""
    tensor = {"dtype": dtype, "shape": [1], "data_offsets": [0, 1]}
    top = json.dumps({"__metadata__": {"packet": text}, "flag": tensor}).encode()
    content = len(top).to_bytes(8, "little") + top + value
    return content + zlib.crc32(content).to_bytes(4, "little")


def test_what_was_made_to_look_like_a_packet_is_refused():
    right = '{"header": {}, "names": ["flag"], "beside": []}'
    assert Packet.from_bytes(written(right)).tensors["flag"].item() is True
    for text, value, said in (
        ('{"header": {"a": NaN}, "names": ["flag"], "beside": []}', b"\1", "NaN is no number"),
        ('{"header": [], "names": ["flag"], "beside": []}', b"\1", "no table"),
        ('{"header": {}, "names": [], "beside": []}', b"\1", "list of names"),
        ("[" * 100_000, b"\1", "cannot be read"),
        (right, b"\2", "neither 0 nor 1"),
    ):
        with pytest.raises(UploadError, match=said):
            Packet.from_bytes(written(text, value))


def test_the_same_packet_is_always_the_same_bytes():
    packets = [
        Packet({"kind": "work", "b": 1, "a": 2}, {"y": torch.ones(1), "x": torch.ones(2)}) for _ in range(20)
    ]
    assert len({packet.to_bytes() for packet in packets}) == 1
