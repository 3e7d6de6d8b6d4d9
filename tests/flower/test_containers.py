"""The container files, as far as they can be looked at without a daemon: what they say must exist and hang together."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from fedkeep.cli.flower import app
from fedkeep.flower.set_up import set_up
from fedkeep.version import __version__
from tests.documents import ROOT
from tests.flower.small import CONFIG

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def party(tmp_path_factory):
    """Return the folder of a party, as ``fedkeep flower init`` writes it."""
    folder = tmp_path_factory.mktemp("made") / "visits"
    set_up(folder, CONFIG, hosts=["link.example.org"], nodes=["clinic-a"], port=8443, days=30)
    return folder / "clinic-a"


@pytest.fixture
def node(party):
    """Return the service of a party's container."""
    made = yaml.safe_load((party / "compose.yaml").read_text(encoding="utf-8"))
    assert list(made) == ["services"]
    assert list(made["services"]) == ["node"]
    return made["services"]["node"]


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and their arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def test_a_partys_container_runs_its_node_in_its_own_folder(node, party):
    assert node["command"] == ["fedkeep", "device", "run", "node.toml"]
    assert node["volumes"] == [f".:{node['working_dir']}"]
    assert node["tmpfs"] == ["/tmp"]
    (user,) = re.findall(r"--uid (\d+)", DOCKERFILE)
    assert f"chown -R {user} ." in (party / "compose.yaml").read_text(encoding="utf-8")
    settings = tomllib.loads((party / "node.toml").read_text(encoding="utf-8"))
    named = [settings["device"]["folder"], settings["data"]["path"], settings["link"]["key"]]
    assert not [path for path in named if Path(path).is_absolute()]


def test_every_volume_is_declared_and_no_two_services_share_one():
    named = [v.split(":")[0] for s in SERVICES.values() for v in s["volumes"] if not v.startswith(".")]
    assert sorted(named) == sorted(COMPOSE["volumes"])
    assert len(set(named)) == len(named)


def test_a_private_key_is_mounted_where_it_is_used_and_nowhere_else():
    keys = {
        name: [v.split(":")[0] for v in service["volumes"] if ".key:" in v]
        for name, service in SERVICES.items()
    }
    assert keys == {"link": ["./keys/link.key"]}
    mounts = [v for service in SERVICES.values() for v in service["volumes"] if v.startswith(".")]
    assert all(mount.endswith(":ro") for mount in mounts)


@pytest.mark.parametrize("name", [*SERVICES, "node"])
def test_a_service_may_write_only_where_it_must(name, node):
    service = {**SERVICES, "node": node}[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["image"] == f"fedkeep:{__version__}"
    build = SERVICES["link"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_the_link_is_the_one_that_is_closed_to_others_and_listens_at_the_port_that_is_published():
    words = SERVICES["link"]["command"]
    assert words[:3] == ["fedkeep", "flower", "link"]
    link = get_command(app).commands["link"]  # type: ignore[attr-defined]
    given = link.make_context("link", words[3:]).params
    assert SERVICES["link"]["ports"] == [f"{given['port']}:{given['port']}"]
    mounted = {volume.split(":")[1] for volume in SERVICES["link"]["volumes"]}
    assert {
        str(given["folder"]),
        *(f"{given['keys']}/{name}" for name in ("ca.pem", "link.pem", "link.key")),
    } <= mounted


def test_the_image_is_pinned_and_runs_as_nobody_special():
    """As hadolint asks: DL3006, DL3007, DL3008's lists removed, DL3002, DL3025, DL3042."""
    told = instructions()
    assert told[0][0] == "FROM"
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", told[0][1])
    runs = [text for word, text in told if word == "RUN"]
    for text in runs:
        assert "sudo" not in text
        assert "apt-get install" not in text or (
            "--no-install-recommends" in text and "rm -rf /var/lib/apt" in text
        )
        assert all("--no-cache-dir" in part for part in text.split("&&") if "pip install" in part)
    users = [text for word, text in told if word == "USER"]
    assert users == ["fedkeep"]
    assert [text[0] for word, text in told if word in ("CMD", "ENTRYPOINT")] == ["["]
    assert not [word for word, _ in told if word == "ADD"]


def test_the_image_takes_the_torch_that_fedkeep_wants_and_files_that_are_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "torch>=2.13" in project["dependencies"]
    assert "torch==2.13.0" in DOCKERFILE
    assert "flower" in project["optional-dependencies"]
    for word, text in instructions():
        if word == "COPY":
            assert all((ROOT / source).exists() for source in shlex.split(text)[:-1])


def test_the_unit_starts_a_command_that_there_is_and_tries_again_when_the_link_is_not_there_yet(party):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(party / "fedkeep-node.service", encoding="utf-8")
    service = unit["Service"]
    assert service["ExecStart"].split()[1:] == ["device", "run", "node.toml"]
    assert service["Restart"] == "on-failure"
    assert "RestartPreventExitStatus" not in service  # 2 is also the code of a node that finds no link
    assert (service["User"], service["StateDirectoryMode"]) == ("fedkeep", "0700")
    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"  # where it may write
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    text = (party / "fedkeep-node.service").read_text(encoding="utf-8")
    assert f"chown -R {service['User']} {service['WorkingDirectory']}\n" in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_the_unit(party, tmp_path):
    command, unit = tmp_path / "fedkeep", tmp_path / "fedkeep-node.service"
    command.touch(0o755)
    text = (party / unit.name).read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/fedkeep/bin/fedkeep", str(command)).replace("User=fedkeep\n", ""))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_owners_comments_say_where_to_write_and_whose_the_keys_must_be():
    """``fedkeep flower init`` lets their owner alone read keys, and no user here is root."""
    comment = (DEPLOY / "compose.yaml").read_text(encoding="utf-8").partition("\nservices")[0]
    assert "--run-config out=run\n" in comment
    assert f"visits:{SERVICES['link']['working_dir']}" in SERVICES["link"]["volumes"]
    (user,) = re.findall(r"--uid (\d+)", DOCKERFILE)
    assert f": chown {user} keys/link.key\n" in comment
