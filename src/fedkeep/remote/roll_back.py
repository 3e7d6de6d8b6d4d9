"""Earlier rounds of a run's folder, kept so that its server can be rolled back to one of them.

    kept/ROUND/commit.json, server-ROUND.safetensors, examples-N.safetensors

Records and ledger only grow, so a commit's extents give them back. Devices follow a server that was rolled back as far as they
keep old versions of private states themselves, and refuse by name where they do not. ``run.json`` notes each round that was
returned to, and which messages came after it (``RolledBack``): so devices know what is taken back of what they have heard.

What differential privacy has charged stays charged, as the rounds that are taken back were released, and the server
that goes on draws cohorts by another secret.
"""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fedkeep.core.errors import RunError
from fedkeep.core.files import beside, sync_folder, whole_or_error, write_of_run
from fedkeep.core.run_files import Commit, read_commit, read_info
from fedkeep.experiments.run_directory import RunDirectory, files_of
from fedkeep.privacy.budget_ledger import FILE, BudgetLedger, marks
from fedkeep.remote.client_ledger import first_after

FOLDER = "kept"


@dataclass(frozen=True)
class KeptRounds:
    """Keeps the last rounds of a run.

    Attributes:
        folder: the run's.
        rounds: how many beside the last.
    """

    folder: Path
    rounds: int

    def keep(self) -> None:
        """Keep the round that was just committed; drop those that are too old."""
        if not self.rounds:
            return
        commit = read_commit(self.folder, read_info(self.folder))
        place = self.folder / FOLDER / str(commit.round)
        part = beside(place)
        with whole_or_error(place):
            part.mkdir(parents=True)
            for name in _files(commit):
                os.link(self.folder / name, part / name)
            shutil.rmtree(place, ignore_errors=True)  # of a later round that was taken back
            os.replace(part, place)
            sync_folder(place.parent)
        for old in kept_rounds(self.folder)[: -self.rounds - 1]:
            shutil.rmtree(self.folder / FOLDER / str(old), ignore_errors=True)


def kept_rounds(folder: Path) -> list[int]:
    """Return the rounds that a run's folder can be rolled back to, ascending."""
    found = (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def roll_back(folder: Path, round: int) -> None:
    """Return a run's folder to an earlier round. Stopped on the way, it is called again.

    Raises:
        RunError: there is no run, it is in use, its ledger is damaged, or the round is not kept.
    """
    known = kept_rounds(folder)
    if round not in known:
        raise RunError(
            "{folder} does not keep round {round}; it keeps {known}. Serve the run with keep_rounds=N to "
            "keep the last N.",
            folder=folder,
            round=round,
            known=known or "none",
        )
    place, info = folder / FOLDER / str(round), read_info(folder)
    with closing(RunDirectory(folder, info)) as directory:  # locked
        info["status"] = "running"
        info.pop("error", None)  # of a round that is taken back
        taken, now = list(info.get("rolled_back", ())), [round, first_after(int(info.get("attempts", 0)))]
        info["rolled_back"] = taken if now in taken else [*taken, now]
        commit = read_commit(place, info)
        if "ledger" in commit.extra:  # what was released up to now stays charged
            BudgetLedger.read(folder / FILE, str(info["run"]), marks(info, read_commit(folder, info).extra))
        directory.write_info(info)
        with whole_or_error(folder):
            for name in _files(commit):
                write_of_run(folder / name, (place / name).read_bytes())
        write_of_run(folder / "commit.json", (place / "commit.json").read_bytes())
        for later in known[known.index(round) + 1 :]:
            shutil.rmtree(folder / FOLDER / str(later), ignore_errors=True)


def _files(commit: Commit) -> list[str]:
    return ["commit.json", *sorted(files_of(commit))]
