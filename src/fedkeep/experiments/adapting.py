"""What clients have adapted to in a round that is not committed yet, so that a run that is killed goes on from there.

    adapting/DONE-OF-KEY-SHA256.safetensors   what is some clients' own, DONE of OF with these; KEY stands for what all
                                              of them began with, SHA256 for the content

A file is written when ``EVERY`` seconds have passed since the last, so quick adaptations write none. The round's commit
removes the folder.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from fedkeep.core.describe import digest
from fedkeep.core.files import PRIVATE_FILE, load_verified, private_folder, whole_or_error, write_of_run
from fedkeep.core.params import Params, prefixed, under
from fedkeep.engines.adapt import Adapted, Fits, Fitting, one_by_one
from fedkeep.engines.client_step import Job
from fedkeep.methods import Adapt

FOLDER = "adapting"
EVERY = 5.0
STOPPED = "stopped"


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
        if (folder / FOLDER).exists():
            key = _key(job, fittings)
            for path in sorted((folder / FOLDER).glob(f"*-{len(fittings)}-{key}-*.safetensors")):
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
                _write(folder / FOLDER, f"{done:09d}-{len(fittings)}-{key}", fresh)
                fresh, last = [], time.monotonic()
            yield found

    return fit


def share_adapted(folder: Path) -> float:
    """Return the share of clients that have adapted in the round that a run is at, as its folder tells; 0: none."""
    names = [path.name.split("-") for path in (folder / FOLDER).glob("*-*-*-*.safetensors")]
    return max((int(done) / int(count) for done, count, *_ in names), default=0.0)


def forget_adapting(folder: Path) -> None:
    """Remove what clients have adapted to in a round that is committed now."""
    with whole_or_error(folder / FOLDER):
        if (folder / FOLDER).exists():
            shutil.rmtree(folder / FOLDER)


def _write(part: Path, name: str, fresh: Sequence[Adapted]) -> None:
    tensors = Params()
    for number, found in enumerate(fresh):
        stopped = {STOPPED: torch.tensor(found.stopped, dtype=torch.int64)}
        tensors |= prefixed(f"{number}/", stopped) | prefixed(f"{number}/own/", found.own)
    content = save({name: value.contiguous() for name, value in tensors.items()})
    with whole_or_error(part):
        private_folder(part)
    file = part / f"{name}-{hashlib.sha256(content).hexdigest()}.safetensors"
    write_of_run(file, content, PRIVATE_FILE)


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
