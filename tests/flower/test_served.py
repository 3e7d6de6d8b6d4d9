"""Every field of a server's configuration arrives in what is served, and devices are told only what they need."""

import math

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.experiments.config import parse_config
from fedkeep.flower import served
from fedkeep.flower.served import experiments_in, federation_of
from tests.flower.small import CONFIG

MODEL = CONFIG[CONFIG.index("[model]") : CONFIG.index("private_scale")]  # and the method
PRIVACY = """
[privacy]
noise = 1.5
clip = 0.25
delta = 1e-4
"""
TEXT = f"""
name = "all"
seed = 11

{MODEL}
[run]
epochs = 2.5
cohort = 7
sampling = "poisson"
evaluate_every = 4
evaluate_shared = true
on_nonfinite = "skip"
min_clients = 3
trackers = ["csv"]
{PRIVACY}
[preparation]
clients_a_word = 5

[rounds]
clients = 6
deadline = 12.5
"""


def test_each_field_of_a_configuration_is_served():
    made = federation_of(TEXT)
    wanted = {
        "name": "all",
        "seed": 11,
        "rounds": None,
        "epochs": 2.5,
        "cohort": 7,
        "sampling": "poisson",
        "evaluate_every": 4,
        "evaluate_shared": True,
        "on_nonfinite": "skip",
        "clients": 6,
        "trackers": ("csv",),
    }
    assert {name: getattr(made, name) for name in wanted} == wanted
    assert (made.policy.minimum, made.policy.deadline) == (3, 12.5)
    assert made.summarise["clients_a_word"] == 5


def test_a_round_waits_an_hour_and_wants_more_than_half_unless_it_is_said_otherwise():
    usual = federation_of(CONFIG).policy
    assert (usual.deadline, [usual.least(asked) for asked in (1, 2, 3, 4)]) == (3600.0, [1, 2, 2, 3])
    said = federation_of(CONFIG + "min_clients = 1\n[rounds]\ndeadline = inf\n").policy
    assert (said.deadline, said.least(4)) == (math.inf, 1)


def test_a_table_privacy_protects_the_run():
    """Without it a run that asks for noise would go on without any, and nothing would be charged."""
    made = federation_of(TEXT).privacy
    assert made is not None
    assert (made.noise, made.clip, made.delta) == (1.5, 0.25, 1e-4)
    assert federation_of(TEXT.replace(PRIVACY, "").replace('sampling = "poisson"\n', "")).privacy is None


def test_devices_are_told_seed_model_method_preparation_and_what_protects_them_alone():
    config = parse_config(federation_of(TEXT).text)
    told = config.model_dump(exclude_unset=True)
    assert set(told) == {"data", "seed", "model", "method", "preparation", "run", "privacy"}
    cohort = federation_of(TEXT).cohort
    assert told["data"] == {"reader": "devices"}
    assert told["run"] == {"rounds": 0, "cohort": cohort, "sampling": "poisson"}
    assert config.privacy == federation_of(TEXT).privacy
    assert told["preparation"] == {"clients_a_word": 5, "standardise": False}  # of sums noise says nothing


@pytest.mark.parametrize("value", ["'six'", "2.7", "true", "[1]", "nan", "inf", "-3"])
@pytest.mark.parametrize("key", ["clients", "buffer", "minimum", "oldest"])
def test_a_whole_number_of_rounds_is_refused_by_name(key, value):
    refused(key, value)


@pytest.mark.parametrize("value", ["'x'", "true", "[1]", "nan", "-1"])
@pytest.mark.parametrize("key", ["deadline", "staleness", "over_selection"])
def test_a_number_of_rounds_is_refused_by_name(key, value):
    refused(key, value)


@pytest.mark.parametrize(
    ("key", "value"), [("clients", "0"), ("buffer", "0"), ("mode", "1"), ("staleness", "inf")]
)
def test_a_setting_of_rounds_is_refused_by_name(key, value):
    refused(key, value)


def refused(key, value):
    text = TEXT.replace("clients = 6\ndeadline = 12.5\n", "")
    with pytest.raises(ConfigError) as error:
        federation_of(f"{text}{key} = {value}\n", "study.toml")
    place, _, got = str(error.value).partition("; got ")
    assert place.startswith(f"study.toml:\n  rounds.{key}")
    assert got.startswith(value)


def test_metrics_of_predicted_classes_are_not_across_machines():
    with pytest.raises(ConfigError, match="run.metrics: not across machines"):
        federation_of(f"{CONFIG}metrics = ['macro_f1']\n")


@pytest.mark.parametrize("threshold", [None, 0.75])
def test_what_devices_tell_of_their_data_is_summed_as_their_changes_are(threshold):
    secure = (
        "" if threshold is None else f"\n[method.secure]\nclip = 2.0\nheaviest = 9\nthreshold = {threshold}\n"
    )
    text = f"{MODEL}\n{secure}\n[run]\nrounds = 1\n"
    made = federation_of(text)
    assert made.secure == threshold
    assert experiments_in({"a.toml": text.encode()})[made.text].secure == threshold


def test_of_a_projects_files_those_alone_are_read_that_may_be_experiments(monkeypatch):
    """Each message checks the whole project, and to say what is wrong with another TOML takes longer than training."""
    read = []
    monkeypatch.setattr(
        served, "parse_config", lambda text, where: read.append(where) or parse_config(text, where)
    )
    others = {
        "pyproject.toml": b'[project]\nname = "x"\n[tool.flwr]\napp = {}\n',
        "broken.toml": b"[",
        "a.md": b"",
    }
    assert len(experiments_in({"config.toml": CONFIG.encode(), **others})) == 1
    assert read == ["config.toml"]
