"""Every key of a configuration has a type, a default and a meaning; a misspelled one has a suggestion."""

from __future__ import annotations

import pytest

from fedkeep.cli.keys import explained, tables
from fedkeep.core.errors import ConfigError
from fedkeep.core.optim import Optimizer
from fedkeep.experiments.config import Config, parse_config
from tests.commands import call
from tests.refusals import raises


def test_every_key_of_every_table_is_typed_and_explained() -> None:
    found = tables()
    assert {
        "",
        "data",
        "method",
        "method.optimizer",
        "method.adapt.optimizer",
        "run",
        "rounds",
    } <= found.keys()
    for name, table in found.items():
        assert table.about, name
        assert table.read_by, name
        for key, one in table.keys.items():
            assert one.about, (name, key)
            assert one.type != "Any", (name, key)


def test_every_field_of_a_configuration_is_a_key_or_a_table() -> None:
    found = tables()
    assert set(Config.model_fields) <= {*found[""].keys, *found}
    assert set(Optimizer.__dataclass_fields__) == set(found["method.optimizer"].keys)
    assert {"method.adapt.optimizer", "method.adapt.early_stopping"} <= found.keys()
    assert {*found["method.adapt"].keys} == {"epochs", "batch_size", "clip_norm"}


def test_defaults_are_those_that_a_configuration_has() -> None:
    config = parse_config('[data]\nreader = "toy"\n[method.server_optimizer]\n[method.optimizer]\n')
    assert config.method.server_optimizer is not None
    assert config.method.optimizer is not None
    for name, made in (
        ("method.server_optimizer", config.method.server_optimizer),
        ("method.optimizer", config.method.optimizer),
    ):
        for key, one in tables()[name].keys.items():
            assert one.default == repr(getattr(made, key)), (name, key)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("run.epochs", "run.epochs"),
        ("server_optimizer.momentum", "method.server_optimizer.momentum"),
        ("method.fedrep", "method.fedrep"),
        ("fedrep.head_epochs", "method.fedrep.head_epochs"),
        ("data.leaf", "data.leaf"),
        ("dirichlet.alpha", "data.partition.dirichlet.alpha"),
        ("model.resnet", "model.resnet"),
    ],
)
def test_a_name_is_found_whole_or_by_its_last_parts(asked: str, name: str) -> None:
    assert [found for found, *_ in explained(asked)] == [name]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("optimizer.lr", "method.optimizer.learning_rate"),
        ("run.epohcs", "run.epochs"),
        ("method.fedrepp", "method.fedrep"),
        ("data.partion", "data.partition"),
    ],
)
def test_a_misspelled_name_has_a_suggestion(asked: str, meant: str) -> None:
    with raises(ConfigError, said=meant):
        explained(asked)


def test_the_command_prints_type_default_meaning_and_who_reads_it() -> None:
    shown = call("explain", "run.cohort").stdout
    assert "run.cohort: int, default 10" in shown
    assert "clients a round" in shown
    assert "fedkeep run" in shown
    assert "optimizer" in call("explain").stdout
    assert call("explain", "run.epohcs").exit_code == 2


def test_a_reader_s_key_is_found_as_it_is_written() -> None:
    assert "data.leaf.folder" in [name for name, _, _ in explained("data.folder")]
    assert [name for name, _, _ in explained("data.examples")] == ["data.examples"]
