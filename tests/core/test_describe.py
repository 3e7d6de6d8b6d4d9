"""Descriptions tell settings apart."""

from __future__ import annotations

import torch

import fedkeep
from fedkeep import Phase
from fedkeep.core.describe import describe, differences, digest
from fedkeep.core.errors import did_you_mean


def test_methods_are_described_to_the_last_field() -> None:
    one = describe(fedkeep.methods.furl("user", local=Phase(optimizer=fedkeep.sgd(0.1, rates={"user": 0.5}))))
    two = describe(
        fedkeep.methods.furl("user", local=Phase(optimizer=fedkeep.sgd(0.1, rates={"user": 0.25})))
    )
    assert one["split"]["private"] == ["user"]
    assert one["predict"] == "forward"
    assert differences(one, one) == []
    lines = differences(one, two)
    assert any(line.startswith("client.phases: ") for line in lines)


def test_differences_are_named_by_path() -> None:
    lines = differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 5}, "e": 4})
    assert lines == ["a.c: 5 in the run, 2 now", "d: None in the run, 3 now", "e: 4 in the run, None now"]


def test_digest_sees_names_shapes_types_and_values() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.tensor(1)}
    others = [
        {"a": torch.zeros(3, 2), "b": torch.tensor(1)},
        {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.tensor(1)},
        {"a": torch.zeros(2, 3), "b": torch.tensor(2)},
        {"a": torch.zeros(2, 3), "c": torch.tensor(1)},
        {"a": -torch.zeros(2, 3), "b": torch.tensor(1)},
    ]
    assert len({digest(t) for t in [base, *others]}) == 6
    assert digest(base) == digest(dict(reversed(base.items())))
    assert digest({"e": torch.zeros(0)}) != digest({})


def test_suggestions() -> None:
    assert did_you_mean("haed", ["head", "body"]) == " Did you mean 'head'?"
    assert did_you_mean("xyz", ["head", "body"]) == ""
