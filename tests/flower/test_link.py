"""What a project is told when it is started reaches its server app through Flower's own reader of settings."""

import shutil
import subprocess
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from fedkeep.core.errors import ConfigError
from fedkeep.flower import guard
from fedkeep.flower.link import Link


@pytest.fixture
def link(tmp_path, monkeypatch):
    """Return a link that was not started, and the words that Flower's command line would get."""
    made, words = Link(tmp_path / "link", tmp_path / "keys"), []

    def flwr(*given):
        words.extend(given)
        return subprocess.CompletedProcess(given, 0, "Successfully started run 17", "")

    monkeypatch.setattr(made, "_flwr", flwr)
    return made, words


@pytest.mark.parametrize("path", ["/home/anna/x", "/home/Zoë/a b", "/home/\U0001f600/日本", "C:\\anna's"])
def test_a_setting_arrives_as_it_was_given(path, link, tmp_path):
    made, words = link
    given = {"status": path, "clients": 6, "patience": 0.5}
    assert made.submit(tmp_path, given) == "17"
    assert parse_config_args([words[words.index("--run-config") + 1]]) == given


def test_a_path_that_flower_would_cut_is_refused(link, tmp_path):
    made, words = link
    with pytest.raises(
        ConfigError, match="status holds no quotation mark, for Flower's sake; got /home/a\"b"
    ):
        made.submit(tmp_path, {"status": '/home/a"b'})
    assert words == []


def test_what_other_programs_read_is_utf_8_whatever_the_systems_encoding(tmp_path, monkeypatch):
    write, given = Path.write_text, {}

    def noting(path, text, encoding=None, **options):
        given[path.name] = encoding
        return write(path, text, encoding, **options)

    monkeypatch.setattr(Path, "write_text", noting)
    Link(tmp_path / "Zoë", tmp_path / "keys")
    guard.install(tmp_path / "commands")
    assert given
    assert set(given.values()) == {"utf-8"}


def test_a_links_server_apps_are_started_by_the_command_that_says_at_once_that_it_lives(tmp_path):
    found = shutil.which("flwr-serverapp", path=Link(tmp_path / "a b", tmp_path / "keys").environment["PATH"])
    assert found == str(tmp_path / "a b" / "flower" / "bin" / "flwr-serverapp")
    assert f"{guard.__file__} {guard.AT_LINK}" in Path(found).read_text()
