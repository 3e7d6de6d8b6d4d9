"""Declarations stand under one name of fedkeep's own; attributes of the user's are never read as one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fedkeep import Split, declare, methods, simulate
from fedkeep.core.declared import declared
from fedkeep.core.errors import ConfigError
from fedkeep.core.net import Net, PooledNet
from fedkeep.data import toy
from fedkeep.split import updated_buffers
from tests.refusals import raises
from tests.tiny import same_bits


def model(**attributes: Any) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    "attributes",
    [
        {"lookup": ["a"]},
        {"lookup": {"0.weight": "x"}},
        {"updated_buffers": None},
        {"updated_buffers": True},
        {"updated_buffers": ("mena",)},
        {"per_example": True},
        {"per_example": ("0.bias",)},
    ],
)
def test_attributes_of_the_users_own_are_no_declarations(attributes: dict[str, Any]) -> None:
    data = toy(users=4)
    named, plain = (
        simulate(made, methods.furl("0.bias"), data, rounds=1) for made in (model(**attributes), model())
    )
    assert same_bits(named.server, plain.server)
    assert not named.net.lookup
    assert not PooledNet(model(**attributes), frozenset({"0.bias"})).gathers


def test_what_is_declared_is_read_and_survives_copies_and_pickles() -> None:
    made = declare(model(), lookup={"0.weight": "x"}, per_example=["0.bias"])
    made[0].register_buffer("mean", torch.zeros(3))
    assert declare(made[0], updated_buffers=("mean",)) is made[0]
    for each in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301
        assert Net(each).lookup == {"0.weight": "x"}
        assert PooledNet(each, frozenset({"0.bias"})).gathers
        assert "0.mean" in updated_buffers(each)
        assert "0.mean" in Split().halves(each).federated_names


def test_a_later_declaration_takes_the_place_of_its_kind_alone() -> None:
    made = declare(declare(model(), lookup={"0.weight": "x"}, per_example=("0.bias",)), per_example=())
    assert (declared(made).lookup, declared(made).per_example) == ({"0.weight": "x"}, ())


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"lookup": ["0.weight"]}, {"got": ["0.weight"]}),
        ({"lookup": {"0.weight": 3}}, {"got": {"0.weight": 3}}),
        ({"lookup": {"0.wieght": "x"}}, {"what": "lookup", "name": "0.wieght"}),
        ({"updated_buffers": "1.running_mean"}, {"what": "updated_buffers", "got": "1.running_mean"}),
        (
            {"updated_buffers": ("0.weight",)},
            {"what": "updated_buffers", "name": "0.weight", "kind": "buffer"},
        ),
        ({"per_example": True}, {"what": "per_example", "got": True}),
        ({"per_example": ("user",)}, {"what": "per_example", "name": "user", "kind": "parameter"}),
    ],
)
def test_wrong_declarations_are_refused(given: dict[str, Any], facts: dict[str, Any]) -> None:
    with raises(ConfigError, model="Sequential", **facts):
        declare(model(), **given)


def test_only_a_module_that_is_made_declares() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            declare(self, per_example=())

    with raises(ConfigError, model="Early"):
        Early()
    with raises(ConfigError, got=3):
        declare(3, per_example=())  # type: ignore[type-var]
