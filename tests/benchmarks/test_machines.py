"""A hospital's models after a federation are the simulation's, to the bit, for every method."""

from __future__ import annotations

import pytest

from benchmarks.machines import told
from fedkeep.methods import METHODS


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_a_hospital_holds_and_predicts_is_the_simulations_to_the_bit(name: str) -> None:
    row = told(name)
    if name == "kteps_star":
        assert "table of words" in row["why"]  # these data are numbers
        return
    assert row.get("different") == [], row
    assert row["predictions"] == 90
    assert row["tensors"] > 0
