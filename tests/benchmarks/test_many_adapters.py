"""The benchmark of many private adapters: what it stores, and that it looks at every state at the end."""

from __future__ import annotations

import pytest
import torch

from benchmarks import many_adapters
from benchmarks.many_adapters import adapter, measure, states


def test_an_adapter_has_two_factors_on_queries_and_values_of_each_layer() -> None:
    found = adapter(1)
    assert len(found) == 6 * 2 * 2
    assert sum(v.numel() for v in found.values()) == 6 * 2 * 2 * 384  # 36,864 bytes


def test_states_tell_users_and_rounds_apart() -> None:
    found = states({"a": torch.zeros(2, 3)}, [4, 7], 512)
    assert found["a"].shape == (2, 2, 3)
    assert found["a"][:, 1, 2].tolist() == [4.5, 7.5]


def test_speeds_of_both_and_every_state_as_it_was_written_last() -> None:
    found = measure(250, 1, 2)
    assert found["ratio"].keys() == {"filled", "read", "again"}  # type: ignore[attr-defined]
    assert found["disk_over_states"] > 1  # type: ignore[operator]


def test_a_store_that_loses_a_write_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loses(many_adapters.Fedkeep):
        def write(self, clients: list[int], params: dict[str, torch.Tensor]) -> None:
            super().write(clients[1:], {n: v[1:] for n, v in params.items()})

    monkeypatch.setattr(many_adapters, "Fedkeep", Loses)
    with pytest.raises(AssertionError, match="store and file differ"):
        measure(150, 1, 1)
