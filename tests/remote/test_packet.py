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
    with pytest.raises(ValueError, match="JSON"):
        Packet({"loss": float("nan")}).to_bytes()


def test_the_same_packet_is_always_the_same_bytes():
    packets = [
        Packet({"kind": "work", "b": 1, "a": 2}, {"y": torch.ones(1), "x": torch.ones(2)}) for _ in range(20)
    ]
    assert len({packet.to_bytes() for packet in packets}) == 1
