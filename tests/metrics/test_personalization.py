from __future__ import annotations

import math

import pytest

from fedkeep.core.errors import DataError
from fedkeep.metrics import ag, ap
from tests.refusals import raises


def test_ag_counts_every_client_once() -> None:
    assert ag({"books": 0.8, "MR": 0.7, "dvd": 0.9}) == pytest.approx(0.8)
    assert math.isnan(ag({}))


def test_ap_by_hand() -> None:
    scores = ap({"a": (0.5, 0.75, 0.70), "b": (0.9, 0.6, 0.6)})
    assert scores.clients == {"a": pytest.approx(0.65), "b": pytest.approx(0.7)}
    assert scores.mean == pytest.approx(0.675)
    assert scores.last == pytest.approx(0.65)
    assert scores.max == pytest.approx((0.75 + 0.9) / 2)
    assert scores.curve == pytest.approx((0.7, 0.675, 0.65))
    before = ap({"a": (0.5,), "b": (0.25,)})
    assert (before.mean, before.last, before.max, before.curve) == (0.375, 0.375, 0.375, (0.375,))


@pytest.mark.parametrize(("curves", "got"), [({}, []), ({"a": ()}, [0]), ({"a": (1,), "b": (1, 0)}, [1, 2])])
def test_curves_that_make_no_ap(curves: dict[str, tuple[float, ...]], got: list[int]) -> None:
    with raises(DataError, said="Ap wants curves of one length", lengths=got):
        ap(curves)
