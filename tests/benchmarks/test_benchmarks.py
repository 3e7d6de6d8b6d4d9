"""The benchmarks' own arithmetic, and that their command lines run on tiny sizes."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import claims, methods, operations, profile, race, speed, speed_table, stores, threads
from benchmarks.contenders.ours import Ours, federated, model_of
from benchmarks.contenders.plain import Plain
from benchmarks.models import Document, PaddedDocument
from benchmarks.processes import ContenderError, Process, own_python
from benchmarks.workloads import QUICK, WORKLOADS, Workload, padded, workload
from fedkeep.engines import Sequential
from fedkeep.engines.batches import Stream, batches
from fedkeep.methods import Phase

ROW = {
    "workload": "W1",
    "cohort": 10,
    "contender": "plain",
    "seconds": 0.5,
    "ratio_to_plain": 1.0,
    "low": 1.0,
    "high": 1.0,
    "peak_mb": 300.0,
    "cpu_seconds": 0.9,
    "fraction_of_peak": 0.1,
    "fraction_of_peak_dense": 0.15,
    "turns": 3,
    "commit": "abc",
    "machine": "a machine",
}


def rows(ratio: float, **changes: object) -> list[dict[str, object]]:
    ours = {
        **ROW,
        "contender": "fedkeep_auto",
        "engine": "workers",
        "ratio_to_plain": ratio,
        "ratio_to_pfl": ratio,
    }
    ours |= {"ratio_to_flower": 9.0, "fraction_of_peak": 0.6, "peak_mb": 200.0, "state_error": 1e-7}
    pfl = {**ROW, "contender": "pfl", "peak_mb": 400.0}
    return [ROW, {**ours, **changes}, pfl]


@pytest.mark.parametrize("name", list(QUICK))
def test_a_round_of_fedkeep_ends_where_the_plain_loop_does(name: str) -> None:
    of = workload(name, quick=True)
    plain = Plain(of, torch.float64)
    ours = Ours(of, model_of(of, of.initial(torch.float64)), Sequential())
    clients = of.cohort_of(1)
    losses = plain.round(1, clients), ours.round(1, clients)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    start = of.initial(torch.float64).state_dict()
    found = ours.state()
    assert found.keys() == plain.state().keys()
    for n, value in plain.state().items():
        assert torch.allclose(found[n], value, rtol=0, atol=1e-12), n
    assert any(not torch.equal(found[n], start[n]) for n in found)


@pytest.mark.parametrize("epochs", [1, 3])
def test_mini_batches_are_those_that_fedkeep_draws(epochs: int) -> None:
    of = workload("W3", quick=True)
    of = Workload(**{**of.__dict__, "epochs": epochs})
    data = federated(of.data())
    ids = np.arange(*data.offsets[1:3])
    phase = Phase(epochs=epochs, batch_size=of.batch)
    ours = [chosen - ids[0] for chosen in batches(data, ids, phase, Stream(0, data.ids[1], 7), 0)]
    theirs = [chosen.numpy() for chosen in of.batches(1, 7, len(ids))]
    assert len(ours) == len(theirs) == 2 * epochs
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not np.array_equal(theirs[0], next(iter(of.batches(1, 8, len(ids)))))


def test_padding_gives_what_packing_gives() -> None:
    torch.manual_seed(0)
    packed, wide = Document().double(), PaddedDocument().double()
    wide.load_state_dict(packed.state_dict())
    text, length = torch.randint(1, 100, (4, 9)), torch.tensor([3, 9, 1, 5])
    text[torch.arange(9) >= length[:, None]] = 0
    found = []
    for model in (packed, wide):
        output = model(text, length)
        output.square().sum().backward()
        found.append([output.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*found, strict=True))
    assert padded(WORKLOADS["W1 ragged"]).model is PaddedDocument


def test_a_step_of_two_short_texts_counted_by_hand() -> None:
    """Texts of 3 and 2 characters, 4 different ones: S = 5, R = 4, D = 2, K = 4, H = 64, I = 32."""
    columns = {"text": np.array([7, 8, 7, 9, 6]), "text_length": np.array([3, 2]), "label": np.array([0, 1])}
    found = operations.documents(WORKLOADS["W1"], columns, np.array([0, 1]))
    unit = 6 * 2 * 4 * 64
    behind = 6 * 2 * (160 * 64 + 64 * 64)
    assert found.needed == unit * (5 * 64 + 4 * 32) + behind
    assert found.dense == unit * 5 * (64 + 32) + behind
    only_second = operations.documents(WORKLOADS["W1"], columns, np.array([1]))
    assert only_second.needed == unit * (2 * 64 + 2 * 32) + behind / 2


W3_IMAGE = 2 * 2 * 32 * 32**2 * 75 + 3 * 2 * 64 * 16**2 * 800 + 3 * 2 * (4096 * 512 + 5120)
W4_IMAGE = 2 * 2 * 6 * 28**2 * 75 + 3 * 2 * 16 * 10**2 * 150 + 3 * 2 * (400 * 120 + 120 * 84 + 840)


@pytest.mark.parametrize(("name", "one"), [("W3", W3_IMAGE), ("W4", W4_IMAGE)])
def test_a_round_adds_up_its_steps(name: str, one: int) -> None:
    of = workload(name, quick=True)  # 2 clients × 20 images × 2 passes
    images = 2 * 20 * 2
    found = operations.operations(of, of.data(), [0, 1], 1)
    assert found.needed == found.dense == images * one
    moved = operations.bytes_moved(of, of.data(), [0, 1], 1)
    count = sum(p.numel() for p in of.initial().parameters())
    assert moved["optimiser"] == 4 * 7 * count * 8  # Adam, 2 clients × 4 steps
    assert moved["upload and mean"] == 4 * 8 * count * 2


def test_the_size_of_w2s_vocabulary_of_a_client() -> None:
    of = WORKLOADS["W2"]
    words = of.draw(np.random.default_rng(0))["text"]
    assert len(words) == 200 * 200
    assert 2_200 < len(np.unique(words)) < 2_600
    assert words.min() >= 1
    assert words.max() < 50_000


def test_claims_and_what_misses_them() -> None:
    case = [("W1", 10)]
    assert claims.missed(rows(3.1), case) == []
    assert claims.missed(rows(2.1), case) == [
        "W1, cohort 10: 2.10 × over plain; claimed 2.2",
        "W1, cohort 10: 2.10 × over pfl; claimed 2.4",
    ]
    assert claims.missed(rows(2.1), [("W2", 16)]) == []
    assert claims.missed(rows(3.1, state_error=2e-6), case) == [
        "W1, fedkeep_auto: state_error 2.0e-06; claimed 1e-06"
    ]
    assert claims.missed(rows(3.1, state_error=math.inf), case) != []
    near = rows(3.1, state_error=2e-6, state_error_to_double=1.9e-6)
    assert claims.missed([{**ROW, "state_error_to_double": 1e-6}, *near[1:]], case) == []
    assert claims.missed([{**ROW, "state_error_to_double": 0.9e-6}, *near[1:]], case) != []
    assert claims.missed(rows(3.1, fraction_of_peak=0.3), case) == [
        "W1, cohort 10: 30% of the multiply-add peak; claimed 35 %"
    ]
    assert claims.missed(rows(3.1, peak_mb=450.0), case) == ["W1, cohort 10: 450 MB at the peak; pfl 400 MB"]


def test_ratios_are_taken_inside_a_turn() -> None:
    base, ours = race.Entry("plain", seconds=[3.0, 6.0]), race.Entry("ours", seconds=[1.0, 3.0])
    assert race.ratios(base, ours) == [3.0, 2.0]


def test_ratios_are_over_the_faster_number_of_threads() -> None:
    setting = race.Setting(True, "cpu", Path("none"), False, 60.0, ("fedkeep_auto",))
    one = race.Race(setting, "W1", None)
    one.scratch.cleanup()
    one.entries["plain"].seconds = [3.0, 9.0, 3.0]
    one.entries["fedkeep_auto"].seconds = [1.0, 1.0, 1.0]
    row = one.measured(one.entries["fedkeep_auto"], 1.0, 1.0)
    assert (row["ratio_to_plain"], row["low"], row["high"]) == (3.0, 3.0, 9.0)
    one.entries[race.OTHER] = race.Entry(race.OTHER, seconds=[2.0, 2.0, 8.0])
    row = one.measured(one.entries["fedkeep_auto"], 1.0, 1.0)
    assert (row["ratio_to_plain"], row["low"], row["high"]) == (2.0, 2.0, 8.0)
    assert one.measured(one.entries["plain"], 1.0, 1.0)["ratio_to_plain"] == pytest.approx(2 / 3)
    one.entries[race.OTHER].reason = "it died"
    assert one.measured(one.entries["fedkeep_auto"], 1.0, 1.0)["ratio_to_plain"] == 3.0


def test_the_distance_of_two_states(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([3.0, 4.0]), y=np.array([12.0]))
    np.savez(tmp_path / "b.npz", x=np.array([3.0, 4.0]), y=np.array([12.5]))
    np.savez(tmp_path / "c.npz", x=np.array([3.0, 4.0]))
    whole, worst = race.state_error(tmp_path / "b.npz", tmp_path / "a.npz")
    assert (whole, worst) == (pytest.approx(0.5 / 13), pytest.approx(0.5 / 12))
    assert race.state_error(tmp_path / "c.npz", tmp_path / "a.npz") == (math.inf, math.inf)


def test_the_page_shows_what_was_reached_and_what_was_not_measured(tmp_path: Path) -> None:
    missing = {"workload": "W1", "cohort": 10, "contender": "flower", "not_measured": "no environment"}
    missing |= {"commit": "abc", "machine": "a machine"}
    text = speed_table.page([*rows(2.9), missing])
    assert "| W1 | 10 | plain | 3 | 2.90 (missed) |" in text
    assert "| W1 | 10 | flower | 5 | 9.00 |" in text
    assert "| flower | not measured: no environment |" in text
    assert "| fedkeep_auto (workers) | 0.500 | 2.90 | 1.00 – 1.00 | 0.90 | 200 | 60% (15%) | 1e-07 |" in text
    speed.keep(tmp_path / "speed.json", rows(2.9))
    kept = speed.keep(tmp_path / "speed.json", [{**ROW, "workload": "W3", "cohort": 5}])
    assert [(r["workload"], r["contender"]) for r in kept] == [
        ("W1", "plain"),
        ("W1", "fedkeep_auto"),
        ("W1", "pfl"),
        ("W3", "plain"),
    ]
    assert json.loads((tmp_path / "speed.json").read_text()) == kept


def test_a_clock_gives_inner_parts_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """``forward`` runs from 1 to 2, and from 5 to 9; inside it ``backward`` from 2 to 5."""
    times = iter([1.0, 2.0, 5.0, 9.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    clock = profile.Clock()
    clock.timed("forward", clock.timed("backward", lambda: None))()
    assert (clock.seconds["forward"], clock.seconds["backward"], clock.seconds["store"]) == (5.0, 3.0, 0.0)


@pytest.mark.slow
def test_the_command_lines_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stores.main(["--quick", "--out", str(tmp_path)]) == 0
    assert profile.main(["--quick", "--turns", "1", "--out", str(tmp_path)]) == 0
    assert threads.main(["--quick", "--turns", "1", "--out", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "profile.json").read_text())["parts"]
    assert {p["workload"] for p in parts} == set(QUICK)
    assert "| 10 KB | 1,000 | 10 | journal |" in (tmp_path / "stores.md").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="time and memory are read from /proc")
def test_a_contender_in_a_process_of_its_own(tmp_path: Path) -> None:
    process = Process(own_python(), ["plain", "--workload", "W1", "--quick", "--double"], 1, 60)
    try:
        first, second = (process.ask(turn=turn, clients=[0, 2]) for turn in (1, 2))
        assert second["loss"] < first["loss"] < 4.3
        assert first["facts"] == {"threads": "1"}
        assert process.ask(save=str(tmp_path / "state.npz"))["saved"]
        assert process.cpu_seconds() > 0.5
        process.forget_peaks()
        assert 100 < process.peak_mb() < 1000
    finally:
        process.close()
    plain = Plain(workload("W1", quick=True), torch.float64)
    for turn in (1, 2):
        plain.round(turn, [0, 2])
    with np.load(tmp_path / "state.npz") as state:
        assert all(np.array_equal(state[n], value) for n, value in plain.state().items())


def test_a_contender_that_cannot_start_says_why() -> None:
    with pytest.raises(ContenderError, match="No module named 'pfl'"):
        Process(own_python(), ["pfl", "--quick"], 1, 60)


@pytest.mark.parametrize("name", list(methods.CONTENDERS))
def test_every_method_takes_a_round_of_the_comparison(name: str) -> None:
    step = methods.rounds(methods.CONTENDERS[name], methods.data_of(None, quick=True), None)
    assert all(math.isfinite(step()) for _ in range(2))


def test_what_a_round_of_each_method_costs_by_hand() -> None:
    seconds = {name: [1.0, 2.0, 4.0] for name in methods.CONTENDERS}
    seconds |= {"KTEPS": [1.6, 3.4, 6.0], "PFL-DA": [2.0, 4.0, 8.0], "FedProx": [1.5, 3.0, 6.0]}
    assert methods.dear(seconds) == {"KTEPS": 1.6}
    text = methods.page(seconds, "2 clients")
    assert "| KTEPS | 1.60 | 1.50 to 1.70 |  |" in text
    assert "| PFL-DA | 2.00 | 2.00 to 2.00 | a second model |" in text
    assert text.count("\n|") == len(methods.CONTENDERS) + 2
