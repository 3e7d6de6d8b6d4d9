import tomllib
import zipfile
from io import BytesIO

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate

from fedkeep.core.errors import ConfigError
from fedkeep.flower.project import bundled, new_project, project_name


def test_flower_takes_the_project_without_a_warning(tmp_path):
    new_project(tmp_path / "my project", "seed = 3\n")
    settings, warnings = load_and_validate(tmp_path / "my project" / "pyproject.toml")
    assert warnings == []
    assert settings["project"]["name"] == "my-project"
    assert (tmp_path / "my project" / "config.toml").read_text() == "seed = 3\n"
    assert len((tmp_path / "my project" / "README.md").read_text().splitlines()) <= 16


def test_the_project_names_no_command_that_its_configuration_cannot_run(tmp_path):
    for name, text in (("with", "[data]\nreader = 'toy'\n"), ("without", "seed = 3\n")):
        new_project(tmp_path / name, text)
    readme = {name: (tmp_path / name / "README.md").read_text() for name in ("with", "without")}
    assert "fedkeep deploy --local 2" in readme["with"]
    assert "deploy" not in readme["without"]
    assert "With a table `[data]`" in readme["without"]


def test_the_servers_run_stands_in_the_project_or_where_it_is_wanted(tmp_path):
    new_project(tmp_path / "one", "")
    new_project(tmp_path / "two", "", out=tmp_path / "elsewhere")
    out = [
        tomllib.loads((tmp_path / name / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"][
            "out"
        ]
        for name in ("one", "two")
    ]
    assert out == [str(tmp_path / "one" / "run"), str(tmp_path / "elsewhere")]


def test_the_run_and_private_states_are_no_part_of_what_flower_sends(tmp_path):
    new_project(tmp_path / "default", "")
    new_project(tmp_path / "other", "", out=tmp_path / "other" / "runs" / "one")
    for project, run in (("default", "run"), ("other", "runs/one")):
        for place in (run, "devices"):
            (tmp_path / project / place).mkdir(parents=True)
            (tmp_path / project / place / "run.json").write_text("{}")
        bundle = zipfile.ZipFile(BytesIO(build_fab_from_disk(tmp_path / project)))
        assert set(bundle.namelist()) == {"pyproject.toml", "config.toml", "README.md", ".info/CONTENT"}


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "kept").write_text("")
    with pytest.raises(ConfigError, match="is there already and not an empty folder"):
        new_project(tmp_path, "")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a b_c", "a-b-c"),
        ("7up", "fedkeep-7up"),
        ("ü", "fedkeep"),
        ("x" * 50, "x" * 32),
        ("a" * 31 + "--b", "a" * 31),
    ],
)
def test_a_name_is_made_one_that_flower_takes(text, name):
    assert project_name(text) == name


def test_a_file_of_the_bundle_is_found_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert bundled("config.toml") == tmp_path / "config.toml"
    with pytest.raises(ConfigError, match="holds no file 'other.toml'"):
        bundled("other.toml")


@pytest.mark.parametrize("name", ["{folder}/config.toml", "../config.toml", "more/../../config.toml"])
def test_a_file_outside_the_project_is_none_of_its_files(name, tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "project" / "more").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "project")
    with pytest.raises(ConfigError, match="names a file of the project.*'..'"):
        bundled(name.format(folder=tmp_path))
