"""The container files, as far as they can be looked at without a daemon: what they say must exist and hang together."""

from __future__ import annotations

import argparse
import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

from fedkeep.version import __version__
from tests.documents import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
NODES = ["node-1", "node-2", "node-3"]


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions and their arguments, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def test_there_are_a_link_a_server_app_and_three_nodes():
    assert list(SERVICES) == ["link", "server-app", *NODES]
    assert {name: SERVICES[name]["command"] for name in NODES} == {
        name: ["fedkeep", "device", "run", "/config/node.toml"] for name in NODES
    }


def test_every_volume_is_declared_and_no_two_services_share_one():
    named = [v.split(":")[0] for s in SERVICES.values() for v in s["volumes"] if not v.startswith(".")]
    assert sorted(named) == sorted(COMPOSE["volumes"])
    assert len(set(named)) == len(named)


def test_a_private_key_is_mounted_where_it_is_used_and_nowhere_else():
    keys = {
        name: [v.split(":")[0] for v in service["volumes"] if ".key:" in v]
        for name, service in SERVICES.items()
    }
    assert keys == {"link": ["./keys/link.key"], "server-app": []} | {n: [f"./keys/{n}.key"] for n in NODES}
    mounts = [v for service in SERVICES.values() for v in service["volumes"] if v.startswith(".")]
    assert all(mount.endswith(":ro") for mount in mounts)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_may_write_only_where_it_must(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["image"] == f"fedkeep:{__version__}"
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_nodes_and_server_app_wait_for_a_healthy_link():
    assert "healthcheck" in SERVICES["link"]
    for name in ("server-app", *NODES):
        assert SERVICES[name]["depends_on"] == {"link": {"condition": "service_healthy"}}


def test_flower_knows_all_options_of_the_link(tmp_path):
    words = SERVICES["link"]["command"]
    parser: argparse.ArgumentParser = _parse_args_run_superlink()
    given = parser.parse_args(words[1:])
    assert (words[0], given.port, given.enable_supernode_auth) == ("flower-superlink", 8443, True)
    assert given.isolation == "process"  # the server app runs in a container of its own
    assert not given.insecure
    assert SERVICES["server-app"]["command"][:2] == ["flower-superexec", "--runtime-api-address=link:8443"]


def test_server_apps_say_at_once_that_they_live(tmp_path):
    """Flower looks for the command on PATH, and finds the one that the image wrote."""
    (run,) = (text for word, text in instructions() if word == "RUN" and "install_at_link" in text)
    folder = "/opt/fedkeep/link"
    python, *rest = shlex.split(run.replace(folder, str(tmp_path)))
    assert python == "python"
    subprocess.run([sys.executable, *rest], check=True)
    path = SERVICES["server-app"]["environment"]["PATH"]
    assert path.split(":")[:2] == [folder, "/usr/local/bin"]
    found = shutil.which("flwr-serverapp", path=path.replace(folder, str(tmp_path)))
    assert found == str(tmp_path / "flwr-serverapp")
    assert "--at-link" in Path(found).read_text(encoding="utf-8")
    assert "PATH" not in SERVICES["node-1"].get("environment", {})


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


def test_the_unit_starts_a_command_that_there_is_and_tries_again_when_the_link_is_not_there_yet():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "fedkeep-node.service", encoding="utf-8")
    service = unit["Service"]
    assert service["ExecStart"].split()[1:3] == ["device", "run"]
    assert service["Restart"] == "on-failure"
    assert "RestartPreventExitStatus" not in service  # 2 is also the code of a node that finds no link
    assert service["StateDirectoryMode"] == "0700"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


def test_the_comments_say_where_a_node_may_write():
    """A node's states lie beside its configuration by the page's example, where nothing may be written here."""
    unit = (DEPLOY / "fedkeep-node.service").read_text(encoding="utf-8")
    assert "StateDirectory=fedkeep\n" in unit
    assert "ProtectSystem=strict\n" in unit
    assert 'folder = "/var/lib/fedkeep/states"' in unit
    comment = (DEPLOY / "compose.yaml").read_text(encoding="utf-8").partition("\nx-fedkeep")[0]
    assert 'folder = "/data/states"' in comment
    assert 'out="/data/runs/NAME"' in comment
    for name in ("server-app", *NODES):
        assert f"{name.removesuffix('-app')}:/data" in SERVICES[name]["volumes"]


def test_the_comments_say_whose_the_keys_must_be():
    """``fedkeep flower init`` lets their owner alone read them, and neither user here is root."""
    unit = (DEPLOY / "fedkeep-node.service").read_text(encoding="utf-8")
    assert "User=fedkeep\n" in unit
    assert "#   useradd --system fedkeep\n#   chown -R fedkeep /etc/fedkeep\n" in unit
    (user,) = re.findall(r"--uid (\d+)", DOCKERFILE)
    comment = (DEPLOY / "compose.yaml").read_text(encoding="utf-8").partition("\nx-fedkeep")[0]
    assert f": chown {user} keys/link.key keys/node-*.key\n" in comment
