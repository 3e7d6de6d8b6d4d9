"""Configuration files: what is accepted, what is refused, and that a written one gives the same again."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import ConfigError
from fedkeep.core.optim import Optimizer
from fedkeep.experiments.build import build_method
from fedkeep.experiments.config import (
    Config,
    DataConfig,
    builtin_config,
    parse_config,
    parse_overrides,
    read_config,
)
from fedkeep.experiments.plugins import builtin_names, builtin_text
from tests.refusals import raises

MINIMAL = """
[data]
reader = "toy"
[model]
kind = "linear"
[method]
kind = "furl"
[run]
rounds = 3
"""


def fault(text: str, overrides: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(text, "mine.toml", overrides)
    return str(error.value)


def test_defaults() -> None:
    config = parse_config(MINIMAL)
    assert (config.name, config.seed, config.run.rounds, config.run.epochs) == ("", 0, 3, None)
    assert (config.run.cohort, config.run.engine, config.run.device) == (10, "auto", "cpu")
    assert config.method.optimizer is None
    assert config.data.options == {}


def test_every_field_of_an_optimiser_arrives() -> None:
    text = MINIMAL + (
        '[method.optimizer]\nkind = "adamw"\nlearning_rate = 1\nrates = { "h*" = 0.5, user = 2 }\nmomentum = 0.1\n'
        'weight_decay = 0.2\nbetas = [0.5, 0.75]\neps = 1e-3\nschedule = "cosine"\n'
        "[method.server_optimizer]\nmomentum = 0.9\n"
    )
    config = parse_config(text)
    assert config.method.optimizer == Optimizer(
        "adamw", 1.0, (("h*", 0.5), ("user", 2.0)), 0.1, 0.2, (0.5, 0.75), 1e-3, "cosine"
    )
    assert config.method.server_optimizer == Optimizer("sgd", 1.0, momentum=0.9)  # plain averaging's rate


def test_further_keys_are_options() -> None:
    config = parse_config(MINIMAL.replace('reader = "toy"', 'reader = "toy"\nusers = 3\nmine = [1, 2]'))
    assert config.data.options == {"users": 3, "mine": [1, 2]}


def test_all_faults_are_named_at_once() -> None:
    text = MINIMAL.replace("rounds = 3", "rounds = 3\ncohort = 0.5\nsampling = 'none'").replace(
        "[model]", "[modle]"
    )
    assert fault(text) == (
        "mine.toml:\n"
        "  run.cohort: wanted a whole number; got 0.5.\n"
        "  run.sampling: wanted 'shuffled', 'independent' or 'poisson'; got 'none'.\n"
        "  modle: unknown key. Did you mean model?"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", "true", "seed: wanted a whole number; got true."),
        ("seed", "1.0", "seed: wanted a whole number; got 1.0."),
        ("name", "3", "name: wanted a text; got 3."),
        ("run", "3", "run: wanted a table; got 3."),
        (
            "run.hold_out",
            "1.0",
            "run.hold_out must be a fraction in [0, 1), or a list of clients' ids; got 1.0.",
        ),
        (
            "method.optimizer.learning_rate",
            "nan",
            "method.optimizer.learning_rate must be at least 0; got nan.",
        ),
        (
            "method.optimizer.rates.user",
            "-1",
            "method.optimizer: The learning rate of 'user' must be at least 0; got -1.0.",
        ),
        (
            "method.loss.kinds",
            '"x"',
            "method.loss.kinds: unknown key. Did you mean method.loss.kind?",
        ),
        (
            "method.adapt.optimizer.rat",
            "1",
            "method.adapt.optimizer.rat: unknown key. Did you mean method.adapt.optimizer.rates?",
        ),
        ("method.adapt.epochs", "-1", "method.adapt.epochs must be at least 0; got -1."),
        (
            "method.adapt.clip_over",
            '"all"',
            "method.adapt.clip_over: unknown key. Did you mean method.adapt.clip_norm?",
        ),
    ],
)
def test_values_that_do_not_fit(key: str, value: str, message: str) -> None:
    assert fault(MINIMAL, {key: value}).startswith(f"mine.toml with {key} = {value}:\n  {message}")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("epochs", ["run.epochs"]),
        ("learning_rate", ["method.optimizer.learning_rate"]),
        ("method.momentum", ["method.optimizer.momentum"]),
        ("run.reader", ["data.reader"]),
    ],
)
def test_a_key_of_another_table_is_named_in_full(key: str, meant: list[str]) -> None:
    if key.startswith("method."):  # its keys are the method's options
        with raises(ConfigError) as caught:
            build_method(parse_config(MINIMAL, "mine.toml", {key: "1"}).method)
        told = str(caught.value)
    else:
        told = fault(MINIMAL, {key: "1"})
    assert f"{key}: unknown key. Did you mean " in told
    assert all(name in told for name in meant)


@pytest.mark.parametrize(
    ("line", "advice"),
    [('label = "way', "quotation marks"), ("label = way", "quotation marks"), ("label way", "")],
)
def test_a_line_that_is_no_toml_is_shown(line: str, advice: str) -> None:
    told = fault(f'[data]\n{line}\nuser = "user"\n')
    assert f"`{line}`" in told
    assert advice in told


def test_rounds_or_epochs() -> None:
    assert fault(MINIMAL, {"run.epochs": "2"}).endswith(
        ":\n  run: Got rounds=3 and epochs=2.0. Give one of them."
    )
    assert parse_config(MINIMAL.replace("rounds = 3", "epochs = 2")).run.epochs == 2.0


def test_overrides() -> None:
    config = parse_config(
        MINIMAL,
        overrides={
            "name": "My run",
            "run.rounds": "7",
            "data.features": "[1, 2]",
            "data.path": "some/where.csv",
            'method.optimizer.rates."head.*"': "0.25",
            'method.optimizer.weight_decay."type:LayerNorm"': "0.0",
            "model.bias": "false",
        },
    )
    assert (config.name, config.run.rounds) == ("My run", 7)
    assert config.data.options == {"features": [1, 2], "path": "some/where.csv"}
    assert config.method.optimizer.rates == (("head.*", 0.25),)
    assert config.method.optimizer.weight_decay == (("type:LayerNorm", 0.0),)
    assert parse_config(config.to_toml()).method == config.method
    assert config.model.options == {"bias": False}


def test_an_override_cannot_smuggle_in_another_key() -> None:
    assert parse_config(MINIMAL, overrides={"name": "x\nseed = 3"}).seed == 0
    assert fault(MINIMAL, {"seed = 3\nname": "x"}) == "--set seed = 3\nname: wanted one key."


def test_parse_overrides() -> None:
    assert parse_overrides(["a.b=1", " c = d=e "]) == {"a.b": "1", "c": "d=e"}
    for wrong in ("a", "=1"):
        with pytest.raises(ConfigError, match="--set wants key=value"):
            parse_overrides([wrong])


def test_a_mark_of_the_byte_order_is_no_part_of_a_file(tmp_path: Path) -> None:
    """As editors on Windows write it."""
    (tmp_path / "c.toml").write_text(MINIMAL, encoding="utf-8-sig")
    config, text = read_config(tmp_path / "c.toml")
    assert (config.run.rounds, text) == (3, MINIMAL)


def test_read_config(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("# mine\n" + MINIMAL, encoding="utf-8")
    config, text = read_config(path)
    assert (config, text) == (parse_config(MINIMAL), "# mine\n" + MINIMAL)
    changed, text = read_config(path, {"seed": "4"})
    assert changed.seed == 4
    assert parse_config(text) == changed
    with raises(ConfigError, said="Cannot read the configuration", reason="No such file or directory"):
        read_config(tmp_path / "none.toml")


@pytest.mark.parametrize("name", builtin_names())
def test_built_in_configurations_are_sound_and_say_what_they_are(name: str) -> None:
    config = builtin_config(name)
    assert config.name
    assert builtin_text(name).startswith("# ")
    assert parse_config(config.to_toml()) == config


def test_built_in_names() -> None:
    names = builtin_names()
    for folder in ("furl", "furl-sticker"):
        for one in ("global-server", "personalized-server", "global-fl", "personalized-fl"):
            assert f"{folder}/{one}" in names
    with pytest.raises(ConfigError) as error:
        builtin_text("furl/globalserver")
    assert str(error.value).startswith("There is no built-in configuration 'furl/globalserver'; there are ")
    assert str(error.value).endswith("Did you mean 'furl/global-server'?")
    assert builtin_text("furl\\global-server.toml") == builtin_text("furl/global-server")


@pytest.mark.parametrize("folder", ["furl", "furl-words", "furl-sticker"])
def test_the_four_configurations_differ_in_what_they_compare_only(folder: str) -> None:
    server, personal_server = (builtin_config(f"{folder}/{n}-server") for n in ("global", "personalized"))
    fl, personal_fl = (builtin_config(f"{folder}/{n}-fl") for n in ("global", "personalized"))
    for config in (server, personal_server):
        assert config.run.centralised
    for config in (fl, personal_fl):
        assert (config.run.engine, config.run.cohort) == ("auto", 10)
    without_user = {
        "user_dim": 0,
        "user_bias": False,
    }  # our best recipe may add a private bias to the user vector
    models = [c.model.options | without_user for c in (server, personal_server, fl, personal_fl)]
    assert all(model == models[0] for model in models)
    paper, personal_paper = (builtin_config(f"{folder}/{n}-fl-paper") for n in ("global", "personalized"))
    assert paper.model == server.model
    assert personal_paper.model == personal_server.model
    assert paper.method.server_optimizer is personal_paper.method.server_optimizer is None
    assert personal_paper.method.optimizer.rates == ()
    assert all(c.data == server.data for c in (personal_server, fl, personal_fl))
    assert server.model.options["user_dim"] == fl.model.options["user_dim"] == 0
    assert personal_server.model.options["user_dim"] == personal_fl.model.options["user_dim"] > 0


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
PLAIN = st.one_of(TEXT, st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False))
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(TEXT, PLAIN, max_size=3))


@given(st.dictionaries(TEXT.filter(lambda t: t not in DataConfig.model_fields), VALUES, max_size=5), TEXT)
@settings(max_examples=60, deadline=None)
def test_a_written_configuration_gives_the_same(options: dict[str, object], name: str) -> None:
    config = Config.model_validate(
        {
            "name": name,
            "data": {"reader": "toy", **options},
            "model": {"kind": "linear"},
            "method": {"kind": "furl"},
            "run": {"rounds": 1},
        }
    )
    assert parse_config(config.to_toml()) == config
