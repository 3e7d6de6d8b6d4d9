from __future__ import annotations

import math

import numpy as np

from fedkeep.tasks.ranking import discounted, hits, ranks_of


def test_ties_and_what_is_no_number_stand_before_the_right_one() -> None:
    scores = np.array([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [0.0, math.nan, 5.0], [math.nan, 0.0, 1.0]])
    assert ranks_of(scores, np.array([2, 0, 2, 0])).tolist() == [2, 3, 2, 3]


def test_the_first_ten_places() -> None:
    rank = np.array([1, 3, 10, 11])
    assert hits(rank).tolist() == [True, True, True, False]
    assert discounted(rank).tolist() == [1.0, 0.5, 1 / math.log2(11), 0.0]
