"""Scripted nodes of the load test: what they make of a real device's answer, and that they do without torch."""

from __future__ import annotations

import subprocess
import sys

import torch

from benchmarks.fleet_nodes import FIRST, PIECE, STEP, files_in, packet_in, records_of, with_name
from fedkeep.flower.packet_records import from_records, to_records
from fedkeep.remote import Packet


def test_an_answer_becomes_anothers() -> None:
    values = {"upload/0/deltas/w": torch.zeros(STEP), "losses": torch.ones(2, dtype=torch.float64)}
    header = {"kind": "answers", "round": 3, "attempt": 5, "answers": [{"client": FIRST}]}
    file = Packet(header, values).to_bytes()
    assert packet_in(file) == header
    found = Packet.from_bytes(with_name(file, FIRST, "n00007", 7))
    assert found.header == {**header, "answers": [{"client": "n00007"}]}
    assert torch.equal(found.tensors["losses"], values["losses"])
    own = found.tensors["upload/0/deltas/w"]
    assert own.nonzero().flatten().tolist() == list(
        range(0, STEP, STEP // 4)
    )  # floats, one in each step of bytes
    assert with_name(with_name(file, FIRST, "n00007"), "n00007", FIRST) == file


def test_records_are_read_and_written_as_fedkeep_does() -> None:
    model, own = torch.randn(PIECE // 4 + 1), torch.zeros(2 * PIECE // 4)
    packets = [Packet({"to": k}, {"model": model, "own": own + k}) for k in range(2)]
    for packet, records in zip(packets, to_records(packets), strict=True):
        assert [name.partition("/")[0] for name in records] == ["own"] * 3 + ["shared-0"] * 2
        file, *beside = files_in(records)
        assert Packet.from_bytes(file, beside).header == packet.header
    file = packets[1].to_bytes()
    read = from_records(records_of(file))
    assert torch.equal(read.tensors["own"], own + 1)


def test_nodes_do_without_torch() -> None:
    code = "import sys, benchmarks.fleet_nodes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
