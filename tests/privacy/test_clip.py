"""Clipping to a quantile of norms: numbers by hand, equal to a plain loop, stopped and continued to the bit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedkeep.core.errors import ConfigError, UploadError
from fedkeep.core.params import Params
from fedkeep.privacy import Chain, QuantileClip, RunDraws, SystemDraw
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
        "b": (client + 1) * torch.randn(2, generator=draw, dtype=torch.float64),
        "w": (client + 1) * torch.randn(3, 4, generator=draw, dtype=torch.float64),
        "n": torch.tensor(round),
    }


def test_by_hand() -> None:
    """‖(3, 4)‖ = 5 is cut to 2: (1.2, 1.6), and reported as 0; C ← 2 · exp(−0.2 (0.5 − 0.9)) when one of two was inside."""
    link, start = QuantileClip(0.9, 0.2, 2.0), {"w": torch.zeros(2).double()}
    server = link.server_state(start)
    sent = link.sent(server)
    cut = link.encode({"w": torch.tensor([3.0, 4.0]).double()}, start, SystemDraw(), {}, sent)
    torch.testing.assert_close(cut.tensors["w"], torch.tensor([1.2, 1.6]).double())
    assert (cut.state, float(cut.report["inside"])) == ({}, 0.0)
    small = torch.tensor([0.0, 2.0]).double()
    whole = link.encode({"w": small}, start, SystemDraw(), {}, sent)
    assert whole.tensors["w"] is small
    assert float(whole.report["inside"]) == 1.0
    after = link.update(server, {"inside": torch.tensor(1.0).double()}, 2)
    assert float(after["bound"]) == pytest.approx(2 * math.exp(-0.2 * (0.5 - 0.9)))
    assert float(server["bound"]) == 2.0


def test_counters_and_an_unchanged_model_stay() -> None:
    link = QuantileClip(bound=1e-9)
    sent = link.sent(link.server_state(START))
    made = link.encode({**START, "n": torch.tensor(9)}, START, SystemDraw(), {}, sent)
    assert int(made.tensors["n"]) == 9
    assert float(made.report["inside"]) == 1.0
    assert not bool(made.tensors["w"].any())


def plain(rounds: int, clients: int) -> tuple[float, np.ndarray]:
    """Return the bound and the sum of clipped changes, in plain numpy."""
    bound, total = 0.1, np.zeros(14)
    for number in range(rounds):
        bits = []
        for client in range(clients):
            found = change(number, client)
            vector = np.concatenate([found["b"].numpy(), found["w"].numpy().reshape(-1)])
            size = np.sqrt((vector**2).sum())
            bits.append(float(size <= bound))
            total += vector * min(1.0, bound / size)
        bound *= math.exp(-0.4 * (np.mean(bits) - 0.6))
    return bound, total


def test_rounds_equal_a_plain_loop_and_a_stop_changes_no_bit(tmp_path: Path) -> None:
    def run(stop: bool) -> tuple[Params, Params]:
        chain = Chain((QuantileClip(0.6, 0.4, 0.1),))
        server, total = chain.server_state(START), {n: START[n].clone() for n in ("b", "w")}
        for number in range(40):
            sent, reports = chain.sent(server), Params()
            for client in range(5):
                arrived, own = chain.encode(
                    change(number, client), START, RunDraws(0, str(client), number), {}, sent
                )
                found, said = chain.decode(arrived, START, sent)
                assert own == {}
                reports = Chain.total(reports, said)
                total = {n: v + found[n] for n, v in total.items()}
            server = chain.update(server, reports, 5)
            if stop and number == 17:
                save_file(server, tmp_path / "server.safetensors")
                server = load_file(tmp_path / "server.safetensors")
        return server, total

    server, total = run(stop=False)
    bound, sums = plain(40, 5)
    assert float(server["0/bound"]) == pytest.approx(bound, rel=0, abs=1e-9)
    found = np.concatenate([total["b"].numpy(), total["w"].numpy().reshape(-1)])
    np.testing.assert_allclose(found, sums, rtol=0, atol=1e-9)
    assert all(same_bits(a, b) for a, b in zip((server, total), run(stop=True), strict=True))


def test_the_bound_follows_the_quantile() -> None:
    """Norms are 5, 10, …, 100: the bound settles where 6 of 20 are within it."""
    chain, start = Chain((QuantileClip(0.3, 0.5, 1.0),)), {"w": torch.zeros(1, dtype=torch.float64)}
    server = chain.server_state(start)
    for _ in range(60):
        sent, reports = chain.sent(server), Params()
        for size in range(5, 101, 5):
            changed = {"w": torch.tensor([float(size)]).double()}
            arrived, _ = chain.encode(changed, start, RunDraws(0, "", 0), {}, sent)
            reports = Chain.total(reports, chain.decode(arrived, start, sent)[1])
        server = chain.update(server, reports, 20)
    assert 30 <= float(server["0/bound"]) < 31


def test_a_noisy_report_is_noisy_and_accepted() -> None:
    chain = Chain((QuantileClip(bound=5.0, bit_noise=0.5),))
    sent = chain.sent(chain.server_state(START))
    bits = []
    for client in range(400):
        arrived, _ = chain.encode(dict(START), START, RunDraws(0, str(client), 0), {}, sent)
        tensors, report = chain.decode(arrived, START, sent)
        assert torch.equal(tensors["w"], START["w"])
        bits.append(float(report["0/inside"]))
    assert np.mean(bits) == pytest.approx(1.0, abs=5 * 0.5 / 20)
    assert np.std(bits) == pytest.approx(0.5, rel=0.2)


@pytest.mark.parametrize(("noise", "told"), [(0.0, -1.0), (0.0, 0.5), (0.0, 2.0), (0.1, -1.01), (0.1, 2.01)])
def test_a_report_that_no_client_makes_is_refused(noise: float, told: float) -> None:
    """By such one a client alone could move the bound for all."""
    link = QuantileClip(bit_noise=noise)
    link.check_report({"inside": torch.tensor(1.0).double()})
    with pytest.raises(UploadError, match="report should be 0 or 1; it is"):
        link.check_report({"inside": torch.tensor(told).double()})


def test_a_bound_that_was_not_sent_is_named() -> None:
    with raises(ConfigError, said="QuantileClip wants the server's bound, and"):
        Chain((QuantileClip(),)).encode(dict(START), START, RunDraws(0, "a", 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantile": 0.0}, "quantile must be in (0, 1); got 0.0."),
        ({"quantile": 1.0}, "quantile must be in (0, 1); got 1.0."),
        ({"rate": 0.0}, "rate must be positive; got 0.0."),
        ({"bound": float("inf")}, "bound must be finite; got inf."),
        ({"bit_noise": -1.0}, "bit_noise must be at least 0; got -1.0."),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float], message: str) -> None:
    with raises(ConfigError, text=message):
        QuantileClip(**options)
