"""The order of the steps of clients side by side, and what a step's batch holds."""

from __future__ import annotations

import numpy as np

from fedkeep.engines.vectorised.stacked_lanes import Stacked, Together, lockstep
from tests.engines.vectorised.cohorts import TEXTS, first, furl, words
from tests.tiny import job


def test_steps_keep_everyones_order_and_are_few() -> None:
    sizes = [[4, 4, 4, 3, 4, 4, 4, 3], [4, 1, 4, 1], [3, 3], [], [4, 4]]
    plans = [[np.full(n, 100 * k + t) for t, n in enumerate(plan)] for k, plan in enumerate(sizes)]
    taken: list[list[int]] = [[] for _ in sizes]
    calls = 0
    for who, several in lockstep(plans, 4, [False] * 5):
        calls += 1
        assert several.shape[0] == len(who)
        assert (np.diff(who) > 0).all()
        for k, rows in zip(who, several, strict=True):
            taken[k].append(int(rows[0]))
            assert len(rows) == sizes[k][len(taken[k]) - 1]
    assert taken == [[100 * k + t for t in range(len(plan))] for k, plan in enumerate(sizes)]
    assert calls == 2 * (3 + 2)  # a pass: full ones side by side, then those of three and those of one


def test_who_is_through_takes_no_more_steps() -> None:
    plans, through = [[np.full(4, t) for t in range(5)] for _ in range(3)], [False] * 3
    taken = []
    for who, _ in lockstep(plans, 4, through):
        taken.append(who)
        through[0], through[1] = len(taken) >= 4, len(taken) >= 2
    assert taken == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [2]]


def test_texts_are_padded_to_the_longest_of_the_step() -> None:
    clients = Stacked(*first(job(words(), furl(), TEXTS)))
    lengths = TEXTS.batch(clients.rows[0])["text_length"].numpy()
    shortest = np.argsort(lengths)[:2]
    step = Together([0], clients.rows[0][shortest][None], clients.examples)
    width = int(lengths[shortest].max())
    assert width < lengths.max()
    assert step.batch()["text"].shape == (1, 2, width)
