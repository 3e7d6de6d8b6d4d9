"""What clients have fitted after the rounds, beside a run: the folder ``fitted`` of the run's.

    fitted.json         the run, the round after which clients fitted, and the hash of each client's file by id
    HASH.safetensors    what is one client's own, named by the hash of its content

A client's file is whole before ``fitted.json`` names it, so a process that is killed leaves what was there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save

from fedkeep.core.errors import RunError, warn
from fedkeep.core.files import PRIVATE_FILE, load_verified, private_folder, whole_or_error, write_of_run
from fedkeep.core.params import Params
from fedkeep.core.run_files import read_info
from fedkeep.core.sealed import FORMAT, read_sealed, sealed_bytes
from fedkeep.experiments.run_directory import locked

FOLDER, INFO = "fitted", "fitted.json"


def write_fitted(folder: Path, round: int, fitted: Mapping[str, Params]) -> None:
    """Keep clients' values in a run's folder, beside those of others that are there.

    Args:
        folder: the run's.
        round: after which they were fitted; values of another round are dropped.
        fitted: by client's id.

    Raises:
        RunError: the folder holds no run, is in use, or cannot be written.
    """
    run = read_info(folder)["run"]
    with locked(folder):
        known = _known(folder, str(run), round)
        part = folder / FOLDER
        with whole_or_error(part):
            private_folder(part)
        for client, values in fitted.items():
            content = save({n: v.detach().cpu().contiguous().clone() for n, v in values.items()})
            known[client] = hashlib.sha256(content).hexdigest()
            write_of_run(part / f"{known[client]}.safetensors", content, PRIVATE_FILE)
        info = {"format": FORMAT, "run": run, "round": round, "clients": known}
        write_of_run(part / INFO, sealed_bytes(info))
        for path in part.glob("*.safetensors"):
            if path.stem not in set(known.values()):
                path.unlink()


def read_fitted(folder: Path, run: str, round: int, *, tell: bool = True) -> dict[str, Params]:
    """Return what clients have fitted after a round of a run, by id; of another round nothing.

    Args:
        folder: the run's.
        run: its id.
        round: the last that it has finished.
        tell: warn of values that are of another round.

    Raises:
        RunError: a file is missing, damaged or of another run.
    """
    return {
        client: load_verified(folder / FOLDER / f"{sha256}.safetensors", sha256)
        for client, sha256 in _known(folder, run, round, tell).items()
    }


def _known(folder: Path, run: str, round: int, tell: bool = False) -> dict[str, str]:
    path = folder / FOLDER / INFO
    if not path.exists():
        return {}
    info = read_sealed(path)
    if info["run"] != run:
        raise RunError(
            "{path} is of another run than run.json beside it. Delete the folder {parent}.",
            path=path,
            parent=path.parent,
        )
    if info["round"] == round:
        return dict(info["clients"])
    if tell:
        warn(
            f"{path.parent} holds what clients fitted after round {info['round']}, and the run is at {round}: it is not "
            f"used. Fit them again: fedkeep personalize {folder}."
        )
    return {}
