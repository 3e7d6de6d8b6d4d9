"""What clients' adapting keeps in a run's folder: in ``adapting`` on the way, in ``fitted`` afterwards.

    adapting/DONE-OF-KEY-SHA256.safetensors   what is some clients' own, DONE of OF with these; KEY stands for what all
                                              of them began with, SHA256 for the content
    fitted/fitted.json                        the run, the round after which clients fitted, and the hash of each client's
                                              file by id
    fitted/SHA256.safetensors                 what is one client's own

``adapting`` is of a round that is not committed yet, so that a run that is killed goes on from there: a file is written when
``EVERY`` seconds have passed since the last, so quick adaptations write none, and the round's commit removes the folder. In
``fitted`` a client's file is whole before ``fitted.json`` names it, so a process that is killed leaves what was there.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fedkeep.core.describe import digest
from fedkeep.core.errors import RunError, warn
from fedkeep.core.files import (
    PRIVATE_FILE,
    load_verified,
    private_folder,
    tensor_file,
    whole_or_error,
    write_of_run,
)
from fedkeep.core.params import Params, prefixed, under
from fedkeep.core.run_files import read_info
from fedkeep.core.sealed import FORMAT, read_sealed, sealed_bytes
from fedkeep.engines.adapt import Adapted, Fits, Fitting, one_by_one
from fedkeep.engines.client_step import Job
from fedkeep.experiments.run_directory import locked
from fedkeep.methods import Adapt

ADAPTING, FITTED, INFO = "adapting", "fitted", "fitted.json"
EVERY = 5.0
STOPPED = "stopped"


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
        part = folder / FITTED
        with whole_or_error(part):
            private_folder(part)
        for client, values in fitted.items():
            content, known[client] = tensor_file(values)
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
        client: load_verified(folder / FITTED / f"{sha256}.safetensors", sha256)
        for client, sha256 in _known(folder, run, round, tell).items()
    }


def _known(folder: Path, run: str, round: int, tell: bool = False) -> dict[str, str]:
    path = folder / FITTED / INFO
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


def kept_in(folder: Path, fits: Fits = one_by_one, every: float = EVERY) -> Fits:
    """Return what fits clients and keeps the results in a run's folder on the way; those kept before are not fitted.

    Args:
        folder: the run's, locked by this process.
        fits: fits those that are left.
        every: seconds between two files.

    Raises:
        RunError: the folder cannot be written, or a file is damaged.
    """

    def fit(job: Job, adapt: Adapt, fittings: Sequence[Fitting]) -> Iterator[Adapted]:
        key, done = "", 0
        if (folder / ADAPTING).exists():
            key = _key(job, fittings)
            for path in sorted((folder / ADAPTING).glob(f"*-{len(fittings)}-{key}-*.safetensors")):
                for found in _read(path):
                    yield found
                    done += 1
            if not done:
                forget_adapting(folder)
        fresh, last = list[Adapted](), time.monotonic()
        for found in fits(job, adapt, fittings[done:]):
            fresh.append(found)
            if time.monotonic() - last >= every:
                key = key or _key(job, fittings)
                done += len(fresh)
                _write(folder / ADAPTING, f"{done:09d}-{len(fittings)}-{key}", fresh)
                fresh, last = [], time.monotonic()
            yield found

    return fit


def share_adapted(folder: Path) -> float:
    """Return the share of clients that have adapted in the round that a run is at, as its folder tells; 0: none."""
    names = [path.name.split("-") for path in (folder / ADAPTING).glob("*-*-*-*.safetensors")]
    return max((int(done) / int(count) for done, count, *_ in names), default=0.0)


def forget_adapting(folder: Path) -> None:
    """Remove what clients have adapted to in a round that is committed now."""
    with whole_or_error(folder / ADAPTING):
        if (folder / ADAPTING).exists():
            shutil.rmtree(folder / ADAPTING)


def _write(part: Path, name: str, fresh: Sequence[Adapted]) -> None:
    tensors = Params()
    for number, found in enumerate(fresh):
        stopped = {STOPPED: torch.tensor(found.stopped, dtype=torch.int64)}
        tensors |= prefixed(f"{number}/", stopped) | prefixed(f"{number}/own/", found.own)
    content, sha256 = tensor_file(tensors)
    with whole_or_error(part):
        private_folder(part)
    write_of_run(part / f"{name}-{sha256}.safetensors", content, PRIVATE_FILE)


def _read(path: Path) -> Iterator[Adapted]:
    clients = dict[str, Params]()
    for name, value in load_verified(path, path.stem.rpartition("-")[2]).items():
        number, _, own = name.partition("/")
        clients.setdefault(number, {})[own] = value
    for number in sorted(clients, key=int):
        passes: tuple[int, ...] = tuple(clients[number].pop(STOPPED).tolist())
        yield Adapted(under("own/", clients[number]), passes)


def _key(job: Job, fittings: Sequence[Fitting]) -> str:
    """Return a hash of what clients begin with: it is another where rounds are repeated with other random numbers."""
    hasher, sent = hashlib.sha256(f"{job.seed}".encode()), dict[int, str]()
    for each in fittings:
        if id(each.sent) not in sent:
            sent[id(each.sent)] = digest(each.sent.flat)
        hasher.update(f"|{each.client}|{sent[id(each.sent)]}|{digest(each.start)}|".encode())
        hasher.update(np.ascontiguousarray(each.rows, np.int64).tobytes())
    return hasher.hexdigest()[:32]
