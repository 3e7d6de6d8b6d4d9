"""What the server app hands on of its settings, and that two nodes of a simulation share nothing."""

import pytest

from fedkeep.flower import nodes, server_app
from tests.flower.loopback import Loopback
from tests.flower.test_apps import CONFIG, project


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
    monkeypatch.setattr(server_app, "tell_elsewhere", lambda _: None)
    given = {
        "clients": 5, "limit": 1234, "patience": 77.5, "keep-rounds": 4, "continue-from": str(tmp_path / "old"),
        "on-change": "anew",
    }  # fmt: skip
    server_app.main(Loopback(None, []), project(tmp_path, monkeypatch, **given))
    federation = found["federation"]
    assert (federation.clients, federation.continue_from, federation.on_change) == (
        5,
        tmp_path / "old",
        "anew",
    )
    assert (found["transport"].limit, found["out"]) == (1234, tmp_path / "run")
    assert (found["patience"], found["keep_rounds"], found["judge_only"]) == (77.5, 4, False)
    text = CONFIG + "[rounds]\nclients = 3\n"
    server_app.main(Loopback(None, []), project(tmp_path, monkeypatch, text, clients=0))
    assert found["federation"].clients == 3
