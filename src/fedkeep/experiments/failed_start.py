"""What becomes of the folder of a run that fails before its first round: the corrected run may have its name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from fedkeep.core.errors import NonFiniteError, RoundError, RunError, StoreError
from fedkeep.privacy.ledger import FILE as LEDGER

STAY = (RunError, StoreError, NonFiniteError, RoundError)


@contextmanager
def removed_if_it_fails(folder: Path | None) -> Iterator[Path | None]:
    """Give a run's folder; remove it where it was made inside and a fault came before the first round was committed.

    One stays that was there before, that holds a round or a ledger of privacy, or that another process has; one that
    can go on, as the folder itself was at fault, such as its full disk; and one whose training diverged.
    """
    there = folder is None or folder.exists()
    try:
        yield folder
    except Exception as error:
        if folder is not None and not there and not isinstance(error, STAY):
            _remove(folder)
        raise


def _remove(folder: Path) -> None:
    if folder.is_dir():
        with suppress(OSError, Timeout), FileLock(str(folder / "lock"), timeout=0):
            if not any((folder / name).exists() for name in ("commit.json", LEDGER)):
                shutil.rmtree(folder, ignore_errors=True)
