"""What the server app hands on of its settings, and refuses of them before it begins."""

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.flower import client_app as nodes
from fedkeep.flower import server_app
from fedkeep.flower.local_federation import read_status
from tests.flower.loopback import Loopback
from tests.flower.small import CONFIG
from tests.flower.test_apps import project


@pytest.fixture(autouse=True)
def _no_nodes():
    nodes._simulated.cache_clear()
    yield
    nodes._simulated.cache_clear()


def test_the_server_app_hands_on_all_that_its_settings_say(tmp_path, monkeypatch):
    found = {}

    def serve(federation, transport, out, **options):
        found.update(federation=federation, transport=transport, out=out, **options)

    monkeypatch.setattr(server_app, "serve_run", serve)
    monkeypatch.setattr(server_app, "read_info", lambda run: {})
    monkeypatch.setattr(server_app, "tell_elsewhere", lambda _: None)
    given = {
        "clients": 5,
        "limit": 1234,
        "patience": 77.5,
        "keep-rounds": 4,
        "continue-from": str(tmp_path / "old"),
        "on-change": "anew",
    }
    server_app.main(Loopback(None, []), project(tmp_path, monkeypatch, **given))
    federation = found["federation"]
    assert (federation.clients, federation.continue_from, federation.on_change) == (
        5,
        tmp_path / "old",
        "anew",
    )
    assert (found["transport"].limit, found["out"]) == (1234, tmp_path / "run")
    assert (found["patience"], found["keep_rounds"], found["only"]) == (77.5, 4, "")
    text = CONFIG + "[rounds]\nclients = 3\n"
    server_app.main(Loopback(None, []), project(tmp_path, monkeypatch, text, clients=0))
    assert found["federation"].clients == 3


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("patience", "soon", "a number; got 'soon'"),
        ("patience", -1.0, "at least 0; got -1.0"),
        ("patience", float("inf"), "a finite number; got inf"),
        ("limit", "2 GB", "a whole number; got '2 GB'"),
        ("limit", 1 << 31, "at most 2147483647; got 2147483648"),
        ("clients", "six", "a whole number; got 'six'"),
        ("clients", -3, "at least 0; got -3"),
        ("clients", True, "a whole number; got true"),
        ("keep-rounds", -1, "at least 0; got -1"),
        ("keep-rounds", 1.5, "a whole number; got 1.5"),
        ("only", "judging", "'', 'judge' or 'adapt'; got 'judging'"),
        ("out", 3, "a text; got 3"),
    ],
)
def test_a_setting_that_is_wrong_is_named_before_anything_is_begun(
    name, value, wanted, tmp_path, monkeypatch
):
    monkeypatch.setattr(server_app, "serve_run", None)
    with pytest.raises(ConfigError) as error:
        server_app.main(Loopback(None, []), project(tmp_path, monkeypatch, **{name: value}))
    assert str(error.value).endswith(f"\n  {name}: wanted {wanted}.")
    status = read_status(tmp_path / "status.json")
    assert (status.state, status.text) == ("failed", str(error.value))


def test_all_settings_that_are_wrong_or_missing_are_named(tmp_path, monkeypatch):
    made = project(tmp_path, monkeypatch, status=7, limit="no")
    del made.run_config["clients"]
    with pytest.raises(ConfigError) as error:
        server_app.main(Loopback(None, []), made)
    assert [line.partition(":")[0].strip() for line in str(error.value).splitlines()[1:]] == [
        "status",
        "clients",
        "limit",
    ]


def test_the_status_says_so_when_the_server_app_ends_in_an_error_of_pythons(tmp_path, monkeypatch):
    def serve(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(server_app, "serve_run", serve)
    with pytest.raises(OSError, match="no route"):
        server_app.main(Loopback(None, []), project(tmp_path, monkeypatch))
    status = read_status(tmp_path / "status.json")
    assert (status.state, status.text) == ("failed", "OSError: no route")
