"""A device behind a guard trains the experiments of the signed project, whatever configuration a server app names."""

from dataclasses import asdict, replace

import pytest
from flwr.cli.build import build_fab_from_disk

from fedkeep.core.errors import ConfigError
from fedkeep.data.preparation import Rules
from fedkeep.flower import client_app
from fedkeep.flower.grid import GridTransport
from fedkeep.flower.keys import make_keys
from fedkeep.flower.project import new_project
from fedkeep.flower.served import experiments_in, federation_of
from fedkeep.flower.signed import check_signed, sign_project
from fedkeep.remote.served_run import serve_run
from tests.flower.small import CONFIG, SECURE
from tests.flower.test_apps import federation


@pytest.fixture(autouse=True)
def _no_nodes():
    client_app._configured.cache_clear()


def signed_files(folder, text):
    """Return the files of a signed project, as a device takes them out of its bundle."""
    make_keys(folder / "keys", hosts=[], nodes=[])
    new_project(folder / "project", text)
    sign_project(folder / "project", folder / "keys" / "signer.key")
    return check_signed(build_fab_from_disk(folder / "project"), [folder / "keys" / "signer.pub"])


def test_every_configuration_of_a_project_is_an_experiment_and_no_other_toml_is():
    prepared = CONFIG + '[preparation]\nclients_a_word = 2\nlabel_names = ["a", "b"]\n'
    files = {
        "config.toml": SECURE.encode(),
        "more/x.toml": prepared.encode(),
        "pyproject.toml": b"[project]\n",
        "README.md": CONFIG.encode(),
        "bad.toml": b"[",
        "latin.toml": "name = 'ü'\n".encode("latin-1"),
    }
    rules = {**asdict(Rules(clients_a_word=2)), "label_names": ["a", "b"]}
    assert {text: one.preparation for text, one in experiments_in(files).items()} == {
        federation_of(SECURE).text: asdict(Rules()),
        federation_of(prepared).text: rules,
    }


def test_data_of_the_server_and_how_long_it_trains_are_no_part_of_an_experiment():
    other = CONFIG.replace('reader = "many_user_text"', 'reader = "the server\'s own"').replace(
        "rounds = 3", "epochs = 0.5"
    )
    assert list(experiments_in({"config.toml": other.encode()})) == [federation_of(CONFIG).text]


def test_a_run_of_another_configuration_than_the_signed_one_gets_no_client(tmp_path, monkeypatch, capsys):
    text = SECURE.replace("rounds = 3", "rounds = 1")
    place, grid = federation(tmp_path / "place", text)
    monkeypatch.setattr(client_app, "signed", experiments_in(signed_files(tmp_path, text)))

    def train(text, out):
        made = replace(federation_of(text), clients=6)
        serve_run(made, GridTransport(grid), tmp_path / out, progress=False, poll=0.01, patience=0.1)

    with pytest.raises(ConfigError, match="and the experiment that the"):
        train(CONFIG, "other")
    assert (
        "has signed, and the experiment that the server names" in capsys.readouterr().out
    )  # told to the owner
    assert not list((place.folder / "nodes").glob("*/state/*.db"))
    train(text.replace("rounds = 1", "rounds = 2"), "run")
    assert len(list((place.folder / "nodes").glob("*/state/*.db"))) == 2


PRIVATE = (
    CONFIG.replace('private_scale = "fedavg"', "private_scale = 1.0").replace(
        "cohort = 4", 'cohort = 4\nsampling = "poisson"'
    )
    + "[privacy]\nclip = 1.0\nnoise = 1.0\ndelta = 1e-3\nheaviest = 12\nbudget = 1000.0\n"
)


@pytest.mark.parametrize(
    "change",
    [
        ("noise = 1.0", "noise = 0.5"),
        ("clip = 1.0", "clip = 2.0"),
        ("delta = 1e-3", "delta = 1e-2"),
        ("cohort = 4", "cohort = 5"),
        ('sampling = "poisson"\n', ""),
        (PRIVATE[PRIVATE.index("[privacy]") :], ""),
    ],
)
def test_differential_privacy_that_a_server_changes_is_not_what_was_signed(
    change, tmp_path, monkeypatch, capsys
):
    place, grid = federation(tmp_path / "place", PRIVATE)
    monkeypatch.setattr(client_app, "signed", experiments_in(signed_files(tmp_path, PRIVATE)))
    changed = PRIVATE.replace(*change)
    if "[privacy]" not in changed:  # that sampling goes with it alone
        changed = changed.replace('"poisson"', '"shuffled"')
    assert changed != PRIVATE
    made = replace(federation_of(changed), clients=6)
    with pytest.raises(ConfigError, match="and the experiment that the"):
        serve_run(made, GridTransport(grid), tmp_path / "run", progress=False, poll=0.01, patience=0.1)
    assert not list((place.folder / "nodes").glob("*/state/*.db"))


def test_differential_privacy_that_was_signed_is_trained(tmp_path, monkeypatch):
    text = PRIVATE.replace("rounds = 3", "rounds = 1")
    place, grid = federation(tmp_path / "place", text)
    monkeypatch.setattr(client_app, "signed", experiments_in(signed_files(tmp_path, text)))
    made = replace(federation_of(text), clients=6)
    serve_run(made, GridTransport(grid), tmp_path / "run", progress=False, poll=0.01, patience=0.1)
    assert len(list((place.folder / "nodes").glob("*/state/*.db"))) == 2
