"""Heads that are found on data go over machines by name: the same bits as a simulation, and a device that checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedkeep import Method, Phase, methods, sgd, simulate
from fedkeep.core.errors import ConfigError, MethodError
from fedkeep.experiments.build import build_data, build_method, build_model, with_head_named
from fedkeep.experiments.config import parse_config
from fedkeep.flower.local_federation import Local, federation, local_of, train
from fedkeep.flower.served import sent_of
from fedkeep.remote.served_run import serve_run
from tests.methods.test_resolve import DATA, Plain, Stranger, Zeros
from tests.remote.federations import Devices
from tests.remote.federations import federation as run_of
from tests.remote.test_conformance import ledger_of, server_of
from tests.tiny import everyone, on_server, same_bits

CASE = "the share of FedAvg"  # its data are not used
LOCAL = Phase(batch_size=4, optimizer=sgd(0.2, momentum=0.9))
TEXT = """
name = "heads"
[data]
reader = "toy"
users = 6
examples = 12
[model]
kind = "linear"
[method]
kind = "fedrod"
[run]
rounds = 2
cohort = 3
"""


def across(model: type[nn.Module], method: Method, folder: Path) -> Devices:
    """Train over the transport in memory; the server has no examples."""

    def made(text: str, encoding: Mapping[str, Any]) -> tuple[nn.Module, Method]:
        return model(), method

    devices = Devices(CASE, folder / "devices", data=DATA, experiment=made)
    options = {"rounds": 3, "cohort": 4, "seed": 2, "clients": len(DATA), "evaluate_every": 1}
    serve_run(
        run_of(CASE, build=lambda encoding: made("", encoding), **options),
        devices.transport,
        folder / "run",
        progress=False,
    )
    return devices


MODELS: dict[str, type[nn.Module]] = {"fedbabu": Zeros, "furl": Plain, "mixture": Plain}


@pytest.mark.parametrize("name", ["fedper", "fedrod", "moon", "lg_fedavg", "feddbe", *MODELS])
def test_a_run_over_machines_has_the_bits_of_a_simulation(name: str, tmp_path: Path) -> None:
    build: Any = getattr(methods, name)
    model, method = MODELS.get(name, Stranger), build(local=LOCAL).but(head="scorer")
    expected = simulate(
        model(), method, DATA, rounds=3, cohort=4, seed=2, engine="sequential", progress=False
    ).last
    devices = across(model, method, tmp_path)
    assert same_bits(server_of(tmp_path / "run"), on_server(expected))
    if expected.method.split.private and name != "mixture":
        kept = devices.kept(ledger_of(tmp_path / "run"))
        assert same_bits(kept, everyone(expected.private, len(DATA)))


def test_a_device_refuses_a_head_that_is_none_on_its_examples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="after its head 'body.0'"):
        across(Stranger, methods.fedper(local=LOCAL).but(head="body.0"), tmp_path)


def test_a_server_without_examples_asks_for_the_name(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="head='NAME'"):
        across(Stranger, methods.fedper(local=LOCAL), tmp_path)


def test_the_head_that_is_found_stands_in_the_project() -> None:
    text = with_head_named(TEXT)
    assert parse_config(text).method.head == "linear"
    assert 'head = "linear"' in sent_of(parse_config(text))
    assert with_head_named(text) == text
    plain = TEXT.replace("fedrod", "fedavg")
    elsewhere = TEXT.replace('"toy"\nusers = 6\nexamples = 12', '"table"\npath = "not-here.csv"')
    for unchanged in (plain, elsewhere):
        assert with_head_named(unchanged) == unchanged


@pytest.fixture
def place(tmp_path: Path) -> Local:
    return local_of(tmp_path / "deployed", TEXT, None, 2)


@pytest.mark.slow
def test_a_run_on_flower_has_the_bits_of_a_simulation(place: Local) -> None:
    with federation(place) as (link, _):
        train(place, link)
    config = parse_config(TEXT)
    data = build_data(config)
    expected = simulate(
        build_model(config, data), build_method(config.method), data, rounds=2, cohort=3, progress=False
    ).last
    assert same_bits(server_of(place.run), on_server(expected))
    assert parse_config(place.config_text).method.head == expected.method.head.layer
