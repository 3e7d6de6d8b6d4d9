"""Chains of links: states in one flat dictionary, reports apart from tensors, rows of tables, and where draws come from."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedkeep.core.errors import ConfigError, UploadError
from fedkeep.core.params import Params
from fedkeep.core.seeds import generator
from fedkeep.privacy import (
    Chain,
    Draw,
    Encoded,
    GaussianNoise,
    Link,
    Projection,
    QuantileClip,
    RunDraws,
    SystemDraw,
    TopK,
    draws,
)
from tests.refusals import raises

START = {
    "w": torch.zeros(3, 4, dtype=torch.float64),
    "b": torch.zeros(2, dtype=torch.float64),
    "n": torch.tensor(5),
}
CHANGE = {
    "w": torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "b": torch.tensor([3.0, -0.1], dtype=torch.float64),
    "n": torch.tensor(6),
}


@dataclass(frozen=True)
class Counting(Link):
    """Adds the client's number of rounds to every number, which it reports; the server sends the sum of all reports."""

    def client_state(self, shapes: Params) -> Params:
        return {"rounds": torch.tensor(0.0, dtype=torch.float64)}

    def server_state(self, shapes: Params) -> Params:
        return {"sum": torch.tensor(0.0, dtype=torch.float64)}

    def sent(self, state: Params) -> Params:
        return {"sum": state["sum"]}

    def encode(self, tensors: Params, start: Params, draw: Draw, state: Params, sent: Params) -> Encoded:
        rounds = state["rounds"] + 1
        moved = {n: v + rounds + sent["sum"] if v.is_floating_point() else v for n, v in tensors.items()}
        return Encoded(tensors=moved, state={"rounds": rounds}, report={"rounds": rounds})

    def decode(self, tensors: Params, start: Params, sent: Params) -> Params:
        return {n: v - sent["sum"] if v.is_floating_point() else v for n, v in tensors.items()}

    def check_report(self, report: Params) -> None:
        if set(report) != {"rounds"}:
            raise UploadError("rounds are missing")

    def update(self, state: Params, reports: Params, count: int) -> Params:
        return {"sum": state["sum"] + reports["rounds"]}


def test_states_are_kept_apart_and_reports_are_no_other_links_business() -> None:
    chain = Chain((Counting(), GaussianNoise(0.5), Counting()))
    client, server = chain.client_state(START), chain.server_state(START)
    assert set(client) == {"0/rounds", "2/rounds"}
    assert set(server) == {"0/sum", "2/sum"}
    noise = RunDraws(1, "ann", 0).link(1)
    noises = {n: 0.5 * noise.normal(CHANGE[n].shape) for n in ("b", "w")}
    totals: Params = {}
    for number in (1, 2):  # one client, asked twice
        sent = chain.sent(server)
        arrived, client = chain.encode(CHANGE, START, RunDraws(1, "ann", 0), client, sent)
        assert {n: float(v) for n, v in client.items()} == {"0/rounds": number, "2/rounds": number}
        assert {n for n in arrived if n not in CHANGE} == {"report/0/rounds", "report/2/rounds"}
        assert float(arrived["report/0/rounds"]) == number  # without noise
        tensors, reports = chain.decode(arrived, START, sent)
        assert list(tensors) == list(CHANGE)
        for name, added in noises.items():
            torch.testing.assert_close(tensors[name], CHANGE[name] + added + 2 * number, rtol=0, atol=1e-12)
        totals = Chain.total(totals, reports)
    assert {n: float(v) for n, v in totals.items()} == {"0/rounds": 3.0, "2/rounds": 3.0}
    server = chain.update(server, totals, 2)
    assert {n: float(v) for n, v in server.items()} == {"0/sum": 3.0, "2/sum": 3.0}
    assert chain.update(server, {}, 0) is server


def test_a_chain_of_nothing() -> None:
    chain = Chain()
    assert chain.client_state(START) == chain.server_state(START) == chain.sent({}) == {}
    assert chain.encode(CHANGE, START, SystemDraw()) == (CHANGE, {})
    assert chain.decode(CHANGE, START) == (CHANGE, {})


def test_which_chains_may_leave_rows_out() -> None:
    assert Chain().rowwise
    assert Chain((QuantileClip(),)).rowwise
    for link in (GaussianNoise(), Projection(), TopK()):
        assert not Chain((QuantileClip(), link)).rowwise


def test_rows_of_a_state_are_cut_and_put_back() -> None:
    chain, rows = Chain((TopK(0.25),)), {"w": torch.tensor([0, 2])}
    start, change = {"w": START["w"][[0, 2]]}, {"w": CHANGE["w"][[0, 2]]}
    state = {"0/w": torch.full((3, 4), 0.01, dtype=torch.float64), "0/b": START["b"]}
    before = {n: v.clone() for n, v in state.items()}
    sent, after = chain.encode(change, start, RunDraws(0, "a", 0), state, rows=rows)
    assert all(torch.equal(state[n], before[n]) for n in state)
    assert torch.equal(after["0/w"][1], state["0/w"][1])
    assert torch.equal(after["0/b"], state["0/b"])
    found, _ = chain.decode(sent, start)
    torch.testing.assert_close(found["w"] + after["0/w"][[0, 2]], change["w"] + 0.01)


def test_a_link_that_cannot_take_the_parameters_says_so_at_the_start() -> None:
    with pytest.raises(ConfigError, match="^The projection's table 'embedding.weight' matches nothing"):
        Chain((GaussianNoise(), Projection())).client_state(START)
    with raises(ConfigError, said="TopK ranks changes of federated parameters,"):
        Chain((Projection(1, 2, "w"), TopK())).server_state(START)


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"report/1/inside": torch.tensor(1.0).double()}, "'report/1/inside' is of no link"),
        ({"report/x": torch.tensor(1.0)}, "'report/x' is of no link"),
        (
            {"report/0/inside": torch.tensor(float("nan")).double()},
            "'report/0/inside' holds a NaN or an infinity",
        ),
        (
            {"report/0/inside": torch.tensor(0.5).double()},
            "QuantileClip's report should be 0 or 1; it is 0.5",
        ),
        (
            {"report/0/inside": torch.tensor(-1.0).double()},
            "QuantileClip's report should be 0 or 1; it is -1.0",
        ),
        (
            {"report/0/more": torch.tensor(1.0)},
            "QuantileClip's report should be 'inside', a float64 number; it is ['inside', 'more']",
        ),
        (
            {"report/0/inside": torch.ones(2).double()},
            "QuantileClip's report should be 'inside', a float64 number; it is ['inside']",
        ),
    ],
)
def test_reports_that_no_client_makes_are_refused(more: Params, fault: str) -> None:
    chain = Chain((QuantileClip(),))
    sent = chain.sent(chain.server_state(START))
    arrived, _ = chain.encode(CHANGE, START, SystemDraw(), {}, sent)
    with raises(UploadError, text=fault):
        chain.decode(arrived | more, START, sent)
    noisy = Chain((QuantileClip(bit_noise=0.45),))  # 10 σ = 4.5
    with pytest.raises(UploadError, match="^QuantileClip's report should be 0 or 1; it is 6.0$"):
        noisy.decode(arrived | {"report/0/inside": torch.tensor(6.0).double()}, START, sent)
    with raises(UploadError, said="inside', a float", report=[]):
        chain.decode({n: v for n, v in arrived.items() if n in CHANGE}, START, sent)
    with raises(UploadError, text="GaussianNoise makes no report, and 'x' came"):
        Chain((GaussianNoise(),)).decode(CHANGE | {"report/0/x": torch.tensor(1.0)}, START)


def test_a_state_that_changes_its_names_is_an_error_of_the_link() -> None:
    @dataclass(frozen=True)
    class Changing(Counting):
        def update(self, state: Params, reports: Params, count: int) -> Params:
            return {"other": state["sum"]}

    chain = Chain((Changing(),))
    with pytest.raises(ValueError, match="may not change its names or shapes: missing"):
        chain.update(chain.server_state(START), {"0/rounds": torch.tensor(1.0)}, 1)


def test_a_link_without_encode_says_so_and_one_without_decode_takes_what_came() -> None:
    with pytest.raises(TypeError, match="^Link is no link: it lacks encode.$"):
        Link().encode(CHANGE, START, SystemDraw(), {}, {})
    assert Link().decode(CHANGE, START, {}) is CHANGE


# --- where random numbers come from


def test_the_runs_draws_are_named_and_repeatable() -> None:
    wanted = torch.randn(3, 2, generator=generator(7, "upload/1", "ann", 4))
    assert torch.equal(draws("run", 7, "ann", 4).link(1).normal((3, 2), torch.float32), wanted)
    others = [(8, "ann", 4, 1), (7, "bob", 4, 1), (7, "ann", 5, 1), (7, "ann", 4, 0)]
    for seed, client, number, link in others:
        found = RunDraws(seed, client, number).link(link).normal((3, 2), torch.float32)
        assert not torch.equal(found, wanted)


def test_noise_of_the_run_is_taken_off_by_whoever_knows_the_seed_and_the_systems_is_not() -> None:
    chain, start = Chain((GaussianNoise(0.5),)), {"w": START["w"]}
    for entropy, removed in (("run", True), ("system", False)):
        sent, _ = chain.encode({"w": CHANGE["w"]}, start, draws(entropy, 3, "ann", 0))  # type: ignore[arg-type]
        assert float((sent["w"] - CHANGE["w"]).abs().max()) > 0.1
        known = sent["w"] - 0.5 * draws(entropy, 3, "ann", 0).link(0).normal((3, 4))  # type: ignore[arg-type]
        assert (float((known - CHANGE["w"]).abs().max()) < 1e-12) is removed


def test_the_systems_draws_are_normal() -> None:
    draw = SystemDraw().link(0)
    numbers = draw.normal((300, 401))
    assert (numbers.shape, numbers.dtype) == ((300, 401), torch.float64)
    assert abs(float(numbers.mean())) < 5 / numbers.numel() ** 0.5
    assert abs(float(numbers.square().mean()) - 1) < 5 * (2 / numbers.numel()) ** 0.5
    assert abs(float((numbers.abs() < 1).double().mean()) - 0.6826895) < 5 * (0.217 / numbers.numel()) ** 0.5
    halves = (
        numbers.reshape(-1)[:60_000],
        numbers.reshape(-1)[60_150:120_150],
    )  # the two of a pair are independent
    assert abs(float((halves[0] * halves[1]).mean())) < 5 / 60_000**0.5
    assert not torch.equal(draw.normal((4,)), draw.normal((4,)))
    assert [tuple(draw.normal(s, torch.float32).shape) for s in ((), (1,), (0, 3), (3,))] == [
        (),
        (1,),
        (0, 3),
        (3,),
    ]
    assert draw.normal((2,), torch.float32).dtype == torch.float32


def test_another_source_is_refused() -> None:
    with raises(ConfigError, text="entropy must be 'run' or 'system'; got 'seed'."):
        draws("seed", 0, "a", 0)  # type: ignore[arg-type]
