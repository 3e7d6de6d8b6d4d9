"""A Flower project of a configuration: four files, and no code, as both apps are fedkeep's own.

The fourth, ``.gitignore``, names the server's run and the states of simulated devices. Flower sends all other texts of
the folder to every device, and a run's ``run.json`` holds the secret that differential privacy draws cohorts by.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePath

from fedkeep.core.errors import ConfigError
from fedkeep.core.files import write_whole
from fedkeep.experiments.toml import from_toml, to_toml

NODE_CONFIG = "fedkeep-node"
"""Key of Flower's node configuration: the path of the node's own."""
CONFIG = "config.toml"
LONGEST_NAME = 32  # Flower's limit
SERVER_APP, CLIENT_APP = "fedkeep.flower.server_app:app", "fedkeep.flower.client_app:app"

README = """# {name}: personalised federated learning on Flower

`config.toml` is the experiment; `pyproject.toml` tells Flower which apps to start: fedkeep's, for every method. There
is no other code here. Flower sends what `.gitignore` does not name to every device: keep the run in it.

On machines: `fedkeep flower init` in the folder above, with nodes, and again after every change; `fedkeep flower link`;
`fedkeep device run` at each site.

"""
TRIED = """`fedkeep run config.toml` simulates it. With TLS, keys and two nodes on this machine, then all is stopped:

    fedkeep deploy --local 2 --config config.toml

In Flower's simulation (needs `pip install 'fedkeep[flower-simulation]'`):

    flwr run . --stream
"""
WITHOUT_DATA = """Devices name their data. With a table `[data]` in `config.toml`, `fedkeep run` simulates it.
"""


def not_empty(folder: Path) -> ConfigError:
    """Return what to say of a folder that should be new, and holds something."""
    return ConfigError("{folder} is there already and not an empty folder. Name another.", folder=folder)


def new_project(folder: Path, config_text: str, name: str = "", *, out: Path | None = None) -> None:
    """Write a Flower project.

    Args:
        folder: where; it must not exist, or be empty.
        config_text: the experiment, as TOML.
        name: the project's; by default the folder's.
        out: where the server keeps its run; by default ``run`` in the folder.

    Raises:
        ConfigError: the folder holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise not_empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    places = (run, devices) = (out or folder / "run").resolve(), folder / "devices"
    settings = {
        "config": CONFIG,
        "out": str(run),
        "devices": str(devices),
        "status": "",  # a file in which the server app says how it is
        "clients": 0,  # how many clients must be there; 0: as the configuration says
        "limit": 0,  # bytes of a message; 0: Flower's own
        "patience": 3600.0,  # seconds to wait for clients before the first round
        "only": "",  # "judge" or "adapt": train nothing; let devices measure what they have, or adapt and measure that
        "keep-rounds": 0,  # how many finished rounds to keep, for fedkeep flower roll-back
        "continue-from": "",  # the folder of an older run that this one begins with
        "on-change": "refuse",  # about parameters that run does not have alike: refuse, or begin them anew
    }
    project = {
        "project": {
            "name": project_name(name or folder.name),
            "version": "1.0.0",
            "license": "Apache-2.0",
            "description": "Personalised federated learning with fedkeep.",
            "dependencies": [],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedkeep",
                    "components": {"serverapp": SERVER_APP, "clientapp": CLIENT_APP},
                    "config": settings,
                }
            }
        },
    }
    ignored = [place.relative_to(folder).as_posix() for place in places if place.is_relative_to(folder)]
    write_whole(folder / ".gitignore", "".join(f"/{place}/\n" for place in ignored).encode())
    write_whole(folder / CONFIG, config_text.encode())
    write_whole(folder / "pyproject.toml", to_toml(project).encode())
    rest = TRIED if "data" in from_toml(config_text) else WITHOUT_DATA
    write_whole(folder / "README.md", (README.format(name=name or folder.name) + rest).encode())


def project_name(text: str) -> str:
    """Return a name that Flower takes: letters, digits and hyphens, a letter first, 32 at most."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", text)[:LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"fedkeep-{name}"[:LONGEST_NAME].strip("-")


def bundled(name: str) -> Path:
    """Return a file of the bundle that Flower has put on the path, or of the working folder.

    Raises:
        ConfigError: there is none, or its name leads out of the project.
    """
    if PurePath(name).anchor or ".." in PurePath(name).parts:
        raise ConfigError(
            "config names a file of the project by its path there, without '..'; got {name!r}. Put the file into the "
            "project, and sign it again.",
            name=name,
        )
    for folder in [*sys.path, "."]:
        path = Path(folder) / name
        if path.is_file():
            return path
    raise ConfigError(
        "The project holds no file {name!r}. Name one of its files under tool.flwr.app.config.",
        name=name,
    )
