"""The same experiment with other methods: what goes along, and what is filled in."""

from __future__ import annotations

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.build import build_data, build_method
from fedkeep.experiments.config import Config, parse_config
from fedkeep.experiments.variants import Variant, variant_of, with_method
from fedkeep.methods import Phase
from fedkeep.privacy import DifferentialPrivacy

TEXT = """
name = "Mine"
[data]
reader = "many_user_text"
users = 4
examples = 8
[model]
kind = "bag_of_words"
embedding_dim = 4
mlp = 4
user_dim = 2
[method]
kind = "furl"
private = "user"
private_scale = "fedavg"
batch_size = 7
epochs = 3
weighting = "uniform"
optimizer = { learning_rate = 0.3 }
server_optimizer = { momentum = 0.5 }
[run]
rounds = 1
"""


@pytest.fixture
def config() -> Config:
    return parse_config(TEXT)


def of(config: Config, kind: str) -> Variant:
    return variant_of(with_method(config, kind), build_data(config))


def test_settings_that_all_methods_know_go_along(config: Config) -> None:
    found = with_method(config, "ditto")
    assert found.name == found.method.kind == "ditto"
    assert found.method.options == {"batch_size": 7, "epochs": 3, "weighting": "uniform"}
    made = build_method(found.method)
    assert made.client.phases[0].batch_size == 7
    assert made.client.phases[0].optimizer.learning_rate == 0.3
    assert made.server.update.optimizer.momentum == 0.5  # type: ignore[attr-defined]
    assert (found.data, found.model, found.run) == (config.data, config.model, config.run)
    assert parse_config(found.to_toml()) == found  # so a run's folder gives it again


def test_the_configurations_own_method_keeps_its_options(config: Config) -> None:
    assert with_method(config, "furl").method == config.method


def test_how_the_configurations_method_adapts_is_its_own(config: Config) -> None:
    config = parse_config(TEXT.replace("[run]", "[method.adapt]\nepochs = 9\n[run]"))
    assert with_method(config, "furl").method.adapt == Phase(epochs=9)
    assert with_method(config, "fedavg").method.adapt is None
    phase = build_method(with_method(config, "fine_tuned").method).adapt.phases[0]
    assert (phase.batch_size, phase.optimizer.learning_rate) == (7, 0.3)


def test_a_method_without_a_server_leaves_the_servers_settings_out(config: Config) -> None:
    found = with_method(config, "local").method
    assert found.options == {"batch_size": 7, "epochs": 3}
    assert found.server_optimizer is None
    build_method(found)


def test_the_last_layer_is_the_head_where_the_model_names_none(config: Config) -> None:
    per, lg = of(config, "fedper"), of(config, "lg_fedavg")
    assert "private" not in {**per.config.method.options, **lg.config.method.options}
    assert per.note.startswith("fedper: head: mlp.3 (")
    assert "private" in per.note
    assert "before" in lg.note
    assert of(config, "furl").note == ""


@pytest.mark.parametrize(
    ("kind", "shared", "adapted"),
    [
        ("furl", True, False),
        ("ditto", True, False),
        ("fedavg", False, False),
        ("local", False, False),
        ("fine_tuned", False, True),
        ("per_fedavg", False, True),
        ("fedbabu", False, True),
        ("fedper", False, False),  # its shared part can't predict alone
    ],
)
def test_what_is_judged_beside_a_clients_own_model(
    config: Config, kind: str, shared: bool, adapted: bool
) -> None:
    run = of(config, kind).config.run
    assert (run.evaluate_shared, run.evaluate_adapted) == (shared, adapted)


def test_what_is_private_is_told_in_numbers(config: Config) -> None:
    assert of(config, "fedavg").private == "nothing"
    assert of(config, "furl").private.startswith("user (2 of ")
    assert of(config, "local").private.startswith("all (")
    assert of(config, "fedbabu").private.endswith("numbers, after the rounds)")
    mixed = of(config, "mixture")
    assert mixed.private.startswith("local_expert.*, gate.* (")
    assert mixed.config.run.evaluate_adapted


def test_what_trains_in_one_place_says_so(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"^asp_mtl: .*run\.centralised = true"):
        of(config, "asp_mtl")


def test_a_method_that_sends_nothing_needs_no_privacy(config: Config) -> None:
    table = DifferentialPrivacy(noise=1.0, clip=1.0, delta=0.01)
    private = config.model_copy(update={"privacy": table})
    assert of(private, "furl").config.privacy == of(private, "fine_tuned").config.privacy == table
    local = of(private, "local")
    assert local.config.privacy is None
    assert local.note == "local: without [privacy], as nothing of it leaves a client."
    assert of(config, "local").note == ""


def test_what_does_not_fit_names_the_method(config: Config) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^--methods: there is no.*'dito'.*'ditto'",
    ):
        with_method(config, "dito")
    with pytest.raises(ConfigError, match=r"^fedbn: .*no batch normalisation.*fedavg"):
        of(config, "fedbn")
    small = parse_config(
        TEXT.replace("many_user_text", "toy").replace(
            'kind = "bag_of_words"\nembedding_dim = 4\nmlp = 4\nuser_dim = 2', 'kind = "linear"'
        )
    )
    assert of(small, "fedper").note.startswith("fedper: head: linear (")
