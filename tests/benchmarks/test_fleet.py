"""Scripted nodes of the load test: what they make of a real device's answer, and that they do without torch."""

from __future__ import annotations

import subprocess
import sys

import torch

from benchmarks.fleet_nodes import FIRST, STEP, packet_in, with_name
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


def test_nodes_do_without_torch() -> None:
    code = "import sys, benchmarks.fleet_nodes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
