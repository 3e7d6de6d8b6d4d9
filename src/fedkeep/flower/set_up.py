"""A federation's folder: its signed project, all keys, and one folder for each party, with just its files.

    DIR/project/     config.toml, and what Flower and devices need beside it, signed
    DIR/keys/        of the owner: the authority's, the link's, the signer's, the publisher's; the nodes' public ones
    DIR/NODE/        of one party: node.toml, its private key, ca.pem, signer.pub, the experiment, a README.md, and files
                     by which systemd or a container runs the node

Called again it signs anew what was changed, adds nodes, and renews keys.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedkeep.core.errors import ConfigError
from fedkeep.core.files import PRIVATE_FILE, private_folder, write_whole
from fedkeep.experiments.config import read_text
from fedkeep.experiments.toml import from_toml, to_toml
from fedkeep.flower.keys import DAYS, RESERVED, make_keys
from fedkeep.flower.node_check import EXPERIMENT
from fedkeep.flower.project import CONFIG, new_project, not_empty
from fedkeep.flower.signed import CLIENTS, NODES, clients_by_node, named_keys, node_names, sign_project
from fedkeep.version import __version__

PROJECT, KEYS, RUN = "project", "keys", "run"
PORT = 8443
PARTY = """# {name}: a node of {project}

1. Put this site's examples beside this file, as `data.csv`, or name file and columns in `node.toml` under `[data]`.
2. `fedkeep device check node.toml` looks at everything; `experiment.toml` is what will be trained.
3. `fedkeep device run node.toml` takes part; as a service: `fedkeep-node.service`, in a container: `compose.yaml`.
"""
SERVICE = """# {name}, a node of {project}, as a service, with fedkeep in /opt/fedkeep. In this folder:
#   useradd --system fedkeep
#   mkdir /var/lib/fedkeep && cp -r . /var/lib/fedkeep && chown -R fedkeep /var/lib/fedkeep
#   cp fedkeep-node.service /etc/systemd/system && systemctl enable --now fedkeep-node
# The service may write below /var/lib/fedkeep alone.
[Unit]
Description=fedkeep: {name}, a node of {project}
Wants=network-online.target time-sync.target
After=network-online.target time-sync.target

[Service]
ExecStart=/opt/fedkeep/bin/fedkeep device run node.toml
User=fedkeep
StateDirectory=fedkeep
StateDirectoryMode=0700
WorkingDirectory=/var/lib/fedkeep
Environment=OMP_NUM_THREADS=1
# Also after wrong use (2): so ends a node, too, whose link is not there yet, or does not know its key yet. The journal
# has the message.
Restart=on-failure
RestartSec=30
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX

[Install]
WantedBy=multi-user.target
"""
COMPOSE = """# {name}, a node of {project}, in a container. Build its image once, in a clone of fedkeep:
#   docker build -f deploy/Dockerfile -t fedkeep:{version} .
# Then in this folder, which the container's user is to own: chown -R 10001 . && docker compose up --detach
# The container may write in this folder and in /tmp alone.
services:
  node:
    image: fedkeep:{version}
    command: [fedkeep, device, run, node.toml]
    working_dir: /node
    volumes: [".:/node"]
    restart: unless-stopped
    init: true
    read_only: true
    tmpfs: [/tmp]
    cap_drop: [ALL]
    security_opt: ["no-new-privileges:true"]
"""


def set_up(
    folder: Path,
    text: str | None,
    *,
    hosts: Sequence[str],
    nodes: Sequence[str],
    port: int,
    days: int,
    renewed: Sequence[str] = (),
    clients: str | None = None,
) -> None:
    """Write a federation's folder, or what it lacks; and sign its project if there are keys.

    New parties are told the first of ``hosts``; without any what other parties of the folder are told.

    Args:
        folder: where.
        text: the experiment as TOML; None: the one that is there.
        hosts: names or addresses by which nodes reach the link; nodes are told the first.
        nodes: names of nodes, each of one party.
        port: of the link.
        days: how long certificates are valid.
        renewed: names of nodes that are there, and get another key.
        clients: which clients are at which node (``flower.signed``); None: as the project says, if it does.

    Raises:
        ConfigError: there is no experiment, a name is none, a node to be renewed is not there, or the folder holds
            something else.
    """
    project, keys = folder / PROJECT, folder / KEYS
    if wrong := sorted({PROJECT, KEYS, RUN} & set(nodes)):
        raise ConfigError(
            "A node is not called {name!r}: the federation's folder has one of that name.", name=wrong[0]
        )
    if project.exists():
        if text is not None:
            write_whole(project / CONFIG, text.encode())
    elif text is None:
        raise ConfigError(
            "{folder} holds no project yet. Say which experiment, and which nodes: --config FILE --node NAME.",
            folder=folder,
        )
    elif folder.exists() and {path.name for path in folder.iterdir()} - {KEYS}:
        raise not_empty(folder)
    for name in renewed:
        if name in RESERVED or not (keys / f"{name}.pub").exists():
            raise ConfigError(
                "{keys} has no key of a node {name!r} that could be renewed. Add the node: --node.",
                keys=keys,
                name=name,
            )
    for name in renewed:
        (keys / f"{name}.pub").unlink()
    nodes = [*nodes, *renewed]
    if nodes or hosts or keys.exists():
        make_keys(keys, hosts=hosts, nodes=nodes, days=days)
    if not project.exists():
        new_project(project, str(text), folder.resolve().name, out=folder / RUN)
    if clients is not None:
        clients_by_node(clients, named_keys(keys))
        write_whole(project / CLIENTS, clients.encode())
    if not keys.exists():
        return
    sign_project(project, keys / "signer.key")
    parties = sorted(path.stem for path in keys.glob("*.pub") if path.stem not in RESERVED)
    told = None if hosts else next(filter(None, (_told(folder / name) for name in parties)), None)
    for name in parties:
        _write_party(folder, name, told or f"{hosts[0] if hosts else 'localhost'}:{port}")


def add_party(folder: Path, name: str, clients: Sequence[str] = ()) -> str:
    """Write the key and the folder of one more party, and sign the project anew.

    Args:
        folder: the federation's.
        name: of its node; one that is there already stays as it is.
        clients: names and globs of its clients, where the project lists clients.

    Returns:
        What stands for its key at the link.

    Raises:
        ConfigError: there is no federation with keys, the name is none, or clients are named where the project lists
            none, or none where it lists them.
    """
    project, keys = folder / PROJECT, folder / KEYS
    if not (keys / "signer.key").exists() or not project.is_dir():
        raise ConfigError(
            "{folder} is no federation with keys. Set it up: fedkeep flower init {folder} --node NAME.",
            folder=folder,
        )
    path, table = project / CLIENTS, None
    if path.exists() != bool(clients):
        if path.exists():
            raise ConfigError(
                "{path} lists clients by node: say whose {name!r} are, with --client.", path=path, name=name
            )
        raise ConfigError(
            "{project} lists no clients by node, so it is not said which are {name!r}'s. Leave --client out.",
            project=project,
            name=name,
        )
    if clients:
        listed = clients_by_node(read_text(path), named_keys(keys), str(path))
        table = to_toml({"clients": {**listed, name: list(clients)}})
        clients_by_node(table, [*named_keys(keys), name])
    set_up(folder, None, hosts=[], nodes=[name], port=PORT, days=DAYS, clients=table)
    return next(key for key, of in node_names(project / NODES).items() if of == name)


def _told(party: Path) -> str | None:
    """Return where a party's folder says that the link is."""
    if not (party / "node.toml").exists():
        return None
    address = from_toml((party / "node.toml").read_text(encoding="utf-8")).get("link", {}).get("address")
    return str(address) if address else None


def _write_party(folder: Path, name: str, address: str) -> None:
    """Write one party's folder; what it has changed in ``node.toml`` stays."""
    party, keys = folder / name, folder / KEYS
    private_folder(party)
    if (keys / f"{name}.key").exists():
        os.replace(keys / f"{name}.key", party / f"{name}.key")
    about = {"name": name, "project": folder.resolve().name, "version": __version__}
    experiment = (folder / PROJECT / CONFIG).read_bytes()
    files = {
        "ca.pem": (keys / "ca.pem").read_bytes(),
        "signer.pub": (keys / "signer.pub").read_bytes(),
        EXPERIMENT: experiment,
        "README.md": PARTY.format(**about).encode(),
        "fedkeep-node.service": SERVICE.format(**about).encode(),
        "compose.yaml": COMPOSE.format(**about).encode(),
    }
    if not (party / "node.toml").exists():
        link = {"address": address, "certificate": "ca.pem", "key": f"{name}.key", "trusted": ["signer.pub"]}
        device = {"owner": name, "folder": "states"}
        simulated = from_toml(experiment.decode()).get("data", {})
        columns = simulated if simulated.get("reader") == "table" else {"reader": "table"}
        table = {"data": {**columns, "path": "data.csv"}, "device": device, "link": link}
        files["node.toml"] = to_toml(table).encode()
    for at, content in files.items():
        write_whole(party / at, content, PRIVATE_FILE)
