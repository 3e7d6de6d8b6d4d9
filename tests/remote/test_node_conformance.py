"""Nodes that are driven by hand train every method of the conformance table to the bits of ``sequential``.

Nothing of what clients keep and none of their examples is in the bytes that leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedkeep.core.params import Params
from fedkeep.data import Ragged
from tests.engines.test_conformance import CASES, COHORT, ROUNDS, SEED, reference
from tests.remote.hand import Hand
from tests.tiny import everyone, on_server, same_bits

FEW = ["furl", "the share of FedAvg", "scaffold", "top-k with error feedback", "upload chain", "local rows"]
FOLLOWS = {
    "scaffold": "client/",  # sends the change of its control, which begins at zero
    "feddyn": "client/",  # its slope is the sum of the changes that it sends, and begins at zero
    "a frozen backbone": "user",  # is added to head.bias and begins at zero: both change alike
}
"""What follows from a client's uploads by the method itself, so that numbers of it may be among them."""


def hand(case: str, kind: str) -> Hand:
    what = CASES[case]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return what.model().to(getattr(torch, kind))

    return Hand(make, what.method, what.data, SEED)


def trained(case: str, kind: str, folder: Path, nodes: int = 2) -> Hand:
    server = hand(case, kind)
    clients = range(len(server.data))
    server.meet(*(server.node(folder / str(k), list(clients[k::nodes])) for k in range(nodes)))
    options = CASES[case].options
    server.go(ROUNDS, int(options.get("cohort", COHORT)), str(options.get("on_nonfinite", "stop")))
    return server


@pytest.mark.parametrize("case", CASES)
def test_nodes_equal_sequential_to_the_bit_and_no_private_value_leaves(case: str, tmp_path: Path) -> None:
    expected, found = reference(case, "float64"), trained(case, "float64", tmp_path)
    server = {**found.server.params, **{f"server/{n}": v for n, v in found.server.state.items()}}
    assert same_bits(server, on_server(expected))
    kept = everyone(expected.private, len(expected.data))
    assert same_bits(found.kept(), kept)
    left = b"".join(found.left)
    hidden = {n: v for n, v in kept.items() if not n.startswith(FOLLOWS.get(case, " "))}
    assert [n for n, v in hidden.items() if seen(v, left)] == []
    assert [n for n, v in secrets(found).items() if seen(v, left)] == []
    found.close()


def seen(value: torch.Tensor, content: bytes) -> list[float]:
    """Return the numbers of a tensor, of 8 bytes each, that are in the content; no whole numbers, they mean little."""
    numbers = value.detach().reshape(-1)
    if numbers.dtype != torch.float64:
        return []
    return [x for x in numbers.tolist() if x != round(x) and np.float64(x).tobytes() in content]


def test_the_search_finds_what_is_there() -> None:
    value = torch.tensor([[0.5, 3.0]], dtype=torch.float64)
    assert seen(value, b"xx" + np.float64(0.5).tobytes() + np.float64(3.0).tobytes()) == [0.5]
    assert seen(value, b"") == []


def secrets(server: Hand) -> Params:
    """Return the examples' numbers."""
    columns = {n: c for n, c in server.data.columns.items() if not isinstance(c, Ragged)}
    return {n: torch.as_tensor(c) for n, c in columns.items() if np.asarray(c).dtype == np.float64}


@pytest.mark.parametrize("case", FEW)
def test_with_nodes_that_forget_all_but_their_disk_too(case: str, tmp_path: Path) -> None:
    """Every round is served by nodes that were made anew, as a transport may do it."""
    expected, found = reference(case, "float64"), hand(case, "float64")
    clients = list(range(len(found.data)))

    def anew() -> Iterable[object]:
        found.close()
        found.nodes = [found.node(tmp_path / str(k), clients[k::3]) for k in range(3)]
        return [found.place.update(dict.fromkeys(node.clients, node)) for node in found.nodes]

    found.meet(*(found.node(tmp_path / str(k), clients[k::3]) for k in range(3)))
    cohort = int(CASES[case].options.get("cohort", COHORT))
    train = found.train

    def train_anew(orders: object) -> object:
        anew()
        return train(orders)  # type: ignore[arg-type]

    found.train = train_anew  # type: ignore[assignment, method-assign]
    found.go(ROUNDS, cohort)
    assert same_bits(found.kept(), everyone(expected.private, len(expected.data)))
    server = {**found.server.params, **{f"server/{n}": v for n, v in found.server.state.items()}}
    assert same_bits(server, on_server(expected))
    found.close()
