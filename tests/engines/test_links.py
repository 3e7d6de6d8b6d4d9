"""Links with state of their own, over whole runs: equal to plain loops, and to the bit after a break."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedkeep import Phase, methods, sgd, simulate
from fedkeep.experiments import drive
from fedkeep.privacy import QuantileClip, TopK
from tests.engines.reference import State, cohorts, rows_of, trained
from tests.tiny import Logits, classes, everyone, same_bits

DATA = classes(counts=(5, 9, 3, 7, 4, 6))
PHASE = Phase(batch_size=4, optimizer=sgd(0.3))
COHORT, ROUNDS, SEED = 4, 5, 2


def model() -> Logits:
    return Logits().double()


def flat(state: State, start: State) -> np.ndarray:
    return np.concatenate([(state[n] - start[n]).numpy().reshape(-1) for n in sorted(start)])


def shaped(vector: np.ndarray, like: State) -> State:
    out, place = {}, 0
    for name in sorted(like):
        size = like[name].numel()
        out[name] = torch.from_numpy(vector[place : place + size]).reshape(like[name].shape)
        place += size
    return out


def local_change(state: State, client: int, round: int) -> np.ndarray:
    after = trained(
        model(), state, DATA, client, PHASE, lambda m: torch.optim.SGD(m.parameters(), 0.3), SEED, round
    )
    return flat(after, state)


def test_top_k_with_error_feedback_equals_a_plain_loop() -> None:
    """m_k, d_k + m_k, the largest k entries travel; a client that is not drawn keeps its memory."""
    start = {n: v.detach().clone() for n, v in model().state_dict().items()}
    size = sum(v.numel() for v in start.values())
    k, memory, state = math.ceil(0.3 * size), {c: np.zeros(size) for c in range(6)}, start
    for number, cohort in enumerate(cohorts(DATA, COHORT, ROUNDS, SEED)):
        sums, weight = np.zeros(size), 0.0
        for client in cohort:
            whole = local_change(state, client, number) + memory[client]
            sent = np.zeros(size)
            largest = np.argsort(-np.abs(whole), kind="stable")[:k]
            sent[largest] = whole[largest]
            memory[client] = whole - sent
            sums += len(rows_of(DATA, client)) * sent
            weight += len(rows_of(DATA, client))
        moved = shaped(sums / weight, state)
        state = {n: v + moved[n] for n, v in state.items()}
    method = methods.fedavg(local=PHASE).but(upload=(TopK(0.3),))
    run = simulate(model(), method, DATA, rounds=ROUNDS, cohort=COHORT, seed=SEED, evaluate_every=0)
    torch.testing.assert_close(run.server, state, rtol=0, atol=1e-09)
    kept = everyone(run.private, 6)
    for client in range(6):
        mine = np.concatenate(
            [kept[f"client/upload/0/{n}"][client].numpy().reshape(-1) for n in sorted(start)]
        )
        np.testing.assert_allclose(mine, memory[client], rtol=0, atol=1e-9)


def test_quantile_clipping_equals_a_plain_loop() -> None:
    """The bound C that clients are sent follows the quantile of norms: C ← C exp(−η (b̄ − γ))."""
    state, bound = {n: v.detach().clone() for n, v in model().state_dict().items()}, 0.2
    bounds = []
    for number, cohort in enumerate(cohorts(DATA, COHORT, ROUNDS, SEED)):
        sums, weight, below = 0.0, 0.0, 0
        for client in cohort:
            change = local_change(state, client, number)
            norm = float(np.linalg.norm(change))
            below += norm <= bound
            sums = sums + len(rows_of(DATA, client)) * change * min(1.0, bound / norm)
            weight += len(rows_of(DATA, client))
        moved = shaped(sums / weight, state)
        state = {n: v + moved[n] for n, v in state.items()}
        bound *= math.exp(-0.4 * (below / len(cohort) - 0.25))
        bounds.append(bound)
    assert len(set(bounds)) > 2  # it moves both with and against the clients of a round
    method = methods.fedavg(local=PHASE).but(upload=(QuantileClip(quantile=0.25, rate=0.4, bound=0.2),))
    run = simulate(model(), method, DATA, rounds=ROUNDS, cohort=COHORT, seed=SEED, evaluate_every=0)
    torch.testing.assert_close(run.server, state, rtol=0, atol=1e-09)


@pytest.mark.parametrize("link", [TopK(0.3), QuantileClip(bound=0.2)], ids=["top-k", "quantile clip"])
def test_stopped_and_continued_is_never_stopped(
    link: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = methods.furl("user", local=PHASE).but(upload=(link,))

    def go(out: str, **options: Any) -> Any:
        options = {"rounds": ROUNDS, "cohort": COHORT, "seed": SEED, "evaluate_every": 2, **options}
        return simulate(model(), method, DATA, out=tmp_path / out, **options)

    whole, rounds, real = go("whole"), [], drive.run_round

    def stop(*arguments: Any) -> Any:
        rounds.append(arguments)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(drive, "run_round", stop)
        with pytest.raises(KeyboardInterrupt):
            go("broken")
    again = go("broken", resume=True)
    assert same_bits(whole.server, again.server)
    assert same_bits(everyone(whole.private, 6), everyone(again.private, 6))
