"""Top-k with error feedback: numbers by hand, equal to a plain loop over rounds, stopped and continued to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedkeep.core.errors import ConfigError, UploadError
from fedkeep.core.params import Params
from fedkeep.privacy import Chain, RunDraws, SystemDraw, TopK
from tests.refusals import raises
from tests.tiny import same_bits

START = {
    "b": torch.zeros(2, dtype=torch.float64),
    "w": torch.zeros(3, 4, dtype=torch.float64),
    "n": torch.tensor(1),
}


def change(round: int, client: int) -> Params:
    draw = torch.Generator().manual_seed(100 * round + client)
    return {
        "b": torch.randn(2, generator=draw, dtype=torch.float64),
        "w": torch.randn(3, 4, generator=draw, dtype=torch.float64),
        "n": torch.tensor(round),
    }


def test_by_hand() -> None:
    """(3, −1, 2, 0.5): half of it is (3, 2); (−1, 0.5) is left, so that (0, −1, 0, 0.6) sends −2 and 1.1."""
    start, link = {"w": torch.zeros(2, 2)}, TopK(0.5)
    state = link.client_state(start)
    first = link.encode({"w": torch.tensor([[3.0, -1.0], [2.0, 0.5]])}, start, SystemDraw(), state, {})
    assert {n: v.tolist() for n, v in first.tensors.items()} == {"w/values": [3.0, 2.0], "w/places": [0, 2]}
    assert first.tensors["w/places"].dtype == torch.int32
    assert first.state["w"].tolist() == [[0.0, -1.0], [0.0, 0.5]]
    assert state["w"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    second = link.encode({"w": torch.tensor([[0.0, -1.0], [0.0, 0.5]])}, start, SystemDraw(), first.state, {})
    assert link.decode(second.tensors, start, {})["w"].tolist() == [[0.0, -2.0], [0.0, 1.0]]
    assert float(second.state["w"].abs().max()) == 0


def test_equal_magnitudes_fill_what_larger_ones_leave() -> None:
    start = {"w": torch.zeros(5)}
    made = TopK(0.6).encode(
        {"w": torch.tensor([1.0, 3.0, 1.0, -1.0, 2.0])}, start, SystemDraw(), TopK().client_state(start), {}
    )
    assert made.tensors["w/places"].tolist() == [0, 1, 4]


def test_equal_magnitudes_travel_in_the_order_of_names_and_places() -> None:
    start = {"w": torch.zeros(3), "b": torch.zeros(2)}
    made = TopK(0.4).encode(
        {"w": torch.ones(3), "b": -torch.ones(2)}, start, SystemDraw(), TopK().client_state(start), {}
    )
    assert {n: v.tolist() for n, v in made.tensors.items()} == {
        "b/values": [-1.0, -1.0],
        "b/places": [0, 1],
        "w/values": [],
        "w/places": [],
    }


def plain(rounds: int, clients: int, fraction: float) -> tuple[list[np.ndarray], np.ndarray]:
    """Return each client's memory and the sum of all that was sent, in plain numpy: b's entries, then w's."""
    memory = [np.zeros(14) for _ in range(clients)]
    total = np.zeros(14)
    for number in range(rounds):
        for client in range(clients):
            found = change(number, client)
            whole = np.concatenate([found["b"].numpy(), found["w"].numpy().reshape(-1)]) + memory[client]
            order = sorted(range(14), key=lambda i, w=whole: (-abs(w[i]), i))  # type: ignore[misc]
            sent = np.zeros(14)
            for i in order[: int(np.ceil(fraction * 14))]:
                sent[i] = whole[i]
            memory[client] = whole - sent
            total += sent
    return memory, total


@pytest.mark.parametrize("fraction", [0.05, 0.3, 1.0])
def test_rounds_equal_a_plain_loop_and_a_stop_changes_no_bit(fraction: float, tmp_path: Path) -> None:
    def run(stop: bool) -> tuple[list[Params], Params]:
        chain = Chain((TopK(fraction),))
        states = [chain.client_state(START) for _ in range(3)]
        total = {"b": torch.zeros(2, dtype=torch.float64), "w": torch.zeros(3, 4, dtype=torch.float64)}
        for number in range(6):
            for client, state in enumerate(states):
                draw = RunDraws(0, str(client), number)
                sent, states[client] = chain.encode(change(number, client), START, draw, state)
                assert sum(len(v) for n, v in sent.items() if n.endswith("/values")) == int(
                    np.ceil(fraction * 14)
                )
                found, reports = chain.decode(sent, START)
                assert reports == {}
                assert int(found["n"]) == number
                total = {n: v + found[n] for n, v in total.items()}
            if stop and number == 2:
                for client, state in enumerate(states):
                    save_file(state, tmp_path / f"{client}.safetensors")
                states = [load_file(tmp_path / f"{client}.safetensors") for client in range(3)]
        return states, total

    states, total = run(stop=False)
    memory, sent = plain(6, 3, fraction)
    for client, state in enumerate(states):
        found = np.concatenate([state["0/b"].numpy(), state["0/w"].numpy().reshape(-1)])
        np.testing.assert_allclose(found, memory[client], rtol=0, atol=1e-9)
    np.testing.assert_allclose(
        np.concatenate([total["b"].numpy(), total["w"].numpy().reshape(-1)]), sent, rtol=0, atol=1e-9
    )
    again, other = run(stop=True)
    assert same_bits(total, other)
    assert all(same_bits(a, b) for a, b in zip(states, again, strict=True))


def test_a_missing_memory_is_named() -> None:
    with raises(ConfigError, name="b", got="none", shape=(2,)):
        TopK().encode({"b": START["b"]}, START, SystemDraw(), {}, {})
    with pytest.raises(ConfigError, match=r"shape \(2,\); got \(3,\)\. Begin with client_state\.$"):
        TopK().encode({"b": START["b"]}, START, SystemDraw(), {"b": torch.zeros(3)}, {})


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_a_fraction_that_makes_no_sense_is_refused(fraction: float) -> None:
    with raises(ConfigError, text=f"fraction must be in (0, 1]; got {fraction!r}."):
        TopK(fraction)


VALUES, PLACES = torch.ones(2, dtype=torch.float64), torch.tensor([0, 11])


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        ({"w/places": PLACES}, "'w/values' is missing"),
        ({"w/values": VALUES}, "'w/places' is missing"),
        ({"w/values": VALUES, "w/places": torch.tensor([0, 12])}, "'w/places' should ascend within 0 … 11"),
        ({"w/values": VALUES, "w/places": torch.tensor([-1, 2])}, "'w/places' should ascend within 0 … 11"),
        ({"w/values": VALUES, "w/places": torch.tensor([3, 3])}, "'w/places' should ascend within 0 … 11"),
        ({"w/values": VALUES, "w/places": VALUES}, "'w/places' should be int32 or int64, is torch.float64"),
        (
            {"w/values": VALUES.float(), "w/places": PLACES},
            (
                "'w' should come as two lists of one length, of torch.float64 and whole numbers; came as (2,) "
                "torch.float32 and (2,) torch.int64"
            ),
        ),
        ({"w/values": VALUES, "w/places": PLACES, "user": VALUES}, "'user' is nothing that TopK sends"),
    ],
)
def test_uploads_that_do_not_fit_are_refused(sent: Params, fault: str) -> None:
    start = {"w": START["w"]}
    with raises(UploadError, text=fault):
        TopK().decode(sent, start, {})


def test_no_numbers_at_all() -> None:
    chain = Chain((TopK(),))
    start = {"n": torch.tensor(1), "e": torch.zeros(0)}
    sent, state = chain.encode(start, start, SystemDraw(), chain.client_state(start))
    assert set(sent) == {"n", "e/values", "e/places"}
    assert chain.decode(sent, start)[0]["e"].shape == (0,)
    assert state["0/e"].shape == (0,)
